"""Errors of the client: one root, subclasses with data instead of text, one mapper from what gRPC tells.

A failure with ErrorInfo (domain `policy.v1`) is an answer of the service. A failure without it is the transport's, and
only then is the service away (spec/fleet.md section 6). "No target" and "no lease" are errors here because `run` and
`lease` have nothing else to return; the raw calls give them as answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from policy_client import messages

DOMAIN = "policy.v1"
DETAILS_TRAILER = "grpc-status-details-bin"
_NO_CONNECTION = ("failed to connect", "DNS resolution failed", "nothing listens")
"""What gRPC, and the fake of `testing`, say where no connection came about."""
UNAVAILABLE, DEADLINE_EXCEEDED = "UNAVAILABLE", "DEADLINE_EXCEEDED"


class PolicyClientError(Exception):
    """Root of every error that this package raises by itself."""


class ServiceAwayError(PolicyClientError):
    """The transport failed and the service said nothing. `code` is the name of the gRPC status."""

    def __init__(self, message: str, code: str = UNAVAILABLE) -> None:
        super().__init__(message)
        self.code = code

    @property
    def was_not_reached(self) -> bool:
        """The call did not get there: there was no connection to send it on."""
        return self.code == UNAVAILABLE and any(words in str(self) for words in _NO_CONNECTION)


class RefusedWhileAwayError(ServiceAwayError):
    """The service is away and no target may be used without it: fail-closed, a lease, or none known to be free."""


class ClientClosedError(PolicyClientError):
    """The client was closed before the call, or while it was under way."""

    def __init__(self) -> None:
        super().__init__("this client is closed: make another one, or close it after its last stream")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class FieldViolation(NamedTuple):
    """A wrong field: its path in the request, what is wrong, the reason of the contract's ErrorReason."""

    field: str
    description: str
    reason: str


class ServiceError(PolicyClientError):
    """The service answered with an error.

    Args:
        message: its text; names no secret.
        reason: `ErrorInfo.reason`, a value of the contract's ErrorReason such as `STORE_UNAVAILABLE`.
        code: name of the gRPC status.
        retry_after_ms: when to come back; None where waiting does not help.
    """

    def __init__(
        self,
        message: str,
        reason: str = "",
        code: str = "",
        *,
        retry_after_ms: int | None = None,
        metadata: dict[str, str] | None = None,
        violations: tuple[FieldViolation, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.code = code
        self.retry_after_ms = retry_after_ms
        self.metadata = metadata or {}
        self.violations = violations

    def __str__(self) -> str:
        return f"{self.reason or self.code}: {self.message}"


class InvalidCallError(ServiceError):
    """INVALID_ARGUMENT; `violations` lists every wrong field."""


class UnauthenticatedError(ServiceError):
    """UNAUTHENTICATED: no bearer or caller key, or an unknown one."""


class ForbiddenError(ServiceError):
    """PERMISSION_DENIED: the key is known and may not do this."""


class FenceError(ServiceError):
    """FAILED_PRECONDITION: the lease is not valid; `reason` is the lease code."""


class OverloadedError(ServiceError):
    """RESOURCE_EXHAUSTED: more than the service takes now, or the spool is full."""


class UnavailableError(ServiceError):
    """UNAVAILABLE with a reason: the store is away, the replica drains. The service itself is there."""


class NoTargetError(PolicyClientError):
    """The policy has no target for the request: a Reject, or a Wait that does not fit into the budget.

    Args:
        reject: what to answer the client with.
        exclusions: every target that is out, with the reason.
        attempts: attempts made for this request before.
    """

    def __init__(
        self,
        reject: messages.Reject,
        exclusions: Sequence[messages.Exclusion] = (),
        attempts: Sequence[messages.EarlierAttempt] = (),
    ) -> None:
        super().__init__(reject.message or reject.code)
        self.reject = reject
        self.exclusions = tuple(exclusions)
        self.attempts = tuple(attempts)

    def __reduce__(self) -> tuple[Any, ...]:
        parts = (self.reject, *self.exclusions), self.attempts
        return _no_target, tuple([each.SerializeToString() for each in listed] for listed in parts)

    @property
    def http_status(self) -> int:
        """Status to give to the client."""
        return self.reject.http_status

    @property
    def code(self) -> str:
        """Code such as `all_targets_cooling_down`."""
        return self.reject.code

    @property
    def retry_after_ms(self) -> int | None:
        """When to come back; None: unknown."""
        return self.reject.retry_after_ms if self.reject.HasField("retry_after_ms") else None

    def body(self) -> dict[str, Any]:
        """The answer as a JSON object in the error shape that OpenAI and Anthropic clients both read."""
        error = {"message": str(self), "type": self.reject.type or "service_unavailable", "code": self.code}
        return {"type": "error", "error": {**error, "param": None}}


class LeaseUnavailableError(PolicyClientError):
    """No connection to lease now. `answer` has code, HTTP status, counts and the time to come back."""

    def __init__(self, answer: messages.LeaseUnavailable) -> None:
        super().__init__(answer.message or answer.code)
        self.answer = answer

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_lease, (self.answer.SerializeToString(),)


class LeaseLostError(PolicyClientError):
    """The lease is over: the service said so, or its time ran out unrenewed. `code` as in the contract."""

    def __init__(self, code: str) -> None:
        super().__init__(f"the lease is over: {code}")
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code,)


def _no_target(told: list[bytes], attempts: list[bytes]) -> NoTargetError:
    """The error as another process raised it; messages themselves cannot be pickled."""
    return NoTargetError(
        messages.Reject.FromString(told[0]),
        [messages.Exclusion.FromString(each) for each in told[1:]],
        [messages.EarlierAttempt.FromString(each) for each in attempts],
    )


def _no_lease(answer: bytes) -> LeaseUnavailableError:
    return LeaseUnavailableError(messages.LeaseUnavailable.FromString(answer))


@dataclass(frozen=True, slots=True)
class Failure:
    """What gRPC tells of a failed call: name of the status, text, trailing metadata."""

    code: str
    details: str
    trailers: tuple[tuple[str, str | bytes], ...] = ()


_BY_CODE: dict[str, type[ServiceError]] = {
    "INVALID_ARGUMENT": InvalidCallError,
    "UNAUTHENTICATED": UnauthenticatedError,
    "PERMISSION_DENIED": ForbiddenError,
    "FAILED_PRECONDITION": FenceError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    UNAVAILABLE: UnavailableError,
}
_OF_THE_TRANSPORT = frozenset({UNAVAILABLE, DEADLINE_EXCEEDED, "INTERNAL", "UNKNOWN"})
"""Statuses that a connection, a proxy or a deadline of our own ends a call with."""


def error_of(failure: Failure) -> PolicyClientError:
    """The failure as an error of this package."""
    status = _status(failure.trailers)
    info = _detail(status, error_details_pb2.ErrorInfo)
    if info is not None and info.domain == DOMAIN:
        return _service_error(failure, status, info)
    if failure.code in _OF_THE_TRANSPORT:
        return ServiceAwayError(f"{failure.code}: {failure.details}", failure.code)
    return _BY_CODE.get(failure.code, ServiceError)(failure.details, "", failure.code)


def _service_error(failure: Failure, status: status_pb2.Status, info: error_details_pb2.ErrorInfo) -> PolicyClientError:
    retry = _detail(status, error_details_pb2.RetryInfo)
    bad = _detail(status, error_details_pb2.BadRequest)
    return _BY_CODE.get(failure.code, ServiceError)(
        failure.details,
        info.reason,
        failure.code,
        retry_after_ms=retry.retry_delay.ToMilliseconds() if retry is not None else None,
        metadata=dict(info.metadata),
        violations=tuple(FieldViolation(v.field, v.description, v.reason) for v in bad.field_violations) if bad else (),
    )


def _status(trailers: Iterable[tuple[str, str | bytes]]) -> status_pb2.Status:
    for name, value in trailers:
        if name == DETAILS_TRAILER and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()


def _detail(status: status_pb2.Status, kind: Any) -> Any:
    """The first detail of a kind; None without one."""
    for detail in status.details:
        if detail.Is(kind.DESCRIPTOR):
            found = kind()
            detail.Unpack(found)
            return found
    return None
