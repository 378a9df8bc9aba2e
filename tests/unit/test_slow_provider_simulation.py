"""A slow but healthy provider never opens its breaker, and a dead one soon does (spec/fleet.md section 3)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from policy_service.application.events import OutcomeEvent
from policy_service.application.report_plan import fold
from policy_service.domain.breaker import BreakerState, State
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.ids import AuthClass, ConnectionId, Generations, ModelId, ProviderId, Target
from policy_service.domain.outcome import Outcome
from policy_service.domain.policy import Policy
from policy_service.domain.state import StateBook

NOBODY = ConnectionId("")
"""Calls name no connection, so that the burst guard, which counts one failure per connection and 5 s, hides nothing."""


class Call(NamedTuple):
    ended_at: int
    started_at: int
    number: int
    fails: bool


class Traffic:
    """Reports of one provider folded in the order in which the calls end."""

    def __init__(self, first_byte_is_end: bool = True) -> None:
        self.policy = Policy(Catalogue())
        self.book = StateBook()
        self.first_byte_is_end = first_byte_is_end

    def report(self, call: Call) -> None:
        outcome = Outcome(503 if call.fails else 200, provider="acme", auth_class=AuthClass.API_KEY)
        event = OutcomeEvent(
            event_id=f"d{call.number}/0",
            at=call.ended_at,
            target=Target(ProviderId("acme"), NOBODY, ModelId("")),
            outcome=outcome,
            started_at=call.started_at,
            first_byte_at=call.ended_at if self.first_byte_is_end else None,
            generations=Generations(self.breaker.generation),
        )
        fold(self.book, event, self.policy)

    @property
    def breaker(self) -> BreakerState:
        return self.book.get(BreakerState, "acme", "")


def calls(seed: int, seconds: int, per_second: int, error_rate: float) -> Iterator[Call]:
    """Calls by end, latency 2 s plus an exponential part of 3 s on average."""
    source = random.Random(seed)
    made = []
    for number in range(seconds * per_second):
        started_at = number * 1_000 // per_second
        ended_at = started_at + 2_000 + round(source.expovariate(1 / 3_000))
        made.append(Call(ended_at, started_at, number, source.random() < error_rate))
    return iter(sorted(made))


def opened_at(traffic: Traffic, made: Iterator[Call]) -> int | None:
    """Instant at which the breaker opens; None if it never does."""
    for call in made:
        traffic.report(call)
        if traffic.breaker.state is State.OPEN:
            return call.ended_at
    return None


def test_slow_provider_with_one_percent_errors_never_opens() -> None:
    assert opened_at(Traffic(), calls(7, seconds=600, per_second=100, error_rate=0.01)) is None


def test_judging_successes_by_their_start_would_open_it() -> None:
    """The simulation can tell: with the start-time rule alone the same traffic opens the breaker."""
    traffic = Traffic(first_byte_is_end=False)
    assert opened_at(traffic, calls(7, seconds=600, per_second=100, error_rate=0.01)) is not None


def test_full_outage_opens_within_five_seconds_at_fifty_calls_a_second() -> None:
    traffic = Traffic()
    for call in calls(7, seconds=60, per_second=50, error_rate=0.0):
        if call.ended_at < 60_000:
            traffic.report(call)
    refused = (Call(60_000 + n * 20, 60_000 + n * 20, 100_000 + n, fails=True) for n in range(500))
    opened = opened_at(traffic, refused)
    assert opened is not None
    assert opened <= 65_000
