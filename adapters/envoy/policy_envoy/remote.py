"""The policy service over gRPC, for a door in a process of its own.

Client settings follow docs/sidecar-guide.md: deadlines, retries of UNAVAILABLE, keepalive that the server accepts.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from policy_envoy.actions import Success
from policy_envoy.calls import HTTP_STATUS_OF_CODE, PolicyCallError
from policy_service.generated.policy.v1 import lease_pb2, permit_pb2, policy_pb2, policy_pb2_grpc

TIMEOUT_S = 2.0
"""Deadline of a call beyond the time that it may wait in line."""
_RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "policy.v1.PolicyService"}],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.02s",
                "maxBackoff": "0.2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
_OPTIONS = (
    ("grpc.service_config", json.dumps(_RETRIES)),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


def channel(address: str, *, root_certificates: bytes | None = None) -> grpc.aio.Channel:
    """A channel to the policy service; TLS where an authority is given."""
    if root_certificates is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(root_certificates), options=_OPTIONS)


class RemoteCalls:
    """PolicyCalls over a channel.

    Args:
        open_channel: channel to the service.
        key: bearer key; empty: none.
    """

    def __init__(self, open_channel: grpc.aio.Channel, key: str = "") -> None:
        self._stub = policy_pb2_grpc.PolicyServiceStub(open_channel)
        self._metadata: Sequence[tuple[str, str]] = (("authorization", f"Bearer {key}"),) if key else ()

    async def select(self, request: policy_pb2.SelectTargetRequest) -> policy_pb2.SelectTargetResponse:
        """SelectTarget, under a request id of its own, which the message keeps: whoever asks again has its place."""
        if not request.request_id:
            request.request_id = secrets.token_hex(12)
        answer: policy_pb2.SelectTargetResponse = await self._call(
            self._stub.SelectTarget, request, request.wait_budget_ms
        )
        return answer

    async def report(self, request: policy_pb2.ReportOutcomeRequest) -> policy_pb2.ReportOutcomeResponse:
        """ReportOutcome."""
        answer: policy_pb2.ReportOutcomeResponse = await self._call(self._stub.ReportOutcome, request)
        return answer

    def selected(self, request: policy_pb2.SelectTargetRequest) -> None:
        """A call takes waiting."""

    def told(self, success: Success) -> bool:
        """A call takes waiting."""
        return False

    async def acquire(self, request: permit_pb2.AcquirePermitRequest) -> permit_pb2.AcquirePermitResponse:
        """AcquirePermit."""
        answer: permit_pb2.AcquirePermitResponse = await self._call(
            self._stub.AcquirePermit, request, request.wait_budget_ms
        )
        return answer

    async def renew(self, request: permit_pb2.RenewPermitRequest) -> permit_pb2.RenewPermitResponse:
        """RenewPermit."""
        answer: permit_pb2.RenewPermitResponse = await self._call(self._stub.RenewPermit, request)
        return answer

    async def release(self, request: permit_pb2.ReleasePermitRequest) -> permit_pb2.ReleasePermitResponse:
        """ReleasePermit."""
        answer: permit_pb2.ReleasePermitResponse = await self._call(self._stub.ReleasePermit, request)
        return answer

    async def check_fence(self, request: lease_pb2.CheckFenceRequest) -> lease_pb2.CheckFenceResponse:
        """CheckFence."""
        answer: lease_pb2.CheckFenceResponse = await self._call(self._stub.CheckFence, request)
        return answer

    async def _call(self, method: Callable[..., Awaitable[Any]], request: Any, waits_ms: int = 0) -> Any:
        try:
            return await method(request, timeout=TIMEOUT_S + waits_ms / 1000, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise call_error(error) from error


def call_error(error: grpc.aio.AioRpcError) -> PolicyCallError:
    """The error of a call; without ErrorInfo it is the transport's, and the service counts as away
    (spec/fleet.md section 6)."""
    reason, after_ms = "", None
    status = rpc_status.from_call(error)
    for detail in () if status is None else status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            reason = _unpacked(detail, error_details_pb2.ErrorInfo()).reason
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            after_ms = _unpacked(detail, error_details_pb2.RetryInfo()).retry_delay.ToMilliseconds()
    code = error.code().name
    http_status = HTTP_STATUS_OF_CODE.get(code, 500)
    text = error.details() or code
    return PolicyCallError(reason or code, http_status, text, after_ms, is_away=reason in _AWAY)


_AWAY = frozenset({"", "DRAINING", "NOT_READY"})
"""No answer of a working service: its transport's, or a replica that is not there for anybody."""


def _unpacked(detail: Any, message: Any) -> Any:
    detail.Unpack(message)
    return message
