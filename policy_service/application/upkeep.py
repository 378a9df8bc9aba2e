"""Upkeep: what time has ended is taken out of the tables, so that state stays as small as the trouble of the hour.

Changes no decision: only rows whose content no longer excludes, counts or suppresses anything are touched. Every
replica may run it at any time; two at once are harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from policy_service.application.ports import Scope, Unit, UnitResult
from policy_service.domain import breaker_burst, lockout_upkeep, provider_cooldown
from policy_service.domain.breaker import BreakerState, State
from policy_service.domain.breaker_burst import BurstState
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.lockout import FamilyPoolState, ModelLockState
from policy_service.domain.policy import Policy
from policy_service.domain.pool_guard import PanicState
from policy_service.domain.provider_cooldown import ProviderCooldownState
from policy_service.domain.state import Key, Row, StateBook

MARGIN_MS: DurationMs = 60_000
"""Reports may be late by the spool's and the network's delay; evidence younger than this stays for them."""
IDLE_BREAKER_MS: DurationMs = 1_800_000
"""A closed breaker without counted failures is forgotten after this time (spec/breaker.md section 11)."""


def spent_rows(rows: Iterable[Row], now: Instant, policy: Policy) -> list[Row]:
    """What the spent ones among `rows` shrink to; rows that still matter are left out."""
    every = list(rows)
    shrunk: dict[Key, Row] = {}
    for row in every:
        shrink = _SHRINK.get(row.KIND)
        after = shrink(row, now, policy) if shrink else row
        if after != row:
            shrunk[row.key] = after
    for gone in lockout_upkeep.evictions((r for r in every if isinstance(r, ModelLockState)), now):
        shrunk[gone.key] = gone
    return list(shrunk.values())


def upkeep_unit(rows: Iterable[Row], now: Instant, policy: Policy) -> Unit[int] | None:
    """Unit that shrinks what the view shows as spent; None where nothing is. Decided anew on the locked rows."""
    keys = {row.key for row in spent_rows(rows, now, policy)}
    if not keys:
        return None

    def run(book: StateBook, at: Instant, _known: Mapping[str, bytes]) -> UnitResult[int]:
        present = [row for kind in _KINDS for row in book.rows(kind) if row.key in keys]
        spent = spent_rows(present, at, policy)
        for row in spent:
            book.put(row)
        return UnitResult(len(spent))

    return Unit(_scope(keys), run)


def _scope(keys: Iterable[Key]) -> Scope:
    listed = list(keys)
    connections = {(key[1], key[2]) for key in listed if len(key) > 2 and key[2]}
    return Scope(frozenset(key[1] for key in listed), frozenset(connections))


def _lock(row: Row, now: Instant, policy: Policy) -> Row:
    assert isinstance(row, ModelLockState)
    return lockout_upkeep.swept(row, now - MARGIN_MS)


def _family(row: Row, now: Instant, policy: Policy) -> Row:
    assert isinstance(row, FamilyPoolState)
    is_over = row.limited_until is not None and row.limited_until < now - MARGIN_MS
    return FamilyPoolState.default(row.key) if is_over else row


def _burst(row: Row, now: Instant, policy: Policy) -> Row:
    assert isinstance(row, BurstState)
    return BurstState.default(row.key) if breaker_burst.expired([row], now - MARGIN_MS) else row


def _cooldown(row: Row, now: Instant, policy: Policy) -> Row:
    assert isinstance(row, ProviderCooldownState)
    profile = policy.for_connection(row.provider, row.connection).provider_cooldown
    gone = provider_cooldown.expired([row], now, profile)
    return ProviderCooldownState.default(row.key) if gone else row


def _breaker(row: Row, now: Instant, policy: Policy) -> Row:
    assert isinstance(row, BreakerState)
    is_quiet = row.state is State.CLOSED and not row.failure_count and not row.override
    if not is_quiet or now - (row.last_failure_at or 0) <= IDLE_BREAKER_MS or row.closed_at is not None:
        return row
    kept = BreakerState(row.provider, row.connection)
    return replace(
        kept,
        generation=row.generation,
        generation_since=row.generation_since,
        last_event_at=row.last_event_at,
        fact_id=row.fact_id,
    )


def _panic(row: Row, now: Instant, policy: Policy) -> Row:
    assert isinstance(row, PanicState)
    return PanicState(row.pool, row.live(now))


_SHRINK: Mapping[str, Callable[[Row, Instant, Policy], Row]] = {
    ModelLockState.KIND: _lock,
    FamilyPoolState.KIND: _family,
    BurstState.KIND: _burst,
    ProviderCooldownState.KIND: _cooldown,
    BreakerState.KIND: _breaker,
    PanicState.KIND: _panic,
}
_KINDS: tuple[type[Row], ...] = (
    ModelLockState,
    FamilyPoolState,
    BurstState,
    ProviderCooldownState,
    BreakerState,
    PanicState,
)
