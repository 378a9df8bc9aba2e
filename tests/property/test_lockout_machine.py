"""The lock writer against an independent model: ends only grow, each outcome counts once, a success halves, a delete
starts a new generation (spec/model_lockout.md sections 4 and 6)."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policy_service.application import connection_acts as acts
from policy_service.application.connection_case import Attempt
from policy_service.application.connection_locks import LockWriter, decay_locks
from policy_service.domain import lockout
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.facts import Cause, FactLog
from policy_service.domain.ids import Generations
from policy_service.domain.lockout import LockEvidence, ModelLockState, Place
from policy_service.domain.policy import Policy
from policy_service.domain.state import Key, Row, StateBook
from policy_service.settings.provider_data import builtin_providers

pytestmark = pytest.mark.timeout(600)
"""Two thousand examples on a busy machine."""
EXAMPLES = int(os.environ.get("POLICY_HYPOTHESIS_EXAMPLES", "200"))
POLICY = Policy(Catalogue(providers=builtin_providers())).for_connection("gemini", "c1")
PLACE = Place("gemini", "c1", "m", POLICY.provider)
RESET, LONGEST = 30_000, 1_800_000


@dataclass
class Model:
    """Lock and counter as arithmetic."""

    until: int | None = None
    count: int = 0
    failed_at: int | None = None
    heard_at: int = 0
    """Newest failure that counted elsewhere."""
    last: int = 0
    generation: int = 1

    def count_after(self, at: int) -> int:
        within = self.count > 0 and self.failed_at is not None and at - self.failed_at <= RESET + self.last
        return self.count + 1 if within else 1

    def fail(self, at: int, base: int, exact: int, in_full: bool) -> None:
        self.count = self.count_after(at)
        if exact:
            wait = exact if in_full else min(exact, LONGEST)
        else:
            wait = min(base * 2 ** min(self.count - 1, 10), LONGEST)
        standing = self.last if (self.until or 0) > at + wait else 0
        self.until = max(self.until or 0, at + wait)
        self.failed_at, self.last = at, max(wait, standing)

    def succeed(self, started: int) -> None:
        if started < max(self.failed_at or 0, self.heard_at):
            return
        self.count //= 2
        if not self.count:
            self.forget()

    def delete(self) -> None:
        if self.until is not None or self.count:
            self.generation += 1
        self.forget()

    def forget(self) -> None:
        self.until, self.count, self.failed_at, self.last, self.heard_at = None, 0, None, 0, 0


class LockoutMachine(RuleBasedStateMachine):
    """One model of one key; failures of one kind, so that one key is written."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[Key, Row] = {}
        self.model = Model()
        self.now = 1_000_000
        self.calls: list[tuple[int, int]] = []
        self.events = 0

    @property
    def row(self) -> ModelLockState:
        return lockout.lock_row(StateBook(self.rows), PLACE, lockout.key_of("family", PLACE.entry, "m"))

    def log(self) -> FactLog:
        self.events += 1
        return FactLog(Cause(f"e{self.events}", self.now))

    def write(
        self,
        evidence: LockEvidence,
        at: int,
        generation: int | None = None,
        twice: bool = False,
        breaker_blocks: bool = False,
    ) -> None:
        generations = None if generation is None else Generations(1, 1, generation)
        book = StateBook(self.rows)
        writer = LockWriter(
            book, PLACE, POLICY, Attempt(at, at, generations, breaker_blocks=breaker_blocks), self.log()
        )
        already = writer.write(evidence)
        if twice:
            assert not writer.write(evidence, already)
        self.rows.update(book.changes)

    @rule(ms=st.sampled_from([1, 3_000, 3_001, 29_000, 60_000, 1_900_000]))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    @rule()
    def a_call_begins(self) -> None:
        self.calls.append((self.now, self.model.generation))

    @rule(
        base=st.sampled_from([1_000, 3_000, 120_000]),
        exact=st.sampled_from([0, 0, 5_000, 7_200_000]),
        source=st.sampled_from(["", "header", "body"]),
        twice=st.booleans(),
    )
    def a_failure_arrives(self, base: int, exact: int, source: str, twice: bool) -> None:
        before = self.row.until or 0
        evidence = LockEvidence(429, "rate_limit_exceeded", base, exact, source if exact else "")
        self.write(evidence, self.now, twice=twice)
        self.model.fail(self.now, base, exact, source == "header")
        assert (self.row.until or 0) >= before

    @precondition(lambda self: self.row.last_event_at is not None)
    @rule(age=st.sampled_from([1, 2_000]), exact=st.sampled_from([0, 7_200_000]))
    def a_late_failure_merges(self, age: int, exact: int) -> None:
        before = self.row
        assert before.last_event_at is not None
        at = before.last_event_at - age
        self.write(LockEvidence(429, "rate_limit_exceeded", 3_000, exact, "header" if exact else ""), at)
        after = self.row
        assert after.failure_count == self.model.count_after(at)
        assert (after.until or 0) >= max(before.until or 0, at + exact if exact else 0)
        assert after.last_failure_at == max(before.last_failure_at or at, at)
        self.model.count, self.model.until = after.failure_count, after.until
        self.model.failed_at, self.model.last = after.last_failure_at, after.last_cooldown_ms

    @rule()
    def a_failure_meets_an_open_breaker(self) -> None:
        before = self.row
        self.write(LockEvidence(502, "bad_gateway", 3_000), self.now, breaker_blocks=True)
        self.write(LockEvidence(429, "rate_limit_exceeded", 3_000), self.now, breaker_blocks=True)
        assert (self.row.until, self.row.failure_count) == (before.until, before.failure_count)
        if self.model.until is not None or self.model.count:
            self.model.heard_at = self.now

    @precondition(lambda self: self.model.generation > 1)
    @rule()
    def a_failure_of_an_older_generation_changes_nothing(self) -> None:
        before = dict(self.rows)
        self.write(LockEvidence(429, "x", 3_000), self.now, self.model.generation - 1)
        assert self.rows == before

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def a_call_succeeds(self, data: st.DataObject) -> None:
        started, generation = data.draw(st.sampled_from(self.calls))
        if generation != self.model.generation:
            return
        book = StateBook(self.rows)
        decay_locks(book, PLACE, POLICY, Attempt(self.now, started), self.log())
        self.rows.update(book.changes)
        self.model.succeed(started)

    @rule()
    def an_operator_deletes_the_lock(self) -> None:
        book = StateBook(self.rows)
        acts.delete_lock(book, PLACE, self.log())
        self.rows.update(book.changes)
        self.model.delete()

    @invariant()
    def service_and_model_agree(self) -> None:
        row = self.row
        assert (row.until, row.failure_count) == (self.model.until, self.model.count)
        assert row.generation == self.model.generation
        assert lockout.is_locked(row, self.now) is (self.model.until is not None and self.now <= self.model.until)


TestLockoutMachine = LockoutMachine.TestCase
TestLockoutMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None)
