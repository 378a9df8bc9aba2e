"""What one outcome does to a connection and its models: the failure algorithm carried out, and the success
(spec/connection_cooldown.md sections 4 and 6, model_lockout.md section 6, egress_lock.md section 3).

The only place that combines connection timer, terminal states, model locks and the egress lock. It reads and
writes a `StateBook` and appends facts; it knows no store and no clock. Evidence is order-proof: what is stale by
generation or start time changes nothing, what is late merges (spec/fleet.md section 2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from policy_service.application.connection_case import Attempt, Case, Errors, Plan, build_case
from policy_service.application.connection_locks import (
    LockWriter,
    decay_locks,
    hear_pool,
    lift_pool,
    limit_pool,
    pool_row,
)
from policy_service.application.connection_steps import plan_failure
from policy_service.application.egress_siblings import cool_siblings, note_sighting
from policy_service.domain import cooldown, early_probe, terminal
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.decision_record import Classification, DecisionRecord
from policy_service.domain.facts import Cause, FactLog
from policy_service.domain.ids import DurationMs, HintSource, Instant
from policy_service.domain.lockout import Decay, Place
from policy_service.domain.outcome import Outcome
from policy_service.domain.policy import ConnectionPolicy, Policy
from policy_service.domain.state import Key, StateBook

__all__ = [
    "Attempt",
    "ConnectionAnswer",
    "SuccessAnswer",
    "fail_connection",
    "rotation_failures",
    "succeed_connection",
]

STALE_GENERATION = "stale_generation"
FUTURE_GENERATION = "future_generation"
STALE_SUCCESS = "stale_success"


@dataclass(frozen=True, slots=True)
class ConnectionAnswer:
    """Answer of the failure algorithm to one failure."""

    fallback: bool
    """Another account of the provider should be tried."""
    cooldown_ms: DurationMs
    base_cooldown_ms: DurationMs
    reason: str
    retry_hint_source: HintSource | None
    terminal: str
    """Terminal state of the connection after the failure; empty without one."""
    step: int
    """Step of the algorithm that decided."""
    record: DecisionRecord
    error_type: str
    locked: frozenset[Key] = frozenset()
    """Model locks whose count this outcome raised; the pool lockout raises none of them again."""
    causes: tuple[str, ...] = ()
    """Why evidence was statistics only: `stale_generation`, `future_generation`."""


@dataclass(frozen=True, slots=True)
class SuccessAnswer:
    """What one success changed."""

    cleared: bool
    decay: Decay
    causes: tuple[str, ...] = ()


def fail_connection(
    book: StateBook,
    outcome: Outcome,
    c: Classification,
    policy: ConnectionPolicy,
    whole: Policy,
    attempt: Attempt,
    facts: FactLog,
) -> ConnectionAnswer:
    """Run the failure algorithm for one failure that no local guard has taken.

    Args:
        book: rows of the connection, its models and, for an egress provider, of every provider of the set.
        outcome: after restatement; `provider` canonical.
        c: what the classification pipeline said.
        policy: profiles of the connection.
        whole: the policy that `policy` came from (egress set, profiles of siblings).
        attempt: instants, generations and permits of the report.
        facts: gets one fact per transition; its cause is completed with what decided.
    """
    row = book.get(ConnectionState, outcome.provider, outcome.connection)
    place = Place(outcome.provider, outcome.connection, outcome.model, policy.provider)
    cause = _generation_cause(attempt.generations and attempt.generations.connection, row.generation)
    case = replace(build_case(outcome, c, policy, row, attempt), pool_until=_pool_until(book, place))
    plan = plan_failure(case)
    facts.cause = _blamed(facts.cause, case, plan)
    note_sighting(book, outcome, policy, attempt.at)
    if not cause:
        _write_connection(book, case, plan, attempt, facts)
        if plan.cools_siblings and plan.timer_ms is not None:
            cool_siblings(book, outcome, whole, attempt.at, plan.timer_ms, facts)
    locks = LockWriter(book, place, policy, attempt, facts)
    locked = locks.write(plan.lock) if plan.lock else frozenset()
    _settle_model(book, plan, locks)
    causes = tuple(dict.fromkeys(each for each in (cause, locks.cause if plan.lock else "") if each))
    return _answer(case, plan, book, locked, causes)


def succeed_connection(
    book: StateBook, outcome: Outcome, policy: ConnectionPolicy, attempt: Attempt, facts: FactLog
) -> SuccessAnswer:
    """Clear what a fresh success clears: error fields, timer, level, streaks, pool timer, half of each count."""
    row = book.get(ConnectionState, outcome.provider, outcome.connection)
    cause = _generation_cause(attempt.generations and attempt.generations.connection, row.generation)
    if not cause and not cooldown.is_fresh(row, attempt.started_at):
        cause = STALE_SUCCESS
    note_sighting(book, outcome, policy, attempt.at)
    cleared = not cause and _clear_connection(book, row, attempt, facts)
    place = Place(outcome.provider, outcome.connection, outcome.model, policy.provider)
    locks = LockWriter(book, place, policy, attempt, facts)
    decay = Decay(False, 0)
    if outcome.model and not locks.cause:
        lift_pool(book, place, policy, attempt, facts)
        decay = decay_locks(book, place, policy, attempt, facts, outcome.first_output_ms)
    causes = tuple(dict.fromkeys(each for each in (cause, locks.cause) if each))
    return SuccessAnswer(cleared, decay, causes)


def rotation_failures(book: StateBook, outcome: Outcome, policy: ConnectionPolicy, at: Instant) -> int:
    """Failures like this one within the rotation window, this one included: input of the classification."""
    row = book.get(ConnectionState, outcome.provider, outcome.connection)
    return cooldown.rotation_count(row, outcome.status or 0, at, policy.rotation.window_ms)


# -- generations -------------------------------------------------------------------------------------
def _generation_cause(given: int | None, present: int) -> str:
    """Why evidence of generation `given` is statistics only; empty where it counts."""
    if given is None or given == present:
        return ""
    return STALE_GENERATION if given < present else FUTURE_GENERATION


# -- carrying a plan out -----------------------------------------------------------------------------
def _settle_model(book: StateBook, plan: Plan, locks: LockWriter) -> None:
    """What a failure does to model and family besides its lock."""
    if locks.cause:
        return
    if plan.unlocked:
        locks.hear(plan.unlocked)
    if plan.pool_ms is not None:
        limit_pool(book, locks.place, locks.attempt.at, plan.pool_ms, locks.facts)
    if plan.blames_pool:
        hear_pool(book, locks.place, locks.attempt.at)
    locks.settle_probe()


def _write_connection(book: StateBook, case: Case, plan: Plan, attempt: Attempt, facts: FactLog) -> None:
    before = book.get(ConnectionState, case.row.provider, case.row.connection)
    after = _with_probe_settled(_with_plan(before, case, plan), attempt)
    if plan.blames_connection and not after.is_terminal:
        after = cooldown.heard(after, case.at)
    if after == before:
        return
    if _is_transition(before, after):
        after = replace(after, fact_id=facts.next_id())
        _record(before, after, facts)
    book.put(replace(after, last_event_at=max(case.at, before.last_event_at or case.at)))


def _with_plan(row: ConnectionState, case: Case, plan: Plan) -> ConnectionState:
    row = _with_error(_with_rotation(row, case), case, plan)
    if plan.takes_level and case.settled.new_backoff_level is not None and not case.late:
        row = replace(row, backoff_level=case.settled.new_backoff_level)
    if plan.errors is Errors.FULL and plan.step >= 16:
        row = _with_sequences(row, case)
    if plan.terminal:
        return _ended(row, case, plan.terminal)
    if plan.timer_ms is not None:
        return cooldown.start_timer(row, case.at, case.at + plan.timer_ms, case.stated_by)
    return _without_elapsed_timer(row, case) if plan.clears_timer else row


def _with_rotation(row: ConnectionState, case: Case) -> ConnectionState:
    gate = case.policy.rotation
    if not gate.enabled or case.status not in gate.on_status:
        return row
    return cooldown.note_rotation(row, case.status, case.at, gate.window_ms)


def _with_error(row: ConnectionState, case: Case, plan: Plan) -> ConnectionState:
    if plan.errors is Errors.NONE:
        return row
    outcome = case.outcome
    fields = cooldown.ErrorFields(
        error=cooldown.excerpt(outcome.message or outcome.text) or f"status {case.status}",
        type=case.error_type or plan.reason,
        source=outcome.origin or "upstream" if plan.errors is Errors.FULL else row.last_error_source,
        code=str(case.status),
        at=case.at if plan.errors is Errors.FULL else None,
    )
    known = replace(row, token_expires_at=case.row.token_expires_at, quota_reset_at=case.row.quota_reset_at)
    return cooldown.merge_error(known if plan.errors is Errors.FULL else row, fields)


def _with_sequences(row: ConnectionState, case: Case) -> ConnectionState:
    """Streak of refusals and soft strikes."""
    if case.refusal is not None:
        row = terminal.with_refusal(row, case.refusal, case.at)
    return terminal.with_soft_strike(row, case.at) if case.resolution.soft_strike else row


def _ended(row: ConnectionState, case: Case, state: str) -> ConnectionState:
    """21 and 22: write the terminal state; a ban by text may switch the connection off."""
    ended = terminal.enter(row, state)
    if case.record.permanent and terminal.disables(case.policy.terminal, case.policy.auth_class):
        return replace(ended, active=False)
    return ended


def _without_elapsed_timer(row: ConnectionState, case: Case) -> ConnectionState:
    """A late failure must not remove the timer that a newer one has set."""
    return row if cooldown.is_cooling(row, case.at) else cooldown.clear_timer(row)


def _with_probe_settled(row: ConnectionState, attempt: Attempt) -> ConnectionState:
    if row.early_probe is None or not early_probe.holds(row.early_probe, attempt.permit_id):
        return row
    return replace(row, early_probe=early_probe.failed(row.early_probe))


def _clear_connection(book: StateBook, row: ConnectionState, attempt: Attempt, facts: FactLog) -> bool:
    after = terminal.without_streak(cooldown.success(row, attempt.started_at))
    if after == row:
        return False
    if _is_transition(row, after):
        after = replace(after, fact_id=facts.next_id())
        _record(row, after, facts)
    book.put(replace(after, last_event_at=max(attempt.at, row.last_event_at or attempt.at)))
    return True


# -- facts and answer --------------------------------------------------------------------------------
def _is_transition(before: ConnectionState, after: ConnectionState) -> bool:
    """State, deadline or switch changed; a new error text alone is none."""

    def seen(row: ConnectionState) -> tuple[object, ...]:
        return row.test_status, row.rate_limited_until, row.active

    return seen(before) != seen(after)


def _record(before: ConnectionState, after: ConnectionState, facts: FactLog) -> None:
    facts.add(
        "connection",
        f"{after.provider}:{after.connection}",
        before.test_status,
        after.test_status,
        provider=after.provider,
        connection=after.connection,
        generation=after.generation,
        deadline_at=after.rate_limited_until,
    )


def _blamed(cause: Cause, case: Case, plan: Plan) -> Cause:
    """The cause completed with what decided, for this fact and those of the mechanisms that follow."""
    source = case.stated_by or None
    return replace(
        cause,
        reason=plan.reason,
        rule_id=case.settled.rule_id,
        hint_source=source,
        hint_ms=case.settled.cooldown_ms if source else None,
    )


def _pool_until(book: StateBook, place: Place) -> int | None:
    return pool_row(book, place).limited_until if place.entry.family_pools and place.model else None


def _answer(
    case: Case, plan: Plan, book: StateBook, locked: frozenset[Key], causes: tuple[str, ...]
) -> ConnectionAnswer:
    row = book.get(ConnectionState, case.row.provider, case.row.connection)
    return ConnectionAnswer(
        plan.fallback,
        plan.cooldown_ms,
        case.settled.base_cooldown_ms,
        plan.reason,
        case.settled.retry_hint_source,
        row.test_status if row.is_terminal else "",
        plan.step,
        case.settled,
        case.error_type,
        locked,
        causes,
    )
