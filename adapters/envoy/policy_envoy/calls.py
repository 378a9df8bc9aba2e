"""What the door asks of the policy service: the calls of `policy.v1` and the one error they end with.

Two implementations: the servicer of the same process (`policy_service.bootstrap`) and a stub (`remote`).
"""

from __future__ import annotations

from typing import Protocol

from policy_envoy.actions import Success
from policy_envoy.flight import Decision
from policy_service.generated.policy.v1 import lease_pb2, permit_pb2, policy_pb2


class PolicyCallError(Exception):
    """A call that has no answer.

    Args:
        code: reason of the contract's ErrorReason, such as `LEASE_FENCE_STALE`.
        http_status: status for the client of the gateway.
        message: public text.
        retry_after_ms: when to come back; None: unknown.
        is_away: no error of the service but of the way to it: Envoy's own fail mode decides.
    """

    def __init__(
        self, code: str, http_status: int, message: str, retry_after_ms: int | None = None, *, is_away: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.http_status = http_status
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.is_away = is_away


HTTP_STATUS_OF_CODE = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "FAILED_PRECONDITION": 409,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""HTTP status by gRPC status (spec/diagnostics.md section 5); any other is 500."""


class PolicyCalls(Protocol):
    """Calls of PolicyService; each raises PolicyCallError."""

    async def select(self, request: policy_pb2.SelectTargetRequest) -> policy_pb2.SelectTargetResponse:
        """SelectTarget."""
        ...

    async def report(self, request: policy_pb2.ReportOutcomeRequest) -> policy_pb2.ReportOutcomeResponse:
        """ReportOutcome."""
        ...

    def selected(self, request: policy_pb2.SelectTargetRequest) -> Decision | policy_pb2.SelectTargetResponse | None:
        """SelectTarget where it takes no waiting; a dispatch with nothing special about it as a value. None: it takes
        waiting, and nothing was selected."""
        ...

    def told(self, success: Success) -> bool:
        """ReportOutcome of a success where it takes no waiting; False: it does, and nothing was reported."""
        ...

    async def acquire(self, request: permit_pb2.AcquirePermitRequest) -> permit_pb2.AcquirePermitResponse:
        """AcquirePermit."""
        ...

    async def renew(self, request: permit_pb2.RenewPermitRequest) -> permit_pb2.RenewPermitResponse:
        """RenewPermit."""
        ...

    async def release(self, request: permit_pb2.ReleasePermitRequest) -> permit_pb2.ReleasePermitResponse:
        """ReleasePermit."""
        ...

    async def check_fence(self, request: lease_pb2.CheckFenceRequest) -> lease_pb2.CheckFenceResponse:
        """CheckFence."""
        ...
