"""Sweep: rows that time has emptied shrink to their defaults, and bounded kinds to their bounds. Pure fold.

It writes only what is already true by time (spec/fleet.md section 7): no read gives another answer after a sweep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from policy_service.domain import breaker_burst, breaker_controls, lockout_upkeep, provider_cooldown
from policy_service.domain.breaker import BreakerState
from policy_service.domain.breaker_burst import BurstState
from policy_service.domain.ids import Instant
from policy_service.domain.lockout import ModelLockState
from policy_service.domain.policy import Policy
from policy_service.domain.provider_cooldown import ProviderCooldownState
from policy_service.domain.state import Row, StateBook


def sweep(book: StateBook, now: Instant, policy: Policy) -> int:
    """Shrink every row of the book that time has emptied; returns the number of rows changed."""
    before = len(book.changes)
    for row in (
        *breaker_controls.forget(book.rows(BreakerState), now),
        *_defaults(breaker_burst.expired(book.rows(BurstState), now)),
        *_defaults(_idle_entries(book, now, policy)),
        *_swept_locks(book, now),
    ):
        book.put(row)
    return len(book.changes) - before


def _defaults(rows: Iterable[Row]) -> Iterator[Row]:
    return (type(row).default(row.key) for row in rows)


def _idle_entries(book: StateBook, now: Instant, policy: Policy) -> list[ProviderCooldownState]:
    """Provider cooldown entries past the retention of their own profile."""
    return [
        entry
        for entry in book.rows(ProviderCooldownState)
        if provider_cooldown.expired([entry], now, policy.for_connection(entry.provider).provider_cooldown)
    ]


def _swept_locks(book: StateBook, now: Instant) -> Iterator[ModelLockState]:
    rows = [lockout_upkeep.swept(row, now) for row in book.rows(ModelLockState)]
    dropped = {row.key: row for row in lockout_upkeep.evictions(rows, now)}
    return (dropped.get(row.key, row) for row in rows)
