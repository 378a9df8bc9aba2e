"""Session keys, pins and route stickiness (spec/affinity.md), beyond the vectors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_service.domain.affinity import (
    Affinity,
    OnIneligible,
    PinEvent,
    PinQuery,
    PinRow,
    PinWrite,
    PoolMember,
    Standing,
    choose,
    choose_forced,
    is_evicted,
    join,
    least_recently_used,
    live_pins,
    refreshed,
    resolve_ttl,
    spread,
    standing,
)
from policy_service.domain.session_key import MAX_LENGTH, SessionSources, first_user_text, normalized, session_key
from policy_service.domain.stickiness import (
    TTL_MS,
    StickyStanding,
    StickyTargets,
    is_enabled,
    sticky_key,
)

QUERY = PinQuery("u1", "p", "hash", 1_000)


def _pin(connection: str = "c1", **fields: Any) -> PinRow:
    known: dict[str, Any] = {"created_at": 0, "last_used_at": 0, "expires_at": 1_000, "version": 4}
    return PinRow("u1", "p", "hash", connection, **(known | fields))


# --- keys ---


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]}, "hi"),
        ({"input": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]}, "hi"),
        ({"input": {"text": "hi"}}, "hi"),
        ({"input": [], "messages": [], "query": " hi "}, "hi"),
        (
            {"contents": [{"role": "model", "parts": [{"text": "x"}]}, {"role": "user", "parts": [{"text": "hi"}]}]},
            "hi",
        ),
        ({"instruction": "hi"}, "hi"),
        ({"prompt": {"nested": "hi"}}, ""),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ""),
        ({"messages": "not a list of messages"}, "not a list of messages"),
        ({"prompt": 7}, ""),
        ({}, ""),
    ],
)
def test_the_first_user_text_is_found_where_each_dialect_keeps_it(body: dict[str, object], text: str) -> None:
    assert first_user_text(body) == text


def test_text_is_trimmed_before_it_is_cut() -> None:
    assert first_user_text({"prompt": " " * 100 + "a" * MAX_LENGTH}) == "a" * MAX_LENGTH


@pytest.mark.parametrize("raw", [None, 7, "", "   ", "a" * (MAX_LENGTH + 1), ["a"], {"id": "a"}])
def test_what_is_no_short_string_is_no_id(raw: object) -> None:
    assert normalized("header", raw) is None


def test_an_id_of_the_body_that_is_none_falls_through_to_the_next() -> None:
    body = {"metadata": "none", "conversation_id": 7, "session_id": "  ", "prompt_cache_key": "k"}
    assert session_key(SessionSources({}, body)) == "prompt-cache:k"


def test_letters_of_other_alphabets_are_hashed() -> None:
    assert (normalized("session", "é") or "").startswith("session:sha256:")


@given(st.text(max_size=200))
def test_a_key_never_holds_a_character_that_it_should_not(raw: str) -> None:
    key = normalized("header", raw)
    assert key is None or all(char.isascii() and (char.isalnum() or char in "._:-") for char in key)


def test_a_lone_surrogate_does_not_break_the_key() -> None:
    assert session_key(SessionSources({}, {"prompt": "\ud800"})) is not None


# --- pins ---


@pytest.mark.parametrize(
    ("override", "generic", "legacy", "ttl"),
    [(None, 0, 7_000, 0), (-1, None, None, 0), (10**12, None, None, 2_592_000_000), (None, 5, 9, 5)],
)
def test_the_ttl_is_the_first_that_applies(override: int | None, generic: int | None, legacy: int, ttl: int) -> None:
    assert resolve_ttl(override, generic, legacy) == ttl


def test_a_move_is_conditional_on_the_row_that_was_seen() -> None:
    found = choose(QUERY, _pin(), Standing.PERMANENT, [PoolMember("c2")], 10)
    assert (found.affinity, found.write) == (Affinity.MOVED, PinWrite.MOVE)
    assert found.row is not None
    assert (found.row.connection_id, found.row.version) == ("c2", 4)


def test_an_expired_pin_is_replaced_by_an_insert() -> None:
    found = choose(QUERY, _pin(), Standing.ELIGIBLE, [PoolMember("c2")], 1_000)
    assert (found.affinity, found.write) == (Affinity.CREATED, PinWrite.INSERT)


def test_a_hit_counts_one_more_in_a_row_and_writes_nothing() -> None:
    found = choose(QUERY, _pin(), Standing.ELIGIBLE, [PoolMember("c1", consecutive=3)], 10)
    assert (found.affinity, found.connection, found.write, found.consecutive) == (Affinity.HIT, "c1", None, 4)


@pytest.mark.parametrize(
    ("query", "pool"),
    [(PinQuery("u1", "p", "", 1_000), [PoolMember("c1")]), (QUERY, []), (PinQuery("", "p", "h", 0), [PoolMember("c")])],
)
def test_without_a_key_a_pool_or_a_ttl_the_strategy_decides(query: PinQuery, pool: list[PoolMember]) -> None:
    found = choose(query, _pin(), Standing.ELIGIBLE, pool, 10)
    assert (found.affinity, found.connection, found.write) == (Affinity.NONE, None, None)


def test_the_loser_of_a_race_detours_if_the_winner_is_not_eligible_for_it() -> None:
    assert join(_pin("c1"), [PoolMember("c1")]).affinity is Affinity.JOINED
    lost = join(_pin("c1"), [PoolMember("c2")])
    assert (lost.affinity, lost.connection, lost.write) == (Affinity.DETOUR, None, None)


def test_a_forced_connection_without_a_pin_is_pinned() -> None:
    found = choose_forced(QUERY, None, "c2", [PoolMember("c1"), PoolMember("c2")], 10, managed=False)
    assert (found.affinity, found.connection, found.write) == (Affinity.CREATED, "c2", PinWrite.INSERT)


def test_a_forced_connection_without_a_ttl_is_just_used() -> None:
    query = PinQuery("u1", "p", "hash", 0)
    found = choose_forced(query, _pin("c1"), "c2", [PoolMember("c1"), PoolMember("c2")], 10, managed=False)
    assert (found.affinity, found.connection, found.write) == (Affinity.NONE, "c2", None)


def test_missing_and_zero_priority_come_last() -> None:
    pool = [PoolMember("a", 0), PoolMember("b", None), PoolMember("c", 998)]
    assert least_recently_used(pool).connection == "c"


def test_equal_members_are_ordered_by_priority_then_id() -> None:
    pool = [PoolMember("b", 1, 5, 1), PoolMember("a", 2, 5, 1), PoolMember("c", 1, 5, 1)]
    assert least_recently_used(pool).connection == "b"


@pytest.mark.parametrize(
    ("sibling", "moves"),
    [
        (PoolMember("s", 2, max_sessions=5, live_pins=0), True),
        (PoolMember("s", 3, max_sessions=5, live_pins=0), False),
        (PoolMember("s", 1, max_sessions=5, live_pins=4), False),
        (PoolMember("s", 1, max_sessions=None), False),
    ],
)
def test_the_spread_moves_to_a_sibling_of_like_priority_with_more_room(sibling: PoolMember, moves: bool) -> None:
    pick = PoolMember("pick", 1, max_sessions=2, live_pins=1)
    assert (spread(pick, [pick, sibling]).connection == "s") is moves


def test_the_spread_stays_where_a_sibling_has_only_as_much_room() -> None:
    pick = PoolMember("pick", 1, max_sessions=2, live_pins=1)
    assert spread(pick, [pick, PoolMember("a", 1, max_sessions=1)]) is pick


def test_a_connection_without_declared_sessions_takes_no_part_in_the_spread() -> None:
    pick = PoolMember("pick", 1)
    assert spread(pick, [pick, PoolMember("s", 1, max_sessions=9)]) is pick


def test_live_pins_are_counted_by_connection() -> None:
    assert live_pins([_pin("c1"), _pin("c1"), _pin("c2", expires_at=5)], 10) == {"c1": 2}


def test_a_refresh_never_shortens_a_pin() -> None:
    pin = refreshed(_pin(expires_at=90_000), "c1", 20_000, 10_000)
    assert pin is not None
    assert (pin.expires_at, pin.created_at, pin.last_used_at) == (90_000, 0, 20_000)


@pytest.mark.parametrize(("connection", "now"), [("c2", 500), ("c1", 1_000)])
def test_only_a_live_pin_of_that_connection_is_refreshed(connection: str, now: int) -> None:
    assert refreshed(_pin(), connection, now, 1_000) is None


@pytest.mark.parametrize(
    ("event", "after", "mode", "evicted"),
    [
        (PinEvent.FAILURE, Standing.TEMPORARY, OnIneligible.DETOUR, False),
        (PinEvent.FAILURE, Standing.TEMPORARY, OnIneligible.REPIN, True),
        (PinEvent.FAILURE, Standing.PERMANENT, OnIneligible.DETOUR, True),
        (PinEvent.FAILURE, Standing.ELIGIBLE, OnIneligible.DETOUR, True),
        (PinEvent.ROUTE_TIMEOUT, Standing.ELIGIBLE, OnIneligible.DETOUR, True),
        (PinEvent.HEDGE_CANCELLED, Standing.PERMANENT, OnIneligible.REPIN, False),
    ],
)
def test_what_evicts_a_pin_whatever_is_left_of_its_ttl(
    event: PinEvent, after: Standing, mode: OnIneligible, evicted: bool
) -> None:
    assert is_evicted(event, _pin(expires_at=0), "c1", after, mode) is evicted
    assert not is_evicted(event, _pin(expires_at=0), "c2", after, mode)


@pytest.mark.parametrize(
    ("mechanism", "reason", "expected"),
    [
        ("", "", Standing.ELIGIBLE),
        ("terminal_state", "banned", Standing.PERMANENT),
        ("lease", "lease_hidden", Standing.PERMANENT),
        ("lease", "lease_held", Standing.TEMPORARY),
        ("availability", "disabled", Standing.PERMANENT),
        ("concurrency", "concurrency_cap", Standing.TEMPORARY),
    ],
)
def test_an_exclusion_is_temporary_or_permanent(mechanism: str, reason: str, expected: Standing) -> None:
    assert standing(mechanism, reason) is expected


# --- route stickiness ---


def test_a_conversation_sticks_for_fifteen_minutes_from_its_last_success() -> None:
    targets, key = StickyTargets(), sticky_key("u1", "r", "hi")
    targets.record(key, "t1", 0)
    assert targets.get(key, TTL_MS - 1) == "t1"
    assert targets.get(key, TTL_MS) is None
    assert len(targets) == 0


def test_the_entry_used_longest_ago_goes_first() -> None:
    targets = StickyTargets(capacity=2)
    keys = [sticky_key("u1", "r", text) for text in ("a", "b", "c")]
    targets.record(keys[0], "t", 0)
    targets.record(keys[1], "t", 0)
    targets.get(keys[0], 1)
    targets.record(keys[2], "t", 2)
    assert [targets.get(key, 3) for key in keys] == ["t", None, "t"]


def test_a_failure_clears_only_the_target_that_is_named() -> None:
    targets, key = StickyTargets(), sticky_key("u1", "r", "hi")
    targets.record(key, "t1", 0)
    targets.failed(key, "t2")
    assert targets.get(key, 1) == "t1"
    targets.failed(key, "t1")
    assert targets.get(key, 1) is None


def test_without_text_or_a_required_caller_nothing_sticks() -> None:
    assert sticky_key("u1", "r", "") is None
    assert sticky_key("", "r", "hi", require_caller=True) is None
    key = sticky_key("", "r", "hi")
    assert key is not None
    assert len(key[2]) == 16
    targets = StickyTargets()
    targets.record(None, "t", 0)
    assert targets.get(None, 0) is None


@pytest.mark.parametrize(
    ("found", "reusable"),
    [
        (StickyStanding(), True),
        (StickyStanding(five_hour=0.84, weekly=0.2), True),
        (StickyStanding(five_hour=0.2, weekly=0.85), False),
        (StickyStanding(is_cooling=True), False),
        (StickyStanding(is_terminal=True), False),
        (StickyStanding(is_quota_exhausted=True), False),
    ],
)
def test_a_sticky_target_is_reused_while_healthy_with_headroom(found: StickyStanding, reusable: bool) -> None:
    assert found.is_reusable is reusable


@pytest.mark.parametrize(("route", "setting", "on"), [(None, False, True), (None, True, False), (False, True, True)])
def test_the_route_decides_before_the_setting(route: bool | None, setting: bool, on: bool) -> None:
    assert is_enabled(route, setting) is on
