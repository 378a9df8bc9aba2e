"""How the client talks to the service: address, TLS, bearer key, deadlines, retries, keepalive (docs/sidecar-guide.md).

Data only: the channels are opened by the two shells, `asynchronous` and `synchronous`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from policy_client import messages

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)

SERVICE = "policy.v1.PolicyService"
DEFAULT_ADDRESS = "127.0.0.1:50051"
HEALTH_METHOD = "/grpc.health.v1.Health/Check"
HEALTH_REQUEST = b"\x0a\x09readiness"
HEALTH_SERVING = b"\x08\x01"
"""grpc.health.v1 as bytes: `HealthCheckRequest(service="readiness")`, status SERVING; one package less to install."""


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to the service: PEM files.

    Args:
        ca: certificates that the server's is checked against; None: those of the system.
        cert, key: the client's own certificate and key, where the server asks for one (mTLS).
        server_name: name that the server's certificate is for, if it is not the one in the address.
    """

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
            OSError: one of them cannot be read.
        """
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))


def _read(path: Path | str | None) -> bytes | None:
    return Path(path).read_bytes() if path is not None else None


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the service is and how long its answers may take.

    Args:
        address: `host:port`, `unix:/path/policy.sock`, or any target gRPC resolves.
        tls: None: plain text, for loopback and Unix sockets.
        key: bearer key, where the server asks for keys.
        select_ms: a decision may take this long, plus the time it may wait in line.
        report_ms: a report may take this long.
        call_ms: any other call (leases, permits, fence).
        options: further gRPC channel options; they win over those of this package.
    """

    address: str = DEFAULT_ADDRESS
    tls: Tls | None = None
    key: str = field(default="", repr=False)
    select_ms: int = 250
    report_ms: int = 1_000
    call_ms: int = 2_000
    options: tuple[tuple[str, str | int], ...] = ()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Sent with every call."""
        return (("authorization", f"Bearer {self.key}"),) if self.key else ()

    def channel_options(self) -> list[tuple[str, str | int]]:
        """gRPC channel options, each with its reason."""
        own: dict[str, str | int] = {
            "grpc.service_config": SERVICE_CONFIG,
            "grpc.enable_retries": 1,
            # The server never answers pings with GOAWAY; a dead peer is found within 40 s, without calls too.
            "grpc.keepalive_time_ms": 30_000,
            "grpc.keepalive_timeout_ms": 10_000,
            "grpc.keepalive_permit_without_calls": 1,
            "grpc.http2.max_pings_without_data": 0,
            # A sidecar that restarts is looked for again at once, not after gRPC's default of up to two minutes.
            "grpc.initial_reconnect_backoff_ms": 100,
            "grpc.min_reconnect_backoff_ms": 100,
            "grpc.max_reconnect_backoff_ms": 1_000,
        }
        if self.tls is not None and self.tls.server_name:
            own["grpc.ssl_target_name_override"] = self.tls.server_name
        return list({**own, **dict(self.options)}.items())


def _retry(attempts: int, initial: str, longest: str, *methods: str) -> dict[str, Any]:
    names = [{"service": SERVICE, "method": method} for method in methods] or [{"service": SERVICE}]
    policy = {
        "maxAttempts": attempts,
        "initialBackoff": initial,
        "maxBackoff": longest,
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    return {"name": names, "retryPolicy": policy}


SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            # A decision waits for nobody: with nothing listening all three tries end within 25 ms, then the fail mode
            # decides. `grpc-retry-pushback-ms` of a draining replica takes precedence over the backoff.
            _retry(3, "0.005s", "0.01s", "SelectTarget", "SelectTargets", "ReportOutcome", "ReportOutcomes"),
            _retry(4, "0.05s", "1s"),
        ]
    }
)
"""Retries: every call named here is safe to repeat, since `run` and `lease` give each its request id."""


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Response]):
    """A call of PolicyService."""

    name: str
    request: type[Request]
    response: type[Response]

    @property
    def path(self) -> str:
        return f"/{SERVICE}/{self.name}"


SELECT = Method("SelectTarget", messages.SelectTargetRequest, messages.SelectTargetResponse)
SELECTS = Method("SelectTargets", messages.SelectTargetsRequest, messages.SelectTargetsResponse)
REPORT = Method("ReportOutcome", messages.ReportOutcomeRequest, messages.ReportOutcomeResponse)
REPORTS = Method("ReportOutcomes", messages.ReportOutcomesRequest, messages.ReportOutcomesResponse)
ACQUIRE_LEASE = Method("AcquireLease", messages.AcquireLeaseRequest, messages.AcquireLeaseResponse)
RENEW_LEASE = Method("RenewLease", messages.RenewLeaseRequest, messages.RenewLeaseResponse)
RELEASE_LEASE = Method("ReleaseLease", messages.ReleaseLeaseRequest, messages.ReleaseLeaseResponse)
GET_LEASE = Method("GetLease", messages.GetLeaseRequest, messages.GetLeaseResponse)
CHECK_FENCE = Method("CheckFence", messages.CheckFenceRequest, messages.CheckFenceResponse)
ACQUIRE_PERMIT = Method("AcquirePermit", messages.AcquirePermitRequest, messages.AcquirePermitResponse)
RENEW_PERMIT = Method("RenewPermit", messages.RenewPermitRequest, messages.RenewPermitResponse)
RELEASE_PERMIT = Method("ReleasePermit", messages.ReleasePermitRequest, messages.ReleasePermitResponse)
CANCEL_PERMIT = Method("CancelPermit", messages.CancelPermitRequest, messages.CancelPermitResponse)
METHODS: tuple[Method[Any, Any], ...] = (
    SELECT,
    SELECTS,
    REPORT,
    REPORTS,
    ACQUIRE_LEASE,
    RENEW_LEASE,
    RELEASE_LEASE,
    GET_LEASE,
    CHECK_FENCE,
    ACQUIRE_PERMIT,
    RENEW_PERMIT,
    RELEASE_PERMIT,
    CANCEL_PERMIT,
)
