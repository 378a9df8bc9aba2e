"""Session affinity: pins of a session to a connection (spec/affinity.md sections 2 to 7, fleet.md section 6).

Pure. A decision names the connection (or leaves it to the account strategy) and the one conditional write of the
pin; the caller applies it, and on a lost race asks again with the winner's row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from policy_service.domain.ids import DurationMs, Instant

TTL_MAX_MS: DurationMs = 30 * 86_400_000
REFRESH_MS: DurationMs = 15_000
_NO_PRIORITY = 999


class Affinity(StrEnum):
    """What the pin did for one selection."""

    CREATED = "created"
    JOINED = "joined"
    HIT = "hit"
    DETOUR = "detour"
    MOVED = "moved"
    NONE = "none"
    NO_CALLER = "no_caller"
    LOCAL = "local"
    """Store away: the pin is held by this replica alone."""


class OnIneligible(StrEnum):
    """Setting `affinity.on_ineligible`."""

    DETOUR = "detour"
    REPIN = "repin"


class Standing(StrEnum):
    """A connection as a pin sees it."""

    ELIGIBLE = "eligible"
    TEMPORARY = "temporary"
    PERMANENT = "permanent"


_PERMANENT = frozenset(
    {
        ("terminal_state", ""),
        ("availability", "disabled"),
        ("availability", "unknown_target"),
        ("lease", "lease_hidden"),
        ("lease", "lease_not_allowed"),
    }
)


def standing(mechanism: str, reason: str) -> Standing:
    """Standing of a connection excluded by a gate (diagnostics.md section 2); "" is not excluded."""
    if not mechanism:
        return Standing.ELIGIBLE
    permanent = (mechanism, "") in _PERMANENT or (mechanism, reason) in _PERMANENT
    return Standing.PERMANENT if permanent else Standing.TEMPORARY


@dataclass(frozen=True, slots=True)
class PinRow:
    """One pin. `api_key_id` "" is the scope that requests without a caller share."""

    api_key_id: str
    provider: str
    session_hash: str
    connection_id: str
    created_at: Instant
    last_used_at: Instant
    expires_at: Instant
    version: int = 0

    def is_live(self, now: Instant) -> bool:
        """An expired or malformed row counts as absent (expiry inclusive)."""
        return bool(self.connection_id) and now < self.expires_at


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A connection that all eligibility filters left, with its learned statistics."""

    connection: str
    priority: int | None = None
    last_used_at: Instant | None = None
    consecutive: int = 0
    max_sessions: int | None = None
    """Declared by OAuth connections that take part in the session spread; None for all others."""
    live_pins: int = 0

    @property
    def rank(self) -> int:
        """Priority; missing or 0 counts as 999."""
        return self.priority or _NO_PRIORITY

    @property
    def free_sessions(self) -> int:
        """Free session slots; 0 where none are declared."""
        return 0 if self.max_sessions is None else self.max_sessions - self.live_pins


class PinWrite(StrEnum):
    """The conditional statement that a decision asks for."""

    INSERT = "insert"
    """If no live row exists; an expired one may be replaced."""
    MOVE = "move"
    """An update of the row that was seen (same connection and version)."""


@dataclass(frozen=True, slots=True)
class PinDecision:
    """One selection. `connection` None: the account strategy picks, and nothing of the pin changes."""

    affinity: Affinity
    connection: str | None = None
    write: PinWrite | None = None
    row: PinRow | None = None
    """The row to write, or the pin that was followed."""
    consecutive: int | None = None
    """New consecutive count of the connection; None: not touched."""


@dataclass(frozen=True, slots=True)
class PinQuery:
    """One selection's question."""

    api_key_id: str
    provider: str
    session_hash: str
    """"" where the request has no session key."""
    ttl_ms: DurationMs
    on_ineligible: OnIneligible = OnIneligible.DETOUR
    require_caller: bool = False


def resolve_ttl(
    override_ms: DurationMs | None, generic_ms: DurationMs | None, legacy_ms: DurationMs | None
) -> DurationMs:
    """TTL of a pin: override > 0, else the generic setting (an explicit 0 is off), else the legacy one, else off."""
    if override_ms is not None and override_ms > 0:
        return min(override_ms, TTL_MAX_MS)
    configured = legacy_ms if generic_ms is None else generic_ms
    return max(0, min(configured or 0, TTL_MAX_MS))


def choose(
    query: PinQuery, pin: PinRow | None, pinned: Standing, pool: Sequence[PoolMember], now: Instant
) -> PinDecision:
    """Section 4.

    Args:
        query: caller, session and settings; the store keeps the row under (api_key_id, provider, session_hash).
        pin: row as read, live or not; None where there is none.
        pinned: standing of the pin's connection; not looked at where it is in the pool.
        pool: what all eligibility filters left, in any order.
    """
    refusal = _without_pins(query, pool)
    if refusal is not None:
        return PinDecision(refusal)
    if pin is None or not pin.is_live(now):
        return _pin_anew(query, None, pool, now)
    member = _member(pool, pin.connection_id)
    if member is not None:
        return PinDecision(Affinity.HIT, pin.connection_id, row=pin, consecutive=member.consecutive + 1)
    if pinned is not Standing.PERMANENT and query.on_ineligible is OnIneligible.DETOUR:
        return PinDecision(Affinity.DETOUR, row=pin)
    return _pin_anew(query, pin, pool, now)


def _without_pins(query: PinQuery, pool: Sequence[PoolMember]) -> Affinity | None:
    if not query.session_hash or query.ttl_ms <= 0 or not pool:
        return Affinity.NONE
    return Affinity.NO_CALLER if query.require_caller and not query.api_key_id else None


def _member(pool: Sequence[PoolMember], connection: str) -> PoolMember | None:
    return next((member for member in pool if member.connection == connection), None)


def _pin_anew(query: PinQuery, seen: PinRow | None, pool: Sequence[PoolMember], now: Instant) -> PinDecision:
    pick = spread(least_recently_used(pool), pool)
    row = PinRow(
        api_key_id=query.api_key_id,
        provider=query.provider,
        session_hash=query.session_hash,
        connection_id=pick.connection,
        created_at=now,
        last_used_at=now,
        expires_at=now + query.ttl_ms,
        version=0 if seen is None else seen.version,
    )
    if seen is None:
        return PinDecision(Affinity.CREATED, pick.connection, PinWrite.INSERT, row, consecutive=1)
    return PinDecision(Affinity.MOVED, pick.connection, PinWrite.MOVE, row, consecutive=1)


def join(winner: PinRow, pool: Sequence[PoolMember]) -> PinDecision:
    """After a lost race: serve from the winner's connection if it is eligible here, otherwise detour.

    The winner's pin is never moved by the loser, whatever the mode.
    """
    member = _member(pool, winner.connection_id)
    if member is None:
        return PinDecision(Affinity.DETOUR, row=winner)
    return PinDecision(Affinity.JOINED, winner.connection_id, row=winner, consecutive=member.consecutive + 1)


def least_recently_used(pool: Sequence[PoolMember]) -> PoolMember:
    """Never used first (lower priority number first), then oldest use, fewer in a row, priority, id."""
    return min(pool, key=_use_order)


def _use_order(member: PoolMember) -> tuple[bool, int, int, int, str]:
    if member.last_used_at is None:
        return (False, member.rank, 0, 0, member.connection)
    return (True, member.last_used_at, member.consecutive, member.rank, member.connection)


def spread(pick: PoolMember, pool: Sequence[PoolMember]) -> PoolMember:
    """OAuth session spread (section 6): a sibling of like priority with strictly more free session slots."""
    if pick.max_sessions is None:
        return pick
    siblings = [
        member
        for member in pool
        if member.max_sessions is not None
        and member.free_sessions > pick.free_sessions
        and member.rank <= pick.rank + 1
    ]
    return min(siblings, key=lambda member: (-member.free_sessions, _use_order(member)), default=pick)


def choose_forced(
    query: PinQuery, pin: PinRow | None, forced: str, pool: Sequence[PoolMember], now: Instant, *, managed: bool
) -> PinDecision:
    """A request that forces a connection (section 5): a live pin to another eligible one beats it.

    `pool` holds every eligible connection, the forced one included where it is eligible. Without a pin the forced
    connection is pinned like a pool of one.
    """
    if managed:
        return PinDecision(Affinity.NONE, forced)
    if _without_pins(query, pool) is not None or pin is None or not pin.is_live(now):
        only = [member for member in pool if member.connection == forced]
        found = choose(query, None, Standing.ELIGIBLE, only, now)
        return replace(found, connection=forced)
    if _member(pool, pin.connection_id) is not None:
        return choose(query, pin, Standing.ELIGIBLE, pool, now)
    return PinDecision(Affinity.DETOUR, forced, row=pin)


def refresh_interval(ttl_ms: DurationMs) -> DurationMs:
    """Shortest time between two written refreshes: 15 s or 1 % of the TTL, whichever is less; whole ms, rounded up."""
    return min(REFRESH_MS, -(-ttl_ms // 100))


def refreshed(pin: PinRow | None, connection: str, now: Instant, ttl_ms: DurationMs) -> PinRow | None:
    """The pin after the first byte came over `connection` (section 3); None: nothing is to be written.

    A pin that names another connection, is over, or was refreshed a moment ago is left alone; deadlines only grow.
    """
    if pin is None or pin.connection_id != connection or not pin.is_live(now) or ttl_ms <= 0:
        return None
    if now - pin.last_used_at < refresh_interval(ttl_ms):
        return None
    return replace(pin, last_used_at=now, expires_at=max(pin.expires_at, now + ttl_ms))


class PinEvent(StrEnum):
    """What happened to a request on a connection, as far as its pin is concerned (section 7)."""

    FAILURE = "failure"
    ROUTE_TIMEOUT = "route_timeout"
    CLIENT_ABORT = "client_abort"
    HEDGE_CANCELLED = "hedge_cancelled"
    LOCAL_REFUSAL = "local_refusal"


_FAILURE_KEEPS = {
    (Standing.TEMPORARY, OnIneligible.DETOUR): True,
}
"""Other failures evict, also those that changed nothing: the pin would lead straight back to the failing connection."""


def is_evicted(event: PinEvent, pin: PinRow, connection: str, after: Standing, mode: OnIneligible) -> bool:
    """True if the pin goes. `after` is the standing of the connection once the failure has been recorded."""
    if pin.connection_id != connection:
        return False
    if event is PinEvent.FAILURE:
        return not _FAILURE_KEEPS.get((after, mode), False)
    return event is PinEvent.ROUTE_TIMEOUT


def live_pins(pins: Sequence[PinRow], now: Instant) -> Mapping[str, int]:
    """Live pins by connection, for the session spread."""
    counts: dict[str, int] = {}
    for pin in pins:
        if pin.is_live(now):
            counts[pin.connection_id] = counts.get(pin.connection_id, 0) + 1
    return counts
