"""Exclusive connection leases: the store operations on rows (spec/leases.md sections 3 to 5, fleet.md section 6).

Pure. The caller holds the locks of the owner and of the connections at hand and passes the rows of both, history
included (of an owner every row, of a connection the active and the newest ended one); `now` is database time read
after the locks. What an operation writes is in `LeaseStep.writes`: a row with id 0 is to be inserted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from policy_service.domain.ids import DurationMs, Instant

TTL_DEFAULT_MS: DurationMs = 120_000
TTL_MIN_MS: DurationMs = 1_000
TTL_MAX_MS: DurationMs = 1_800_000
GENERATION_MAX = 2**53 - 1
LISTING_DELAY_MS: DurationMs = 5_000
"""A newly listed connection is leased from listing + this on: until then a replica may still offer it to others."""
NEW_ROW = 0


class LeaseState(StrEnum):
    """States of a row; every state but ACTIVE is an end."""

    ACTIVE = "ACTIVE"
    RELEASED = "RELEASED"
    EXPIRED = "EXPIRED"
    INVALIDATED = "INVALIDATED"


class EndReason(StrEnum):
    """Why a lease ended."""

    AUTHORIZATION_CHANGED = "AUTHORIZATION_CHANGED"
    CLIENT_CANCELLED = "CLIENT_CANCELLED"
    CONNECTION_INELIGIBLE = "CONNECTION_INELIGIBLE"
    HEALTH_OR_COOLDOWN = "HEALTH_OR_COOLDOWN"
    MANAGED_KEY_REVOKED = "MANAGED_KEY_REVOKED"
    MODEL_INELIGIBLE = "MODEL_INELIGIBLE"
    OWNER_EXIT = "OWNER_EXIT"
    QUOTA_UNAVAILABLE = "QUOTA_UNAVAILABLE"
    TTL_EXPIRED = "TTL_EXPIRED"


RELEASE_REASONS = frozenset({EndReason.OWNER_EXIT, EndReason.CLIENT_CANCELLED})


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """One lease period."""

    id: int
    owner_hash: str
    api_key_id: str
    provider: str
    connection_id: str
    generation: int
    state: LeaseState
    ttl_ms: DurationMs
    acquired_at: Instant
    renewed_at: Instant
    expires_at: Instant
    ended_at: Instant | None = None
    end_reason: EndReason | None = None

    def is_active(self, now: Instant) -> bool:
        """Alive at `now`, whether or not a lapsed row has been swept."""
        return self.state is LeaseState.ACTIVE and now < self.expires_at


@dataclass(frozen=True, slots=True)
class LeaseCall:
    """Arguments of an operation. `ttl_ms` None: not requested."""

    owner_hash: str
    api_key_id: str
    generation: int = 0
    provider: str = ""
    connection_id: str = ""
    ttl_ms: DurationMs | None = None
    reason: EndReason | None = None


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """Numbers in force at the moment of the check."""

    lock_delay_ms: DurationMs = 0
    generation_floor: int = 0
    """New generations start above it: epoch x 2^32 after an asynchronous failover (fleet.md section 7)."""
    listed_at: Instant | None = None
    """When the connection at hand was listed by a managed key; None: long ago."""
    held_until: Instant | None = None
    """End of the pause after an asynchronous failover (fleet.md section 7); None: no pause."""


class LeaseResult(StrEnum):
    """Answers of the operations."""

    ACQUIRED = "ACQUIRED"
    REUSED = "REUSED"
    OWNER_ALREADY_ACTIVE = "OWNER_ALREADY_ACTIVE"
    CONNECTION_BUSY = "CONNECTION_BUSY"
    TRANSITIONED = "TRANSITIONED"
    RENEWED = "RENEWED"
    RELEASED = "RELEASED"
    INVALIDATED = "INVALIDATED"
    FOUND = "FOUND"
    STALE = "STALE"


class Fence(StrEnum):
    """Answers of the fence, in the order in which they are looked for."""

    REQUIRED = "REQUIRED"
    STALE = "STALE"
    AUTHORIZATION_MISMATCH = "AUTHORIZATION_MISMATCH"
    CONNECTION_MISMATCH = "CONNECTION_MISMATCH"
    VALID = "VALID"


@dataclass(frozen=True, slots=True)
class LeaseStep:
    """Result of one operation with its writes: updates of known rows and, with id 0, the row to insert."""

    result: LeaseResult
    lease: LeaseRow | None = None
    """The lease as it now stands; for OWNER_ALREADY_ACTIVE the existing one."""
    free_at: Instant | None = None
    """CONNECTION_BUSY: when the connection becomes free at the latest."""
    writes: tuple[LeaseRow, ...] = ()


def clamp_ttl(ttl_ms: DurationMs) -> DurationMs:
    """1 s .. 30 min."""
    return max(TTL_MIN_MS, min(TTL_MAX_MS, ttl_ms))


def expire(rows: Iterable[LeaseRow], now: Instant) -> tuple[LeaseRow, ...]:
    """The expire step: lapsed ACTIVE rows as they are to be written (expiry inclusive)."""
    lapsed = (row for row in rows if row.state is LeaseState.ACTIVE and row.expires_at <= now)
    return tuple(_ended(row, LeaseState.EXPIRED, EndReason.TTL_EXPIRED, now) for row in lapsed)


def acquire(rows: Sequence[LeaseRow], call: LeaseCall, rules: LeaseRules, now: Instant) -> LeaseStep:
    """A new lease, or the owner's own if it asks for the connection it holds (then extended)."""
    return _after_expiry(rows, now, lambda present: _acquire(present, call, rules, now))


def _acquire(rows: Sequence[LeaseRow], call: LeaseCall, rules: LeaseRules, now: Instant) -> LeaseStep:
    own = active_of_owner(rows, call.owner_hash, now)
    if own is not None:
        if (own.api_key_id, own.connection_id) != (call.api_key_id, call.connection_id):
            return LeaseStep(LeaseResult.OWNER_ALREADY_ACTIVE, own)
        return _write(LeaseResult.REUSED, _renewed(replace(own, provider=call.provider), call.ttl_ms, now))
    free_at = busy_until(rows, call.connection_id, rules, now)
    if free_at is not None:
        return LeaseStep(LeaseResult.CONNECTION_BUSY, free_at=free_at)
    ttl = TTL_DEFAULT_MS if call.ttl_ms is None else clamp_ttl(call.ttl_ms)
    return _write(LeaseResult.ACQUIRED, _new_row(call, next_generation(rows, call.owner_hash, rules), ttl, now))


def transition(rows: Sequence[LeaseRow], call: LeaseCall, rules: LeaseRules, now: Instant) -> LeaseStep:
    """Move the owner's lease to another connection; the generation stays."""
    return _after_expiry(rows, now, lambda present: _transition(present, call, rules, now))


def _transition(rows: Sequence[LeaseRow], call: LeaseCall, rules: LeaseRules, now: Instant) -> LeaseStep:
    own = _match(rows, call, now)
    if own is None:
        return LeaseStep(LeaseResult.STALE)
    if own.connection_id == call.connection_id:
        return LeaseStep(LeaseResult.REUSED, own)
    free_at = busy_until(rows, call.connection_id, rules, now)
    if free_at is not None:
        return LeaseStep(LeaseResult.CONNECTION_BUSY, free_at=free_at)
    ttl = own.ttl_ms if call.ttl_ms is None else clamp_ttl(call.ttl_ms)
    moved = _new_row(call, own.generation, ttl, now)
    reason = call.reason or EndReason.CONNECTION_INELIGIBLE
    old = _ended(own, LeaseState.INVALIDATED, reason, now)
    return LeaseStep(LeaseResult.TRANSITIONED, moved, writes=(old, moved))


def renew(rows: Sequence[LeaseRow], call: LeaseCall, now: Instant) -> LeaseStep:
    """Extend to now + TTL; the only thing that does."""
    return _on_match(rows, call, now, lambda own: _write(LeaseResult.RENEWED, _renewed(own, call.ttl_ms, now)))


def invalidate(rows: Sequence[LeaseRow], call: LeaseCall, now: Instant) -> LeaseStep:
    """End the lease on behalf of the service."""
    reason = call.reason or EndReason.CONNECTION_INELIGIBLE
    ended = LeaseState.INVALIDATED
    return _on_match(rows, call, now, lambda own: _write(LeaseResult.INVALIDATED, _ended(own, ended, reason, now)))


def release(rows: Sequence[LeaseRow], call: LeaseCall, now: Instant) -> LeaseStep:
    """The owner's own end of the lease. Repeating it answers RELEASED again and writes nothing."""
    return _after_expiry(rows, now, lambda present: _release(present, call, now))


def _release(rows: Sequence[LeaseRow], call: LeaseCall, now: Instant) -> LeaseStep:
    own = _match(rows, call, now)
    if own is not None:
        reason = call.reason or EndReason.OWNER_EXIT
        return _write(LeaseResult.RELEASED, _ended(own, LeaseState.RELEASED, reason, now))
    newest = _newest(row for row in rows if (row.owner_hash, row.generation) == (call.owner_hash, call.generation))
    was_released = newest is not None and newest.state is LeaseState.RELEASED and newest.api_key_id == call.api_key_id
    return LeaseStep(LeaseResult.RELEASED, newest) if was_released else LeaseStep(LeaseResult.STALE)


def get(rows: Sequence[LeaseRow], call: LeaseCall, now: Instant) -> LeaseStep:
    """The active lease of owner, generation and key. Read only."""
    own = _match(rows, call, now)
    return LeaseStep(LeaseResult.STALE) if own is None else LeaseStep(LeaseResult.FOUND, own)


def fence(rows: Sequence[LeaseRow], call: LeaseCall, now: Instant) -> Fence:
    """May this very call be dispatched? Read only; judges expiry on read."""
    own = active_of_owner(rows, call.owner_hash, now)
    if own is None:
        return Fence.REQUIRED
    checks = (
        (own.generation == call.generation, Fence.STALE),
        (own.api_key_id == call.api_key_id, Fence.AUTHORIZATION_MISMATCH),
        (own.connection_id == call.connection_id, Fence.CONNECTION_MISMATCH),
    )
    return next((verdict for holds, verdict in checks if not holds), Fence.VALID)


def withdraw(
    rows: Iterable[LeaseRow], api_key_id: str, *, is_managed: bool, allowed: Iterable[str], now: Instant
) -> tuple[LeaseRow, ...]:
    """Rows to write after a key changed: all its leases end if it is no managed key any more, else those on
    connections that it does not list."""
    listed = frozenset(allowed)
    reason = EndReason.AUTHORIZATION_CHANGED if is_managed else EndReason.MANAGED_KEY_REVOKED
    mine = (row for row in rows if row.api_key_id == api_key_id and row.is_active(now))
    gone = (row for row in mine if not is_managed or row.connection_id not in listed)
    return tuple(_ended(row, LeaseState.INVALIDATED, reason, now) for row in gone)


# --- questions -------------------------------------------------------------------------------------------


def active_of_owner(rows: Iterable[LeaseRow], owner_hash: str, now: Instant) -> LeaseRow | None:
    """The owner's active lease; there is at most one."""
    return next((row for row in rows if row.owner_hash == owner_hash and row.is_active(now)), None)


def active_of_connection(rows: Iterable[LeaseRow], connection_id: str, now: Instant) -> LeaseRow | None:
    """The connection's active lease; there is at most one."""
    return next((row for row in rows if row.connection_id == connection_id and row.is_active(now)), None)


def next_generation(rows: Iterable[LeaseRow], owner_hash: str, rules: LeaseRules) -> int:
    """1 + the highest generation ever stored for the owner (or the floor)."""
    stored = (row.generation for row in rows if row.owner_hash == owner_hash)
    return max((rules.generation_floor, *stored)) + 1


def busy_until(rows: Iterable[LeaseRow], connection_id: str, rules: LeaseRules, now: Instant) -> Instant | None:
    """When a connection becomes free at the latest; None: it is free (the bound is inclusive)."""
    own = [row for row in rows if row.connection_id == connection_id]
    bounds = [] if rules.listed_at is None else [rules.listed_at + LISTING_DELAY_MS]
    bounds += [] if rules.held_until is None else [rules.held_until]
    holder = active_of_connection(own, connection_id, now)
    last = holder or _newest(own)
    if last is not None:
        bounds.append(_free_at(last, rules.lock_delay_ms))
    free_at = max(bounds, default=now)
    return free_at if free_at > now or holder is not None else None


def _free_at(row: LeaseRow, lock_delay_ms: DurationMs) -> Instant:
    """End of the lock-delay behind a lease; a release leaves none (section 5)."""
    if row.state is LeaseState.RELEASED:
        return row.ended_at or row.expires_at
    if row.state is LeaseState.INVALIDATED and row.ended_at is not None:
        return row.ended_at + lock_delay_ms
    return row.expires_at + lock_delay_ms


def visible_label(label: str, *, is_account: bool, identities: Iterable[str] = ()) -> str | None:
    """Label of a connection as `get` shows it; None: hidden.

    Args:
        label: as configured.
        is_account: an OAuth or access-token connection.
        identities: e-mail and display name of the account.
    """
    text = label.strip()
    if not text or "@" in text:
        return None
    names = {name.strip().casefold() for name in identities if name}
    return None if is_account and text.casefold() in names else label


# --- transitions of one row ------------------------------------------------------------------------------


def _after_expiry(rows: Sequence[LeaseRow], now: Instant, run: Callable[[Sequence[LeaseRow]], LeaseStep]) -> LeaseStep:
    """Run an operation on the rows as the expire step leaves them, and write both."""
    lapsed = {row.id: row for row in expire(rows, now)}
    step = run([lapsed.get(row.id, row) for row in rows])
    return replace(step, writes=(*lapsed.values(), *step.writes))


def _on_match(
    rows: Sequence[LeaseRow], call: LeaseCall, now: Instant, run: Callable[[LeaseRow], LeaseStep]
) -> LeaseStep:
    def matched(present: Sequence[LeaseRow]) -> LeaseStep:
        own = _match(present, call, now)
        return LeaseStep(LeaseResult.STALE) if own is None else run(own)

    return _after_expiry(rows, now, matched)


def _match(rows: Iterable[LeaseRow], call: LeaseCall, now: Instant) -> LeaseRow | None:
    own = active_of_owner(rows, call.owner_hash, now)
    if own is None or (own.generation, own.api_key_id) != (call.generation, call.api_key_id):
        return None
    return own


def _newest(rows: Iterable[LeaseRow]) -> LeaseRow | None:
    return max(rows, key=lambda row: row.id, default=None)


def _write(result: LeaseResult, row: LeaseRow) -> LeaseStep:
    return LeaseStep(result, row, writes=(row,))


def _renewed(row: LeaseRow, ttl_ms: DurationMs | None, now: Instant) -> LeaseRow:
    ttl = row.ttl_ms if ttl_ms is None else clamp_ttl(ttl_ms)
    return replace(row, ttl_ms=ttl, renewed_at=now, expires_at=now + ttl)


def _ended(row: LeaseRow, state: LeaseState, reason: EndReason, now: Instant) -> LeaseRow:
    return replace(row, state=state, end_reason=reason, ended_at=now)


def _new_row(call: LeaseCall, generation: int, ttl_ms: DurationMs, now: Instant) -> LeaseRow:
    return LeaseRow(
        id=NEW_ROW,
        owner_hash=call.owner_hash,
        api_key_id=call.api_key_id,
        provider=call.provider,
        connection_id=call.connection_id,
        generation=generation,
        state=LeaseState.ACTIVE,
        ttl_ms=ttl_ms,
        acquired_at=now,
        renewed_at=now,
        expires_at=now + ttl_ms,
    )
