"""The one error root of the service: what makes a call a bad call, as data.

A use case raises these; each transport has one mapper to its own status codes. A refusal to serve a target is
not an error but a verdict. `message` is public: it never contains SQL, credentials, tokens or bodies.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, NamedTuple

from policy_service.domain.ids import DurationMs


class ErrorKind(StrEnum):
    """Class of an error; a transport maps it to a status code."""

    INVALID = "invalid"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"
    PRECONDITION = "precondition"
    EXHAUSTED = "exhausted"
    UNAVAILABLE = "unavailable"
    DEADLINE = "deadline"
    UNIMPLEMENTED = "unimplemented"
    INTERNAL = "internal"


class FieldProblem(NamedTuple):
    """One field that is wrong: path as in the contract, what is wrong, what would be right."""

    path: str
    problem: str
    remedy: str = ""
    reason: str = "INVALID_FIELD"


class PolicyError(Exception):
    """Root. `reason` is a value of the contract's ErrorReason, `metadata` goes out with it."""

    kind: ClassVar[ErrorKind] = ErrorKind.INTERNAL
    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        retry_after_ms: DurationMs | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.retry_after_ms = retry_after_ms
        self.metadata = metadata or {}


class InvalidRequestError(PolicyError):
    """The request cannot be read; all problems at once."""

    kind = ErrorKind.INVALID
    default_reason = "INVALID_REQUEST"

    def __init__(self, problems: tuple[FieldProblem, ...], *, reason: str = "") -> None:
        listed = "; ".join(f"{p.path}: {p.problem}" for p in problems[:20])
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        super().__init__(listed + more, reason=reason or problems[0].reason)
        self.problems = problems


class UnknownStrategyError(InvalidRequestError):
    """The strategy is not one of the list (spec/strategies.md section 1)."""

    default_reason = "UNKNOWN_STRATEGY"

    def __init__(self, given: str, known: tuple[str, ...], path: str = "strategy") -> None:
        problem = FieldProblem(path, f"unknown strategy {given!r}", "one of " + ", ".join(known), "UNKNOWN_STRATEGY")
        super().__init__((problem,))
        self.metadata = {"given": given, "known": ",".join(known)}


class TokenError(InvalidRequestError):
    """The decision token is not one of ours, or no longer."""

    default_reason = "DECISION_TOKEN_INVALID"

    def __init__(self, reason: str, problem: str, remedy: str = "", path: str = "decision_token") -> None:
        super().__init__((FieldProblem(path, problem, remedy, reason),))


class UnauthenticatedError(PolicyError):
    """No key, or an unknown one."""

    kind = ErrorKind.UNAUTHENTICATED
    default_reason = "CREDENTIALS_MISSING"


class ForbiddenError(PolicyError):
    """The key is known but lacks the scope."""

    kind = ErrorKind.FORBIDDEN
    default_reason = "SCOPE_MISSING"


class NotFoundError(PolicyError):
    """The object named does not exist."""

    kind = ErrorKind.NOT_FOUND
    default_reason = "NOT_FOUND"


class VersionMismatchError(PolicyError):
    """A conditional write met another version."""

    kind = ErrorKind.CONFLICT
    default_reason = "SETTINGS_VERSION_MISMATCH"


class FenceError(PolicyError):
    """The call needed a valid lease fence (spec/leases.md section 6.3); `reason` is the lease code."""

    kind = ErrorKind.PRECONDITION
    default_reason = "LEASE_FENCE_STALE"


class OverloadedError(PolicyError):
    """The service has more work than it admits; come back after `retry_after_ms`."""

    kind = ErrorKind.EXHAUSTED
    default_reason = "TOO_MANY_CALLS"


class SpoolRefusalError(OverloadedError):
    """A report can be kept nowhere: the store is away and the spool takes no more.

    Args:
        cause: what is full.
        retry_after_ms: after so long the report is worth another try.
    """

    default_reason = "SPOOL_FULL"

    def __init__(self, cause: str, *, reason: str = "", retry_after_ms: DurationMs | None = 1_000) -> None:
        remedy = "bring the database back, or raise spool.max_bytes; keep the report and send it again"
        super().__init__(f"the report was not taken: {cause}; {remedy}", reason=reason, retry_after_ms=retry_after_ms)


class StoreLostError(PolicyError):
    """A hard mechanism needs the store, which is away."""

    kind = ErrorKind.UNAVAILABLE
    default_reason = "STORE_UNAVAILABLE"


class DrainingError(PolicyError):
    """The replica is going away; another one answers."""

    kind = ErrorKind.UNAVAILABLE
    default_reason = "DRAINING"


class DeadlineError(PolicyError):
    """The call ran longer than its method may."""

    kind = ErrorKind.DEADLINE
    default_reason = "METHOD_DEADLINE"


class NotBuiltError(PolicyError):
    """The contract has the call, this release does not answer it."""

    kind = ErrorKind.UNIMPLEMENTED
    default_reason = "NOT_IMPLEMENTED"


class InternalError(PolicyError):
    """A fault of the service itself; the log has the cause, the caller gets none of it."""
