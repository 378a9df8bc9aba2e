"""Request queue admission: who is paced, order of admission, refusals, wedge recovery (spec/queue_admission.md).

A limiter is a gate with a pace; its tickets are permits with the execution limit as their longest life. What the
limiter learns from the upstream is in `queue_learning`. All refusals are local.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from policy_service.domain.gates import Gate, GateBook, Pace, PermitRow, PermitState
from policy_service.domain.ids import AuthClass, DurationMs, Instant
from policy_service.domain.line import Answer, PermitAnswer, PermitRequest, acquire, reset, settle
from policy_service.domain.profiles import QueueProfile

WAIT_MIN_MS: DurationMs = 1
WAIT_MAX_MS: DurationMs = 86_400_000
OVERRIDE_MAX_MS: DurationMs = 600_000
WINDOW_MS: DurationMs = 60_000
NO_RESERVOIR = 2**53 - 1
NO_CONCURRENCY_LIMIT = 1_000
NO_LIMIT = QueueProfile(
    requests_per_minute=NO_RESERVOIR, min_time_between_requests_ms=0, concurrent_requests=NO_CONCURRENCY_LIMIT
)
"""A limiter that must exist without a limit."""
FLEET_GATE = "queue:global"
"""Gate of `queue.global_concurrent_requests`."""


class QueueCode(StrEnum):
    """Refusals of section 4, and the ends of the other mechanisms that a ticket can meet."""

    QUEUE_FULL = "RATE_LIMIT_QUEUE_FULL"
    QUEUE_TIMEOUT = "RATE_LIMIT_QUEUE_TIMEOUT"
    QUEUE_WEDGED = "RATE_LIMIT_QUEUE_WEDGED"
    EXECUTION_TIMEOUT = "RATE_LIMIT_EXECUTION_TIMEOUT"
    ABORTED = "ABORTED"
    WAITER_LOST = "WAITER_LOST"
    RESET = "SEMAPHORE_RESET"
    PERMIT_EXPIRED = "PERMIT_EXPIRED"
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"


HTTP_STATUS: Mapping[QueueCode, int] = {
    QueueCode.QUEUE_FULL: 429,
    QueueCode.QUEUE_TIMEOUT: 503,
    QueueCode.QUEUE_WEDGED: 503,
    QueueCode.EXECUTION_TIMEOUT: 504,
    QueueCode.ABORTED: 499,
    QueueCode.WAITER_LOST: 499,
    QueueCode.RESET: 503,
    QueueCode.PERMIT_EXPIRED: 409,
    QueueCode.STORE_UNAVAILABLE: 503,
}
_BY_END = {
    PermitState.TIMED_OUT: QueueCode.QUEUE_TIMEOUT,
    PermitState.WEDGED: QueueCode.QUEUE_WEDGED,
    PermitState.CANCELLED: QueueCode.ABORTED,
    PermitState.WAITER_LOST: QueueCode.WAITER_LOST,
    PermitState.RESET: QueueCode.RESET,
    PermitState.EXPIRED: QueueCode.PERMIT_EXPIRED,
}


class LimiterScope(StrEnum):
    """What a limiter is keyed by beside provider and connection (section 2; catalogue data)."""

    CONNECTION = ""
    QUOTA_SCOPE = "quota_scope"
    MODEL_FAMILY = "model_family"
    MODEL = "model"


def limiter_key(
    provider: str, connection: str, scope: LimiterScope, *, model: str = "", family: str = "", quota_scope: str = ""
) -> str:
    """Key of the limiter; a scope without a value falls back (family to model, anything to the connection)."""
    parts = {
        LimiterScope.CONNECTION: "",
        LimiterScope.QUOTA_SCOPE: quota_scope,
        LimiterScope.MODEL_FAMILY: family or model,
        LimiterScope.MODEL: model,
    }
    suffix = parts[scope]
    return f"{provider}:{connection}:{suffix}" if suffix else f"{provider}:{connection}"


_LIMITS = frozenset(
    {
        "requests_per_minute",
        "min_time_between_requests_ms",
        "concurrent_requests",
        "max_queue_depth",
        "rpm",
        "minTime",
        "maxConcurrent",
    }
)


def is_paced(
    declared: Mapping[str, object], auth_class: AuthClass, *, auto_enable: bool, is_active: bool = True
) -> bool:
    """True if a connection is paced: it (or its route or provider) declares a limit, or is auto-enabled."""
    if any(_is_positive(declared.get(name)) for name in _LIMITS):
        return True
    return auto_enable and is_active and auth_class is AuthClass.API_KEY


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def effective_wait_ms(configured: float, *, override: object = None, floor: DurationMs = 0) -> DurationMs:
    """A wait budget: positive override of the connection, else the configured value raised to the provider's floor.

    Both are clamped to 1 ms .. 24 h whatever their source; overrides are at most 600 000.
    """
    if _is_positive(override) and isinstance(override, int | float):
        return _clamped(min(override, OVERRIDE_MAX_MS))
    return _clamped(max(configured, floor))


def _clamped(value: float) -> DurationMs:
    return int(max(WAIT_MIN_MS, min(WAIT_MAX_MS, value)))


_OVERRIDES = {
    "rpm": ("requests_per_minute", "rpm_override"),
    "minTime": ("min_time_between_requests_ms",),
    "maxConcurrent": ("concurrent_requests",),
}


def effective_profile(
    configured: QueueProfile, overrides: Mapping[str, object], floor_ms: DurationMs = 0
) -> QueueProfile:
    """Profile of one connection: positive overrides win, waits are clamped and raised to the provider's floor.

    Args:
        configured: as resolved from stored settings, environment and defaults.
        overrides: of the connection, by the names of section 1; 0 or absent falls through.
        floor_ms: floor of `max_wait_ms` (catalogue data).
    """
    changes: dict[str, int] = {
        "max_wait_ms": effective_wait_ms(configured.max_wait_ms, override=overrides.get("maxWaitMs"), floor=floor_ms),
        "execution_max_wait_ms": effective_wait_ms(
            configured.execution_max_wait_ms, override=overrides.get("executionMaxWaitMs")
        ),
    }
    for name, fields in _OVERRIDES.items():
        value = overrides.get(name)
        if _is_positive(value) and isinstance(value, int | float):
            changes |= dict.fromkeys(fields, int(value))
    return replace(configured, **changes)  # type: ignore[arg-type]


def wait_budget_ms(max_wait_ms: DurationMs, remaining_ms: float | None, *, unbounded_wait: bool) -> DurationMs | None:
    """Step 3: the smaller of the effective wait and what the caller has left; None: no deadline."""
    own = None if unbounded_wait else max_wait_ms
    caller = None if remaining_ms is None or not math.isfinite(remaining_ms) else int(remaining_ms)
    return min((budget for budget in (own, caller) if budget is not None), default=None)


def execution_limit_ms(execution_max_wait_ms: DurationMs, start_timeout_ms: DurationMs | None) -> DurationMs:
    """Step 5: never shorter than the caller's own start timeout."""
    return max(execution_max_wait_ms, start_timeout_ms or 0)


def is_line_full(max_queue_depth: int, queued: int) -> bool:
    """Step 6, pure: 0 is off."""
    return 0 < max_queue_depth <= queued


def start_slot_wait_ms(last_slot_at: Instant | None, spacing_ms: DurationMs, now: Instant) -> DurationMs:
    """Step 4: wait until the next static start slot of a provider (0: now)."""
    return 0 if last_slot_at is None else max(0, last_slot_at + spacing_ms - now)


def limiter_gate(key: str, profile: QueueProfile, pace: Pace | None = None) -> Gate:
    """The limiter as a gate; `pace` is its stored pacing, absent for a limiter that has not started anything.

    The depth is checked by `admit` (step 6), not by the gate.
    """
    return Gate(key, profile.concurrent_requests, depth=0, pace=pace or configured_pace(profile))


def configured_pace(profile: QueueProfile) -> Pace:
    """Pacing by configuration alone: full reservoir, configured gap."""
    rpm = profile.requests_per_minute
    tokens = None if rpm >= NO_RESERVOIR else rpm
    return Pace(tokens=tokens, refill_to=rpm, window_ms=WINDOW_MS, gap_ms=profile.min_time_between_requests_ms)


@dataclass(frozen=True, slots=True)
class Submission:
    """One request for admission. `waited_ms` is what the wait for a static start slot took."""

    request_id: str
    permit_id: str
    ticket: int
    replica: str = ""
    remaining_budget_ms: float | None = None
    start_timeout_ms: DurationMs | None = None
    aborted: bool = False
    waited_ms: DurationMs = 0
    ttl_ms: DurationMs | None = None
    """Life of a ticket without renewal; None: the whole execution limit."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Answer to a submission: admitted or queued with the ticket, or a refusal code."""

    code: QueueCode | None = None
    row: PermitRow | None = None
    execution_limit_ms: DurationMs = 0
    queued: int = 0
    retry_after_s: int | None = None

    @property
    def is_admitted(self) -> bool:
        """A start slot was free."""
        return self.row is not None and self.row.state is PermitState.HELD


def admit(book: GateBook, key: str, profile: QueueProfile, submission: Submission, now: Instant) -> Admission:
    """Steps 2 to 9 of section 3 at the limiter `key` (and every other gate of the book: the fleet's)."""
    if submission.aborted:
        return Admission(QueueCode.ABORTED)
    limit = execution_limit_ms(profile.execution_max_wait_ms, submission.start_timeout_ms)
    budget = wait_budget_ms(profile.max_wait_ms, submission.remaining_budget_ms, unbounded_wait=profile.unbounded_wait)
    settle(book, now)
    refused = None if book.of(submission.request_id) else _too_late(book, key, profile, budget, submission.waited_ms)
    if refused is not None:
        return _refused(refused, book, key, now)
    left = None if budget is None else budget - submission.waited_ms
    return _answer(acquire(book, _request(book, submission, left, limit), now), book, key, limit, now)


def _too_late(
    book: GateBook, key: str, profile: QueueProfile, budget: DurationMs | None, waited_ms: DurationMs
) -> QueueCode | None:
    """Steps 3, 6 and 7 for a request that has no ticket yet."""
    if budget is not None and budget <= 0:
        return QueueCode.QUEUE_TIMEOUT
    if is_line_full(profile.max_queue_depth, _queued(book, key)):
        return QueueCode.QUEUE_FULL
    return QueueCode.QUEUE_TIMEOUT if budget is not None and budget <= waited_ms else None


def _request(book: GateBook, submission: Submission, left: DurationMs | None, limit: DurationMs) -> PermitRequest:
    return PermitRequest(
        request_id=submission.request_id,
        permit_id=submission.permit_id,
        gates=tuple(sorted(book.gates)),
        ticket=submission.ticket,
        ttl_ms=limit if submission.ttl_ms is None else min(submission.ttl_ms, limit),
        timeout_ms=left,
        replica=submission.replica,
        max_held_ms=limit,
    )


def _answer(found: PermitAnswer, book: GateBook, key: str, limit: DurationMs, now: Instant) -> Admission:
    if found.answer in (Answer.HELD, Answer.WAITING):
        return Admission(row=found.row, execution_limit_ms=limit, queued=_queued(book, key))
    if found.answer is Answer.QUEUE_FULL:
        return _refused(QueueCode.QUEUE_FULL, book, key, now)
    code = end_code(found.row) if found.row is not None else None
    return _refused(code or QueueCode.QUEUE_TIMEOUT, book, key, now)


def _refused(code: QueueCode, book: GateBook, key: str, now: Instant) -> Admission:
    return Admission(code, queued=_queued(book, key), retry_after_s=retry_after_s(book.gates[key], now))


def _queued(book: GateBook, key: str) -> int:
    """Waiters without a slot; one that is offered a slot has left the queue."""
    return sum(row.state is PermitState.WAITING and not row.is_offered for row in book.rows(key))


def end_code(row: PermitRow) -> QueueCode | None:
    """What a ticket that ended is told; None for a live or released one."""
    if row.state is PermitState.EXPIRED and is_execution_limit(row):
        return QueueCode.EXECUTION_TIMEOUT
    return _BY_END.get(row.state)


def is_execution_limit(row: PermitRow) -> bool:
    """True if the ticket ran into its execution limit, and was not merely left without renewal."""
    if row.held_at is None or row.max_held_ms is None or row.expires_at is None:
        return False
    return row.expires_at >= row.held_at + row.max_held_ms


def retry_after_s(gate: Gate, now: Instant) -> int | None:
    """Next refill (with an empty reservoir) or the end of the running gap, in whole seconds, at least 1."""
    pace = (gate.pace or Pace()).refreshed(now)
    is_dry = pace.tokens is not None and pace.tokens <= 0
    ends = [pace.refill_at] if is_dry and pace.refill_at else []
    ends += [pace.gap_ends_at] if pace.gap_ends_at > now else []
    return max(1, -(-(max(ends) - now) // 1_000)) if ends else None


def recover_wedge(book: GateBook, key: str, profile: QueueProfile, now: Instant) -> list[PermitRow]:
    """Reset a wedged limiter (section 6); returns the tickets ended with QUEUE_WEDGED, none where it is healthy.

    Settles first: a limiter that can hand on does so and is not wedged.
    """
    settle(book, now)
    since = wedged_since(book, key, now)
    if since is None or now < since + profile.wedge_after_ms:
        return []
    book.put_gate(replace(book.gates[key], pace=configured_pace(profile)))
    return reset(book, key, now, PermitState.WEDGED)


def wedged_since(book: GateBook, key: str, now: Instant) -> Instant | None:
    """Instant from which a limiter that should start work has started none; None where it has a reason to wait."""
    waiting = [row for row in book.rows(key) if row.state is PermitState.WAITING]
    if not waiting or any(row.occupies_slot for row in book.rows(key)):
        return None
    if not all(book.has_room(gate, now) for gate in book.gates):
        return None
    pace = book.gates[key].pace or Pace()
    return max(pace.last_start_at or 0, min(row.queued_at for row in waiting))
