"""Upkeep of model locks: sweep, limit, listing (spec/model_lockout.md sections 1 and 7). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.lockout import ModelLockState, is_locked, released

LOCK_LIMIT: Final = 1_000


# -- keeping the table small -------------------------------------------------------------------------
def swept(row: ModelLockState, now: Instant) -> ModelLockState:
    """Row without what time has ended: the lock once it is over, the counter once it no longer escalates."""
    if row.until is not None and now > row.until:
        row = replace(row, until=None, locked_at=None, early_probe=None)
    horizon = (row.last_failure_at or 0) + row.reset_after_ms + row.last_cooldown_ms
    return released(row) if row.until is None and row.failure_count and now > horizon else row


def evictions(rows: Iterable[ModelLockState], now: Instant, limit: int = LOCK_LIMIT) -> tuple[ModelLockState, ...]:
    """Rows to drop so that at most `limit` locks stay, and at most as many counters without a lock: the oldest that
    lock nothing any more. Locks in force leave the counters their room, for these carry the escalation."""
    present = [row for row in rows if row.until is not None or row.failure_count]
    locks = [row for row in present if row.until is not None]
    counters = [row for row in present if row.until is None]
    return tuple(released(row) for row in (*_surplus(locks, now, limit), *_surplus(counters, now, limit)))


def _surplus(present: list[ModelLockState], now: Instant, limit: int) -> list[ModelLockState]:
    spare = sorted(
        (row for row in present if not is_locked(row, now)), key=lambda row: row.until or row.last_failure_at or 0
    )
    return spare[: max(0, len(present) - limit)]


# -- listing -----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class LockListing:
    """One active lock as operators see it."""

    provider: str
    connection: str
    model: str
    key_kind: str
    reason: str
    until: Instant
    remaining_ms: DurationMs
    failure_count: int
    hint_source: str


def listing(rows: Iterable[ModelLockState], now: Instant) -> tuple[LockListing, ...]:
    """Locks in force, the one that ends first at the top."""
    held = [_listed(row, row.until, now) for row in rows if row.until is not None and is_locked(row, now)]
    return tuple(sorted(held, key=lambda item: (item.until, item.provider, item.connection, item.model)))


def _listed(row: ModelLockState, until: Instant, now: Instant) -> LockListing:
    return LockListing(
        row.provider,
        row.connection,
        row.model or row.model_key,
        row.written_as or row.key_kind,
        row.reason,
        until,
        until - now,
        row.failure_count,
        row.hint_source,
    )
