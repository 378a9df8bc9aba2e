"""Terminal states under arbitrary traffic: entered by evidence, left by acts alone, fenced by generations
(spec/terminal_states.md)."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policy_service.application import connection_acts as acts
from policy_service.application.connection_case import Attempt
from policy_service.application.connection_plan import fail_connection, succeed_connection
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.classification import classify
from policy_service.domain.connection_state import TERMINAL_STATES, ConnectionState
from policy_service.domain.facts import Cause, Fact, FactLog
from policy_service.domain.ids import Generations
from policy_service.domain.lockout import FamilyPoolState
from policy_service.domain.outcome import Outcome
from policy_service.domain.policy import Policy
from policy_service.domain.state import Key, Row, StateBook
from policy_service.settings.provider_data import builtin_providers

pytestmark = pytest.mark.timeout(600)
"""Two thousand examples on a busy machine."""
EXAMPLES = int(os.environ.get("POLICY_HYPOTHESIS_EXAMPLES", "200"))
POLICY = Policy(Catalogue(providers=builtin_providers()))
STATUSES = st.sampled_from([400, 401, 402, 403, 404, 408, 410, 413, 422, 429, 432, 500, 501, 502, 503, 504, 529])
TEXTS = st.sampled_from(
    ["", "rate limit", "account has been disabled", "insufficient credits", "Request not allowed", "unauthorized",
     "weekly usage limit", "overloaded", "quota exceeded", "PERMISSION_DENIED", "The model m is no longer available"]
)  # fmt: skip


class TerminalMachine(RuleBasedStateMachine):
    """One connection of any provider."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[Key, Row] = {}
        self.facts: list[Fact] = []
        self.now = 1_000_000
        self.provider = "openai"
        self.generation = 1
        self.expected: ConnectionState | None = None
        self.events = 0

    @initialize(provider=st.sampled_from(["openai", "kiro", "claude", "gemini", "codex", "agentrouter", "grok-web"]))
    def choose(self, provider: str) -> None:
        self.provider = provider

    @property
    def row(self) -> ConnectionState:
        return StateBook(self.rows).get(ConnectionState, self.provider, "c1")

    def family_waits(self, model: str) -> bool:
        """A model whose family pool waits ends the evaluation before any text is believed (section 4, step 4)."""
        pools = (row for row in self.rows.values() if isinstance(row, FamilyPoolState))
        return bool(model) and any((pool.limited_until or 0) > self.now for pool in pools)

    def log(self) -> FactLog:
        self.events += 1
        return FactLog(Cause(f"e{self.events}", self.now))

    def take(self, book: StateBook, log: FactLog) -> None:
        self.rows.update(book.changes)
        self.facts.extend(log.facts)

    def fail(self, status: int, text: str, model: str, generation: int | None = None, persist: bool = True) -> None:
        outcome = Outcome(
            status=status,
            provider=self.provider,
            connection="c1",
            model=model,
            message=text,
            text=text,
            persist=persist,
        )
        policy = POLICY.for_connection(self.provider, "c1")
        generations = None if generation is None else Generations(1, generation, 1)
        book, log = StateBook(self.rows), self.log()
        attempt = Attempt(self.now, self.now, generations)
        fail_connection(book, outcome, classify(outcome, policy, self.now), policy, POLICY, attempt, log)
        self.take(book, log)

    @rule(ms=st.sampled_from([1, 5_000, 300_000, 900_000, 90_000_000]))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    @rule(status=STATUSES, text=TEXTS, model=st.sampled_from(["", "m"]), persist=st.booleans())
    def a_failure_arrives(self, status: int, text: str, model: str, persist: bool) -> None:
        before, waits = self.row, self.family_waits(model)
        self.fail(status, text, model, persist=persist)
        if before.is_terminal:
            assert self.row == before
        if "account has been disabled" in text and not waits:
            assert self.row.is_terminal
        if status in (502, 503, 504, 529) and text in ("", "rate limit", "overloaded") and not before.is_terminal:
            assert not self.row.is_terminal

    @rule(age=st.integers(0, 10_000))
    def a_success_arrives(self, age: int) -> None:
        before = self.row
        outcome = Outcome(status=200, provider=self.provider, connection="c1", model="m")
        policy = POLICY.for_connection(self.provider, "c1")
        book, log = StateBook(self.rows), self.log()
        succeed_connection(book, outcome, policy, Attempt(self.now, self.now - age), log)
        self.take(book, log)
        if before.is_terminal:
            assert self.row == before

    @precondition(lambda self: self.generation > 1)
    @rule(status=STATUSES, text=TEXTS)
    def evidence_of_an_older_generation_arrives(self, status: int, text: str) -> None:
        before = self.row
        self.fail(status, text, "m", self.generation - 1)
        assert self.row == before

    @rule(change=st.booleans())
    def an_act_ends_it(self, change: bool) -> None:
        act = acts.change_credential if change else acts.reset_connection
        book, log = StateBook(self.rows), self.log()
        act(book, self.provider, "c1", self.now, log)
        self.take(book, log)
        self.generation += 1
        assert self.row.test_status == "active"
        assert self.row.active

    @rule(ok=st.booleans())
    def a_revival_is_tried(self, ok: bool) -> None:
        before = self.row
        book, log = StateBook(self.rows), self.log()
        permit = acts.grant_retry(book, self.provider, "c1", f"p{self.events}", self.now, log)
        self.take(book, log)
        if permit is None:
            return
        assert before.test_status == "expired"
        assert before.retry_attempts < 3
        book, log = StateBook(self.rows), self.log()
        acts.retry_result(book, self.provider, "c1", ok, self.now, log)
        self.take(book, log)
        self.generation += ok
        assert self.row.test_status == ("active" if ok else "expired")

    @invariant()
    def a_terminal_row_has_no_timer(self) -> None:
        if self.row.test_status in TERMINAL_STATES:
            assert self.row.rate_limited_until is None

    @invariant()
    def generations_count_the_acts(self) -> None:
        assert self.row.generation == self.generation

    @invariant()
    def every_state_has_a_fact(self) -> None:
        own = [fact for fact in self.facts if fact.mechanism == "connection"]
        shown = own[-1].to_state if own else "active"
        assert shown == self.row.test_status
        assert (own[-1].deadline_at if own else None) == self.row.rate_limited_until


TestTerminalMachine = TerminalMachine.TestCase
TestTerminalMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None)
