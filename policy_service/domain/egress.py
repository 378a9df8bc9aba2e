"""Egress-bucketed lock: cool the siblings that share an exhausted address (spec/egress_lock.md). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self

from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.state import Key

KEPT_MS: Final = 24 * 3_600_000
REFRESH_MS: Final = 600_000
"""A connection that stays on its address is written again no more often than this."""
DEFAULT_COOLDOWN_MS: Final = 120_000
_REASONS: Final = frozenset({"quota_exhausted", "rate_limit_exceeded"})


@dataclass(frozen=True, slots=True)
class EgressSighting:
    """Connection seen on an egress address; kept for 24 h with its newest time."""

    KIND: ClassVar[str] = "egress_sighting"
    provider: str
    connection: str
    address: str
    seen_at: Instant | None = None

    @property
    def key(self) -> Key:
        return (self.KIND, self.provider, self.connection, self.address)

    @property
    def is_default(self) -> bool:
        return self.seen_at is None

    @property
    def generation(self) -> int:
        return 1

    @classmethod
    def default(cls, key: Key) -> Self:
        return cls(key[1], key[2], key[3])


def is_trigger(
    status: int | None, reason: str, *, in_set: bool, permanent: bool, credits_exhausted: bool, disable_cooling: bool
) -> bool:
    """True if one failure exhausts the address and not the account alone (section 1)."""
    harmless = permanent or credits_exhausted or disable_cooling
    return status == 429 and in_set and reason in _REASONS and not harmless


def duration_of(cooldown_ms: DurationMs) -> DurationMs:
    """Length of the lock for a decision's cooldown."""
    return cooldown_ms if cooldown_ms > 0 else DEFAULT_COOLDOWN_MS


def last_address(sightings: Iterable[EgressSighting], provider: str, connection: str, now: Instant) -> str:
    """Newest known address of a connection within 24 h; empty where there is none."""
    own = (s for s in sightings if s.provider == provider and s.connection == connection)
    newest = max((s for s in own if s.address and _is_known(s, now)), key=_time, default=None)
    return newest.address if newest else ""


def siblings(
    sightings: Iterable[EgressSighting],
    address: str,
    providers: Set[str],
    failing: tuple[str, str],
    now: Instant,
) -> tuple[tuple[str, str], ...]:
    """(provider, connection) of every other connection of the set seen on the address within 24 h, sorted."""
    seen = (s for s in sightings if s.address == address and s.provider in providers and _is_known(s, now))
    return tuple(sorted({(s.provider, s.connection) for s in seen} - {failing}))


def sighted(
    row: EgressSighting, others: Iterable[EgressSighting], now: Instant, refresh_ms: DurationMs = REFRESH_MS
) -> EgressSighting | None:
    """Sighting to write for one outcome, or None where the newest one already says the same.

    Args:
        row: present sighting of this connection on this address.
        others: sightings of the same connection on other addresses.
        now: instant of the outcome; the newest time wins.
    """
    moved = any(_time(other) > _time(row) for other in others)
    if not row.address or (not moved and row.seen_at is not None and now - row.seen_at < refresh_ms):
        return None
    return replace(row, seen_at=max(now, row.seen_at or now))


def is_stale(row: EgressSighting, now: Instant) -> bool:
    """True for a sighting past its keeping time."""
    return not _is_known(row, now)


def _time(row: EgressSighting) -> Instant:
    return 0 if row.seen_at is None else row.seen_at


def _is_known(row: EgressSighting, now: Instant) -> bool:
    return row.seen_at is not None and now - row.seen_at <= KEPT_MS
