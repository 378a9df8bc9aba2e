"""The streak of refused requests and the soft strikes against an independent model (spec/terminal_states.md
sections 4 and 5)."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.vectors.account_world import AccountWorld

pytestmark = pytest.mark.timeout(600)
"""Two thousand examples on a busy machine."""
EXAMPLES = int(os.environ.get("POLICY_HYPOTHESIS_EXAMPLES", "200"))
DAY = 24 * 3_600_000
SOFT = {"terminal.ambiguous_401_soft_lockout": True}


@dataclass
class Refusals:
    """Streak as an operator would count it."""

    streak: int = 0
    last: int | None = None
    until: int = 0
    banned: bool = False

    def refuse(self, at: int) -> None:
        if self.banned or at < self.until:
            return
        self.streak = self.streak + 1 if self.last is not None and at - self.last < DAY else 1
        self.last = at
        if self.streak == 3:
            self.banned, self.streak, self.last, self.until = True, 0, None, 0
        else:
            self.until = at + (300_000, 900_000)[self.streak - 1]

    def forget(self) -> None:
        if not self.banned:
            self.streak, self.last, self.until = 0, None, 0


class RefusalMachine(RuleBasedStateMachine):
    """One connection whose provider refuses single requests."""

    def __init__(self) -> None:
        super().__init__()
        self.world = AccountWorld({"provider": "claude"})
        self.model = Refusals()
        self.now = 0
        self.failed_at: int | None = None

    @rule(ms=st.sampled_from([1, 299_999, 300_000, 900_000, DAY - 1, DAY]))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    @rule(times=st.integers(1, 3))
    def a_request_is_refused(self, times: int) -> None:
        for _ in range(times):
            self.world.failure({"at_ms": self.now, "status": 403, "text": "Request not allowed"})
            self.model.refuse(self.now)
        self.failed_at = self.now

    @rule(age=st.sampled_from([0, 1_000, DAY]))
    def a_call_succeeds(self, age: int) -> None:
        self.world.success({"at_ms": self.now, "started_at_ms": self.now - age})
        if self.failed_at is None or self.now - age >= self.failed_at:
            self.model.forget()

    @rule()
    def a_replica_restarts(self) -> None:
        self.world.restart()

    @invariant()
    def streak_and_ban_agree(self) -> None:
        row = self.world.row()
        assert (row.test_status == "banned") is self.model.banned
        assert row.active is not self.model.banned
        assert row.streak == self.model.streak
        assert (row.rate_limited_until or 0) == self.model.until


class SoftStrikeMachine(RuleBasedStateMachine):
    """One key with the soft path: three ambiguous 401s an hour are forgiven."""

    def __init__(self) -> None:
        super().__init__()
        self.world = AccountWorld({"provider": "mistral", "settings": SOFT})
        self.now = 0
        self.since: int | None = None
        self.strikes = 0
        self.expired = False

    @rule(ms=st.sampled_from([1, 60_000, 3_599_999, 3_600_000]))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    @rule()
    def an_ambiguous_401_arrives(self) -> None:
        self.world.failure({"at_ms": self.now, "status": 401, "text": "unauthorized"})
        if self.expired:
            return
        if self.since is None or self.now - self.since >= 3_600_000:
            self.since, self.strikes = self.now, 0
        self.strikes += 1
        self.expired = self.strikes > 3

    @rule()
    def a_call_succeeds(self) -> None:
        self.world.success({"at_ms": self.now})
        if not self.expired:
            self.since, self.strikes = None, 0

    @invariant()
    def the_fourth_strike_parks_the_connection(self) -> None:
        assert (self.world.row().test_status == "expired") is self.expired
        if not self.expired:
            assert self.world.row().soft_strikes == self.strikes


TestRefusalMachine = RefusalMachine.TestCase
TestRefusalMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None)
TestSoftStrikeMachine = SoftStrikeMachine.TestCase
TestSoftStrikeMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=20, deadline=None)
