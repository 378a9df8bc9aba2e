"""Egress lock: trigger, addresses, siblings (spec/egress_lock.md)."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from policy_service.domain import egress
from policy_service.domain.egress import EgressSighting
from tests.vectors.account_world import AccountWorld

DAY = 24 * 3_600_000
PROVIDERS = frozenset({"opencode-go", "opencode-cli"})


def seen(connection: str, address: str, at: int, provider: str = "opencode-go") -> EgressSighting:
    return EgressSighting(provider, connection, address, at)


@pytest.mark.parametrize(
    ("status", "reason", "flags", "triggers"),
    [
        (429, "quota_exhausted", {}, True),
        (429, "rate_limit_exceeded", {}, True),
        (429, "model_capacity", {}, False),
        (403, "quota_exhausted", {}, False),
        (429, "quota_exhausted", {"in_set": False}, False),
        (429, "quota_exhausted", {"permanent": True}, False),
        (429, "quota_exhausted", {"credits_exhausted": True}, False),
        (429, "quota_exhausted", {"disable_cooling": True}, False),
    ],
)
def test_the_trigger_needs_every_condition(status: int, reason: str, flags: dict[str, bool], triggers: bool) -> None:
    given = {"in_set": True, "permanent": False, "credits_exhausted": False, "disable_cooling": False, **flags}
    assert egress.is_trigger(status, reason, **given) is triggers


def test_the_newest_known_address_counts() -> None:
    sightings = [seen("f", "old", 10), seen("f", "new", 20), seen("f", "", 30), seen("g", "other", 40)]
    assert egress.last_address(sightings, "opencode-go", "f", 50) == "new"


def test_an_address_is_known_for_a_day() -> None:
    sightings = [seen("f", "a", 0)]
    assert egress.last_address(sightings, "opencode-go", "f", DAY) == "a"
    assert egress.last_address(sightings, "opencode-go", "f", DAY + 1) == ""


def test_siblings_share_the_address_and_belong_to_the_set() -> None:
    sightings = [
        seen("f", "a", 0),
        seen("s", "a", 0),
        seen("t", "b", 0),
        seen("u", "a", 0, "openai"),
        seen("v", "a", 0, "opencode-cli"),
        seen("w", "a", -1),
    ]
    found = egress.siblings(sightings, "a", PROVIDERS, ("opencode-go", "f"), DAY)
    assert found == (("opencode-cli", "v"), ("opencode-go", "s"))


def test_a_connection_that_stays_on_its_address_is_written_seldom() -> None:
    row = seen("f", "a", 0)
    assert egress.sighted(row, (), egress.REFRESH_MS - 1) is None
    assert egress.sighted(row, (), egress.REFRESH_MS) == seen("f", "a", egress.REFRESH_MS)


def test_a_sighting_is_refreshed_after_ten_minutes() -> None:
    assert egress.sighted(seen("f", "a", 0), (), 599_999) is None
    assert egress.sighted(seen("f", "a", 0), (), 600_000) is not None


def test_a_late_outcome_never_takes_a_sighting_back() -> None:
    assert egress.sighted(seen("f", "a", 9), [seen("f", "b", 10)], 5) == seen("f", "a", 9)


def test_sightings_of_the_same_instant_are_no_move() -> None:
    assert egress.sighted(seen("f", "a", 5), [seen("f", "b", 5)], 6) is None


def test_an_address_never_seen_is_no_newer_than_one_that_was() -> None:
    assert egress.sighted(seen("f", "a", 0), [EgressSighting("opencode-go", "f", "b", None)], 6) is None


def test_an_absent_sighting_is_named_by_its_key_and_written_at_first_sight() -> None:
    absent = EgressSighting.default(seen("f", "a", 0).key)
    assert absent == EgressSighting("opencode-go", "f", "a", None)
    assert egress.is_stale(absent, 0)
    assert absent.is_default
    assert not seen("f", "a", 0).is_default
    assert absent.generation == 1
    assert egress.sighted(seen("f", "a", 1_000_000), (), 1_000_001) is None
    assert egress.sighted(absent, (), 7) == seen("f", "a", 7)
    assert egress.sighted(absent, [EgressSighting("opencode-go", "f", "b", None)], 7) == seen("f", "a", 7)


def test_no_address_is_no_sighting() -> None:
    assert egress.sighted(EgressSighting("opencode-go", "f", "", None), (), 7) is None


def test_addresses_of_others_are_not_taken_for_ones_own() -> None:
    sightings = [seen("f", "a", 10), seen("g", "b", 20), seen("f", "c", 30, "openai")]
    assert egress.last_address(sightings, "opencode-go", "f", 40) == "a"


def test_a_connection_that_returns_to_an_address_is_written_at_once() -> None:
    assert egress.sighted(seen("f", "a", 0), [seen("f", "b", 5)], 6) == seen("f", "a", 6)


def test_without_a_stated_wait_siblings_cool_for_two_minutes() -> None:
    assert egress.duration_of(0) == 120_000
    assert egress.duration_of(5) == 5


def world(**siblings: dict[str, object]) -> AccountWorld:
    at_address = {"provider": "opencode-go", "egress": [{"ip": "192.0.2.1", "at_ms": -5}]}
    return AccountWorld({"connections": {name: {**at_address, **entry} for name, entry in siblings.items()}})


def test_a_longer_timer_of_a_sibling_stays() -> None:
    both = world(F={}, A={"test_status": "unavailable", "rate_limited_until_ms": 90_000})
    both.failure({"connection": "F", "status": 429, "text": "rate limit"})
    assert both.row("A").rate_limited_until == 90_000
    assert both.row("F").rate_limited_until == 3_000


def test_a_longer_stated_wait_while_cooling_reaches_the_siblings_too() -> None:
    both = world(F={}, A={})
    both.failure({"connection": "F", "status": 429, "text": "rate limit"})
    both.failure({"at_ms": 1_000, "connection": "F", "status": 429, "headers": {"Retry-After": "60"}})
    assert both.row("F").rate_limited_until == 61_000
    assert both.row("A").rate_limited_until == 61_000
    assert both.row("F").backoff_level == 1


def test_a_failing_search_for_siblings_is_recorded_and_swallowed() -> None:
    both = world(F={}, A={})
    with patch.object(egress, "siblings", side_effect=LookupError("no table")):
        both.failure({"connection": "F", "status": 429, "text": "rate limit"})
    assert both.row("F").rate_limited_until == 3_000
    assert both.row("A").rate_limited_until is None
    assert [fact.reason for fact in both.facts if fact.mechanism == "egress_lock"] == [
        "sibling_search_failed:LookupError"
    ]


def test_each_sibling_that_cools_has_a_fact_of_its_own() -> None:
    both = world(F={}, A={}, B={})
    both.failure({"connection": "F", "status": 429, "text": "rate limit"})
    facts = [(f.connection, f.deadline_at) for f in both.facts if f.mechanism == "egress_lock"]
    assert facts == [("A", 3_000), ("B", 3_000)]
