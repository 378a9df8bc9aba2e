"""Database time: learnt from samples, never falling, blind to the host's wall clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policy_service.application.clock import DatabaseClock
from policy_service.application.ports import ClockSample


class Monotonic:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.ms = 1_000.0

    def __call__(self) -> float:
        return self.ms


def test_the_middle_of_the_round_trip_is_the_instant_of_the_sample() -> None:
    host = Monotonic()
    clock = DatabaseClock(host)
    clock.learn(ClockSample(50_000, sent_ms=1_000.0, received_ms=1_010.0))
    host.ms = 1_010.0
    assert clock.now() == 50_005


def test_a_shorter_round_trip_replaces_a_longer_one_but_not_the_reverse() -> None:
    host = Monotonic()
    clock = DatabaseClock(host)
    clock.learn(ClockSample(50_000, 1_000.0, 1_002.0))
    clock.learn(ClockSample(99_000, 1_010.0, 1_200.0))
    host.ms = 1_001.0
    assert clock.now() == 50_000
    assert clock.round_trip_ms == 2.0


def test_an_old_sample_gives_way_to_a_fresh_one_with_a_longer_round_trip() -> None:
    host = Monotonic()
    clock = DatabaseClock(host)
    clock.learn(ClockSample(50_000, 1_000.0, 1_002.0))
    clock.learn(ClockSample(200_000, 90_000.0, 90_010.0))
    host.ms = 90_005.0
    assert clock.now() == 200_000


@given(st.lists(st.tuples(st.integers(0, 1_000_000), st.integers(0, 500), st.integers(0, 100_000)), max_size=30))
def test_the_estimate_never_falls_whatever_the_samples_say(samples: list[tuple[int, int, int]]) -> None:
    host = Monotonic()
    clock = DatabaseClock(host)
    last = clock.now()
    for database_ms, round_trip, passed in samples:
        host.ms += passed
        clock.learn(ClockSample(database_ms, host.ms - round_trip, host.ms))
        assert clock.now() >= last
        last = clock.now()
