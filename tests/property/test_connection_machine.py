"""The connection algorithm against an independent model: deadlines only grow, one ladder step a burst, stale and
repeated evidence changes nothing (spec/connection_cooldown.md, README rulings 8 to 14)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policy_service.application import connection_acts as acts
from policy_service.application.connection_case import Attempt
from policy_service.application.connection_plan import ConnectionAnswer, fail_connection, succeed_connection
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.classification import classify
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.facts import Cause, FactLog
from policy_service.domain.ids import Generations
from policy_service.domain.outcome import Outcome
from policy_service.domain.policy import Policy
from policy_service.domain.state import Key, Row, StateBook
from policy_service.settings.provider_data import builtin_providers

pytestmark = pytest.mark.timeout(600)
"""Two thousand examples on a busy machine."""
EXAMPLES = int(os.environ.get("POLICY_HYPOTHESIS_EXAMPLES", "200"))
POLICY = Policy(Catalogue(providers=builtin_providers()))
SECOND = 1_000
TERMINAL = {401: "expired", 402: "credits_exhausted"}


@dataclass
class Model:
    """What an operator would expect of one API key, written down without looking at the service."""

    until: int | None = None
    level: int = 0
    status: str = "active"
    failed_at: int | None = None
    heard_at: int = 0
    """Newest failure that arrived, whether or not it changed anything else."""
    generation: int = 1
    steps: list[int] = field(default_factory=list)

    def cools(self, at: int) -> bool:
        return self.until is not None and self.until > at

    def is_dead(self) -> bool:
        return self.status in TERMINAL.values()

    def fail(self, status: int, hint: int, at: int) -> None:
        if self.is_dead():
            return
        self.heard_at = max(self.heard_at, at)
        if status in TERMINAL:
            self.status, self.until, self.failed_at = TERMINAL[status], None, at
        elif self.cools(at):
            assert self.until is not None
            if hint and status != 404:
                self.until = max(self.until, at + hint)
        else:
            self.until, self.status, self.failed_at = at + self._duration(status, hint), "unavailable", at

    def _duration(self, status: int, hint: int) -> int:
        if status == 404:
            return 120 * SECOND
        if hint:
            self.level = 0
            return hint
        waits = [3, 6, 12, 24, 48, 96]
        wait = waits[self.level] * SECOND
        self.level = min(5, self.level + 1)
        return wait

    def succeed(self, started: int) -> None:
        if started >= self.heard_at and not self.is_dead():
            self.until, self.level, self.status, self.failed_at = None, 0, "active", None
            self.heard_at = 0

    def renew(self) -> None:
        self.until, self.level, self.status, self.failed_at, self.heard_at = None, 0, "active", None, 0
        self.generation += 1


class ConnectionMachine(RuleBasedStateMachine):
    """One key of one provider under traffic, operators and late reports."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[Key, Row] = {}
        self.model = Model()
        self.now = 1_000_000
        self.newest = 0
        self.calls: list[tuple[int, int]] = []
        self.events = 0
        self.last: tuple[int, int, int] | None = None

    # -- the service -------------------------------------------------------------------------------------
    @property
    def row(self) -> ConnectionState:
        return StateBook(self.rows).get(ConnectionState, "openai", "c1")

    def log(self, at: int) -> FactLog:
        self.events += 1
        return FactLog(Cause(f"e{self.events}", at))

    def fail(self, status: int, hint: int, at: int, generation: int | None = None) -> ConnectionAnswer:
        headers = {"retry-after": str(hint // SECOND)} if hint else {}
        outcome = Outcome(status=status, provider="openai", connection="c1", headers=headers)
        policy = POLICY.for_connection("openai", "c1")
        generations = None if generation is None else Generations(1, generation, 1)
        book, attempt = StateBook(self.rows), Attempt(at, at, generations)
        found = classify(outcome, policy, at)
        answer = fail_connection(book, outcome, found, policy, POLICY, attempt, self.log(at))
        self.rows.update(book.changes)
        return answer

    def succeed(self, started: int, generation: int | None = None) -> None:
        outcome = Outcome(status=200, provider="openai", connection="c1")
        generations = None if generation is None else Generations(1, generation, 1)
        book, attempt = StateBook(self.rows), Attempt(self.now, started, generations)
        succeed_connection(book, outcome, POLICY.for_connection("openai", "c1"), attempt, self.log(self.now))
        self.rows.update(book.changes)

    # -- traffic -----------------------------------------------------------------------------------------
    @rule(ms=st.sampled_from([1, 499, 500, 1_000, 3_000, 6_000, 12_000, 100_000, 2_000_000]))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    @rule()
    def a_call_begins(self) -> None:
        self.calls.append((self.now, self.model.generation))

    @rule(
        status=st.sampled_from([503, 503, 429, 404, 401, 402]),
        hint=st.sampled_from([0, 0, 1, 2, 60, 7_200]),
        burst=st.integers(1, 4),
    )
    def failures_arrive(self, status: int, hint: int, burst: int) -> None:
        before = self.row
        for _ in range(burst):
            answer = self.fail(status, hint * SECOND, self.now)
            assert answer.fallback
            self.model.fail(status, hint * SECOND, self.now)
        if not self.row.is_terminal:
            assert (self.row.rate_limited_until or 0) >= (before.rate_limited_until or 0)
        assert self.row.backoff_level <= before.backoff_level + 1
        self.newest = max(self.newest, self.now)
        self.last = (status, hint * SECOND, self.now)

    @precondition(lambda self: self.last is not None and self.last[2] == self.now)
    @rule()
    def the_same_failure_is_folded_again(self) -> None:
        assert self.last is not None
        cooled = self.row.is_terminal or (self.row.rate_limited_until or 0) > self.now
        before = self.row
        if cooled:
            self.fail(*self.last)
            assert self.row == before

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def a_call_succeeds(self, data: st.DataObject) -> None:
        started, generation = data.draw(st.sampled_from(self.calls))
        before, self.last = self.row, None
        self.succeed(started, generation)
        if generation != self.model.generation:
            assert self.row == before
        else:
            self.model.succeed(started)

    @precondition(lambda self: self.model.generation > 1)
    @rule(status=st.sampled_from([503, 429, 401, 402]), hint=st.sampled_from([0, 60]))
    def a_failure_of_an_older_generation_arrives(self, status: int, hint: int) -> None:
        before = self.row
        answer = self.fail(status, hint * SECOND, self.now, self.model.generation - 1)
        assert self.row == before
        assert "stale_generation" in answer.causes

    @precondition(lambda self: self.row.last_event_at is not None)
    @rule(age=st.sampled_from([1, 500, 5_000]), hint=st.sampled_from([0, 60, 7_200]))
    def a_late_failure_merges(self, age: int, hint: int) -> None:
        before = self.row
        assert before.last_event_at is not None
        at = before.last_event_at - age
        self.fail(503 if not hint else 429, hint * SECOND, at)
        after = self.row
        assert after.backoff_level == before.backoff_level
        assert (after.last_error_at or 0) >= (before.last_error_at or 0)
        assert (after.rate_limited_until or 0) >= (before.rate_limited_until or 0)
        assert (after.rate_limited_until or 0) >= (at + hint * SECOND if hint and not after.is_terminal else 0)
        self.model.until, self.model.failed_at = after.rate_limited_until, after.last_error_at
        self.model.status = after.test_status
        self.model.heard_at = max(self.model.heard_at, at)

    # -- operators ---------------------------------------------------------------------------------------
    @rule(change=st.booleans())
    def an_operator_acts(self, change: bool) -> None:
        act = acts.change_credential if change else acts.reset_connection
        book = StateBook(self.rows)
        act(book, "openai", "c1", self.now, self.log(self.now))
        self.rows.update(book.changes)
        self.model.renew()
        self.last = None

    # -- agreement ---------------------------------------------------------------------------------------
    @invariant()
    def service_and_model_agree(self) -> None:
        row = self.row
        assert row.rate_limited_until == self.model.until
        assert row.backoff_level == self.model.level
        assert row.test_status == self.model.status
        assert row.last_error_at == self.model.failed_at
        assert row.generation == self.model.generation


TestConnectionMachine = ConnectionMachine.TestCase
TestConnectionMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None)
