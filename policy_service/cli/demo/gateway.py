"""A small gateway: asks the service where to go, calls, reports, and does what the answer says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

import grpc

from policy_service.cli.demo.client import Attempt, Journey, PolicyClient, Reported, Selected, Target, earlier_attempt
from policy_service.cli.demo.http_call import HttpResult, call
from policy_service.cli.demo.script import Pace
from policy_service.cli.demo.traffic import ClientAnswer, ClientRequest
from policy_service.generated.policy.v1 import policy_pb2


class ServiceGateway:
    """Serves client requests by the decisions of the service.

    Args:
        client: calls the service.
        ports: where each connection listens.
        pace: limits, the same as those of the control.
    """

    def __init__(self, client: PolicyClient, ports: Mapping[str, int], pace: Pace) -> None:
        self._client = client
        self._ports = ports
        self._pace = pace
        self.added_ms: list[float] = []
        """For each client request, how long it waited for answers of the service."""
        self.service_errors = 0
        """Client requests that ended because a call to the service failed."""

    async def serve(self, request: ClientRequest) -> ClientAnswer:
        """Ask, call and report until there is an answer for the client."""
        journey = Journey(request, time.monotonic() + self._pace.patience_s)
        try:
            while await self._decide_and_go(journey):
                pass
        except grpc.RpcError:
            self.service_errors += 1
            journey.status = 503
        finally:
            self.added_ms.append(journey.added_ms)
        return ClientAnswer(journey.status)

    async def _decide_and_go(self, journey: Journey) -> bool:
        """One decision and what follows from it; True: ask again."""
        decision = await self._client.select(journey)
        kind = decision.WhichOneof("verdict")
        if kind == "dispatch":
            return await self._walk(journey, decision)
        if kind == "wait":
            return await _sleep(journey, decision.wait.wait_ms)
        journey.status = decision.reject.http_status
        return False

    async def _walk(self, journey: Journey, decision: Selected) -> bool:
        """Call the target, then the fallbacks for as long as the service says so; True: ask again."""
        targets = [decision.dispatch.target, *decision.dispatch.fallbacks]
        began, place, number = time.monotonic(), 0, 0
        while True:
            offset_ms = round((time.monotonic() - began) * 1000)
            attempt = Attempt(decision, number, targets[place], offset_ms)
            result = await self._call(journey, attempt)
            attempt = replace(attempt, result=result)
            if result.is_success:
                journey.status = result.status
                self._client.report_behind(journey, attempt)
                return False
            reported = await self._client.report(journey, attempt)
            following = await _follow(journey, attempt, result, reported, targets)
            if following is None:
                await self._client.release(attempt)
                return reported.action.kind != policy_pb2.ACTION_KIND_RETURN_TO_CLIENT
            place, number = following, number + 1

    async def _call(self, journey: Journey, attempt: Attempt) -> HttpResult:
        """Call upstream; a client that leaves meanwhile is reported, too."""
        try:
            return await call(self._ports[attempt.target.connection], self._pace.attempt_timeout_s)
        except asyncio.CancelledError:
            self._client.report_behind(journey, attempt)
            raise


async def _follow(
    journey: Journey, attempt: Attempt, result: HttpResult, reported: Reported, targets: list[Target]
) -> int | None:
    """Do what the action says; the place of the next target of this decision, None where it has none."""
    journey.status = reported.verdict.restated_status or result.status or 502
    journey.earlier.append(earlier_attempt(attempt, result, reported))
    action = reported.action
    await asyncio.sleep(min(action.delay_ms, journey.left_ms) / 1000)
    if action.kind == policy_pb2.ACTION_KIND_RETRY_SAME:
        return _place(targets, attempt.target)
    if action.kind == policy_pb2.ACTION_KIND_FALL_BACK and action.HasField("next_target"):
        return _place(targets, action.next_target)
    return None


async def _sleep(journey: Journey, wait_ms: int) -> bool:
    """Wait as told; False where the client would not live to see the end."""
    if wait_ms >= journey.left_ms:
        return False
    await asyncio.sleep(wait_ms / 1000)
    journey.earlier.clear()  # after a wait every target may be tried again (spec/cooldown_wait.md section 3)
    return True


def _place(targets: list[Target], wanted: Target) -> int | None:
    """Where the target stands in the decision; None where it is none of it."""
    same = [(each.connection, each.model) == (wanted.connection, wanted.model) for each in targets]
    return same.index(True) if True in same else None
