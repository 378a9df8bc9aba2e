"""Permits under any order of calls: caps hold, the line is served in order, slots are given back once.

The model knows nothing of the line: it looks at the rows that each operation wrote, as an auditor of the table would.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policy_service.domain.gates import LIVE, OFFER_MS, WAITER_LOST_MS, Gate, GateBook, PermitRow, PermitState
from policy_service.domain.line import (
    Answer,
    PermitAnswer,
    PermitRequest,
    acquire,
    cancel,
    claim,
    needs_own_replica,
    release,
    renew,
    reset,
    settle,
)

EXAMPLES = int(os.environ.get("POLICY_HYPOTHESIS_EXAMPLES", "200"))
GATES = ("account", "fleet", "model")
REQUESTS = tuple(f"q{n}" for n in range(8))
requests = st.sampled_from(REQUESTS)
gate_sets = st.sets(st.sampled_from(GATES), min_size=1).map(lambda keys: tuple(sorted(keys)))


def _silent(_: list[PermitRow]) -> PermitAnswer:
    """Answer of an operation that answers nobody."""
    return PermitAnswer(Answer.UNKNOWN)


def _occupies(row: PermitRow) -> bool:
    return row.state is PermitState.HELD or (row.state is PermitState.WAITING and row.offered_until is not None)


class PermitLine(RuleBasedStateMachine):
    """Three gates, some requests over several of them; callers claim, or die and never do."""

    @initialize(caps=st.lists(st.integers(1, 3), min_size=3, max_size=3), depth=st.integers(0, 3))
    def start(self, caps: list[int], depth: int) -> None:
        self.now = 1_000
        self.ticket = 0
        self.rows: dict[tuple[str, str], PermitRow] = {}
        self.gates = {key: Gate(key, cap, depth) for key, cap in zip(GATES, caps, strict=True)}

    def transact(self, keys: tuple[str, ...], operation: Any) -> PermitAnswer:
        """One transaction on the locked gates; ended rows must never change again."""
        book = GateBook([self.gates[key] for key in keys], [row for row in self.rows.values() if row.gate in keys])
        answer: PermitAnswer = operation(book)
        for key, row in book.changed.items():
            before = self.rows.get(key)
            assert before is None or before.state in LIVE or before.permit_id != row.permit_id
            self._audit_grant(before, row, book)
        self.rows |= book.changed
        self.gates |= book.changed_gates
        assert all(not row.is_offered for row in needs_own_replica(book))
        return answer

    def _audit_grant(self, before: PermitRow | None, row: PermitRow, book: GateBook) -> None:
        """A slot that is given goes to the lowest ticket in line (silent waiters aside), and never above the cap."""
        was = before is not None and before.permit_id == row.permit_id and _occupies(before)
        if was or not _occupies(row):
            return
        ahead = [
            other
            for other in book.rows(row.gate)
            if other.state is PermitState.WAITING and not other.is_offered and not other.is_silent
        ]
        assert all(other.ticket > row.ticket for other in ahead), (row, ahead)
        limit = book.gates[row.gate].limit
        assert limit is not None
        assert sum(_occupies(other) for other in book.rows(row.gate)) <= limit

    @rule(request=requests, gates=gate_sets, timeout=st.sampled_from([0, 3_000, 60_000, None]))
    def acquires(self, request: str, gates: tuple[str, ...], timeout: int | None) -> None:
        known = [row for row in self.rows.values() if row.request_id == request]
        keys = known[0].gates if known else gates
        self.ticket += 1
        asked = PermitRequest(request, f"p{self.ticket}", keys, self.ticket, timeout_ms=timeout, ttl_ms=10_000)
        answer = self.transact(keys, lambda book: acquire(book, asked, self.now))
        if answer.answer in (Answer.QUEUE_FULL, Answer.TIMEOUT):
            assert not [row for row in self.rows.values() if row.permit_id == asked.permit_id]

    def of(self, request: str) -> PermitRow | None:
        return next((row for row in self.rows.values() if row.request_id == request), None)

    @rule(request=requests)
    def claims(self, request: str) -> None:
        row = self.of(request)
        if row is not None:
            answer = self.transact(row.gates, lambda book: claim(book, request, "r1", self.now))
            assert answer.row is not None
            assert not answer.row.is_offered

    @rule(request=requests, operation=st.sampled_from([release, cancel]))
    def ends(self, request: str, operation: Any) -> None:
        row = self.of(request)
        if row is None:
            return
        first = self.transact(row.gates, lambda book: operation(book, request, self.now))
        again = self.transact(row.gates, lambda book: operation(book, request, self.now))
        assert first.answer in (Answer.RELEASED, Answer.CANCELLED, Answer.ALREADY_ENDED)
        assert again.answer is Answer.ALREADY_ENDED

    @rule(request=requests)
    def renews(self, request: str) -> None:
        row = self.of(request)
        if row is None:
            return
        answer = self.transact(row.gates, lambda book: renew(book, request, self.now))
        assert answer.row is not None
        held = answer.row.state is PermitState.HELD
        assert (answer.answer is Answer.RENEWED) == held
        assert not held or answer.row.expires_at == self.now + 10_000

    @rule(gate=st.sampled_from(GATES), cap=st.integers(1, 3))
    def recaps(self, gate: str, cap: int) -> None:
        self.gates[gate] = replace(self.gates[gate], limit=cap)
        self.transact((gate,), lambda book: _silent(settle(book, self.now)))

    @rule(gate=st.sampled_from(GATES))
    def resets(self, gate: str) -> None:
        self.transact((gate,), lambda book: _silent(reset(book, gate, self.now)))

    @rule(by=st.sampled_from([0, 1, 500, OFFER_MS, 5_000, 10_000, WAITER_LOST_MS, 700_000]))
    def time_passes(self, by: int) -> None:
        self.now += by

    @rule(gates=gate_sets)
    def sweeps(self, gates: tuple[str, ...]) -> None:
        self.transact(gates, lambda book: _silent(settle(book, self.now)))

    @precondition(lambda self: hasattr(self, "rows"))
    @invariant()
    def a_request_is_in_one_state_at_all_gates_it_holds(self) -> None:
        """Held at one gate of a request is held at all of them, or ended there."""
        for request in REQUESTS:
            states = {row.state for row in self.rows.values() if row.request_id == request}
            assert not {PermitState.HELD, PermitState.WAITING} <= states

    @precondition(lambda self: hasattr(self, "rows"))
    @invariant()
    def what_lives_has_a_deadline(self) -> None:
        for row in self.rows.values():
            assert row.state is not PermitState.HELD or row.expires_at is not None
            assert row.is_live == (row.ended_at is None)


PermitLine.TestCase.settings = settings(max_examples=max(50, EXAMPLES // 3), stateful_step_count=40, deadline=None)
TestPermitLine = PermitLine.TestCase
