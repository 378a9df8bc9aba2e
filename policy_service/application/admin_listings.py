"""What operators see of the state: read from the view, refreshed by time, written never
(spec/operator_surface.md sections 1 and 2, spec/model_lockout.md section 7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from policy_service.application.ports import Clock
from policy_service.application.view import View
from policy_service.domain import breaker, cooldown, lockout, provider_cooldown
from policy_service.domain.breaker import BreakerState, State
from policy_service.domain.breaker_controls import load_row
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.lockout import FamilyPoolState, ModelLockState
from policy_service.domain.lockout_upkeep import LockListing, listing
from policy_service.domain.policy import Policy
from policy_service.domain.provider_cooldown import ProviderCooldownState
from policy_service.domain.state import R, Row
from policy_service.domain.usage_wall_state import Lane, is_lane_active


@dataclass(frozen=True, slots=True)
class BreakerView:
    """One breaker as it stands now; `control` is empty, `force_open` or `disabled`."""

    key: str
    state: str
    control: str
    failure_count: int
    retry_after_ms: DurationMs | None
    """Time until it admits a probe; None where it is not OPEN."""
    generation: int
    live_probes: int
    last_failure_at: Instant | None


@dataclass(frozen=True, slots=True)
class StateRow:
    """One row of state of any mechanism."""

    mechanism: str
    key: str
    provider: str
    connection: str
    model: str
    state: str
    until: Instant | None
    generation: int
    row: Row
    health_score: int | None = None
    """Of a connection: preference among its siblings, 0 .. 100 (spec/connection_cooldown.md section 8)."""

    @property
    def place(self) -> tuple[str, str, str]:
        """Where it stands in the listing."""
        return self.provider, self.mechanism, self.key


class StatePage(NamedTuple):
    """Rows in order; `after` continues, None where these were the last."""

    rows: tuple[StateRow, ...]
    after: tuple[str, str, str] | None
    view_age_ms: DurationMs


class Counts(NamedTuple):
    """Blocks and usage-wall lanes in force."""

    cooling_connections: int
    model_lockouts: int
    active_lanes: int


class Listings:
    """Reads of the view."""

    def __init__(self, view: View, clock: Clock) -> None:
        self._view = view
        self._clock = clock

    def breakers(self, provider: str = "") -> tuple[BreakerView, ...]:
        """Breakers that are not in their default state, by key."""
        now, policy = self._clock.now(), self._view.policy
        rows = sorted(self._rows(BreakerState, provider), key=lambda row: row.name)
        return tuple(breaker_view(row, policy, now) for row in rows)

    def model_cooldowns(self, provider: str = "", connection: str = "") -> tuple[LockListing, ...]:
        """Model locks in force, the longest first."""
        found = listing(self._rows(ModelLockState, provider, connection), self._clock.now())
        return tuple(sorted(found, key=lambda item: (-item.remaining_ms, item.provider, item.connection, item.model)))

    def state(
        self,
        limit: int,
        provider: str = "",
        connection: str = "",
        after: tuple[str, str, str] | None = None,
    ) -> StatePage:
        """Every row that is not in its default state, by provider, mechanism and key."""
        now = self._clock.now()
        shown = (_state_row(row, now) for row in self._selected(provider, connection))
        found = sorted((row for row in shown if after is None or row.place > after), key=lambda row: row.place)
        more = found[limit - 1].place if len(found) > limit else None
        return StatePage(tuple(found[:limit]), more, max(0, now - self._view.as_of))

    def counts(self) -> Counts:
        """How much is out of use, or served beyond its usage wall."""
        now = self._clock.now()
        cooling = sum(cooldown.is_cooling(row, now) for row in self._rows(ConnectionState))
        locked = sum(lockout.is_locked(row, now) for row in self._rows(ModelLockState))
        return Counts(cooling, locked, sum(is_lane_active(lane, now) for lane in self._rows(Lane)))

    def _rows(self, kind: type[R], provider: str = "", connection: str = "") -> Iterator[R]:
        return (row for row in self._selected(provider, connection) if isinstance(row, kind))

    def _selected(self, provider: str, connection: str) -> Iterator[Row]:
        wanted = self._view.policy.canonical(provider) if provider else ""
        rows = (self._view.provider_rows(wanted) or {}) if wanted else self._view.rows
        for row in rows.values():
            if not row.is_default and connection in ("", getattr(row, "connection", "")):
                yield row


def breaker_view(row: BreakerState, policy: Policy, now: Instant) -> BreakerView:
    """A breaker, refreshed by time."""
    seen = breaker.refresh(breaker_repaired(row, policy), now)
    is_open = seen.state is State.OPEN and not seen.override and seen.reopen_at is not None
    return BreakerView(
        key=seen.name,
        state=str(seen.state),
        control=str(seen.override),
        failure_count=seen.failure_count,
        retry_after_ms=max(0, (seen.reopen_at or now) - now) if is_open else None,
        generation=seen.generation,
        live_probes=len(breaker.live_permits(seen, now)),
        last_failure_at=seen.last_failure_at,
    )


def breaker_repaired(row: BreakerState, policy: Policy) -> BreakerState:
    """The row as every decision reads it (spec/breaker.md section 11)."""
    return load_row(row, policy.for_connection(row.provider, row.connection).breaker)


# -- any row in one line -----------------------------------------------------------------------------
class _Told(NamedTuple):
    """How the rows of one kind are told: mechanism, state in one word, end."""

    mechanism: str
    state: Callable[[Any, Instant], str]
    until: str
    """Field that holds the end."""


def _breaker_word(row: BreakerState, now: Instant) -> str:
    return str(row.override or breaker.refresh(row, now).state).lower()


def _connection_word(row: ConnectionState, now: Instant) -> str:
    if row.is_terminal:
        return row.test_status
    return "disabled" if not row.active else "cooling" if cooldown.is_cooling(row, now) else "counting"


def _lock_word(row: ModelLockState, now: Instant) -> str:
    return "locked" if lockout.is_locked(row, now) else "counting"


def _entry_word(row: ProviderCooldownState, now: Instant) -> str:
    return "cooling" if provider_cooldown.is_cooling(row, now) else "counting"


def _pool_word(row: FamilyPoolState, now: Instant) -> str:
    return "cooling" if (row.limited_until or 0) > now else "idle"


_TOLD: Mapping[str, _Told] = {
    BreakerState.KIND: _Told("breaker", _breaker_word, "reopen_at"),
    ConnectionState.KIND: _Told("connection_cooldown", _connection_word, "rate_limited_until"),
    ModelLockState.KIND: _Told("model_lockout", _lock_word, "until"),
    ProviderCooldownState.KIND: _Told("provider_cooldown", _entry_word, "cooling_until"),
    FamilyPoolState.KIND: _Told("model_lockout", _pool_word, "limited_until"),
}


def _state_row(row: Row, now: Instant) -> StateRow:
    told = _TOLD.get(row.KIND) or _Told(row.KIND, lambda *_: "present", "until")
    is_terminal = isinstance(row, ConnectionState) and row.is_terminal
    return StateRow(
        mechanism="terminal_state" if is_terminal else told.mechanism,
        key=":".join(part for part in row.key[1:] if part),
        provider=row.key[1],
        connection=getattr(row, "connection", ""),
        model=getattr(row, "model", ""),
        state=told.state(row, now),
        until=getattr(row, told.until, None),
        generation=row.generation,
        row=row,
        health_score=cooldown.health_score(row, now) if isinstance(row, ConnectionState) else None,
    )
