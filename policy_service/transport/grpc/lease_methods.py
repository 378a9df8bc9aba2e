"""Lease methods of PolicyService and AdminService: read the message, run the use case, write the answer.

Owner tokens are hashed here; what goes further is the hash (spec/leases.md section 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policy_service.application.errors import FieldProblem, InvalidRequestError
from policy_service.application.lease_upkeep import LeaseAdmin
from policy_service.application.leases import Leases
from policy_service.application.messages.lease import FenceMessage, LeaseMessage, LeaseShown, LeaseUnavailable
from policy_service.application.messages.token import DecisionToken
from policy_service.domain.lease import GENERATION_MAX, EndReason, LeaseRow
from policy_service.domain.lease_context import LeaseCode, read_owner
from policy_service.generated.policy.v1 import admin_pb2, lease_pb2
from policy_service.transport.grpc.gate import Unary
from policy_service.transport.grpc.limits import MAX_ALLOWED_CONNECTIONS, Problems
from policy_service.transport.grpc.mapping.admin_request import actor
from policy_service.transport.grpc.mapping.reading import Reading, request_id
from policy_service.transport.grpc.wire_enums import FENCE, LEASE_END, LEASE_STATE

_PATHS = {"ttlMs": "ttl_ms", "generation": "lease.generation"}
"""Field paths of the contract by the names of the HTTP form."""


class LeaseMethods:
    """The methods of owners."""

    def __init__(self, leases: Leases, reading: Reading) -> None:
        self._leases = leases
        self._reading = reading

    async def acquire(self, message: lease_pb2.AcquireLeaseRequest) -> lease_pb2.AcquireLeaseResponse:
        """AcquireLease. None now is an answer."""
        asked = self._acquire_message(message)
        answer = await _with_paths(self._leases.acquire(asked), {"lease.owner": "owner"})
        if isinstance(answer, LeaseUnavailable):
            return lease_pb2.AcquireLeaseResponse(unavailable=_unavailable(answer), request_id=asked.request_id)
        return lease_pb2.AcquireLeaseResponse(lease=lease_message(answer), request_id=asked.request_id)

    async def renew(self, message: lease_pb2.RenewLeaseRequest) -> lease_pb2.RenewLeaseResponse:
        """RenewLease."""
        shown = await _with_paths(self._leases.renew(_lifecycle(message, "renew", _ttl(message))))
        return lease_pb2.RenewLeaseResponse(lease=lease_message(shown))

    async def release(self, message: lease_pb2.ReleaseLeaseRequest) -> lease_pb2.ReleaseLeaseResponse:
        """ReleaseLease."""
        reason = {"reason": LEASE_END.text(message.reason).upper() or "UNKNOWN"} if message.reason else {}
        shown = await _with_paths(self._leases.release(_lifecycle(message, "release", reason)))
        return lease_pb2.ReleaseLeaseResponse(lease=lease_message(shown))

    async def get(self, message: lease_pb2.GetLeaseRequest) -> lease_pb2.GetLeaseResponse:
        """GetLease."""
        shown = await _with_paths(self._leases.get(_lifecycle(message, "status", {})))
        return lease_pb2.GetLeaseResponse(lease=lease_message(shown))

    async def check_fence(self, message: lease_pb2.CheckFenceRequest) -> lease_pb2.CheckFenceResponse:
        """CheckFence."""
        answer = await self._leases.check_fence(self._fence_message(message))
        return lease_pb2.CheckFenceResponse(
            status=FENCE.number(answer.verdict.value.lower()),
            checked_at_unix_ms=answer.at,
            expires_at_unix_ms=answer.expires_at,
        )

    def _acquire_message(self, message: lease_pb2.AcquireLeaseRequest) -> LeaseMessage:
        problems = Problems()
        asked_id = request_id(message.request_id, self._reading, problems)
        problems.count("allowed_connections", len(message.allowed_connections), MAX_ALLOWED_CONNECTIONS)
        problems.settle()
        return LeaseMessage(
            {"action": "acquire", "model": message.model} | _ttl(message),
            read_owner(message.owner),
            message.caller_id,
            message.caller_key_sha256,
            asked_id,
            bool(message.request_id),
            tuple(message.allowed_connections),
        )

    def _fence_message(self, message: lease_pb2.CheckFenceRequest) -> FenceMessage:
        """Explicit fields win over those of the token."""
        token = self._token(message.decision_token)
        held = token.lease if token else None
        is_explicit = message.HasField("lease") or held is None
        generation = message.lease.generation if is_explicit or held is None else held.generation
        if not 0 <= generation <= GENERATION_MAX:
            problem = FieldProblem("lease.generation", "out of range", "1 .. 2^53-1", LeaseCode.CONTEXT_INVALID.value)
            raise InvalidRequestError((problem,))
        return FenceMessage(
            read_owner(message.lease.owner) if is_explicit or held is None else held.owner_hash,
            generation,
            message.connection or (held.connection if held else ""),
            message.caller_id or ("" if message.caller_key_sha256 or held is None else held.caller_id),
            message.caller_key_sha256,
        )

    def _token(self, sealed: bytes) -> DecisionToken | None:
        return self._reading.seal.open(sealed, self._reading.clock.now(), "decision_token") if sealed else None


def lease_methods(leases: Leases, reading: Reading) -> Mapping[str, Unary]:
    """Methods of PolicyService by name."""
    methods = LeaseMethods(leases, reading)
    return {
        "AcquireLease": methods.acquire,
        "RenewLease": methods.renew,
        "ReleaseLease": methods.release,
        "GetLease": methods.get,
        "CheckFence": methods.check_fence,
    }


def lease_admin_operations(admin: LeaseAdmin) -> Mapping[str, Unary]:
    """Methods of AdminService by name."""

    async def invalidate(message: admin_pb2.InvalidateLeaseRequest) -> admin_pb2.InvalidateLeaseResponse:
        problems = Problems()
        problems.text("owner_hash", message.owner_hash)
        problems.text("connection", message.connection)
        reason = _end_reason(message.reason, problems)
        acting = actor(message.actor, problems)
        problems.settle()
        row = await admin.invalidate(message.owner_hash, message.generation, message.connection, reason, acting)
        return admin_pb2.InvalidateLeaseResponse(lease=lease_message(LeaseShown(row)))

    async def listed(message: admin_pb2.ListLeasesRequest) -> admin_pb2.ListLeasesResponse:
        return admin_pb2.ListLeasesResponse(leases=map(_view, await admin.list(message.caller_id)))

    return {"InvalidateLease": invalidate, "ListLeases": listed}


def _end_reason(number: int, problems: Problems) -> EndReason | None:
    """A reason that the contract knows; None where none is given."""
    text = LEASE_END.text(number).upper()
    if number and not text:
        problems.add("reason", f"{number} is no LeaseEndReason", "one of " + ", ".join(EndReason))
    return EndReason(text) if text else None


def lease_message(shown: LeaseShown) -> lease_pb2.Lease:
    """A lease as its owner sees it."""
    row = shown.row
    return lease_pb2.Lease(
        state=LEASE_STATE.number(row.state.value.lower()),
        generation=row.generation,
        acquired_at_unix_ms=row.acquired_at,
        renewed_at_unix_ms=row.renewed_at,
        expires_at_unix_ms=row.expires_at,
        ttl_ms=row.ttl_ms,
        provider=shown.provider,
        connection_label=shown.label,
        reused=shown.reused,
    )


def _view(row: LeaseRow) -> admin_pb2.LeaseView:
    return admin_pb2.LeaseView(
        lease=lease_message(LeaseShown(row)),
        owner_hash=row.owner_hash,
        caller_id=row.api_key_id,
        provider=row.provider,
        connection=row.connection_id,
    )


def _unavailable(answer: LeaseUnavailable) -> lease_pb2.LeaseUnavailable:
    return lease_pb2.LeaseUnavailable(
        code=answer.code,
        http_status=answer.http_status,
        retry_after_ms=answer.retry_after_ms,
        eligible_count=answer.eligible_count,
        free_count=answer.free_count,
        message=answer.message,
    )


def _lifecycle(message: Any, action: str, fields: Mapping[str, object]) -> LeaseMessage:
    body = {"action": action, "generation": message.lease.generation, **fields}
    return LeaseMessage(body, read_owner(message.lease.owner), message.caller_id, message.caller_key_sha256)


def _ttl(message: Any) -> dict[str, object]:
    return {"ttlMs": message.ttl_ms} if message.HasField("ttl_ms") else {}


async def _with_paths(work: Any, paths: Mapping[str, str] | None = None) -> Any:
    """Run a use case; wrong fields are named as the contract names them."""
    names = {**_PATHS, **(paths or {})}
    try:
        return await work
    except InvalidRequestError as error:
        named = tuple(problem._replace(path=names.get(problem.path, problem.path)) for problem in error.problems)
        raise InvalidRequestError(named, reason=error.reason) from None
