"""Whole decisions about session pins, and the edges of their order and times (spec/affinity.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policy_service.domain.affinity import (
    Affinity,
    OnIneligible,
    PinDecision,
    PinQuery,
    PinRow,
    PinWrite,
    PoolMember,
    Standing,
    choose,
    choose_forced,
    join,
    least_recently_used,
    refresh_interval,
    refreshed,
    spread,
)
from policy_service.domain.lease_context import is_json
from policy_service.domain.session_key import first_user_text

QUERY = PinQuery("u1", "p", "hash", 1_000)
PIN = PinRow("u1", "p", "hash", "c1", created_at=0, last_used_at=0, expires_at=1_000, version=4)
POOL = [PoolMember("c1", consecutive=3), PoolMember("c2", last_used_at=5)]


def test_every_decision_is_whole() -> None:
    anew = PinRow("u1", "p", "hash", "c1", created_at=10, last_used_at=10, expires_at=1_010, version=0)
    assert choose(QUERY, None, Standing.ELIGIBLE, POOL, 10) == PinDecision(
        Affinity.CREATED, "c1", PinWrite.INSERT, anew, consecutive=1
    )
    assert choose(QUERY, PIN, Standing.ELIGIBLE, POOL, 999) == PinDecision(Affinity.HIT, "c1", row=PIN, consecutive=4)
    assert choose(QUERY, PIN, Standing.ELIGIBLE, POOL, 1_000).affinity is Affinity.CREATED
    elsewhere = replace(PIN, connection_id="c9")
    moved = replace(anew, version=4)
    assert choose(QUERY, elsewhere, Standing.PERMANENT, POOL, 10) == PinDecision(
        Affinity.MOVED, "c1", PinWrite.MOVE, moved, consecutive=1
    )
    assert choose(QUERY, elsewhere, Standing.TEMPORARY, POOL, 10) == PinDecision(Affinity.DETOUR, row=elsewhere)
    repin = replace(QUERY, on_ineligible=OnIneligible.REPIN)
    assert choose(repin, elsewhere, Standing.TEMPORARY, POOL, 10).affinity is Affinity.MOVED
    assert join(PIN, POOL) == PinDecision(Affinity.JOINED, "c1", row=PIN, consecutive=4)
    assert join(elsewhere, POOL) == PinDecision(Affinity.DETOUR, row=elsewhere)


def test_pins_need_a_session_a_time_and_where_it_is_asked_for_a_caller() -> None:
    nameless = replace(QUERY, api_key_id="", require_caller=True)
    assert choose(nameless, None, Standing.ELIGIBLE, POOL, 0) == PinDecision(Affinity.NO_CALLER)
    assert choose(replace(nameless, require_caller=False), None, Standing.ELIGIBLE, POOL, 0).connection == "c1"
    assert choose(replace(QUERY, ttl_ms=1), None, Standing.ELIGIBLE, POOL, 0).affinity is Affinity.CREATED
    assert choose(replace(QUERY, ttl_ms=0), None, Standing.ELIGIBLE, POOL, 0) == PinDecision(Affinity.NONE)


def test_a_live_pin_to_another_eligible_connection_beats_a_forced_one() -> None:
    assert choose_forced(QUERY, PIN, "c2", POOL, 10, managed=False).connection == "c1"
    assert choose_forced(QUERY, PIN, "c2", POOL, 10, managed=True) == PinDecision(Affinity.NONE, "c2")
    elsewhere = replace(PIN, connection_id="c9")
    assert choose_forced(QUERY, elsewhere, "c2", POOL, 10, managed=False) == PinDecision(
        Affinity.DETOUR, "c2", row=elsewhere
    )
    over = choose_forced(QUERY, PIN, "c2", POOL, 1_000, managed=False)
    assert (over.affinity, over.connection) == (Affinity.CREATED, "c2")


def test_the_order_of_use() -> None:
    order = [
        PoolMember("a", 1), PoolMember("b", 2), PoolMember("c", 9, 4, 9), PoolMember("d", 9, 5, 1),
        PoolMember("e", 1, 5, 2), PoolMember("f", 2, 5, 2), PoolMember("g", 2, 5, 2),
    ]  # fmt: skip
    left = list(reversed(order))
    picked = []
    while left:
        picked.append(least_recently_used(left))
        left.remove(picked[-1])
    assert picked == order


def test_the_spread_prefers_the_most_room_then_the_order_of_use() -> None:
    pick = PoolMember("pick", 1, max_sessions=2, live_pins=1)
    roomy = PoolMember("z", 2, 7, 0, max_sessions=5, live_pins=1)
    equal = PoolMember("y", 2, 6, 0, max_sessions=4, live_pins=0)
    assert spread(pick, [pick, roomy, equal]) is equal
    assert spread(pick, [pick, replace(roomy, live_pins=0), equal]).connection == "z"
    assert spread(pick, [pick, replace(equal, live_pins=3)]) is pick


@pytest.mark.parametrize(("ttl", "interval"), [(100, 1), (101, 2), (1_499_900, 14_999), (1_500_000, 15_000),
    (9_999_999, 15_000)])  # fmt: skip
def test_a_pin_is_refreshed_no_more_often_than_its_interval(ttl: int, interval: int) -> None:
    assert refresh_interval(ttl) == interval
    pin = replace(PIN, expires_at=10**9)
    assert refreshed(pin, "c1", interval - 1, ttl) is None
    assert refreshed(pin, "c1", interval, ttl) == replace(pin, last_used_at=interval)
    assert refreshed(pin, "c1", interval, 0) is None
    assert refreshed(PIN, "c1", 999, 1_000) == replace(PIN, last_used_at=999, expires_at=1_999)


def test_objects_are_read_four_levels_deep_and_no_deeper() -> None:
    text: object = "hi"
    for _ in range(4):
        text = {"text": text}
    assert first_user_text({"prompt": text}) == "hi"
    assert first_user_text({"prompt": {"text": text}}) == ""


@pytest.mark.parametrize(
    ("content_type", "json"),
    [("application/json", True), (" Application/JSON ;charset=utf-8;x=y", True), ("text/json", False), (None, False),
    ("", False)],
)  # fmt: skip
def test_json_is_known_by_its_type_alone(content_type: str | None, json: bool) -> None:
    assert is_json(content_type) is json
