"""Opt-in memory of failing providers over requests (spec/provider_cooldown.md). Pure.

Two entries per failure: a sliding window of the provider, and a ladder of the connection. Whether a failure is
recorded at all (switch, pool attempt, request-scoped, per-model) is decided by `records` and the outcome fold.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from policy_service.domain.facts import FactLog
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.profiles import ProviderCooldownProfile
from policy_service.domain.state import Key

MECHANISM = "provider_cooldown"
MIN_RETENTION_MS: DurationMs = 1_800_000
UNKNOWN_PROVIDERS = frozenset({"", "unknown"})
_PER_MODEL_STATUSES = frozenset({429, 500})
_MAX_DOUBLINGS = 10
_IDLE, _COOLING = "idle", "cooling"


@dataclass(frozen=True, slots=True)
class ProviderCooldownState:
    """Window of a provider (connection "") or count of one connection."""

    KIND: ClassVar[str] = "provider_cooldown"
    provider: str
    connection: str = ""
    failures: tuple[Instant, ...] = ()
    """Failure times of the window, ascending; provider entries only."""
    count: int = 0
    """Failures in a row; connection entries only."""
    cooling_until: Instant | None = None
    last_failure_at: Instant | None = None
    last_event_at: Instant | None = None
    fact_id: str = ""

    @property
    def key(self) -> Key:
        return (self.KIND, self.provider, self.connection)

    @property
    def is_default(self) -> bool:
        return not self.failures and not self.count and self.cooling_until is None

    @property
    def generation(self) -> int:
        return 1

    @property
    def name(self) -> str:
        """Text form of the key."""
        return f"{self.provider}:{self.connection}" if self.connection else self.provider

    @classmethod
    def default(cls, key: Key) -> Self:
        return cls(key[1], key[2])


def is_cooling(entry: ProviderCooldownState, now: Instant) -> bool:
    """Cooling iff the end lies after `now`; a connection entry also needs a count."""
    if entry.cooling_until is None or (entry.connection and not entry.count):
        return False
    return entry.cooling_until > now


def remaining_ms(entry: ProviderCooldownState, now: Instant) -> DurationMs:
    """Time left, 0 where it is not cooling."""
    return entry.cooling_until - now if entry.cooling_until is not None and is_cooling(entry, now) else 0


def records(profile: ProviderCooldownProfile, provider: str, status: int | None, counts_per_model: bool) -> bool:
    """Is a failure of this provider recorded (section 4, tests 1, 2 and 4)?"""
    if not profile.enabled or provider in UNKNOWN_PROVIDERS:
        return False
    return not (counts_per_model and status in _PER_MODEL_STATUSES)


def record_failure(
    entry: ProviderCooldownState, at: Instant, profile: ProviderCooldownProfile, facts: FactLog
) -> ProviderCooldownState:
    """One failure on a provider entry (connection "") or a connection entry; the end only ever moves later."""
    counted = _step(entry, at) if entry.connection else _slide(entry, at, profile)
    counted = replace(
        counted, last_failure_at=_latest(entry.last_failure_at, at), last_event_at=_latest(entry.last_event_at, at)
    )
    duration = _connection_ms(counted, profile) if entry.connection else _provider_ms(counted, profile)
    if duration is None:
        return counted
    until = _latest(counted.cooling_until, at + duration)
    if until == counted.cooling_until or until <= at:
        return counted
    before = _COOLING if is_cooling(entry, at) else _IDLE
    cooling = replace(counted, cooling_until=until, fact_id=facts.next_id())
    _add_fact(facts, cooling, before, _COOLING)
    return cooling


def record_success(
    entry: ProviderCooldownState, at: Instant, started_at: Instant, facts: FactLog
) -> ProviderCooldownState:
    """A success clears the entry, unless it started before the newest failure."""
    is_stale = entry.last_failure_at is not None and started_at < entry.last_failure_at
    if entry.is_default or is_stale:
        return entry
    return _clear(entry, at, facts, "success")


def reset(entry: ProviderCooldownState, now: Instant, facts: FactLog) -> ProviderCooldownState:
    """Operator reset: window, count and end are cleared."""
    return entry if entry.is_default else _clear(entry, now, facts, "reset")


def retention_ms(profile: ProviderCooldownProfile) -> DurationMs:
    """How long an entry is kept after its last failure (section 5)."""
    window = profile.failure_window_ms + profile.cooldown_ms
    return math.ceil(max(MIN_RETENTION_MS, profile.max_ms, window))


def expired(
    entries: Iterable[ProviderCooldownState], now: Instant, profile: ProviderCooldownProfile
) -> list[ProviderCooldownState]:
    """Entries that the purge may drop."""
    kept = retention_ms(profile)
    return [e for e in entries if not is_cooling(e, now) and now - (e.last_failure_at or 0) > kept]


def _slide(entry: ProviderCooldownState, at: Instant, profile: ProviderCooldownProfile) -> ProviderCooldownState:
    """Add a time to the window. A late one is measured against the newest event, not against itself."""
    newest = _latest(entry.last_failure_at, at)
    times = list(entry.failures)
    insort(times, at)
    return replace(entry, failures=tuple(t for t in times if newest - t <= profile.failure_window_ms))


def _step(entry: ProviderCooldownState, at: Instant) -> ProviderCooldownState:
    """Climb one step; a late failure climbs none (fleet.md section 2)."""
    is_late = entry.last_event_at is not None and at < entry.last_event_at
    return entry if is_late else replace(entry, count=entry.count + 1)


def _provider_ms(entry: ProviderCooldownState, profile: ProviderCooldownProfile) -> DurationMs | None:
    return math.ceil(profile.cooldown_ms) if len(entry.failures) >= profile.failure_threshold else None


def _connection_ms(entry: ProviderCooldownState, profile: ProviderCooldownProfile) -> DurationMs | None:
    if not entry.count:
        return None
    return math.ceil(min(profile.min_ms * (1 << min(entry.count - 1, _MAX_DOUBLINGS)), profile.max_ms))


def _clear(entry: ProviderCooldownState, at: Instant, facts: FactLog, reason: str) -> ProviderCooldownState:
    was_cooling = is_cooling(entry, at)
    cleared = replace(entry, failures=(), count=0, cooling_until=None, last_event_at=_latest(entry.last_event_at, at))
    if was_cooling:
        cleared = replace(cleared, fact_id=facts.next_id())
        _add_fact(facts, cleared, _COOLING, _IDLE, reason)
    return cleared


def _add_fact(facts: FactLog, entry: ProviderCooldownState, before: str, after: str, reason: str | None = None) -> None:
    facts.add(
        MECHANISM,
        entry.name,
        before,
        after,
        provider=entry.provider,
        connection=entry.connection,
        deadline_at=entry.cooling_until,
        reason=reason,
        failure_count=entry.count or len(entry.failures),
    )


def _latest(known: Instant | None, at: Instant) -> Instant:
    return at if known is None else max(known, at)
