"""The fold: what one reported outcome does to every mechanism (spec/README.md, "Order of evaluation for one outcome").

Pure: it reads and writes a `StateBook`, knows no store and no clock, and is used alike by the commit, by the view's
projection and by replay. Step 1 (idempotency over transactions) is the caller's, who knows the stored answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from policy_service.application.breaker_plan import (
    BreakerAnswer,
    BreakerCase,
    fold_breaker,
    target_blocked,
)
from policy_service.application.connection_acts import free_early_probe
from policy_service.application.connection_locks import LockWriter, lock_for_pool
from policy_service.application.connection_plan import (
    Attempt,
    ConnectionAnswer,
    SuccessAnswer,
    fail_connection,
    rotation_failures,
    succeed_connection,
)
from policy_service.application.connection_steps import exhausts_address, is_connection_quota
from policy_service.application.events import OutcomeEvent
from policy_service.application.ports import Scope
from policy_service.application.report_meaning import Meaning, meaning_of, named_outcome
from policy_service.domain import provider_cooldown
from policy_service.domain.breaker import split_name
from policy_service.domain.breaker_probe import Verdict
from policy_service.domain.classification import classify_reading, resolve
from policy_service.domain.decision_record import Classification, DecisionRecord
from policy_service.domain.error_types import provider_does_not_serve
from policy_service.domain.facts import Cause, Fact, FactLog
from policy_service.domain.guards import FREE_TIER_REMOVED
from policy_service.domain.ids import Instant
from policy_service.domain.lockout import Place
from policy_service.domain.outcome import Outcome
from policy_service.domain.policy import ConnectionPolicy, Policy
from policy_service.domain.provider_cooldown import ProviderCooldownState
from policy_service.domain.reading import Reading
from policy_service.domain.restatement import Restated
from policy_service.domain.state import StateBook

STALE_SUCCESS = "stale_success"
REQUEST_RULES = frozenset(
    {"parameter", "malformed", "overflow", "model-access", "model-code", "inner-request-error", "bad-request"}
)
"""Pipeline rules that blame the request itself; no mechanism but the answer takes note of them."""
_EXCUSED_IN_POOLS = REQUEST_RULES - {"bad-request"}
"""A 400 that says nothing of itself locks a model where the operator has listed its status (model_lockout.md 5)."""


@dataclass(frozen=True, slots=True)
class FoldResult:
    """What one outcome meant and did; everything the answer to its reporter is made of."""

    facts: tuple[Fact, ...] = ()
    causes: tuple[str, ...] = ()
    """Why evidence was statistics only: `stale_generation`, `future_generation`, `void_permit`,
    `stale_success`, `suppressed`, `late`, `overridden`."""
    is_success: bool = False
    has_effect: bool = False
    """Some row changed. A success without effect is not stored and may be judged again (fleet.md section 1)."""
    counted: bool = False
    """A breaker count moved, or a probe's verdict fell."""
    verdict: Verdict | None = None
    """Of the probe; None without one or where its permit had no say."""
    breaker_exclusion: str = ""
    guard: str = ""
    """Local guard that ended the evaluation; empty without one."""
    restated: Restated | None = None
    classification: Classification | None = None
    record: DecisionRecord | None = None
    connection: ConnectionAnswer | None = None
    success: SuccessAnswer | None = None


@dataclass(frozen=True, slots=True)
class _Report:
    """One event with everything the steps look at."""

    book: StateBook
    event: OutcomeEvent
    whole: Policy
    policy: ConnectionPolicy
    outcome: Outcome
    read: Meaning | None
    """What a failure means; None for a success."""
    facts: FactLog
    draw: float
    now: Instant | None
    replicas: int | None


def fold(
    book: StateBook,
    event: OutcomeEvent,
    policy: Policy,
    entropy_draw: float | None = None,
    *,
    now: Instant | None = None,
    replicas: int | None = None,
) -> FoldResult:
    """Fold one outcome into the book.

    Args:
        entropy_draw: uniform in [0, 1) for the reopen jitter; None: derived from the event id, so that the commit and
            every projection of one event draw the same number.
        now: time of the transaction; decides only whether a late failure may still trip a breaker. None: the event's.
        replicas: replicas alive, for the evidence quorum; None: unknown.
    """
    report = _read(book, event, policy, draw_of(event) if entropy_draw is None else entropy_draw, now, replicas)
    before = dict(book.changes)
    result = _fold_success(report) if report.outcome.is_success else _fold_failure(report)
    return replace(result, facts=tuple(report.facts.facts), has_effect=book.changes != before)


def draw_of(event: OutcomeEvent) -> float:
    """A number in [0, 1) that depends on the event alone."""
    digest = hashlib.blake2b(event.event_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / (1 << 53)


def scope_of(events: Sequence[OutcomeEvent], policy: Policy) -> Scope:
    """Guard rows to lock and rows to read for a batch; an exhausted address concerns every provider of the set."""
    connections: set[tuple[str, str]] = {(event.target.provider, event.target.connection) for event in events}
    connections |= {split_name(ref.breaker_key) for event in events for ref in event.probes}
    shared = policy.egress_providers if any(_may_exhaust_address(event, policy) for event in events) else frozenset()
    return Scope(
        frozenset({provider for provider, _ in connections} | shared),
        frozenset(pair for pair in connections if pair[1]),
        whole_providers=frozenset(shared),
    )


def _may_exhaust_address(event: OutcomeEvent, policy: Policy) -> bool:
    return event.target.provider in policy.egress_providers and not event.outcome.is_success


# --- reading ------------------------------------------------------------------------------------------------
def _read(
    book: StateBook, event: OutcomeEvent, policy: Policy, draw: float, now: Instant | None, replicas: int | None
) -> _Report:
    if event.outcome.is_success:
        provider, connection, _ = event.target
        applies = policy.for_connection(provider, connection, event.outcome.auth_class)
        log = _fact_log(event, None)
        return _Report(book, event, policy, applies, named_outcome(event), None, log, draw, now, replicas)
    read = meaning_of(event, policy)
    log = _fact_log(event, read)
    return _Report(book, event, policy, read.policy, read.outcome, read, log, draw, now, replicas)


def _fact_log(event: OutcomeEvent, read: Meaning | None) -> FactLog:
    restated = read.restated if read and read.restated and read.restated.rule_id is not None else None
    cause = Cause(
        event.event_id,
        event.at,
        replica=event.replica,
        decision_id=event.decision_id,
        request_id=event.request_id,
        status=event.outcome.status,
        restated_status=restated.status if restated else None,
        reason=read.found.reason if read else "",
        rule_id=_rule_id(read.found, restated) if read else None,
        rule=event.verdict.rule if event.verdict else "",
    )
    return FactLog(cause)


def _rule_id(found: Classification, restated: Restated | None) -> str | None:
    """The provider's or operator's rule behind a failure, else the one that corrected its status."""
    return found.rule_id or (restated.rule_id if restated else None)


# --- success ------------------------------------------------------------------------------------------------
def _fold_success(report: _Report) -> FoldResult:
    if report.event.statistics_only:
        return FoldResult(is_success=True, causes=(STALE_SUCCESS,))
    breaker = fold_breaker(report.book, _breaker_case(report, None), report.facts)
    _clear_provider_cooldown(report)
    success = None
    if report.event.target.connection:
        success = succeed_connection(report.book, report.outcome, report.policy, _attempt(report), report.facts)
    return FoldResult(
        is_success=True,
        causes=_causes(breaker, success),
        counted=breaker.counted,
        verdict=breaker.verdict,
        success=success,
    )


def _clear_provider_cooldown(report: _Report) -> None:
    event, book = report.event, report.book
    for part in _cooldown_parts(event):
        entry = book.get(ProviderCooldownState, event.target.provider, part)
        book.put(provider_cooldown.record_success(entry, event.at, event.started_at, report.facts))


# --- failure ------------------------------------------------------------------------------------------------
def _fold_failure(report: _Report) -> FoldResult:
    read, outcome, policy = report.read, report.outcome, report.policy
    assert read is not None
    guard, reading, found = read.guard, read.reading, read.found
    if policy.rotation.enabled:
        found = classify_reading(reading, rotation_failures(report.book, outcome, policy, report.event.at))
    breaker = fold_breaker(report.book, _breaker_case(report, found), report.facts)
    if breaker.closed:
        _clear_provider_cooldown(report)
    result = FoldResult(
        counted=breaker.counted,
        verdict=breaker.verdict,
        breaker_exclusion=breaker.exclusion,
        guard=guard,
        restated=read.restated,
        classification=found,
        record=resolve(found, 0, policy),
    )
    if guard:
        _after_guard(report, guard, result.record, reading)
        return replace(result, causes=breaker.causes)
    _record_provider_cooldown(report, found, result.record)
    return _fold_connection(report, result, found, reading, breaker)


def _fold_connection(
    report: _Report, result: FoldResult, found: Classification, reading: Reading, breaker: BreakerAnswer
) -> FoldResult:
    """Steps 9 and 10: the failure algorithm and the pool lockout."""
    if not report.event.target.connection:
        return replace(result, causes=breaker.causes)
    attempt = replace(_attempt(report), breaker_blocks=target_blocked(report.book, _breaker_case(report, found)))
    answer = fail_connection(report.book, report.outcome, found, report.policy, report.whole, attempt, report.facts)
    lock_for_pool(
        report.book,
        report.outcome,
        reading.hint,
        answer.record,
        report.policy,
        attempt,
        report.facts,
        request_scoped=found.rule in _EXCUSED_IN_POOLS,
        about_model=provider_does_not_serve(report.outcome),
        already=answer.locked,
    )
    return replace(result, causes=_causes(breaker, answer), record=answer.record, connection=answer)


def _after_guard(report: _Report, guard: str, record: DecisionRecord | None, reading: Reading) -> None:
    """The evaluation ends, save for a target timeout in the pool lockout; an early probe told nothing."""
    free_early_probe(report.book, Place(*report.event.target, report.policy.provider), report.event.early_probe)
    outcome = report.outcome
    if guard == FREE_TIER_REMOVED and outcome.connection and outcome.model:
        place = Place(*report.event.target, report.policy.provider)
        LockWriter(report.book, place, report.policy, _attempt(report), report.facts).remove()
    if record is None or report.outcome.code.lower() != "combo_target_timeout":
        return
    blocked = target_blocked(report.book, _breaker_case(report, None))
    attempt = replace(_attempt(report), breaker_blocks=blocked)
    lock_for_pool(
        report.book,
        report.outcome,
        reading.hint,
        record,
        report.policy,
        attempt,
        report.facts,
        request_scoped=bool(guard),
    )


def _record_provider_cooldown(report: _Report, found: Classification, record: DecisionRecord | None) -> None:
    event, outcome, policy = report.event, report.outcome, report.policy
    profile, provider = policy.provider_cooldown, event.target.provider
    if not outcome.pool_attempt or found.rule in REQUEST_RULES:
        return
    if record and (is_connection_quota(record) or exhausts_address(outcome, record, policy)):
        return  # guards.md section 5: the account or its address is spent, the provider is not
    if not provider_cooldown.records(profile, provider, outcome.status, policy.counts_per_model):
        return
    for part in _cooldown_parts(event):
        entry = report.book.get(ProviderCooldownState, provider, part)
        report.book.put(provider_cooldown.record_failure(entry, event.at, profile, report.facts))


# --- shared -------------------------------------------------------------------------------------------------
def _cooldown_parts(event: OutcomeEvent) -> tuple[str, ...]:
    return ("", event.target.connection) if event.target.connection else ("",)


def _attempt(report: _Report) -> Attempt:
    event = report.event
    return Attempt(event.at, event.started_at, event.generations, permit_id=event.early_probe)


def _breaker_case(report: _Report, found: Classification | None) -> BreakerCase:
    return BreakerCase(
        report.event,
        report.outcome,
        report.policy,
        found,
        report.draw,
        report.now,
        report.replicas,
        _known_connections(report) if report.policy.breaker.quorum_enabled else None,
    )


def _known_connections(report: _Report) -> int | None:
    """Declared connections of the provider; None where none is declared and the number is unknown."""
    provider = report.event.target.provider
    declared = report.whole.catalogue.connections.values()
    return sum(report.whole.canonical(each.provider) == provider for each in declared) or None


def _causes(breaker: BreakerAnswer, other: ConnectionAnswer | SuccessAnswer | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*breaker.causes, *(other.causes if other else ()))))
