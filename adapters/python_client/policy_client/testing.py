"""A policy service in memory, for tests of code that uses the client: no network, no database, no time.

    policy = ScriptedPolicy()
    policy.will_dispatch("openai/main/gpt-4o", "openai/spare/gpt-4o").will_wait(10).will_reject(429)
    client = policy.client()            # or policy.async_client()
    ...
    assert [report.http_status for report in policy.reports] == [503, 200]

Unscripted, it dispatches to the candidates in order, without those that failed before; a route has to be scripted. It
is a fake: it judges by status alone and remembers nothing between requests. It refuses the calls that the service does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Self, TypeVar

from google.protobuf.message import Message
from grpc import StatusCode

from policy_client import messages, outcomes
from policy_client._generated.policy.v1 import lease_pb2
from policy_client.asynchronous import AsyncPolicyClient
from policy_client.away import AwayPolicy
from policy_client.connection import Method
from policy_client.core import Sources
from policy_client.decision import identity
from policy_client.errors import (
    FenceError,
    FieldViolation,
    InvalidCallError,
    PolicyClientError,
    ServiceAwayError,
    ServiceError,
)
from policy_client.synchronous import PolicyClient
from policy_client.wire import Done

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)
Scripted = messages.SelectTargetResponse | PolicyClientError


def target(text: str) -> messages.Target:
    """A target written as `provider/connection/model`."""
    provider, connection_id, model = [*text.split("/", 2), "", ""][:3]
    return messages.Target(provider=provider, connection=connection_id, model=model)


class ScriptedPolicy:
    """The service of a test. Each `will_...` is the answer to one SelectTarget, in order."""

    def __init__(self) -> None:
        self.is_away = False
        """True: every call fails as if nothing listened."""
        self.lease_lost = ""
        """Set to a lease code: the service says no to every renewal and fence."""
        self.selections: list[messages.SelectTargetRequest] = []
        self.reports: list[messages.ReportOutcomeRequest] = []
        self.calls: list[str] = []
        """Names of all calls, in order."""
        self._script: deque[Scripted] = deque()
        self._verdicts: deque[messages.ReportOutcomeResponse] = deque()
        self._decisions: dict[bytes, tuple[messages.Target, ...]] = {}
        self._generation = 0

    # -- script ----------------------------------------------------------------------------------------
    def will_dispatch(self, first: str, *fallbacks: str, **fields: Any) -> Self:
        """Go to `first`, then to the fallbacks; `fields` are those of the message Dispatch."""
        dispatch = messages.Dispatch(target=target(first), fallbacks=map(target, fallbacks), **fields)
        return self._will(messages.SelectTargetResponse(dispatch=dispatch))

    def will_wait(self, wait_ms: int, reason: str = "rate_limit") -> Self:
        """Sleep and ask again."""
        return self._will(messages.SelectTargetResponse(wait=messages.Wait(wait_ms=wait_ms, reason_text=reason)))

    def will_reject(self, http_status: int, code: str = "all_targets_skipped", **fields: Any) -> Self:
        """No target; `fields` are those of the message Reject."""
        reject = messages.Reject(http_status=http_status, code=code, **fields)
        return self._will(messages.SelectTargetResponse(reject=reject))

    def will_fail(self, error: PolicyClientError) -> Self:
        """SelectTarget fails with an error."""
        self._script.append(error)
        return self

    def will_judge(self, **fields: Any) -> Self:
        """The answer to one report; `fields` are those of the message ReportOutcomeResponse."""
        self._verdicts.append(messages.ReportOutcomeResponse(**fields))
        return self

    def _will(self, response: messages.SelectTargetResponse) -> Self:
        self._script.append(response)
        return self

    # -- clients ---------------------------------------------------------------------------------------
    def client(self, away: AwayPolicy | None = None, sources: Sources | None = None) -> PolicyClient:
        """A blocking client of this policy."""
        return PolicyClient(rpc=_Blocking(self), away=away, sources=sources)

    def async_client(self, away: AwayPolicy | None = None, sources: Sources | None = None) -> AsyncPolicyClient:
        """An asyncio client of this policy."""
        return AsyncPolicyClient(rpc=_Async(self), away=away, sources=sources)

    # -- answers ---------------------------------------------------------------------------------------
    def answer(self, method: Method[Any, Any], request: Any) -> Any:
        """The answer to one call.

        Raises:
            PolicyClientError: as scripted, or because the service is away.
        """
        if self.is_away:
            raise ServiceAwayError("UNAVAILABLE: nothing listens")
        self.calls.append(method.name)
        return _ANSWERS[method.name](self, request)

    def _select(self, request: messages.SelectTargetRequest) -> messages.SelectTargetResponse:
        _check_selection(request)
        self.selections.append(request)
        scripted = self._script.popleft() if self._script else _in_order(request)
        if isinstance(scripted, PolicyClientError):
            raise scripted
        response = messages.SelectTargetResponse()
        response.CopyFrom(scripted)
        response.request_id = request.request_id
        response.decision_id = f"decision-{len(self.selections)}"
        if not response.HasField("reject"):
            response.decision_token = response.decision_id.encode()
            dispatch = response.dispatch
            self._decisions[response.decision_token] = (dispatch.target, *dispatch.fallbacks)
        return response

    def _selects(self, request: messages.SelectTargetsRequest) -> messages.SelectTargetsResponse:
        answers = messages.SelectTargetsResponse()
        for item in request.items:
            _put(answers.results.add(), self._select, item)
        return answers

    def _report(self, request: messages.ReportOutcomeRequest) -> messages.ReportOutcomeResponse:
        self._check_report(request)
        self.reports.append(request)
        return self._verdicts.popleft() if self._verdicts else self._by_status(request)

    def _check_report(self, request: messages.ReportOutcomeRequest) -> None:
        if not request.decision_token and not request.report_id:
            raise _invalid("report_id", "neither decision_token nor report_id", "REPORT_ID_REQUIRED")
        if request.decision_token and request.decision_token not in self._decisions:
            raise _invalid("decision_token", "not a token of this policy", "DECISION_TOKEN_INVALID")
        if request.WhichOneof("outcome") is None:
            raise _invalid("outcome", "nothing happened", "FIELD_REQUIRED")

    def _reports(self, request: messages.ReportOutcomesRequest) -> messages.ReportOutcomesResponse:
        answers = messages.ReportOutcomesResponse()
        for item in request.items:
            _put(answers.results.add(), self._report, item)
        return answers

    def _by_status(self, request: messages.ReportOutcomeRequest) -> messages.ReportOutcomeResponse:
        answer = messages.ReportOutcomeResponse(durable=True)
        outcome = _outcome(request)
        answer.verdict.success = outcome.is_success
        answer.action.kind = messages.ACTION_KIND_RETURN_TO_CLIENT
        if not outcome.is_success and not outcome.is_local and outcome.may_fall_back:
            answer.action.kind = messages.ACTION_KIND_FALL_BACK
            following = self._following(request)
            if following is not None:
                answer.action.next_target.CopyFrom(following)
        return answer

    def _following(self, request: messages.ReportOutcomeRequest) -> messages.Target | None:
        targets = self._decisions.get(request.decision_token, ())
        places = {identity(each): place for place, each in enumerate(targets)}
        place = places.get(identity(request.target), len(targets)) + 1
        return targets[place] if place < len(targets) else None

    def _acquire_lease(self, request: messages.AcquireLeaseRequest) -> messages.AcquireLeaseResponse:
        self._generation += 1
        return messages.AcquireLeaseResponse(lease=self._lease(request.ttl_ms or 120_000))

    def _renew_lease(self, request: messages.RenewLeaseRequest) -> messages.RenewLeaseResponse:
        self._require_lease()
        return messages.RenewLeaseResponse(lease=self._lease(request.ttl_ms or 120_000))

    def _get_lease(self, request: messages.GetLeaseRequest) -> messages.GetLeaseResponse:
        self._require_lease()
        return messages.GetLeaseResponse(lease=self._lease(120_000))

    def _release_lease(self, request: messages.ReleaseLeaseRequest) -> messages.ReleaseLeaseResponse:
        self._require_lease()
        return messages.ReleaseLeaseResponse()

    def _check_fence(self, request: messages.CheckFenceRequest) -> messages.CheckFenceResponse:
        status = lease_pb2.FENCE_STATUS_STALE if self.lease_lost else messages.FENCE_STATUS_VALID
        return messages.CheckFenceResponse(status=status)

    def _lease(self, ttl_ms: int) -> messages.Lease:
        return messages.Lease(generation=self._generation, ttl_ms=ttl_ms, expires_at_unix_ms=ttl_ms)

    def _require_lease(self) -> None:
        if self.lease_lost:
            raise FenceError("the lease is over", self.lease_lost, "FAILED_PRECONDITION")


_ANSWERS: dict[str, Callable[[ScriptedPolicy, Any], Any]] = {
    "SelectTarget": ScriptedPolicy._select,
    "SelectTargets": ScriptedPolicy._selects,
    "ReportOutcome": ScriptedPolicy._report,
    "ReportOutcomes": ScriptedPolicy._reports,
    "AcquireLease": ScriptedPolicy._acquire_lease,
    "RenewLease": ScriptedPolicy._renew_lease,
    "ReleaseLease": ScriptedPolicy._release_lease,
    "GetLease": ScriptedPolicy._get_lease,
    "CheckFence": ScriptedPolicy._check_fence,
    "AcquirePermit": lambda *_: messages.AcquirePermitResponse(),
    "RenewPermit": lambda *_: messages.RenewPermitResponse(),
    "ReleasePermit": lambda *_: messages.ReleasePermitResponse(),
    "CancelPermit": lambda *_: messages.CancelPermitResponse(),
}


def _put(result: Any, answer: Callable[[Any], Message], item: Message) -> None:
    """One result of a batch: the answer, or the error of this item alone."""
    try:
        result.answer.CopyFrom(answer(item))
    except ServiceError as error:
        result.error.code = StatusCode[error.code].value[0]
        result.error.message = error.message


def _invalid(field: str, problem: str, reason: str) -> InvalidCallError:
    violation = FieldViolation(field, problem, reason)
    return InvalidCallError(f"{field}: {problem}", reason, "INVALID_ARGUMENT", violations=(violation,))


def _check_selection(request: messages.SelectTargetRequest) -> None:
    if request.route and request.candidates:
        raise _invalid("route", "both route and candidates", "INVALID_FIELD")
    if not request.route and not request.candidates:
        raise _invalid("candidates", "neither route nor candidates", "FIELD_REQUIRED")


def _in_order(request: messages.SelectTargetRequest) -> messages.SelectTargetResponse:
    tried = {identity(each.target) for each in request.earlier_attempts}
    forced, allowed = request.forced_connection, request.allowed_connections
    named = [
        each
        for each in sorted(request.candidates, key=lambda candidate: candidate.priority)
        if each.connection == (forced or each.connection) and (not allowed or each.connection in allowed)
    ]
    left = [each for each in named if identity(each) not in tried]
    if not left:
        status, code = (503, "all_targets_skipped") if named else (404, "no_executable_targets")
        reject = messages.Reject(http_status=status, code=code, type="service_unavailable")
        return messages.SelectTargetResponse(reject=reject)
    first, *rest = (messages.Target(provider=c.provider, connection=c.connection, model=c.model) for c in left)
    return messages.SelectTargetResponse(dispatch=messages.Dispatch(target=first, fallbacks=rest))


def _outcome(request: messages.ReportOutcomeRequest) -> outcomes.Outcome:
    match request.WhichOneof("outcome"):
        case "network_error":
            return outcomes.network(request.network_error)
        case "client_cancelled":
            return outcomes.cancelled()
        case "local_fault":
            return outcomes.local_fault(request.local_fault.kind)
    return outcomes.Outcome(request.http_status, body=request.body, stream_error=request.details.stream_error)


class _Blocking:
    """Calls of the blocking client; what is sent behind is answered at once."""

    def __init__(self, policy: ScriptedPolicy) -> None:
        self._policy = policy

    def call(self, method: Method[Q, A], request: Q, timeout_ms: int, silence_ms: int = 0) -> A:
        answer: A = self._policy.answer(method, request)
        return answer

    def send(self, method: Method[Any, Any], request: Message, timeout_ms: int, done: Done) -> None:
        try:
            self._policy.answer(method, request)
        except PolicyClientError as error:
            done(error)
        else:
            done(None)

    def is_serving(self, timeout_ms: int) -> bool:
        return not self._policy.is_away

    def close(self) -> None:
        """Nothing to give back."""


class _Async:
    """Calls of the asyncio client."""

    def __init__(self, policy: ScriptedPolicy) -> None:
        self._policy = policy

    async def call(self, method: Method[Q, A], request: Q, timeout_ms: int, silence_ms: int = 0) -> A:
        answer: A = self._policy.answer(method, request)
        return answer

    async def is_serving(self, timeout_ms: int) -> bool:
        return not self._policy.is_away

    async def close(self) -> None:
        """Nothing to give back."""
