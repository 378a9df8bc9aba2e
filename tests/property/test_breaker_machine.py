"""The breaker against an independent model: mutable, written from the state table, sharing no code with the domain."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policy_service.domain import breaker
from policy_service.domain.breaker import BreakerState, Effect, State
from policy_service.domain.breaker_controls import clear_override, disable, force_open, reset
from policy_service.domain.breaker_probe import (
    Acquired,
    Evidence,
    HeldPermit,
    ProbeAnswer,
    ProbeRequest,
    acquire,
    judge,
    release_permit,
    renew_permit,
)
from policy_service.domain.breaker_transitions import CountedFailure, count_failure, count_success
from policy_service.domain.facts import Cause, FactLog
from policy_service.domain.profiles import BreakerProfile

EXAMPLES = int(os.environ.get("POLICY_HYPOTHESIS_EXAMPLES", "200"))
RESET_MS = 1_000
LOST_REMEMBERED = 64
"""Reclaimed permits of one round that still have a say."""


@dataclass
class Slot:
    expires: int
    lost: bool = False


@dataclass
class Model:
    """What the specification says, as a mutable table."""

    threshold: int
    degraded_at: int
    probes: int
    to_close: int
    consecutive: bool
    state: str = "CLOSED"
    control: str = ""
    generation: int = 1
    count: int = 0
    last_failure: int | None = None
    cycles: int = 0
    reopen: int = 0
    alive: int = 0
    slots: dict[str, Slot] = field(default_factory=dict)
    transitions: int = 0

    def pass_time(self, now: int) -> None:
        if not self.control and self.state == "OPEN" and now >= self.reopen:
            self.go("HALF_OPEN")

    def go(self, state: str) -> None:
        self.transitions += 1
        self.state = state
        self.generation += 1
        self.slots.clear()
        self.alive = 0

    def open(self, now: int) -> None:
        excess = self.cycles - 2
        factor = 1 if excess <= 0 else min(2**excess, 4)
        self.go("OPEN")
        self.reopen = now + RESET_MS * factor

    def failure(self, now: int) -> None:
        self.pass_time(now)
        if self.control or self.state in ("OPEN", "HALF_OPEN"):
            return
        self.count += 1
        self.last_failure = now
        if self.count >= self.threshold:
            self.open(now)
        elif self.state == "CLOSED" and self.count >= self.degraded_at:
            self.state = "DEGRADED"
            self.transitions += 1

    def success(self, now: int, first_byte: int) -> None:
        self.pass_time(now)
        if self.control or self.state in ("OPEN", "HALF_OPEN"):
            return
        if self.last_failure is not None and first_byte < self.last_failure:
            return
        self.count = 0 if self.consecutive else max(0, self.count - 1)
        if self.state == "DEGRADED" and self.count <= self.degraded_at:
            self.state = "CLOSED"
            self.transitions += 1

    def held(self, now: int) -> int:
        return sum(1 for slot in self.slots.values() if not slot.lost and now < slot.expires)

    def take(self, permit: str, now: int) -> str:
        self.pass_time(now)
        if self.control:
            return "no" if self.control == "force_open" else "free"
        if self.state != "HALF_OPEN":
            return "no" if self.state == "OPEN" else "free"
        if self.held(now) >= self.probes:
            return "no"
        for slot in self.slots.values():
            if not slot.lost and now >= slot.expires:
                slot.lost = True
                self.generation += 1
        self.slots[permit] = Slot(now + RESET_MS)
        lost = [name for name, slot in self.slots.items() if slot.lost]
        for name in lost[:-LOST_REMEMBERED]:
            del self.slots[name]
        return "permit"

    def verdict(self, permit: str, verdict: str, now: int) -> bool:
        self.pass_time(now)
        slot = self.slots.get(permit)
        if self.control or slot is None or (slot.lost and verdict != "alive"):
            return False
        del self.slots[permit]
        if verdict == "down":
            self.count += 1
            self.last_failure = now
            self.cycles += 1
            self.open(now)
        if verdict == "alive":
            self.alive += 1
            if self.alive >= self.to_close:
                self.count = self.cycles = 0
                self.go("CLOSED")
        return True

    def set_control(self, control: str, now: int) -> None:
        if control != self.control:
            self.control = control
            self.generation += 1
            self.slots.clear()
            self.transitions += 1
        self.pass_time(now)

    def reset(self) -> None:
        self.control = ""
        self.go("CLOSED")
        self.count = self.cycles = 0
        self.last_failure = None


STATUS_OF = {"alive": 200, "down": 503, "inconclusive": 520}


class BreakerMachine(RuleBasedStateMachine):
    """Random calls, probes, controls and waits; after each step state and model agree."""

    @initialize(
        threshold=st.integers(1, 6),
        degraded=st.integers(1, 5),
        probes=st.integers(1, 3),
        to_close=st.integers(1, 3),
        consecutive=st.booleans(),
        starts_half_open=st.booleans(),
    )
    def begin(
        self, threshold: int, degraded: int, probes: int, to_close: int, consecutive: bool, starts_half_open: bool
    ) -> None:
        degraded = max(1, min(degraded, threshold - 1))
        self.profile = BreakerProfile(
            failure_threshold=threshold,
            degradation_threshold=degraded,
            reset_timeout_ms=RESET_MS,
            max_backoff_multiplier=4,
            backoff_escalation_cycles=2,
            half_open_probes=probes,
            successes_to_close=to_close,
            count_mode="consecutive" if consecutive else "net",
        )
        self.model = Model(threshold, degraded, probes, to_close, consecutive)
        self.state = BreakerState("acme")
        if starts_half_open:
            self.state = BreakerState("acme", state=State.HALF_OPEN, failure_count=threshold)
            self.model.state, self.model.count = "HALF_OPEN", threshold
        self.now = 0
        self.permits: list[str] = []
        self.settled: list[tuple[str, str]] = []
        self.facts = 0

    def log(self) -> FactLog:
        self.pending = FactLog(Cause("e", self.now))
        return self.pending

    def count_facts(self) -> None:
        self.facts += len(self.pending.facts)

    def move(self, state: BreakerState) -> None:
        running = self.state.state is State.OPEN and state.state is State.OPEN
        if running:
            assert state.reopen_at is not None
            assert self.state.reopen_at is not None
            assert state.reopen_at >= self.state.reopen_at
        assert state.generation >= self.state.generation
        self.state = state
        self.count_facts()

    # -- rules ---------------------------------------------------------------------------------------
    @rule(ms=st.sampled_from([0, 1, 10, 500, RESET_MS - 1, RESET_MS, 2 * RESET_MS, 4 * RESET_MS]))
    def wait(self, ms: int) -> None:
        self.now += ms

    @rule(count=st.integers(1, 4))
    def fail(self, count: int) -> None:
        for _ in range(count):
            self.move(count_failure(self.state, CountedFailure(self.now), self.profile, self.log())[0])
            self.model.failure(self.now)

    @rule(age=st.sampled_from([0, 1, 600]))
    def succeed(self, age: int) -> None:
        self.move(count_success(self.state, self.now, self.now - age, self.profile, self.log())[0])
        self.model.success(self.now, self.now - age)

    @rule()
    def take(self) -> None:
        permit = f"p{len(self.permits)}"
        state, result = acquire(self.state, self.now, self.profile, ProbeRequest(permit), self.log())
        self.move(state)
        expected = self.model.take(permit, self.now)
        assert expected == _kind(result)
        if expected == "permit":
            self.permits.append(permit)
        else:
            self.permits.append(f"never-{permit}")

    @precondition(lambda self: self.permits)
    @rule(data=st.data(), verdict=st.sampled_from(sorted(STATUS_OF)))
    def answer(self, data: st.DataObject, verdict: str) -> None:
        permit = data.draw(st.sampled_from(self.permits))
        effect = self.report(permit, verdict)
        assert (effect is Effect.COUNTED) == self.model.verdict(permit, verdict, self.now)
        self.settled.append((permit, verdict))

    @precondition(lambda self: any(slot.lost for slot in self.model.slots.values()))
    @rule(data=st.data(), verdict=st.sampled_from(sorted(STATUS_OF)))
    def answer_after_the_slot_was_reclaimed(self, data: st.DataObject, verdict: str) -> None:
        permit = data.draw(st.sampled_from(sorted(k for k, slot in self.model.slots.items() if slot.lost)))
        effect = self.report(permit, verdict)
        assert (effect is Effect.COUNTED) == (verdict == "alive")
        assert self.model.verdict(permit, verdict, self.now) == (verdict == "alive")

    @rule()
    def lose_every_probe(self) -> None:
        """All slots are taken, nobody reports, and the next acquire finds them expired."""
        for _ in range(self.profile.half_open_probes):
            self.take()
        self.now += RESET_MS
        self.take()

    @precondition(lambda self: self.settled)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        """A verdict given before has no say any more, except that of a reclaimed permit that was not heard."""
        permit, verdict = data.draw(st.sampled_from(self.settled))
        counted = self.model.verdict(permit, verdict, self.now)
        held = {p.id for p in self.state.permits}
        effect = self.report(permit, verdict)
        assert permit in held or effect is not Effect.COUNTED
        assert (effect is Effect.COUNTED) == counted

    @precondition(lambda self: self.permits)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        permit = data.draw(st.sampled_from(self.permits))
        self.log()
        self.move(release_permit(self.state, permit))
        slot = self.model.slots.get(permit)
        if slot is not None and not slot.lost:
            del self.model.slots[permit]

    @precondition(lambda self: self.permits)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        permit = data.draw(st.sampled_from(self.permits))
        self.log()
        state, renewed = renew_permit(self.state, permit, self.now, self.profile)
        self.move(state)
        slot = self.model.slots.get(permit)
        assert (renewed is not None) == (slot is not None and not slot.lost)
        if slot is not None and not slot.lost:
            slot.expires = max(slot.expires, self.now + RESET_MS)

    @rule(control=st.sampled_from(["force_open", "disabled", "", "", "", ""]))
    def control(self, control: str) -> None:
        act = {"force_open": force_open, "disabled": disable, "": clear_override}[control]
        self.move(act(self.state, self.now, self.log()))
        self.model.set_control(control, self.now)

    @precondition(lambda self: self.model.control or self.model.count > 2)
    @rule()
    def reset(self) -> None:
        self.move(reset(self.state, self.now, self.log()))
        self.model.reset()

    def report(self, permit: str, verdict: str) -> Effect:
        answer = ProbeAnswer(STATUS_OF[verdict], "", False, self.now)
        held = HeldPermit(permit, self.state.generation)
        state, _, effect = judge(self.state, held, answer, Evidence(self.now), self.profile, self.log())
        self.move(state)
        return effect

    # -- invariants ----------------------------------------------------------------------------------
    @invariant()
    def agrees_with_the_model(self) -> None:
        seen = self.state
        expected: dict[str, Any] = {
            "state": self.model.state,
            "generation": self.model.generation,
            "failure_count": self.model.count,
            "open_cycle_count": self.model.cycles,
            "half_open_alive": self.model.alive,
            "last_failure_at": self.model.last_failure,
        }
        assert {name: getattr(seen, name) for name in expected} == expected
        assert {p.id: p.reclaimed for p in seen.permits} == {k: s.lost for k, s in self.model.slots.items()}

    @invariant()
    def never_more_probes_than_allowed(self) -> None:
        assert len(breaker.live_permits(self.state, self.now)) <= self.profile.half_open_probes

    @invariant()
    def permits_exist_in_half_open_only(self) -> None:
        assert not self.state.permits or self.state.state is State.HALF_OPEN

    @invariant()
    def every_transition_is_one_fact(self) -> None:
        assert self.facts == self.model.transitions

    @invariant()
    def stale_evidence_is_recognised(self) -> None:
        older = self.state.generation - 1
        assert breaker.generation_effect(self.state, older, self.now) is Effect.STALE_GENERATION

    @invariant()
    def reading_promises_what_acquiring_keeps(self) -> None:
        promised = breaker.admits(self.state, self.now, self.profile)
        _, result = acquire(self.state, self.now, self.profile, ProbeRequest("reader"), FactLog(Cause("r", self.now)))
        assert promised == isinstance(result, Acquired)
        wait = breaker.retry_after_ms(self.state, self.now, self.profile)
        assert wait is None or wait > 0


def _kind(result: object) -> str:
    if not isinstance(result, Acquired):
        return "no"
    return "permit" if result.permit else "free"


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
