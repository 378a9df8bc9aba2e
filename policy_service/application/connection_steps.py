"""The failure algorithm of a connection as a table of steps (spec/connection_cooldown.md section 4).

Each step looks at the case and either decides, by answering a plan, or passes on. The order is normative; the
number of a plan is the number of its step. Nothing here writes: `connection_plan` carries a plan out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from policy_service.application.connection_case import Case, Errors, Plan, is_empty_shared_wallet
from policy_service.domain import cooldown, egress, error_types, rules, signals
from policy_service.domain.decision_record import DecisionRecord, Reason
from policy_service.domain.guards import is_request_resource
from policy_service.domain.ids import DurationMs
from policy_service.domain.lockout import LockEvidence
from policy_service.domain.outcome import Outcome
from policy_service.domain.policy import ConnectionPolicy

Step = Callable[[Case], Plan | None]

CONNECTION_QUOTA_MS: Final = 120_000
MODEL_RULE_MS: Final = 3_600_000
_ACCOUNT_REFUSALS: Final = {403: "forbidden", 402: "credits"}
_PER_MODEL: Final = frozenset({404, 429})
RETIRED_RULE: Final = "retired-model"


def plan_failure(case: Case) -> Plan:
    """What one failure does. Steps 1 and 2 come first; a running timer then leaves room for few things only."""
    if _is_request_resource(case):
        return Plan(1, fallback=False, reason=Reason.NOT_FOUND)
    if case.row.is_terminal:
        return Plan(2, reason=case.record.reason)
    if case.is_cooling:
        return _while_cooling(case, first_plan(AFTER_TIMER, case))
    return first_plan((_family_limited, *AFTER_TIMER), case)


def first_plan(steps: Sequence[Step], case: Case) -> Plan:
    """Plan of the first step that decides; the last step of a table always does."""
    for step in steps:
        plan = step(case)
        if plan is not None:
            return plan
    raise AssertionError("the last step decides every case")


def _is_request_resource(case: Case) -> bool:
    return is_request_resource(case.outcome)


def _while_cooling(case: Case, wanted: Plan) -> Plan:
    """Step 3: of what the failure would do, only a terminal state or a longer stated wait is kept."""
    if wanted.terminal:
        return wanted
    remaining = cooldown.remaining_ms(case.row, case.at)
    if wanted.timer_ms is not None and wanted.timer_ms > remaining and _is_stated(case):
        return Plan(
            3,
            cooldown_ms=wanted.timer_ms,
            reason=wanted.reason,
            timer_ms=wanted.timer_ms,
            cools_siblings=wanted.cools_siblings,
            blames_connection=True,
        )
    return Plan(
        3,
        cooldown_ms=remaining,
        reason=case.record.reason,
        blames_connection=wanted.errors is Errors.FULL,
        unlocked=wanted.lock,
        blames_pool=wanted.pool_ms is not None,
    )


def _is_stated(case: Case) -> bool:
    """The wait is the upstream's or a rule's own, not a step of the ladder."""
    return case.settled.used_upstream_retry_hint or case.settled.configured_cooldown_ms is not None


# -- the steps ---------------------------------------------------------------------------------------
def _family_limited(case: Case) -> Plan | None:
    """4: the family pool of the model waits already."""
    if case.pool_until is None or case.pool_until <= case.at:
        return None
    return Plan(4, cooldown_ms=case.pool_until - case.at, reason=case.record.reason, blames_pool=True)


def _provider_lacks_model(case: Case) -> Plan | None:
    """5: another account of the provider would answer the same."""
    if case.status != 400 or not error_types.provider_does_not_serve(case.outcome):
        return None
    if rules.operator_match(case.outcome, case.policy, case.text):
        return None
    return Plan(5, fallback=False, reason="provider_model_unsupported")


def _health_check(case: Case) -> Plan | None:
    """7: a diagnosis records the error and nothing else."""
    if not case.is_isolated_check:
        return None
    return Plan(7, reason=case.record.reason, errors=Errors.SHORT)


def _connection_quota(case: Case) -> Plan | None:
    """8: a rule says that the whole connection has spent its quota. Never terminal, never a model lock."""
    if not is_connection_quota(case.record) or not case.may_cool or _is_egress_trigger(case):
        return None
    return _timer(8, case, case.record.cooldown_ms or CONNECTION_QUOTA_MS)


def is_connection_quota(record: DecisionRecord) -> bool:
    """A rule says of a quota that it is the connection's, not the provider's (restatement_and_rules.md section 5)."""
    scoped = record.rule_scope == "connection" and record.rule_scope_honored
    return scoped and record.reason == Reason.QUOTA_EXHAUSTED and not record.permanent and not record.credits_exhausted


def _egress(case: Case) -> Plan | None:
    """9: the address is exhausted, and with it every sibling behind it."""
    if not _is_egress_trigger(case):
        return None
    return replace(_timer(9, case, egress.duration_of(case.record.cooldown_ms)), cools_siblings=True)


def _is_egress_trigger(case: Case) -> bool:
    return exhausts_address(case.outcome, case.record, case.policy)


def exhausts_address(outcome: Outcome, record: DecisionRecord, policy: ConnectionPolicy) -> bool:
    """The failure is held against the egress address (egress_lock.md section 1)."""
    return egress.is_trigger(
        outcome.status,
        record.reason,
        in_set=policy.in_egress_set,
        permanent=record.permanent,
        credits_exhausted=record.credits_exhausted,
        disable_cooling=policy.connection.disable_cooling,
    )


def _model_rule(case: Case) -> Plan | None:
    """10: a rule says that a 400 concerns the model."""
    record = case.record
    if case.status != 400 or not case.model or record.rule_scope != "model" or not record.rule_scope_honored:
        return None
    lock = _lock(case, "model_capacity", record.configured_cooldown_ms or MODEL_RULE_MS)
    # The rule's own time, not a wait that the server stated: it meets the maximum of locks.
    lock = replace(lock, exact_source="", uncapped=False)
    return Plan(10, cooldown_ms=record.cooldown_ms, reason=record.reason, lock=lock)


def _account_ended(case: Case) -> Plan | None:
    """11 and 12: a ban or an empty wallet is judged before any model lock."""
    record = case.record
    spent = record.credits_exhausted or is_empty_shared_wallet(case.outcome, case.policy, case.text)
    if not (record.permanent or spent) or case.resolution.state is None:
        return None
    return _terminal(12, case, case.resolution.state)


def _per_model(case: Case) -> Plan | None:
    """13: a failure that concerns one model of the connection."""
    if not case.model or not _is_per_model_failure(case):
        return None
    record = case.record
    if case.status == 500:
        return Plan(13, reason=record.reason, errors=Errors.FULL)
    reason = "not_found" if case.status == 404 else record.reason
    return Plan(13, cooldown_ms=record.cooldown_ms, reason=record.reason, lock=_lock(case, reason))


def _is_per_model_failure(case: Case) -> bool:
    status, provider = case.status, case.policy.provider
    quota = case.policy.counts_per_model and not provider.family_pools and (status in _PER_MODEL or status >= 500)
    nonquota = provider.per_model_nonquota and (status == 404 or status >= 500)
    listed = status in provider.model_lock_extra_statuses
    return quota or nonquota or listed or _names_model(case) or case.record.rule == RETIRED_RULE


def _names_model(case: Case) -> bool:
    """The answer itself blames the model, whatever the provider."""
    if case.status == 404:
        return case.outcome.code.lower() in signals.MODEL_CODES or signals.MODEL_UNSERVED.found_in(case.text)
    return case.status == 413 and case.model.lower() in case.text


def _no_fallback(case: Case) -> Plan | None:
    """14: another account would not help."""
    if case.record.should_fallback:
        return None
    return Plan(14, fallback=False, cooldown_ms=case.record.cooldown_ms, reason=case.record.reason)


def _forbidden_mode(case: Case) -> Plan | None:
    """15: a 403 that concerns one mode of a provider."""
    if case.status != 403 or not case.policy.provider.forbidden_is_model_scoped or not case.model:
        return None
    return _locked(15, case, "forbidden")


def _account_judged(case: Case) -> Plan | None:
    """16: a terminal state, or the refusal that ends a streak."""
    if case.resolution.state is not None:
        return _terminal(16, case, case.resolution.state)
    return _terminal(16, case, "banned") if case.refusal is not None and case.refusal.bans else None


def _refused_per_model(case: Case) -> Plan | None:
    """17: no entitlement or no money for one model."""
    reason = _ACCOUNT_REFUSALS.get(case.status)
    if reason is None or not case.policy.counts_per_model or not case.model:
        return None
    return _locked(17, case, reason)


def _local_not_found(case: Case) -> Plan | None:
    """18: a local server has not loaded the model."""
    if case.status != 404 or not case.is_local or not case.model:
        return None
    return _locked(18, case, "not_found")


def _family_pool(case: Case) -> Plan | None:
    """19: the family of the model is limited, not the connection."""
    if case.status != 429 or not case.policy.provider.family_pools:
        return None
    if not case.model:
        return Plan(19, cooldown_ms=case.settled.cooldown_ms, reason=case.settled.reason)
    return replace(_locked(19, case, case.settled.reason), pool_ms=case.settled.cooldown_ms)


def _downgrade(case: Case) -> Plan | None:
    """20: a pool caller wants the target out of use, not the connection."""
    if case.outcome.persist or not case.model:
        return None
    settled = case.settled
    lock = _lock(case, settled.reason, settled.cooldown_ms) if settled.cooldown_ms > 0 else None
    return Plan(
        20,
        cooldown_ms=settled.cooldown_ms,
        reason=settled.reason,
        errors=Errors.FULL,
        takes_level=True,
        lock=lock,
    )


def _connection(case: Case) -> Plan:
    """21: the connection itself cools, or carries only the error."""
    settled = case.settled
    if settled.cooldown_ms > 0 and case.may_cool:
        return _timer(21, case, settled.cooldown_ms)
    return Plan(
        21,
        cooldown_ms=settled.cooldown_ms,
        reason=settled.reason,
        errors=Errors.FULL,
        takes_level=True,
        clears_timer=True,
    )


AFTER_TIMER: Final[tuple[Step, ...]] = (
    _provider_lacks_model,
    _health_check,
    _connection_quota,
    _egress,
    _model_rule,
    _account_ended,
    _per_model,
    _no_fallback,
    _forbidden_mode,
    _account_judged,
    _refused_per_model,
    _local_not_found,
    _family_pool,
    _downgrade,
    _connection,
)
"""Steps 5 and 7 to 21; step 6 is the classification, step 22 belongs to the writing of a ban."""


# -- parts of plans ----------------------------------------------------------------------------------
def _timer(step: int, case: Case, duration: DurationMs) -> Plan:
    return Plan(
        step,
        cooldown_ms=duration,
        reason=case.settled.reason,
        errors=Errors.FULL,
        takes_level=True,
        timer_ms=duration,
    )


def _terminal(step: int, case: Case, state: str) -> Plan:
    return Plan(step, reason=case.record.reason, errors=Errors.FULL, takes_level=True, terminal=state)


def _locked(step: int, case: Case, reason: str) -> Plan:
    settled = case.settled
    return Plan(step, cooldown_ms=settled.cooldown_ms, reason=settled.reason, lock=_lock(case, reason))


def _lock(case: Case, reason: str, exact_ms: DurationMs | None = None) -> LockEvidence:
    """Evidence for the lock writer. A ladder value is not exact: the lock escalates by its own count."""
    record = case.settled
    if exact_ms is None:
        is_exact = bool(case.stated_by) or record.uncapped or record.exact_quota
        exact_ms = record.cooldown_ms if is_exact else 0
    return LockEvidence(
        case.outcome.status,
        reason,
        record.base_cooldown_ms,
        exact_ms,
        case.stated_by,
        record.uncapped,
        local=case.is_local,
    )
