"""Text keys of breakers (spec/breaker.md section 12): whatever a provider and a connection are called."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_service.domain.breaker import breaker_name, split_name
from tests.vectors.world_events import Player

PARTS = st.lists(st.sampled_from([":", "::", "conn", "::conn::", "a", "%", "ü/ "])).map("".join)


@pytest.mark.parametrize("connection", ["", "c1", "c::conn::1", ":"])
@pytest.mark.parametrize(
    "provider", ["openai", "a::conn::b", "a::conn::conn::b", "x:::conn:::y", "a::b", "::conn", "a::conn:"]
)
def test_a_name_gives_back_what_it_was_made_of(provider: str, connection: str) -> None:
    assert split_name(breaker_name(provider, connection)) == (provider, connection)


@settings(max_examples=1_000, deadline=None)
@given(PARTS, PARTS)
def test_the_mark_of_a_connection_never_comes_from_the_providers_own_name(provider: str, connection: str) -> None:
    assert split_name(breaker_name(provider, connection)) == (provider, connection)


def test_the_breaker_of_a_provider_that_is_called_like_a_connections_key_closes_again() -> None:
    """Its probe was taken for one of another breaker: the permit was never settled and the breaker never closed."""
    given = {"auth_class": "api_key", "provider": "a::conn::b", "state": {"state": "HALF_OPEN", "failure_count": 12}}
    steps = [
        {"at_ms": 0, "event": "admit", "as": "p", "expect": {"granted": True, "probe": True}},
        {"at_ms": 5, "event": "outcome", "of": "p", "status": 200, "expect": {"verdict": "alive"}},
    ]
    Player(given).play({"steps": steps, "expect": {"state": "CLOSED"}})
