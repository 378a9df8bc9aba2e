"""What the state machine of a request and its shell tell each other: steps to take, events that came of them.

Plain values. A shell performs a step and hands the event to `Journey.advance`; `behind` of a turn is sent without
waiting for it. Attempts, answers and results are what the user of `run` sees.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from policy_client import messages
from policy_client.outcomes import Headers, Outcome, http

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call that is to be made.

    Args:
        target: where to.
        number: from 0 within a decision.
        headers: to set on the upstream request.
        strip_headers: lower-case names that must not travel upstream.
        degradations: changes to make to the request.
        timeout_ms: time for this attempt; None: the caller's own. The async client enforces it.
        is_probe: tests a half-open breaker.
        is_local: decided without the service.
    """

    target: messages.Target
    number: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    strip_headers: tuple[str, ...] = ()
    degradations: tuple[messages.Degradation, ...] = ()
    timeout_ms: int | None = None
    is_probe: bool = False
    is_local: bool = False


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What a call gives back: the value for whoever asked, and the outcome for the service.

    `is_open`: a stream has begun well; its end is told by `complete` of the client.
    """

    value: T
    outcome: Outcome
    is_open: bool = False


def answered(value: T, status: int, headers: Headers = (), body: bytes = b"") -> Answer[T]:
    """An answer with an HTTP status; headers and body matter for failures."""
    return Answer(value, http(status, headers, body if status >= 400 else b""))


def streaming(value: T, status: int = 200, headers: Headers = ()) -> Answer[T]:
    """A stream that has begun; tell its end with `complete`."""
    return Answer(value, http(status, headers), is_open=True)


@dataclass(frozen=True, slots=True)
class OpenReport:
    """The report that a stream still owes: all of it but the outcome. `called_at` by the client's clock."""

    report: messages.ReportOutcomeRequest
    called_at: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Result(Generic[T]):
    """The answer to give to the client.

    Args:
        value: what the call returned.
        outcome: how it ended.
        attempt: the attempt that gave it.
        attempts: the failed attempts before it, across decisions.
        verdict: what the service made of a failure; None for a success, and for what was decided without it.
        owed: of a stream, the report of its end.
    """

    value: T
    outcome: Outcome
    attempt: Attempt
    attempts: tuple[messages.EarlierAttempt, ...] = ()
    verdict: messages.Verdict | None = None
    owed: OpenReport | None = None

    @property
    def is_success(self) -> bool:
        return self.outcome.is_success

    @property
    def http_status(self) -> int | None:
        """Status to give to the client: restated where the service says so."""
        if self.verdict is not None and self.verdict.HasField("restated_status"):
            return self.verdict.restated_status
        return self.outcome.status

    @property
    def retry_after_ms(self) -> int | None:
        """Retry-After to give to the client; None: none."""
        has_time = self.verdict is not None and self.verdict.HasField("retry_after_ms")
        return self.verdict.retry_after_ms if has_time and self.verdict is not None else None


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of one request, ms.

    Args:
        total_ms: whole request; no attempt starts after it.
        wait_ms: all waits together: in line, for a cooldown, before a retry.
        attempt_ms: one attempt; None: what the policy says, else unlimited.
        dispatches: upstream calls.
    """

    total_ms: int = 600_000
    wait_ms: int = 30_000
    attempt_ms: int | None = None
    dispatches: int = 30


# --- steps ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Select:
    """Ask SelectTarget; it may stand in line for `line_ms`."""

    request: messages.SelectTargetRequest
    line_ms: int


@dataclass(frozen=True, slots=True)
class CheckFence:
    """Ask CheckFence before a dispatch that no fresh SelectTarget covers."""

    request: messages.CheckFenceRequest


@dataclass(frozen=True, slots=True)
class Call:
    """Make the upstream call."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Report:
    """Report and wait for what to do next."""

    request: messages.ReportOutcomeRequest


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait."""

    ms: int


@dataclass(frozen=True, slots=True)
class Return(Generic[T]):
    """The end: give the result."""

    result: Result[T]


@dataclass(frozen=True, slots=True)
class Raise:
    """The end: raise."""

    error: BaseException


Step: TypeAlias = Select | CheckFence | Call | Report | Sleep | Return[T] | Raise


# --- events -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Selected:
    """SelectTarget answered."""

    response: messages.SelectTargetResponse


@dataclass(frozen=True, slots=True)
class LocalOrder:
    """The service is away; these targets may be used without it. `may_hold`: as in `Failed`."""

    targets: tuple[messages.Target, ...]
    may_hold: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A call to the service failed for good: SelectTarget or CheckFence.

    `may_hold`: its answer was not waited for, so it may have taken grants or a place in line for this request.
    """

    error: BaseException
    may_hold: bool = False


@dataclass(frozen=True, slots=True)
class FenceChecked:
    """CheckFence answered."""

    response: messages.CheckFenceResponse


@dataclass(frozen=True, slots=True)
class Answered(Generic[T]):
    """The upstream call returned."""

    answer: Answer[T]


@dataclass(frozen=True, slots=True)
class Raised:
    """The upstream call raised."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Reported:
    """ReportOutcome answered."""

    response: messages.ReportOutcomeResponse


@dataclass(frozen=True, slots=True)
class ReportLost:
    """The report is kept for later, or refused: go on without its answer."""


@dataclass(frozen=True, slots=True)
class Slept:
    """The wait is over."""


@dataclass(frozen=True, slots=True)
class Left:
    """Whoever asked is gone; nothing more is to be done for them but to clean up."""


Event: TypeAlias = (
    Selected | LocalOrder | Failed | FenceChecked | Answered[T] | Raised | Reported | ReportLost | Slept | Left
)


# --- sent behind ------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class BehindReport:
    """A report that decides nothing more. `began_at`: start of an attempt that has no token, by the client's clock."""

    request: messages.ReportOutcomeRequest
    began_at: int | None = None


GiveBack: TypeAlias = messages.ReleasePermitRequest | messages.CancelPermitRequest | messages.ReleaseLeaseRequest
Behind: TypeAlias = BehindReport | GiveBack


@dataclass(frozen=True, slots=True)
class Hold:
    """Grants that have to be kept alive while the attempt runs; every `renew_ms`."""

    token: bytes = field(repr=False)
    renew_ms: int


MOST_RENEWALS = 1_000
"""Renewals of one hold: an end for a stream that nobody completes."""
