"""Model lockout: one model of one connection out of use (spec/model_lockout.md). Pure.

Two writers share the locks: the failure algorithm of a connection (always) and the pool lockout (opt-in). A lock
never shortens except by a fresh success or a manual delete; its counter outlives it for a while and carries the
escalation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final, NamedTuple, Self

from policy_service.domain.catalogue import Provider
from policy_service.domain.connection_state import EarlyProbe
from policy_service.domain.daily_reset import DAY_MS, whole_wait
from policy_service.domain.ids import DurationMs, HintSource, Instant
from policy_service.domain.lockout_keys import EXACT, LockKey, key_of, keys_of, scoped_model, written_kind
from policy_service.domain.profiles import LockoutProfile, SlowFirstOutput
from policy_service.domain.state import Key, StateBook

__all__ = [
    "SLOW_REASON",
    "Decay",
    "FamilyPoolState",
    "LockEvidence",
    "LockKey",
    "LockWrite",
    "ModelLockState",
    "Place",
    "decay_report",
    "decayed",
    "deleted",
    "extend_lock",
    "generation_of",
    "is_locked",
    "key_of",
    "key_written",
    "lock_keys",
    "lock_row",
    "lock_rows",
    "longest_lock",
    "note_first_output",
    "released",
    "scoped_model",
    "write_lock",
]

_NO_MAXIMUM_MS: Final = 120_000
_LONGEST_DAY_MS = 25 * 3_600_000
_LOCAL_NOT_FOUND_MS: Final = 5_000
_FALLBACK_BASE_MS: Final = {429: 1_000}
_STATED_CAPS_MS: Final[Mapping[str, DurationMs]] = {HintSource.HEADER: 30 * DAY_MS, HintSource.RETRY_INFO: DAY_MS}
"""Longest waits that the server itself may set, by where it stated them (section 4, case 2)."""
SLOW_REASON: Final = "slow_first_output"


@dataclass(frozen=True, slots=True)
class ModelLockState:
    """Lock and counter of one key. `key_kind` is `family`, `bare` or `exact`; `model_key` the key's text.

    Family and bare key of a model without a quota family are one row, stored as `family`; `written_as` keeps the
    kind that was asked for.
    """

    KIND: ClassVar[str] = "model_lock"
    provider: str
    connection: str
    key_kind: str
    model_key: str
    model: str = ""
    """Bare model name for listings."""
    until: Instant | None = None
    locked_at: Instant | None = None
    reason: str = ""
    failure_count: int = 0
    last_failure_at: Instant | None = None
    reset_after_ms: int = 0
    last_cooldown_ms: int = 0
    hint_source: str = ""
    generation: int = 1
    slow_events: tuple[Instant, ...] = ()
    slow_step: int = 0
    early_probe: EarlyProbe | None = None
    last_event_at: Instant | None = None
    fact_id: str = ""
    written_as: str = ""
    failure_heard_at: Instant | None = None
    """Newest failure that arrived, counted or not: a success of a call that began before it clears nothing."""

    @property
    def key(self) -> Key:
        return (self.KIND, self.provider, self.connection, self.key_kind, self.model_key)

    @property
    def is_default(self) -> bool:
        return self.until is None and self.failure_count == 0 and not self.slow_events and not self.slow_step

    @classmethod
    def default(cls, key: Key) -> Self:
        return cls(key[1], key[2], key[3], key[4])


@dataclass(frozen=True, slots=True)
class FamilyPoolState:
    """Timer of one family pool of a connection (connection_cooldown.md steps 4 and 19)."""

    KIND: ClassVar[str] = "family_pool"
    provider: str
    connection: str
    pool: str
    limited_until: Instant | None = None
    limited_at: Instant | None = None
    """Newest failure behind the timer; an older success does not lift it."""
    last_event_at: Instant | None = None
    fact_id: str = ""

    @property
    def key(self) -> Key:
        return (self.KIND, self.provider, self.connection, self.pool)

    @property
    def is_default(self) -> bool:
        return self.limited_until is None

    @property
    def generation(self) -> int:
        return 1

    @classmethod
    def default(cls, key: Key) -> Self:
        return cls(key[1], key[2], key[3])


# -- place of a target -------------------------------------------------------------------------------
class Place(NamedTuple):
    """The model whose locks are meant: canonical provider id, connection, model, and the provider's entry."""

    provider: str
    connection: str
    model: str
    entry: Provider

    @property
    def pool(self) -> str:
        """Family pool of the model."""
        return scoped_model(self.entry, self.model)


def lock_keys(entry: Provider, provider: str, connection: str, model: str) -> tuple[Key, ...]:
    """Row keys of every place at which a lock of this model can lie."""
    return tuple((ModelLockState.KIND, provider, connection, *key) for key in keys_of(entry, model))


def lock_row(book: StateBook, place: Place, key: LockKey) -> ModelLockState:
    """Row at one of the target's keys."""
    return book.get(ModelLockState, place.provider, place.connection, key.kind, key.text)


def lock_rows(book: StateBook, place: Place) -> tuple[ModelLockState, ...]:
    """Rows of every key of the target, absent ones as defaults; a reader must look at all of them."""
    return tuple(lock_row(book, place, key) for key in keys_of(place.entry, place.model))


def generation_of(book: StateBook, place: Place) -> int:
    """Generation of the target's locks: the newest of its keys (they grow together at a manual delete)."""
    return max(row.generation for row in lock_rows(book, place))


def is_locked(row: ModelLockState, now: Instant) -> bool:
    """True up to and including the end."""
    return row.until is not None and now <= row.until


def longest_lock(rows: Iterable[ModelLockState], now: Instant) -> ModelLockState | None:
    """The lock in force that ends last, or None."""
    held = [row for row in rows if is_locked(row, now)]
    return max(held, key=lambda row: row.until or 0, default=None)


# -- the writer --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class LockEvidence:
    """One failure handed to the writer (section 4). `exact_ms` 0: the lock escalates by its own count."""

    status: int | None
    reason: str
    base_ms: DurationMs = 0
    exact_ms: DurationMs = 0
    exact_source: str = ""
    uncapped: bool = False
    scope: str | None = None
    local: bool = False
    until_midnight: bool = True
    """A spent quota without a stated end lasts until midnight; off for the pool lockout."""


class Counted(NamedTuple):
    """Effect on the counter: its value after the failure, and the step that the duration takes."""

    total: int
    step: int


def key_written(evidence: LockEvidence, place: Place) -> tuple[str, LockKey]:
    """Kind that a failure writes, and its place."""
    kind = written_kind(evidence.status, evidence.reason, evidence.scope or place.entry.default_lock_scope)
    return kind, key_of(kind, place.entry, place.model)


def count_failure(row: ModelLockState, at: Instant, late: bool) -> Counted:
    """Counter after one more failure. Late evidence adds to the count but takes the step that stands."""
    if row.last_failure_at is None or not row.failure_count:
        return Counted(1, 1)
    within = at - row.last_failure_at <= row.reset_after_ms + row.last_cooldown_ms
    count = row.failure_count + 1 if within else 1
    return Counted(count, row.failure_count if late and within else count)


def lock_duration(
    evidence: LockEvidence, step: int, profile: LockoutProfile, base_ms: DurationMs, now: Instant, zone: str | None
) -> DurationMs:
    """Length of the lock (table of section 4)."""
    longest = profile.max_cooldown_ms
    if evidence.exact_ms > 0:
        allowed = None if evidence.uncapped else _STATED_CAPS_MS.get(evidence.exact_source, longest)
        return _limited(evidence.exact_ms, allowed)
    if evidence.reason == "quota_exhausted" and evidence.until_midnight:
        return _limited(_until_midnight(now, zone), longest)
    scaled = base_ms << min(step - 1, profile.max_backoff_steps)
    return _limited(scaled, _NO_MAXIMUM_MS if longest is None else longest)


def lock_base(evidence: LockEvidence, profile_base_ms: DurationMs) -> DurationMs:
    """Base of the lock's own ladder: the decision's, else the profile's, else by status."""
    if evidence.local and evidence.status == 404:
        return _LOCAL_NOT_FOUND_MS
    return evidence.base_ms or profile_base_ms or _FALLBACK_BASE_MS.get(evidence.status or 0, 5_000)


def _until_midnight(now: Instant, zone: str | None) -> DurationMs:
    """To the end of the day, 25 h on the longest of most zones; a longer one is taken for a day (case 4)."""
    wait = whole_wait(now, zone, 0)
    return wait if wait <= _LONGEST_DAY_MS else DAY_MS


def _limited(duration: DurationMs, longest: DurationMs | None) -> DurationMs:
    return duration if longest is None else min(duration, longest)


@dataclass(frozen=True, slots=True)
class LockWrite:
    """Circumstances of one write.

    `counts` False: this outcome was counted at this key before, or it is the failed test of an early probe; only
    a later end is taken over.
    """

    at: Instant
    profile: LockoutProfile
    profile_base_ms: DurationMs = 0
    zone: str | None = None
    counts: bool = True


def write_lock(row: ModelLockState, evidence: LockEvidence, place: Place, how: LockWrite) -> ModelLockState:
    """Row after one failure: count raised, end never shortened (sections 4 and "never shorter")."""
    late = row.last_event_at is not None and how.at < row.last_event_at
    counted = count_failure(row, how.at, late) if how.counts else Counted(row.failure_count, max(1, row.failure_count))
    base = lock_base(evidence, how.profile_base_ms)
    duration = lock_duration(evidence, counted.step, how.profile, base, how.at, how.zone)
    until = how.at + duration
    # A longer lock that stands goes on deciding how long the count lives.
    standing = row.last_cooldown_ms if row.until is not None and row.until > until else 0
    kind, _ = key_written(evidence, place)
    written = replace(
        row,
        model=place.model,
        written_as=kind,
        failure_count=counted.total,
        last_failure_at=_later(row.last_failure_at, how.at),
        reset_after_ms=how.profile.reset_after_ms,
        last_cooldown_ms=row.last_cooldown_ms if late else max(duration, standing),
        last_event_at=_later(row.last_event_at, how.at),
    )
    return extend_lock(written, how.at, until, evidence.reason, evidence.exact_source)


def extend_lock(row: ModelLockState, at: Instant, until: Instant, reason: str, source: str = "") -> ModelLockState:
    """Lock until `until` at the earliest; a later end stays with its reason."""
    if row.until is not None and row.until >= until:
        return row
    running = is_locked(row, at)
    return replace(
        row,
        until=until,
        locked_at=row.locked_at if running and row.locked_at is not None else at,
        reason=reason,
        hint_source=source,
        early_probe=row.early_probe if running else None,
    )


def _later(a: Instant | None, b: Instant) -> Instant:
    return b if a is None else max(a, b)


def heard(row: ModelLockState, at: Instant) -> ModelLockState:
    """Row that knows of a failure which counted elsewhere, so that no older success sets its lock or count aside."""
    is_news = (row.until is not None or row.failure_count) and at > (row.last_failure_at or 0)
    return replace(row, failure_heard_at=_later(row.failure_heard_at, at)) if is_news else row


# -- recovery ----------------------------------------------------------------------------------------
def is_fresh(row: ModelLockState, started_at: Instant) -> bool:
    """False for a call that began before the newest failure of the model."""
    return all(at is None or started_at >= at for at in (row.last_failure_at, row.failure_heard_at))


class Decay(NamedTuple):
    """What a success did to the counters of a target."""

    cleared: bool
    new_failure_count: int


def decayed(row: ModelLockState, started_at: Instant) -> ModelLockState:
    """Row after a success: count halved, at 0 counter and lock gone. An older success changes nothing."""
    if (row.until is None and not row.failure_count) or not is_fresh(row, started_at):
        return row
    half = row.failure_count // 2
    return replace(row, failure_count=half) if half else released(row)


def released(row: ModelLockState) -> ModelLockState:
    """Row without lock and counter; slow events and generation stay."""
    return replace(
        ModelLockState.default(row.key),
        generation=row.generation,
        slow_events=row.slow_events,
        slow_step=row.slow_step,
        last_event_at=row.last_event_at,
        fact_id=row.fact_id,
    )


def decay_report(before: Iterable[ModelLockState], after: Iterable[ModelLockState]) -> Decay:
    """Summary over the keys of one target; without any state: not cleared, 0."""
    had_state = any(row.until is not None or row.failure_count for row in before)
    rows = tuple(after)
    count = max((row.failure_count for row in rows), default=0)
    return Decay(had_state and all(row.until is None and not row.failure_count for row in rows), count)


def deleted(rows: Iterable[ModelLockState]) -> tuple[ModelLockState, ...]:
    """Rows of one target after a manual delete: empty, all at the next generation."""
    present = tuple(rows)
    generation = 1 + max((row.generation for row in present), default=0)
    return tuple(
        replace(ModelLockState.default(row.key), generation=generation, last_event_at=row.last_event_at)
        for row in present
    )


# -- slow first output -------------------------------------------------------------------------------
def note_first_output(
    row: ModelLockState, first_output_ms: DurationMs, at: Instant, slow: SlowFirstOutput
) -> ModelLockState:
    """Row of the exact key after a fresh success: a prompt one clears events and step, a slow one may lock."""
    if first_output_ms <= slow.threshold_ms:
        return replace(row, slow_events=(), slow_step=0)
    events = (*(t for t in row.slow_events if at - t < slow.window_ms), at)
    if len(events) < slow.events:
        return replace(row, slow_events=events)
    duration = slow.locks_ms[min(row.slow_step, len(slow.locks_ms) - 1)]
    stepped = replace(
        row,
        slow_events=(),
        slow_step=row.slow_step + 1,
        last_failure_at=_later(row.last_failure_at, at),
        written_as=EXACT,
    )
    return extend_lock(stepped, at, at + duration, SLOW_REASON)
