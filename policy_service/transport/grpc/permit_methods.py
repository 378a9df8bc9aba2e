"""Permit methods of PolicyService and gate operations of AdminService: read, run the use case, write the answer.

A refusal is an answer of AcquirePermit. Renewal, release and cancel answer UNAVAILABLE where the store is away.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from policy_service.application.errors import StoreLostError
from policy_service.application.messages import DecisionToken, PermitGrant, TokenTarget
from policy_service.application.permit_gates import FREE, LINE_DEPTH, passage_of, passage_of_keys
from policy_service.application.permit_work import (
    Passage,
    PermitAsk,
    PermitChange,
    PermitOutcome,
    PermitRefusal,
    ids_of,
)
from policy_service.application.permits import Permits
from policy_service.application.ports import StoreUnavailableError
from policy_service.application.ports_permits import GateStatus
from policy_service.application.probe_permits import ProbePermits
from policy_service.domain.gates import Gate, PermitState
from policy_service.domain.ids import ConnectionId, DurationMs, ModelId, ProviderId, Target
from policy_service.domain.permits import cap_of
from policy_service.domain.policy import Policy
from policy_service.generated.policy.v1 import admin_pb2, permit_pb2
from policy_service.transport.grpc.gate import Unary
from policy_service.transport.grpc.limits import MAX_REQUEST_ID_CHARS, Problems
from policy_service.transport.grpc.mapping.admin_request import actor
from policy_service.transport.grpc.mapping.reading import Reading, duration, optional, request_id
from policy_service.transport.grpc.wire_enums import PERMIT_KIND, PERMIT_STATE

T = TypeVar("T")

MAX_GATES = 16
MAX_KEY_CHARS = 512
MAX_WAIT_MS: DurationMs = 600_000
TTL_MS = (1_000, 1_800_000)
MAX_DEPTH = 100_000


class PermitMethods:
    """Methods by name, for the servicers.

    Args:
        policy: the policy in force.
        probes: the other permits of decisions.
    """

    def __init__(
        self,
        permits: Permits,
        policy: Callable[[], Policy],
        reading: Reading,
        probes: ProbePermits | None = None,
    ) -> None:
        self._permits = permits
        self._policy = policy
        self._reading = reading
        self._probes = probes

    def policy_methods(self) -> Mapping[str, Unary]:
        """For `PolicyServicer(further=...)`."""
        return {
            "AcquirePermit": self.acquire,
            "RenewPermit": self.renew,
            "ReleasePermit": self.release,
            "CancelPermit": self.cancel,
        }

    def admin_methods(self) -> Mapping[str, Unary]:
        """For `AdminServicer(operations=...)`."""
        return {"BlockGate": self.block_gate, "ResetGate": self.reset_gate, "ListGates": self.list_gates}

    # -- policy ------------------------------------------------------------------------------------------
    async def acquire(self, message: permit_pb2.AcquirePermitRequest) -> permit_pb2.AcquirePermitResponse:
        """AcquirePermit: waits in line within its budget."""
        ask = self._ask(message)
        return acquire_response(await self._permits.acquire(ask), ask.request_id)

    async def renew(self, message: permit_pb2.RenewPermitRequest) -> permit_pb2.RenewPermitResponse:
        """RenewPermit."""
        problems = Problems()
        ttl_ms: DurationMs | None = optional(message, "ttl_ms")
        problems.between("ttl_ms", ttl_ms, *TTL_MS)
        ids, token = self._permit_ids(message, problems)
        changes = await _stored(self._permits.renew(ids, ttl_ms))
        if self._probes and token:
            changes += await _stored(self._probes.renew(token))
        return permit_pb2.RenewPermitResponse(results=map(permit_result, changes))

    async def release(self, message: permit_pb2.ReleasePermitRequest) -> permit_pb2.ReleasePermitResponse:
        """ReleasePermit: once, however often it is asked for; the limiter learns from the headers."""
        ids, token = self._permit_ids(message, Problems())
        headers = {header.name.lower(): header.value for header in message.headers[: self._reading.limits.headers]}
        if headers:
            await _stored(self._permits.learn_from(ids, headers, self._policy()))
        changes = await _stored(self._permits.release(ids))
        if self._probes and token:
            changes += await _stored(self._probes.release(token))
        return permit_pb2.ReleasePermitResponse(results=map(permit_result, changes))

    async def cancel(self, message: permit_pb2.CancelPermitRequest) -> permit_pb2.CancelPermitResponse:
        """CancelPermit: leave the line, or give back whatever a raced grant holds."""
        problems = Problems()
        if not message.request_id:
            problems.require("request_id", "is missing", "the request_id of the AcquirePermit or SelectTarget")
        problems.text("request_id", message.request_id, MAX_REQUEST_ID_CHARS)
        problems.settle()
        changes = await _stored(self._permits.cancel(message.request_id))
        if self._probes:
            changes += await _stored(self._probes.withdraw(message.request_id))
        return permit_pb2.CancelPermitResponse(results=map(permit_result, changes))

    # -- admin -------------------------------------------------------------------------------------------
    async def block_gate(self, message: admin_pb2.BlockGateRequest) -> admin_pb2.BlockGateResponse:
        """BlockGate."""
        problems = Problems()
        _check_key(message.gate, "gate", problems)
        for_ms = duration(message, "for_ms", problems)
        until: int | None = optional(message, "until_at_unix_ms")
        if for_ms is None and until is None:
            problems.require("for_ms", "one of for_ms and until_at_unix_ms is required", "say for how long")
        acting = actor(message.actor, problems)
        problems.settle()
        end = await _stored(self._permits.block_gate(message.gate, for_ms=for_ms, until=until, actor=acting.text))
        return admin_pb2.BlockGateResponse(blocked_until_at_unix_ms=end)

    async def reset_gate(self, message: admin_pb2.ResetGateRequest) -> admin_pb2.ResetGateResponse:
        """ResetGate: everybody in line is told SEMAPHORE_RESET; held permits stay."""
        problems = Problems()
        _check_key(message.gate, "gate", problems)
        acting = actor(message.actor, problems)
        problems.settle()
        ended = await _stored(self._permits.reset_gate(message.gate, actor=acting.text))
        return admin_pb2.ResetGateResponse(reset_count=ended)

    async def list_gates(self, message: admin_pb2.ListGatesRequest) -> admin_pb2.ListGatesResponse:
        """ListGates."""
        problems = Problems()
        problems.text("prefix", message.prefix, MAX_KEY_CHARS)
        problems.settle()
        found = await _stored(self._permits.list_gates(message.prefix))
        return admin_pb2.ListGatesResponse(gates=map(gate_view, found))

    # -- reading -----------------------------------------------------------------------------------------
    def _ask(self, message: permit_pb2.AcquirePermitRequest) -> PermitAsk:
        problems = Problems()
        token = self._reading.seal.open(message.decision_token, self._now()) if message.decision_token else None
        passage = self._passage(message, token, problems)
        given = message.request_id or (_own_request_id(token, passage, message.target_key) if token else "")
        ask = PermitAsk(
            _with_depth(passage, optional(message, "queue_depth")),
            request_id(given, self._reading, problems),
            duration(message, "wait_budget_ms", problems, MAX_WAIT_MS),
            optional(message, "ttl_ms") or self._policy().setting("concurrency.permit_ttl_ms"),
            duration(message, "start_timeout_ms", problems),
        )
        problems.between("ttl_ms", ask.ttl_ms, *TTL_MS)
        problems.between("queue_depth", optional(message, "queue_depth"), 0, MAX_DEPTH)
        problems.settle()
        return ask

    def _passage(
        self, message: permit_pb2.AcquirePermitRequest, token: DecisionToken | None, problems: Problems
    ) -> Passage:
        ways = [bool(message.gates), message.HasField("queue"), token is not None]
        if sum(ways) != 1:
            problems.require("gates", "exactly one of gates, queue and decision_token is needed", "set one of them")
            return FREE
        if token is not None:
            return self._passage_of_decision(token, message.target_key, problems)
        if message.gates:
            return passage_of_keys(self._policy(), _gates(message.gates, problems))
        return self._queue(message.queue, problems)

    def _passage_of_decision(self, token: DecisionToken, key: str, problems: Problems) -> Passage:
        named = _target_of(token, key)
        if named is None:
            problems.add("target_key", "is no target of this decision", "one of the keys of the answer")
            return FREE
        return passage_of(self._policy(), named.target)

    def _queue(self, queue: permit_pb2.QueueGate, problems: Problems) -> Passage:
        """The queue alone; a connection that is not paced passes freely."""
        for name in ("provider", "connection"):
            if not getattr(queue, name):
                problems.require(f"queue.{name}", "is missing")
            problems.text(f"queue.{name}", getattr(queue, name))
        problems.text("queue.model", queue.model)
        policy = self._policy()
        target = Target(
            ProviderId(policy.canonical(queue.provider)), ConnectionId(queue.connection), ModelId(queue.model)
        )
        passage = passage_of(policy, target)
        if not passage.limiter:
            return FREE
        return replace(passage, gates=tuple(g for g in passage.gates if g.pace is not None or g.depth == 0))

    def _permit_ids(
        self, message: permit_pb2.RenewPermitRequest | permit_pb2.ReleasePermitRequest, problems: Problems
    ) -> tuple[tuple[str, ...], DecisionToken | None]:
        token = self._reading.seal.open(message.decision_token, self._now()) if message.decision_token else None
        if not message.permit_ids and token is None:
            problems.require("permit_ids", "permit_ids or decision_token is needed", "say which permits are meant")
        problems.count("permit_ids", len(message.permit_ids), MAX_GATES)
        for index, permit_id in enumerate(message.permit_ids[:MAX_GATES]):
            problems.text(f"permit_ids[{index}]", permit_id)
        problems.settle()
        return tuple(dict.fromkeys((*message.permit_ids, *ids_of(token.permits if token else ())))), token

    def _now(self) -> int:
        return self._reading.clock.now()


def _target_of(token: DecisionToken, key: str) -> TokenTarget | None:
    if not key:
        return token.targets[0] if token.targets else None
    return next((named for named in token.targets if named.key == key), None)


def _own_request_id(token: DecisionToken, passage: Passage, key: str) -> str:
    """A request id that a repetition arrives at as well; the decision's own where it already holds these gates."""
    held = {ref.gate for ref in token.permits}
    if held.issuperset(passage.keys):
        return token.request_id
    return f"{token.decision_id}/{key}"[:MAX_REQUEST_ID_CHARS]


def _gates(messages: Sequence[permit_pb2.Gate], problems: Problems) -> list[Gate]:
    problems.count("gates", len(messages), MAX_GATES)
    found = []
    for index, gate in enumerate(messages[:MAX_GATES]):
        _check_key(gate.key, f"gates[{index}].key", problems)
        found.append(Gate(gate.key, cap_of(optional(gate, "limit"))))
    return found


def _check_key(key: str, path: str, problems: Problems) -> None:
    if not key:
        problems.require(path, "is missing", "the key of a gate")
    problems.text(path, key, MAX_KEY_CHARS)


def _with_depth(passage: Passage, depth: int | None) -> Passage:
    """Another length of the line at the gates that have one; a limiter's is a setting."""
    if depth is None or depth == LINE_DEPTH:
        return passage
    gates = tuple(gate if gate.key == passage.limiter else replace(gate, depth=depth) for gate in passage.gates)
    return replace(passage, gates=gates)


async def _stored(call: Awaitable[T]) -> T:
    try:
        return await call
    except StoreUnavailableError:
        raise StoreLostError("permits need the store, which does not answer") from None


# -- writing -----------------------------------------------------------------------------------------------
def acquire_response(outcome: PermitOutcome, request: str) -> permit_pb2.AcquirePermitResponse:
    """The answer of AcquirePermit; a dispatch that needs no permit is granted none."""
    answer = permit_pb2.AcquirePermitResponse(request_id=request, waited_ms=outcome.waited_ms)
    if outcome.ended is not None:
        answer.already_ended = state_number(outcome.ended)
    elif outcome.refusal is not None:
        answer.refused.CopyFrom(_refused(outcome.refusal))
    else:
        ticket = outcome.row.ticket if outcome.row else 0
        answer.granted.CopyFrom(permit_pb2.PermitGrantSet(permits=map(_permit, outcome.grants), ticket=ticket))
    return answer


def _permit(grant: PermitGrant) -> permit_pb2.Permit:
    return permit_pb2.Permit(
        permit_id=grant.permit_id,
        kind=PERMIT_KIND.number(grant.kind),
        gate=grant.gate,
        expires_at_unix_ms=grant.expires_at,
        execution_limit_ms=grant.execution_limit_ms,
        is_local=grant.is_local,
    )


def _refused(refusal: PermitRefusal) -> permit_pb2.PermitRefusal:
    after_s = refusal.retry_after_s
    return permit_pb2.PermitRefusal(
        code=refusal.code,
        http_status=refusal.http_status,
        gate=refusal.gate,
        line_depth=refusal.depth,
        retry_after_ms=None if after_s is None else after_s * 1000,
    )


def state_number(state: PermitState | None) -> Any:
    """Number of a state; a wedged ticket was reset with its limiter, one that is unknown has none."""
    if state is PermitState.WEDGED:
        state = PermitState.RESET
    return PERMIT_STATE.number("" if state is None else state.value.lower())


def permit_result(change: PermitChange) -> permit_pb2.PermitResult:
    """Result of one permit."""
    return permit_pb2.PermitResult(
        permit_id=change.permit_id,
        state=state_number(change.state),
        expires_at_unix_ms=change.expires_at,
        code=change.code,
        already_ended=change.already_ended,
    )


def gate_view(status: GateStatus) -> admin_pb2.GateView:
    """One gate for the operator."""
    gate = status.gate
    kind = "queue" if gate.pace is not None else "concurrency"
    return admin_pb2.GateView(
        gate=gate.key,
        limit=gate.limit,
        held=status.load.held,
        waiting=status.load.waiting,
        earliest_expiry_at_unix_ms=status.load.first_end,
        blocked_until_at_unix_ms=gate.blocked_until,
        kind=PERMIT_KIND.number(kind),
    )
