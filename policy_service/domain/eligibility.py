"""Eligibility: the gates that a target passes before any strategy sees it (spec/diagnostics.md section 2).

Pure; combines the mechanisms. The first gate that refuses names the exclusion. Every gate reads refreshed state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from policy_service.domain import breaker, cooldown, lockout, lockout_keys, provider_cooldown
from policy_service.domain.breaker import BreakerState, Override, State
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.early_probe import Block, next_permit_at
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import SERVER_STATED, Instant, Target
from policy_service.domain.lockout import FamilyPoolState, ModelLockState
from policy_service.domain.lockout_removal import REMOVED
from policy_service.domain.policy import ConnectionPolicy
from policy_service.domain.provider_cooldown import ProviderCooldownState
from policy_service.domain.state import Key, Row


@dataclass(frozen=True, slots=True)
class Gate:
    """Result of the gates for one target."""

    exclusion: Exclusion | None = None
    needs_grant: bool = False
    """Passes, but a probe permit (or a place in a slow start) must be acquired first."""
    changes_at: Instant | None = None
    """Next instant at which time alone may change this result; None: never."""

    def changing_at(self, instant: Instant) -> Gate:
        """The same result with another next change."""
        return replace(self, changes_at=instant)


@dataclass(frozen=True, slots=True)
class _Question:
    """One target with everything the gates look at."""

    rows: Mapping[Key, Row]
    target: Target
    policy: ConnectionPolicy
    now: Instant
    key: str
    is_disabled: bool
    allow_cooling: bool
    replica: str

    @property
    def breakers(self) -> tuple[BreakerState, ...]:
        """Rows of the provider's breaker and, where that option is on, of the connection's own."""
        provider, connection, _ = self.target
        found = [self.rows.get((BreakerState.KIND, provider, ""))]
        if self.policy.breaker.per_connection and connection:
            found.append(self.rows.get((BreakerState.KIND, provider, connection)))
        return tuple(row for row in found if isinstance(row, BreakerState))

    @property
    def connection(self) -> ConnectionState | None:
        row = self.rows.get((ConnectionState.KIND, self.target.provider, self.target.connection))
        return row if isinstance(row, ConnectionState) and self.target.connection else None

    def excluded(
        self,
        reason: str,
        until: Instant | None = None,
        evidence: str = "",
        cause: str = "",
        since: Instant | None = None,
        hint_source: str = "",
    ) -> Exclusion:
        return Exclusion(
            self.target,
            reason,
            until,
            evidence,
            target_key=self.key,
            cause=cause,
            since=since,
            is_fixed=hint_source in SERVER_STATED,
        )


def check_target(
    rows: Mapping[Key, Row],
    target: Target,
    policy: ConnectionPolicy,
    now: Instant,
    *,
    key: str = "",
    is_disabled: bool = False,
    allow_cooling: bool = False,
    replica: str = "",
) -> Gate:
    """Run the gates for one target.

    Args:
        rows: non-default rows of the target's provider.
        target: provider canonical.
        policy: profiles of the connection.
        now: database time, ms.
        key: key of the target in its route, for the record.
        is_disabled: the catalogue switches the connection off.
        allow_cooling: this leg may use cooling connections.
        replica: this replica, for evidence that concerns it alone.
    """
    question = _Question(rows, target, policy, now, key, is_disabled, allow_cooling, replica)
    for gate in _GATES:
        exclusion = gate(question)
        if exclusion is not None:
            return Gate(exclusion, changes_at=_ends_at(exclusion))
    return Gate(needs_grant=_needs_grant(question), changes_at=_next_change(question))


def longest_timer(
    rows: Mapping[Key, Row], target: Target, policy: ConnectionPolicy, now: Instant, replica: str = ""
) -> Exclusion | None:
    """Of the recovery timers that hold a target the one that ends last (spec/cooldown_wait.md section 3)."""
    question = _Question(rows, target, policy, now, "", is_disabled=False, allow_cooling=False, replica=replica)
    held = [found for gate in _TIMERS if (found := gate(question)) is not None]
    return max(held, key=lambda exclusion: exclusion.until or 0, default=None)


def early_probe_due(rows: Mapping[Key, Row], target: Target, policy: ConnectionPolicy, now: Instant) -> Instant | None:
    """Instant from which a long block of `target` may be tested (spec/guards.md section 7); None: not at all."""
    question = _Question(rows, target, policy, now, "", is_disabled=False, allow_cooling=False, replica="")
    row = question.connection
    if row is not None and cooldown.is_cooling(row, now) and row.rate_limited_until is not None:
        start = row.last_error_at if row.limited_since is None else row.limited_since
        return _due(Block(start or now, row.rate_limited_until, row.hint_source, row.early_probe), policy)
    held = [lock for lock in _locks(question) if lockout.is_locked(lock, now)]
    blocks = [Block(lock.locked_at or 0, lock.until or 0, lock.hint_source, lock.early_probe) for lock in held]
    due = [_due(block, policy) for block in blocks]
    return None if not due or None in due else max(instant for instant in due if instant is not None)


def _due(block: Block, policy: ConnectionPolicy) -> Instant | None:
    return next_permit_at(block, policy.early_probe)


def _ends_at(exclusion: Exclusion) -> Instant | None:
    """First free instant: a model is locked up to and including its end (model_lockout.md section 1)."""
    if exclusion.until is None:
        return None
    return exclusion.until + (exclusion.reason == "model_lockout")


def _manual_control(q: _Question) -> Exclusion | None:
    for row in q.breakers:
        if row.override is Override.FORCE_OPEN:
            return q.excluded("forced_open", evidence=row.fact_id)
    return None


def _terminal_state(q: _Question) -> Exclusion | None:
    row = q.connection
    if row is not None and row.is_terminal:
        return q.excluded(row.test_status, evidence=row.fact_id)
    return None


def _open_breaker(q: _Question) -> Exclusion | None:
    for row in q.breakers:
        if row.override is Override.DISABLED:
            continue
        seen = breaker.refresh(row, q.now)
        if seen.state is State.OPEN:
            return q.excluded("circuit_open", seen.reopen_at, row.fact_id, since=row.generation_since)
        if until := breaker.replica_open_until(seen, q.now, q.replica):
            return q.excluded("circuit_open", until, row.fact_id)
    return None


def _provider_cooldown(q: _Question) -> Exclusion | None:
    if not q.policy.provider_cooldown.enabled:
        return None
    provider, connection, _ = q.target
    for part in (connection, "") if connection else ("",):
        row = q.rows.get((ProviderCooldownState.KIND, provider, part))
        if isinstance(row, ProviderCooldownState) and provider_cooldown.is_cooling(row, q.now):
            return q.excluded("provider_cooldown", row.cooling_until, row.fact_id, since=row.last_failure_at)
    return None


def _connection_timer(q: _Question) -> Exclusion | None:
    row = q.connection
    if row is None or q.allow_cooling or not cooldown.is_cooling(row, q.now):
        return None
    return q.excluded(
        "connection_cooldown",
        row.rate_limited_until,
        row.fact_id,
        row.last_error_type,
        row.limited_since,
        row.hint_source,
    )


def _family_pool(q: _Question) -> Exclusion | None:
    if not q.policy.provider.family_pools or not q.target.model:
        return None
    pool = lockout_keys.scoped_model(q.policy.provider, q.target.model)
    row = q.rows.get((FamilyPoolState.KIND, q.target.provider, q.target.connection, pool))
    if isinstance(row, FamilyPoolState) and row.limited_until is not None and row.limited_until > q.now:
        return q.excluded("model_lockout", row.limited_until, row.fact_id, "rate_limit_exceeded")
    return None


def _model_lock(q: _Question) -> Exclusion | None:
    if not q.target.model:
        return None
    longest = lockout.longest_lock(_locks(q), q.now)
    if longest is None:
        return None
    if longest.reason == REMOVED:
        return q.excluded(REMOVED, evidence=longest.fact_id)
    return q.excluded(
        "model_lockout", longest.until, longest.fact_id, longest.reason, longest.locked_at, longest.hint_source
    )


def _availability(q: _Question) -> Exclusion | None:
    row = q.connection
    if q.is_disabled or (row is not None and not row.active):
        return q.excluded("disabled", evidence=row.fact_id if row else "")
    return None


_GATES: tuple[Callable[[_Question], Exclusion | None], ...] = (
    _manual_control,
    _terminal_state,
    _open_breaker,
    _provider_cooldown,
    _connection_timer,
    _family_pool,
    _model_lock,
    _availability,
)
"""In the order of spec/diagnostics.md section 2."""

_TIMERS = (_open_breaker, _provider_cooldown, _connection_timer, _family_pool, _model_lock)


def lock_keys(policy: ConnectionPolicy, target: Target) -> tuple[Key, ...]:
    """Keys of the family, bare and exact lock of a target; none without a model."""
    provider, connection, model = target
    if not model:
        return ()
    keys = lockout_keys.keys_of(policy.provider, model)
    return tuple((ModelLockState.KIND, provider, connection, key.kind, key.text) for key in keys)


def _locks(q: _Question) -> list[ModelLockState]:
    found = (q.rows.get(key) for key in lock_keys(q.policy, q.target))
    return [row for row in found if isinstance(row, ModelLockState)]


def _needs_grant(q: _Question) -> bool:
    return any(breaker.needs_guard(row, q.now, q.policy.breaker) for row in q.breakers)


def _next_change(q: _Question) -> Instant | None:
    """A passing target changes by time alone only where a slow start ends; one that has ended changes nothing more."""
    ends = [
        row.closed_at + q.policy.breaker.slow_start_duration_ms
        for row in q.breakers
        if row.closed_at is not None and q.policy.breaker.slow_start_enabled
    ]
    return min((end for end in ends if end > q.now), default=None)
