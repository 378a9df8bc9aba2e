"""Model locks and family pools of one outcome: the lock writer over a `StateBook` (spec/model_lockout.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from policy_service.application.connection_case import Attempt
from policy_service.domain import early_probe, lockout, lockout_pool
from policy_service.domain.decision_record import DecisionRecord, Hint
from policy_service.domain.facts import FactLog
from policy_service.domain.ids import SERVER_STATED, DurationMs
from policy_service.domain.lockout import Decay, FamilyPoolState, LockEvidence, LockWrite, ModelLockState, Place
from policy_service.domain.lockout_keys import BARE, EXACT
from policy_service.domain.lockout_removal import removed
from policy_service.domain.outcome import Outcome
from policy_service.domain.policy import ConnectionPolicy
from policy_service.domain.state import Key, StateBook

NO_KEYS: frozenset[Key] = frozenset()
MECHANISM_POOL = "family_pool"


@dataclass(frozen=True, slots=True)
class LockWriter:
    """Writes the locks of one outcome for one target."""

    book: StateBook
    place: Place
    policy: ConnectionPolicy
    attempt: Attempt
    facts: FactLog

    @property
    def cause(self) -> str:
        """Why the outcome must not touch the locks (an older or unknown generation); empty where it may."""
        given = self.attempt.generations
        present = lockout.generation_of(self.book, self.place)
        if given is None or given.model_lock == present:
            return ""
        return "stale_generation" if given.model_lock < present else "future_generation"

    def write(self, evidence: LockEvidence, already: frozenset[Key] = NO_KEYS) -> frozenset[Key]:
        """Write one failure; returns the keys whose count rose. `already`: keys this outcome has counted at."""
        if self.attempt.breaker_blocks:
            self.hear(evidence)
        if self.attempt.breaker_blocks or self.cause:
            return NO_KEYS
        before = self._row(evidence)
        trial = self._is_tested(before)
        if trial:
            after = self._failed_trial(before, evidence)
        else:
            after = lockout.write_lock(before, evidence, self.place, self._how(before.key not in already))
        self._put(before, after)
        return NO_KEYS if trial or before.key in already else frozenset({before.key})

    def remove(self) -> None:
        """Take the model out of use for good (spec/guards.md section 1)."""
        if self.cause:
            return
        before = lockout.lock_row(self.book, self.place, lockout.key_of(BARE, self.place.entry, self.place.model))
        self._put(before, removed(before, self.place, self.attempt.at))

    def hear(self, evidence: LockEvidence) -> None:
        """Let a lock that stands know of a failure that another mechanism has taken."""
        if not self.cause:
            self.book.put(lockout.heard(self._row(evidence), self.attempt.at))

    def settle_probe(self) -> None:
        """The test of a long lock has failed, at whichever key its failure was written, if at any."""
        for row in lockout.lock_rows(self.book, self.place):
            if row.early_probe is not None and self._is_tested(row):
                heard = lockout.heard(row, self.attempt.at)
                self.book.put(replace(heard, early_probe=early_probe.failed(row.early_probe)))

    def _is_tested(self, row: ModelLockState) -> bool:
        """The outcome is that of the row's early probe, also where another writer has settled that already."""
        permit = row.early_probe
        return permit is not None and bool(permit.id) and permit.id == self.attempt.permit_id

    def _row(self, evidence: LockEvidence) -> ModelLockState:
        _, key = lockout.key_written(evidence, self.place)
        return lockout.lock_row(self.book, self.place, key)

    def _how(self, counts: bool) -> LockWrite:
        policy = self.policy
        base = policy.ladder.base_cooldown_ms
        return LockWrite(self.attempt.at, policy.lockout, base, policy.daily_reset_zone, counts)

    def _failed_trial(self, row: ModelLockState, evidence: LockEvidence) -> ModelLockState:
        """The test of a long block failed: only a later stated end counts."""
        permit = early_probe.failed(row.early_probe) if row.early_probe else None
        settled = replace(lockout.heard(row, self.attempt.at), early_probe=permit)
        if not evidence.exact_source:
            return settled
        longest = self.policy.lockout.max_cooldown_ms
        in_full = evidence.exact_source in SERVER_STATED or longest is None
        wait = evidence.exact_ms if in_full else min(evidence.exact_ms, longest or 0)
        at = self.attempt.at
        return lockout.extend_lock(settled, at, at + wait, evidence.reason, evidence.exact_source)

    def _put(self, before: ModelLockState, after: ModelLockState) -> None:
        if after.until != before.until:
            after = replace(after, fact_id=self.facts.next_id())
            record_lock(before, after, self.attempt.at, self.facts)
        self.book.put(after)


def record_lock(before: ModelLockState, after: ModelLockState, at: int, facts: FactLog) -> None:
    """Fact of a lock that was set, moved or lifted."""
    facts.add(
        "model_lock",
        f"{after.provider}:{after.connection}:{after.written_as or after.key_kind}:{after.model_key}",
        _state_of(before, at),
        _state_of(after, at),
        provider=after.provider,
        connection=after.connection,
        model=after.model or before.model,
        generation=after.generation,
        deadline_at=after.until,
        reason=after.reason or None,
        failure_count=after.failure_count,
    )


def _state_of(row: ModelLockState, at: int) -> str:
    return "locked" if lockout.is_locked(row, at) else "free"


# -- pool lockout ------------------------------------------------------------------------------------
def lock_for_pool(
    book: StateBook,
    outcome: Outcome,
    hint: Hint | None,
    record: DecisionRecord,
    policy: ConnectionPolicy,
    attempt: Attempt,
    facts: FactLog,
    *,
    request_scoped: bool = False,
    about_model: bool = False,
    already: frozenset[Key] = NO_KEYS,
) -> frozenset[Key]:
    """Pool lockout for one failed pool attempt (section 5); returns the keys whose count rose.

    Args:
        outcome: after restatement, provider canonical.
        hint: parsed hint, whether or not the profile honours hints.
        record: decision of the failure.
        request_scoped: the request is to blame; only `combo_target_timeout` and a 400 about a model that the provider
            counts by itself lock then.
        about_model: a 400 says that the provider does not serve this model.
        already: keys at which the failure algorithm has counted this outcome.
    """
    blames_model = about_model or record.rule_scope == "model"
    scoped_400 = outcome.status == 400 and policy.counts_per_model and blames_model
    excused = request_scoped and outcome.code.lower() != "combo_target_timeout" and not scoped_400
    if not outcome.pool_attempt or excused or not outcome.model or outcome.status is None:
        return NO_KEYS
    wait, source = (hint.wait_ms, str(hint.source)) if hint else (0, "")
    evidence = lockout_pool.pool_evidence(outcome.status, wait, source, scoped_400, policy.lockout)
    if evidence is None:
        return NO_KEYS
    place = Place(outcome.provider, outcome.connection, outcome.model, policy.provider)
    return LockWriter(book, place, policy, attempt, facts).write(evidence, already)


# -- success -----------------------------------------------------------------------------------------
def decay_locks(
    book: StateBook,
    place: Place,
    policy: ConnectionPolicy,
    attempt: Attempt,
    facts: FactLog,
    first_output_ms: DurationMs | None = None,
) -> Decay:
    """Halve every counter of the target. A late first output is an event of its exact key besides, and lifts no lock
    that stands there without a count."""
    before = lockout.lock_rows(book, place)
    slow = policy.lockout.slow_first_output
    watched = slow.enabled and first_output_ms is not None
    for row in before:
        is_timed = watched and row.key_kind == EXACT
        is_late = is_timed and (first_output_ms or 0) > slow.threshold_ms
        after = row if is_late and not row.failure_count else lockout.decayed(row, attempt.started_at)
        if is_timed and lockout.is_fresh(row, attempt.started_at):
            after = lockout.note_first_output(replace(after, model=place.model), first_output_ms or 0, attempt.at, slow)
        _put_success(book, row, after, attempt, facts)
    return lockout.decay_report(before, lockout.lock_rows(book, place))


def _put_success(
    book: StateBook, before: ModelLockState, after: ModelLockState, attempt: Attempt, facts: FactLog
) -> None:
    if after == before or (after.is_default and before.is_default):
        return
    if after.until != before.until:
        after = replace(after, fact_id=facts.next_id())
        record_lock(before, after, attempt.at, facts)
    book.put(replace(after, last_event_at=max(attempt.at, before.last_event_at or attempt.at)))


# -- family pools ------------------------------------------------------------------------------------
def pool_row(book: StateBook, place: Place) -> FamilyPoolState:
    """Timer of the family pool that the model draws from."""
    return book.get(FamilyPoolState, place.provider, place.connection, place.pool)


def limit_pool(book: StateBook, place: Place, at: int, duration: DurationMs, facts: FactLog) -> None:
    """Limit the family until `at + duration` at the earliest."""
    row = pool_row(book, place)
    until = max(at + duration, row.limited_until or 0)
    after = replace(row, limited_until=until, limited_at=max(at, row.limited_at or at))
    _put_pool(book, row, after, place, at, facts)


def hear_pool(book: StateBook, place: Place, at: int) -> None:
    """A failure of a family that waits already: newer than any success of a call that began before it."""
    row = pool_row(book, place)
    if row.limited_until is not None:
        book.put(replace(row, limited_at=max(at, row.limited_at or at)))


def free_pool(book: StateBook, row: FamilyPoolState, facts: FactLog) -> None:
    """An act ends the timer of a family, with a fact."""
    if row.limited_until is None:
        return
    facts.add(
        MECHANISM_POOL,
        f"{row.provider}:{row.connection}:{row.pool}",
        "limited",
        "free",
        provider=row.provider,
        connection=row.connection,
    )
    book.put(FamilyPoolState.default(row.key))


def lift_pool(book: StateBook, place: Place, policy: ConnectionPolicy, attempt: Attempt, facts: FactLog) -> None:
    """A call of the family that began after its newest limit went through: the family is free."""
    if not policy.provider.family_pools:
        return
    row = pool_row(book, place)
    if row.limited_until is None or (row.limited_at is not None and attempt.started_at < row.limited_at):
        return
    _put_pool(book, row, replace(row, limited_until=None, limited_at=None), place, attempt.at, facts)


def _put_pool(
    book: StateBook, before: FamilyPoolState, after: FamilyPoolState, place: Place, at: int, facts: FactLog
) -> None:
    if after.limited_until != before.limited_until:
        after = replace(after, fact_id=facts.next_id())
        facts.add(
            MECHANISM_POOL,
            f"{after.provider}:{after.connection}:{after.pool}",
            "free" if before.limited_until is None else "limited",
            "free" if after.limited_until is None else "limited",
            provider=after.provider,
            connection=after.connection,
            model=place.model,
            deadline_at=after.limited_until,
        )
    book.put(replace(after, last_event_at=max(at, before.last_event_at or at)))
