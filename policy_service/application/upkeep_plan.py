"""Sweep: rows that time has emptied shrink to their defaults, and bounded kinds to their bounds. Pure fold.

It writes only what is already true by time (spec/fleet.md section 7): no read gives another answer after a sweep.
Every replica may run it at any time; two at once are harmless.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from policy_service.application.ports import Scope, Unit, UnitResult
from policy_service.domain import (
    breaker_burst,
    breaker_controls,
    lockout,
    lockout_upkeep,
    provider_cooldown,
    usage_wall_state,
)
from policy_service.domain.breaker import BreakerState
from policy_service.domain.breaker_burst import BurstState
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.lockout import FamilyPoolState, ModelLockState
from policy_service.domain.policy import Policy
from policy_service.domain.pool_guard import PanicState
from policy_service.domain.provider_cooldown import ProviderCooldownState
from policy_service.domain.state import Key, Row, StateBook
from policy_service.domain.usage_wall_state import Lane

MARGIN_MS: DurationMs = 60_000
"""Reports may be late by the delay of spool and network; evidence younger than this stays for them."""


def upkeep_unit(rows: Mapping[Key, Row], now: Instant, policy: Policy) -> Unit[int] | None:
    """Unit that sweeps what the view shows as spent; None where nothing is. Decided anew on the locked rows.

    Args:
        rows: non-default rows of the view.
        now: database time.
    """
    seen = StateBook(rows)
    surplus = {row.key for row in lockout_upkeep.evictions(seen.rows(ModelLockState), now)}
    surplus |= {row.key for row in usage_wall_state.surplus(seen.rows(Lane))}
    surplus |= {row.key for row in breaker_controls.surplus(seen.rows(BreakerState))}
    sweep(seen, now - MARGIN_MS, policy, surplus)
    if not seen.changes:
        return None

    def run(book: StateBook, at: Instant, _known: Mapping[str, bytes]) -> UnitResult[int]:
        return UnitResult(sweep(book, at - MARGIN_MS, policy, surplus))

    return Unit(_scope(seen.changes), run)


def sweep(book: StateBook, now: Instant, policy: Policy, surplus: Collection[Key] = ()) -> int:
    """Shrink every row of the book that time has emptied; returns the number of rows changed.

    Args:
        surplus: keys of model locks, usage-wall rows and breakers beyond the limits of the fleet; locks that lock
            nothing, rows that no report touched since and idle breakers are dropped.
    """
    before = len(book.changes)
    for row in (
        *breaker_controls.forget(book.rows(BreakerState), now, surplus),
        *_defaults(breaker_burst.expired(book.rows(BurstState), now)),
        *_defaults(_idle_entries(book, now, policy)),
        *_defaults(_ended_pools(book, now)),
        *_swept_locks(book, now, surplus),
        *_defaults(row for row in book.rows(Lane) if row.key in surplus and row.touched_at < now),
        *(PanicState(row.pool, row.live(now)) for row in book.rows(PanicState)),
    ):
        book.put(row)
    return len(book.changes) - before


def _scope(keys: Iterable[Key]) -> Scope:
    listed = list(keys)
    connections = {(key[1], key[2]) for key in listed if len(key) > 2 and key[2]}
    return Scope(frozenset(key[1] for key in listed), frozenset(connections))


def _defaults(rows: Iterable[Row]) -> Iterator[Row]:
    return (type(row).default(row.key) for row in rows)


def _idle_entries(book: StateBook, now: Instant, policy: Policy) -> list[ProviderCooldownState]:
    """Provider cooldown entries past the retention of their own profile."""
    return [
        entry
        for entry in book.rows(ProviderCooldownState)
        if provider_cooldown.expired([entry], now, policy.for_connection(entry.provider).provider_cooldown)
    ]


def _ended_pools(book: StateBook, now: Instant) -> list[FamilyPoolState]:
    return [row for row in book.rows(FamilyPoolState) if row.limited_until is not None and row.limited_until < now]


def _swept_locks(book: StateBook, now: Instant, surplus: Collection[Key]) -> Iterator[ModelLockState]:
    for row in book.rows(ModelLockState):
        is_surplus = row.key in surplus and not lockout.is_locked(row, now + MARGIN_MS)
        yield lockout.released(row) if is_surplus else lockout_upkeep.swept(row, now)
