"""Acts of operators on the state, as pure folds: breaker controls and the reset of operator_surface.md section 4.

Every act names its actor in the cause of its facts; an act that finds nothing to change writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from policy_service.application.connection_acts import change_credential, delete_lock, reset_connection
from policy_service.application.connection_locks import free_pool
from policy_service.application.ports import Scope
from policy_service.domain import breaker_controls, provider_cooldown
from policy_service.domain.breaker import BreakerState
from policy_service.domain.breaker_burst import BurstState
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.cooldown import clear
from policy_service.domain.facts import FactLog
from policy_service.domain.ids import Instant
from policy_service.domain.lockout import FamilyPoolState, ModelLockState, Place
from policy_service.domain.policy import Policy
from policy_service.domain.provider_cooldown import ProviderCooldownState
from policy_service.domain.state import R, StateBook
from policy_service.domain.usage_wall_state import Lane, is_lane_active

__all__ = [
    "CONTROLS",
    "OWNED_SCOPES",
    "RESETTERS",
    "SCOPES",
    "Selection",
    "change_credential",
    "clear_all_locks",
    "clear_model_lock",
    "control_breaker",
    "reset_connection",
    "reset_scopes",
    "reset_unit_scope",
]

Control = Callable[[BreakerState, Instant, FactLog], BreakerState]

CONTROLS: dict[str, Control] = {
    "reset": breaker_controls.reset,
    "force_open": breaker_controls.force_open,
    "disable": breaker_controls.disable,
    "clear_override": breaker_controls.clear_override,
}
"""Manual controls by name (breaker.md section 10)."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What an act is narrowed to; empty fields narrow nothing. Provider canonical."""

    provider: str = ""
    connection: str = ""
    model: str = ""

    def covers(self, provider: str, connection: str) -> bool:
        """Does a row of this provider and connection fall under the act?"""
        return self.provider in ("", provider) and self.connection in ("", connection)


def control_breaker(
    book: StateBook, control: str, provider: str, connection: str, now: Instant, facts: FactLog
) -> BreakerState:
    """Carry out one manual control on one breaker key; `connection` "" is the provider's key.

    Raises:
        KeyError: no such control.
    """
    after = CONTROLS[control](book.get(BreakerState, provider, connection), now, facts)
    book.put(after)
    if control == "reset":
        _end_bursts(book, Selection(provider, connection))
    return after


# --- reset --------------------------------------------------------------------------------------------------
def reset_scopes(book: StateBook, scopes: Iterable[str], selection: Selection, now: Instant, facts: FactLog) -> int:
    """Reset every named scope of state that a fold owns; returns the number of rows changed.

    Raises:
        KeyError: a scope that no resetter here serves.
    """
    return sum(RESETTERS[scope](book, selection, now, facts) for scope in scopes)


def reset_unit_scope(selection: Selection) -> Scope:
    """Rows and guards of a reset: one provider as a whole, or everything."""
    if not selection.provider:
        return Scope(frozenset(), all_providers=True)
    own = frozenset({selection.provider})
    return Scope(own, whole_providers=own)


def clear_model_lock(
    book: StateBook, provider: str, connection: str, model: str, policy: Policy, facts: FactLog
) -> int:
    """Delete the locks of a model on one connection, or on every connection that has one; locks removed."""
    held = {row.connection for row in book.rows(ModelLockState) if row.provider == provider}
    wanted = (connection,) if connection else tuple(sorted(held))
    entry = policy.for_connection(provider).provider
    return sum(delete_lock(book, Place(provider, each, model, entry), facts) for each in wanted)


def clear_all_locks(book: StateBook, now: Instant, facts: FactLog) -> int:
    """Delete every model lock of the book with its counter, and the timers of family pools; locks removed."""
    held = sum(row.until is not None for row in book.rows(ModelLockState))
    _reset_model_locks(book, Selection(), now, facts)
    for pool in list(book.rows(FamilyPoolState)):
        free_pool(book, pool, facts)
    return held


def _reset_breakers(book: StateBook, selection: Selection, now: Instant, facts: FactLog) -> int:
    rows = [row for row in _selected(book, BreakerState, selection) if not row.is_default]
    for row in rows:
        book.put(breaker_controls.reset(row, now, facts))
    _end_bursts(book, selection)
    return len(rows)


def _reset_provider_cooldowns(book: StateBook, selection: Selection, now: Instant, facts: FactLog) -> int:
    rows = [row for row in _selected(book, ProviderCooldownState, selection) if not row.is_default]
    for row in rows:
        book.put(provider_cooldown.reset(row, now, facts))
    return len(rows)


def _reset_connection_cooldowns(book: StateBook, selection: Selection, now: Instant, facts: FactLog) -> int:
    """Timers, levels and error fields; terminal states stay."""
    rows = [row for row in _selected(book, ConnectionState, selection) if not row.is_terminal]
    changed = [row for row in rows if clear(row) != row]
    for row in changed:
        book.put(_reset_timer(row, now, facts))
    pools = [row for row in _selected(book, FamilyPoolState, selection) if not row.is_default]
    for pool in pools:
        free_pool(book, pool, facts)
    return len(changed) + len(pools)


def _reset_timer(row: ConnectionState, now: Instant, facts: FactLog) -> ConnectionState:
    """A clean row of the next generation: evidence of calls before the reset is statistics only."""
    cleared = replace(
        clear(row),
        generation=row.generation + 1,
        streak=0,
        streak_at=None,
        streak_until=None,
        last_event_at=max(now, row.last_event_at or now),
        fact_id=facts.next_id(),
    )
    facts.add(
        "connection",
        f"{row.provider}:{row.connection}",
        row.test_status,
        cleared.test_status,
        provider=row.provider,
        connection=row.connection,
        generation=cleared.generation,
        reason="reset",
    )
    return cleared


def _reset_terminal_states(book: StateBook, selection: Selection, now: Instant, facts: FactLog) -> int:
    rows = [row for row in _selected(book, ConnectionState, selection) if row.is_terminal or not row.active]
    for row in rows:
        reset_connection(book, row.provider, row.connection, now, facts)
    return len(rows)


def _reset_model_locks(book: StateBook, selection: Selection, now: Instant, facts: FactLog) -> int:
    rows = [row for row in _selected(book, ModelLockState, selection) if not row.is_default]
    for row in rows:
        book.put(_deleted(row, _next_lock_generation(book, row), now, facts))
    return len(rows)


def _next_lock_generation(book: StateBook, row: ModelLockState) -> int:
    """Above every key of the connection: the keys of one model share one number, the highest of them."""
    others = (each for each in book.rows(ModelLockState) if each.key[1:3] == row.key[1:3])
    return 1 + max((each.generation for each in others), default=row.generation)


def _deleted(row: ModelLockState, generation: int, now: Instant, facts: FactLog) -> ModelLockState:
    after = replace(
        ModelLockState.default(row.key),
        generation=generation,
        last_event_at=max(now, row.last_event_at or now),
        fact_id=facts.next_id(),
    )
    facts.add(
        "model_lock",
        f"{row.provider}:{row.connection}:{row.written_as or row.key_kind}:{row.model_key}",
        "free" if row.until is None else "locked",
        "free",
        provider=row.provider,
        connection=row.connection,
        model=row.model,
        generation=after.generation,
        reason="reset",
    )
    return after


def _reset_lanes(book: StateBook, selection: Selection, now: Instant, facts: FactLog) -> int:
    """Lanes with everything remembered of them, open claims included."""
    rows = [lane for lane in _selected(book, Lane, selection) if not lane.is_default]
    for lane in rows:
        book.put(Lane.default(lane.key))
        facts.add(
            "usage_wall",
            f"{lane.provider}/{lane.connection}",
            "active" if is_lane_active(lane, now) else "idle",
            "idle",
            provider=lane.provider,
            connection=lane.connection,
            reason="reset",
        )
    return len(rows)


def _end_bursts(book: StateBook, selection: Selection) -> None:
    for guard in _selected(book, BurstState, selection):
        book.put(BurstState.default(guard.key))


def _selected(book: StateBook, kind: type[R], selection: Selection) -> list[R]:
    """Rows of a kind under the selection; the key's second and third part are provider and connection."""
    return [row for row in book.rows(kind) if selection.covers(row.key[1], row.key[2])]


RESETTERS: dict[str, Callable[[StateBook, Selection, Instant, FactLog], int]] = {
    "breakers": _reset_breakers,
    "provider_cooldowns": _reset_provider_cooldowns,
    "connection_cooldowns": _reset_connection_cooldowns,
    "terminal_states": _reset_terminal_states,
    "model_lockouts": _reset_model_locks,
    "usage_wall": _reset_lanes,
}
"""Scopes whose state is kept in rows of the book."""
OWNED_SCOPES = {"affinity_pins": "affinity", "permits": "concurrency"}
"""Scopes that are reset by the use cases that own that state, with the mechanism of their facts."""
SCOPES = (*RESETTERS, *OWNED_SCOPES)
"""Every scope of operator_surface.md section 4."""
