"""Acts of operators, credentials and jobs on connections and model locks, over a `StateBook`
(spec/terminal_states.md, connection_cooldown.md section 6, model_lockout.md section 6, operator_surface.md section 4).

Each act that sets old evidence aside raises a generation and leaves a fact with its actor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from policy_service.application.connection_case import Attempt
from policy_service.application.connection_locks import free_pool
from policy_service.domain import cooldown, early_probe, lockout, terminal
from policy_service.domain.connection_state import ConnectionState, EarlyProbe
from policy_service.domain.cooldown import RecoveryView
from policy_service.domain.early_probe import Block
from policy_service.domain.facts import FactLog
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.lockout import FamilyPoolState, ModelLockState, Place
from policy_service.domain.policy import ConnectionPolicy
from policy_service.domain.state import StateBook
from policy_service.domain.terminal import RetryPermit

DISABLED = "disabled"
"""State, in facts, of a connection that is switched off without a terminal state."""

__all__ = [
    "Attempt",
    "change_credential",
    "delete_lock",
    "grant_connection_probe",
    "grant_lock_probe",
    "grant_retry",
    "recover_connection",
    "reset_connection",
    "retry_result",
    "set_enabled",
]


def reset_connection(book: StateBook, provider: str, connection: str, now: Instant, facts: FactLog) -> ConnectionState:
    """Operator reset, re-test or re-enabling: everything the service held against the connection is gone."""
    return _renew(book, provider, connection, facts, lambda row: terminal.revive(row, now))


def change_credential(
    book: StateBook,
    provider: str,
    connection: str,
    now: Instant,
    facts: FactLog,
    token_expires_at: Instant | None = None,
) -> ConnectionState:
    """A new credential: outcomes of the old one are statistics only from here on."""
    return _renew(book, provider, connection, facts, lambda row: terminal.change_credential(row, now, token_expires_at))


def set_enabled(
    book: StateBook, provider: str, connection: str, enabled: bool, now: Instant, facts: FactLog
) -> tuple[ConnectionState, bool]:
    """Switch a connection on or off; the row after it, and whether it changed. Switching on clears everything that
    was held against the connection, as a reset does."""
    row = book.get(ConnectionState, provider, connection)
    if row.active == enabled:
        return row, False
    if enabled:
        return reset_connection(book, provider, connection, now, facts), True
    return _put(book, row, replace(row, active=False, last_event_at=max(now, row.last_event_at or now)), facts), True


def recover_connection(
    book: StateBook, provider: str, connection: str, seen: RecoveryView, now: Instant, facts: FactLog
) -> bool:
    """Compare and set of a recovery job; False: the row is not as the job saw it, nothing was done."""
    row = book.get(ConnectionState, provider, connection)
    after = cooldown.recover(row, seen)
    if after is not None:
        _put(book, row, replace(after, last_event_at=max(now, row.last_event_at or now)), facts)
    return after is not None


def grant_retry(
    book: StateBook, provider: str, connection: str, permit_id: str, now: Instant, facts: FactLog
) -> RetryPermit | None:
    """Hand out the revival of an expired connection if one is due."""
    row = book.get(ConnectionState, provider, connection)
    after, permit = terminal.grant_retry(row, permit_id, now)
    _put(book, row, after, facts)
    return permit


def retry_result(
    book: StateBook, provider: str, connection: str, succeeded: bool, now: Instant, facts: FactLog
) -> ConnectionState:
    """Result of a revival; only an expired connection can be revived."""
    row = book.get(ConnectionState, provider, connection)
    if row.test_status != terminal.EXPIRED:
        return row
    act = terminal.retry_succeeded if succeeded else terminal.retry_failed
    return _put(book, row, act(row, now), facts)


def delete_lock(book: StateBook, place: Place, facts: FactLog) -> int:
    """Remove lock and counter at every key of a model and the timer of its family; returns the locks removed.

    Where there is nothing to remove, no generation rises: calls under way there are still heard.
    """
    before = lockout.lock_rows(book, place)
    pool = book.get(FamilyPoolState, place.provider, place.connection, place.pool)
    if all(row.is_default for row in before) and pool.is_default:
        return 0
    for row, after in zip(before, lockout.deleted(before), strict=True):
        book.put(after)
        if row.until is not None or row.failure_count:
            _record_delete(row, after, facts)
    free_pool(book, pool, facts)
    return sum(row.until is not None for row in before)


def _record_delete(row: ModelLockState, after: ModelLockState, facts: FactLog) -> None:
    facts.add(
        "model_lock",
        f"{row.provider}:{row.connection}:{row.written_as or row.key_kind}:{row.model_key}",
        "locked" if row.until is not None else "free",
        "free",
        provider=row.provider,
        connection=row.connection,
        model=row.model,
        generation=after.generation,
    )


# -- early probes ------------------------------------------------------------------------------------
def grant_connection_probe(
    book: StateBook, provider: str, connection: str, policy: ConnectionPolicy, permit_id: str, now: Instant
) -> EarlyProbe | None:
    """Permit to test a cooling connection before the end of a long block; None where none is due."""
    row = book.get(ConnectionState, provider, connection)
    start = row.last_error_at if row.limited_since is None else row.limited_since
    if row.is_terminal or row.rate_limited_until is None or start is None:
        return None
    block = Block(start, row.rate_limited_until, row.hint_source, row.early_probe)
    permit = _grant(block, policy, permit_id, now)
    if permit is not None:
        book.put(replace(row, early_probe=permit))
    return permit


def grant_lock_probe(
    book: StateBook, place: Place, policy: ConnectionPolicy, permit_id: str, now: Instant
) -> EarlyProbe | None:
    """Permit to test a locked model before the end of a long lock; None where none is due.

    Every key that locks the model has to agree, for one of them alone would still refuse the call.
    """
    held = [row for row in lockout.lock_rows(book, place) if lockout.is_locked(row, now)]
    blocks = [Block(row.locked_at or 0, row.until or 0, row.hint_source, row.early_probe) for row in held]
    permits = [_grant(block, policy, permit_id, now) for block in blocks]
    if not permits or any(permit is None for permit in permits):
        return None
    for row, permit in zip(held, permits, strict=True):
        book.put(replace(row, early_probe=permit))
    return permits[0]


def free_early_probe(book: StateBook, place: Place, permit_id: str) -> None:
    """Free a permit whose call told nothing about connection and model, or was never made (guards.md section 7)."""
    row = book.get(ConnectionState, place.provider, place.connection)
    if early_probe.holds(row.early_probe, permit_id):
        book.put(replace(row, early_probe=None))
    for lock in lockout.lock_rows(book, place) if permit_id and place.model else ():
        if early_probe.holds(lock.early_probe, permit_id):
            book.put(replace(lock, early_probe=None))


def _grant(block: Block, policy: ConnectionPolicy, permit_id: str, now: Instant) -> EarlyProbe | None:
    ttl: DurationMs = math.ceil(policy.breaker.reset_timeout_ms)
    return early_probe.grant(block, policy.early_probe, now, permit_id, ttl)


# -- writing -----------------------------------------------------------------------------------------
def _renew(
    book: StateBook,
    provider: str,
    connection: str,
    facts: FactLog,
    act: Callable[[ConnectionState], ConnectionState],
) -> ConnectionState:
    for pool in list(book.rows(FamilyPoolState)):
        if (pool.provider, pool.connection) == (provider, connection):
            free_pool(book, pool, facts)
    row = book.get(ConnectionState, provider, connection)
    return _put(book, row, act(row), facts)


def _put(book: StateBook, before: ConnectionState, after: ConnectionState, facts: FactLog) -> ConnectionState:
    if _shown(before) != _shown(after):
        after = replace(after, fact_id=facts.next_id())
        facts.add(
            "connection",
            f"{after.provider}:{after.connection}",
            _state(before),
            _state(after),
            provider=after.provider,
            connection=after.connection,
            generation=after.generation,
            deadline_at=after.rate_limited_until,
        )
    book.put(after)
    return after


def _state(row: ConnectionState) -> str:
    return row.test_status if row.active or row.is_terminal else DISABLED


def _shown(row: ConnectionState) -> tuple[object, ...]:
    return row.test_status, row.rate_limited_until, row.active, row.generation
