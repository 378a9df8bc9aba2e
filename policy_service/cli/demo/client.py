"""The two calls of a gateway to the service, as messages of the contract, timed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import grpc

from policy_service.cli.demo.http_call import HttpResult
from policy_service.cli.demo.traffic import ClientRequest
from policy_service.generated.policy.v1 import permit_pb2, policy_pb2, policy_pb2_grpc, types_pb2

Selected: TypeAlias = policy_pb2.SelectTargetResponse
Reported: TypeAlias = policy_pb2.ReportOutcomeResponse
Target: TypeAlias = types_pb2.Target

_CALL_LIMIT_S: Final = 5.0


class Watcher(Protocol):
    """Is told what the service answers."""

    def selected(self, request: ClientRequest, answer: Selected) -> None: ...

    def reported(self, request: ClientRequest, target: Target, result: HttpResult, answer: Reported) -> None: ...


@dataclass(slots=True)
class Journey:
    """One client request on its way.

    Args:
        request: what the client asked.
        ends_at: monotonic end of the client's patience.
    """

    request: ClientRequest
    ends_at: float
    asked: int = 0
    """SelectTarget calls so far."""
    token: bytes = b""
    """Of the newest decision."""
    earlier: list[types_pb2.EarlierAttempt] = field(default_factory=list)
    status: int = 503
    """What the client gets if nothing better comes."""
    added_ms: float = 0.0
    """Time that the client waited for answers of the service."""

    @property
    def left_ms(self) -> int:
        """Patience left."""
        return max(0, round((self.ends_at - time.monotonic()) * 1000))


@dataclass(frozen=True, slots=True)
class Attempt:
    """One upstream call of a decision. `result` None: the client left before it came."""

    decision: Selected
    number: int
    target: Target
    offset_ms: int
    result: HttpResult | None = None


class PolicyClient:
    """Calls the service.

    Args:
        channel: to the service.
        watcher: is told every answer.
    """

    def __init__(self, channel: grpc.aio.Channel, watcher: Watcher) -> None:
        self._stub = policy_pb2_grpc.PolicyServiceStub(channel)
        self._watcher = watcher
        self._behind: set[asyncio.Task[Reported]] = set()
        self.select_ms: list[float] = []
        """For each SelectTarget, how long it took."""

    async def select(self, journey: Journey) -> Selected:
        """Where may this request go now?"""
        journey.asked += 1
        began = time.perf_counter()
        answer: Selected = await self._stub.SelectTarget(_select_message(journey), timeout=_CALL_LIMIT_S)
        spent_ms = (time.perf_counter() - began) * 1000
        journey.added_ms += spent_ms
        self.select_ms.append(spent_ms)
        journey.token = answer.decision_token
        self._watcher.selected(journey.request, answer)
        return answer

    async def report(self, journey: Journey, attempt: Attempt) -> Reported:
        """This is what came back; what now?"""
        began = time.perf_counter()
        answer = await self._report(journey, attempt)
        journey.added_ms += (time.perf_counter() - began) * 1000
        return answer

    def report_behind(self, journey: Journey, attempt: Attempt) -> None:
        """Report without keeping the client waiting: there is nothing left to decide for it."""
        task = asyncio.create_task(self._report(journey, attempt))
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)

    async def settle(self) -> None:
        """Wait for the reports that no client waited for."""
        await asyncio.gather(*self._behind)

    async def release(self, attempt: Attempt) -> None:
        """Free the slots of a decision whose last report did not: whether it goes on, only the answer says."""
        if attempt.decision.dispatch.permits:
            message = permit_pb2.ReleasePermitRequest(decision_token=attempt.decision.decision_token)
            await self._stub.ReleasePermit(message, timeout=_CALL_LIMIT_S)

    async def _report(self, journey: Journey, attempt: Attempt) -> Reported:
        answer: Reported = await self._stub.ReportOutcome(_report_message(attempt), timeout=_CALL_LIMIT_S)
        if attempt.result:
            self._watcher.reported(journey.request, attempt.target, attempt.result, answer)
        return answer


def _select_message(journey: Journey) -> policy_pb2.SelectTargetRequest:
    return policy_pb2.SelectTargetRequest(
        request_id=f"demo-{journey.request.number}-{journey.asked}",
        route=journey.request.route,
        caller_id="gateway",
        deadline_ms=journey.left_ms,
        wait_budget_ms=journey.left_ms,
        earlier_attempts=journey.earlier,
        previous_decision_token=journey.token,
        explain=True,
    )


def _report_message(attempt: Attempt) -> policy_pb2.ReportOutcomeRequest:
    message = policy_pb2.ReportOutcomeRequest(
        decision_token=attempt.decision.decision_token,
        attempt=attempt.number,
        target=attempt.target,
        attempt_offset_ms=attempt.offset_ms,
    )
    if attempt.result is None:
        message.client_cancelled.SetInParent()
        message.final = True
        return message
    message.final = attempt.result.is_success
    message.latency_ms = attempt.result.latency_ms
    _put_result(message, attempt.result)
    return message


def _put_result(message: policy_pb2.ReportOutcomeRequest, result: HttpResult) -> None:
    message.headers.extend(types_pb2.Header(name=name, value=value) for name, value in result.headers)
    if result.status:
        message.http_status = result.status
        message.origin = policy_pb2.ORIGIN_UPSTREAM
        message.body = b"" if result.is_success else result.body
    else:
        message.network_error = policy_pb2.NetworkErrorKind.Value(f"NETWORK_ERROR_KIND_{result.network_error}")
        message.origin = policy_pb2.ORIGIN_TRANSPORT


def earlier_attempt(attempt: Attempt, result: HttpResult, reported: Reported) -> types_pb2.EarlierAttempt:
    """What the next SelectTarget of this client request is told about a failed attempt."""
    verdict = reported.verdict
    return types_pb2.EarlierAttempt(
        target=attempt.target,
        http_status=result.status or None,
        reason=verdict.reason_text,
        scope=verdict.scope_text,
        retry_hint_ms=verdict.retry_after_ms if verdict.HasField("retry_after_ms") else None,
        kind=verdict.failure_kind_text,
    )
