"""Pins to the last field: defaults, order of picks, spread, refresh, eviction; keys of sessions (spec/affinity.md)."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import pytest

from policy_service.domain.affinity import (
    REFRESH_MS,
    TTL_MAX_MS,
    Affinity,
    OnIneligible,
    PinDecision,
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
    refresh_interval,
    refreshed,
    resolve_ttl,
    spread,
    standing,
)
from policy_service.domain.session_key import SessionSources, first_user_text, normalized, session_hash, session_key

NOW = 1_000_000
QUERY = PinQuery("u", "p", "h", 60_000)
PIN = PinRow("u", "p", "h", "c1", NOW - 900, NOW - 800, NOW + 500, 3)
FRESH = PinRow("u", "p", "h", "c1", NOW, NOW, NOW + 60_000, 0)
POOL = (PoolMember("c1", consecutive=4), PoolMember("c2"))


def test_values_claim_nothing_that_nobody_said() -> None:
    assert (TTL_MAX_MS, REFRESH_MS) == (2_592_000_000, 15_000)
    assert PoolMember("c") == PoolMember("c", None, None, 0, None, 0)
    assert PinQuery("u", "p", "h", 1) == PinQuery("u", "p", "h", 1, OnIneligible.DETOUR, False)
    assert PinDecision(Affinity.NONE) == PinDecision(Affinity.NONE, None, None, None, None)
    assert PinRow("u", "p", "h", "c", 1, 2, 3).version == 0


@pytest.mark.parametrize(("priority", "rank"), [(None, 999), (0, 999), (1, 1), (998, 998), (1_000, 1_000)])
def test_a_missing_priority_comes_last(priority: int | None, rank: int) -> None:
    assert PoolMember("c", priority).rank == rank


@pytest.mark.parametrize(("most", "live", "free"), [(None, 0, 0), (None, 3, 0), (5, 0, 5), (5, 3, 2), (2, 3, -1)])
def test_free_sessions_are_declared_ones_without_live_pins(most: int | None, live: int, free: int) -> None:
    assert PoolMember("c", max_sessions=most, live_pins=live).free_sessions == free


@pytest.mark.parametrize(
    ("override", "generic", "legacy", "ttl"),
    [
        (1, 5, 9, 1), (0, 5, 9, 5), (None, None, 9, 9), (None, None, None, 0), (None, -5, 9, 0), (None, 0, 9, 0),
        (None, 2_592_000_001, None, 2_592_000_000), (2_592_000_000, 1, 1, 2_592_000_000),
        (2_592_000_001, 1, 1, 2_592_000_000), (None, None, -1, 0), (None, 1, None, 1),
    ],
)  # fmt: skip
def test_a_ttl_by_its_first_source_within_its_bounds(
    override: int | None, generic: int | None, legacy: int | None, ttl: int
) -> None:
    assert resolve_ttl(override, generic, legacy) == ttl


@pytest.mark.parametrize(
    ("mechanism", "reason", "stands"),
    [
        ("", "", Standing.ELIGIBLE), ("terminal_state", "banned", Standing.PERMANENT),
        ("terminal_state", "", Standing.PERMANENT), ("availability", "disabled", Standing.PERMANENT),
        ("availability", "unknown_target", Standing.PERMANENT), ("availability", "other", Standing.TEMPORARY),
        ("lease", "lease_hidden", Standing.PERMANENT), ("lease", "lease_not_allowed", Standing.PERMANENT),
        ("lease", "other", Standing.TEMPORARY), ("breaker", "open", Standing.TEMPORARY),
        ("breaker", "", Standing.TEMPORARY),
    ],
)  # fmt: skip
def test_how_long_an_exclusion_lasts(mechanism: str, reason: str, stands: Standing) -> None:
    assert standing(mechanism, reason) is stands


@pytest.mark.parametrize(
    ("pin", "live"),
    [(PIN, True), (replace(PIN, expires_at=NOW), False), (replace(PIN, expires_at=NOW + 1), True),
     (replace(PIN, connection_id=""), False)],
)  # fmt: skip
def test_a_pin_lives_until_its_end(pin: PinRow, live: bool) -> None:
    assert pin.is_live(NOW) is live
    expected = Affinity.HIT if live else Affinity.CREATED
    assert choose(QUERY, pin, Standing.ELIGIBLE, POOL, NOW).affinity is expected
    assert live_pins([pin, PIN], NOW) == {"c1": 2 if live else 1}


# -- the choice ----------------------------------------------------------------------------------------------
MOVED = replace(FRESH, connection_id="c2", version=3)
ELSEWHERE = (PoolMember("c2"),)


@pytest.mark.parametrize(
    ("pinned", "mode", "decision"),
    [
        (Standing.TEMPORARY, OnIneligible.DETOUR, PinDecision(Affinity.DETOUR, row=PIN)),
        (Standing.ELIGIBLE, OnIneligible.DETOUR, PinDecision(Affinity.DETOUR, row=PIN)),
        (Standing.PERMANENT, OnIneligible.DETOUR, PinDecision(Affinity.MOVED, "c2", PinWrite.MOVE, MOVED, 1)),
        (Standing.TEMPORARY, OnIneligible.REPIN, PinDecision(Affinity.MOVED, "c2", PinWrite.MOVE, MOVED, 1)),
    ],
)
def test_a_pin_that_cannot_be_followed(pinned: Standing, mode: OnIneligible, decision: PinDecision) -> None:
    assert choose(replace(QUERY, on_ineligible=mode), PIN, pinned, ELSEWHERE, NOW) == decision


def test_a_first_pin_and_one_that_is_followed() -> None:
    created = PinDecision(Affinity.CREATED, "c1", PinWrite.INSERT, FRESH, 1)
    assert choose(QUERY, None, Standing.ELIGIBLE, POOL[:1], NOW) == created
    followed = PinDecision(Affinity.HIT, "c1", None, PIN, 5)
    assert choose(QUERY, PIN, Standing.PERMANENT, POOL, NOW) == followed
    assert join(PIN, POOL) == replace(followed, affinity=Affinity.JOINED)
    assert join(PIN, ELSEWHERE) == PinDecision(Affinity.DETOUR, row=PIN)


@pytest.mark.parametrize(
    ("changed", "pool", "affinity"),
    [
        ({"session_hash": ""}, POOL, Affinity.NONE), ({"ttl_ms": 0}, POOL, Affinity.NONE),
        ({"ttl_ms": -1}, POOL, Affinity.NONE),
        ({"ttl_ms": 1}, POOL, Affinity.HIT), ({}, (), Affinity.NONE),
        ({"require_caller": True, "api_key_id": ""}, POOL, Affinity.NO_CALLER),
        ({"require_caller": True}, POOL, Affinity.HIT),
        ({"api_key_id": ""}, POOL, Affinity.HIT),
        ({"require_caller": True, "api_key_id": "", "ttl_ms": 0}, POOL, Affinity.NONE),
    ],
)  # fmt: skip
def test_who_gets_no_pin(changed: dict[str, object], pool: tuple[PoolMember, ...], affinity: Affinity) -> None:
    query = replace(QUERY, **changed)  # type: ignore[arg-type]
    assert choose(query, PIN, Standing.ELIGIBLE, pool, NOW).affinity is affinity


@pytest.mark.parametrize(
    ("pin", "pool", "managed", "decision"),
    [
        (PIN, POOL, True, PinDecision(Affinity.NONE, "c2")),
        (PIN, POOL, False, PinDecision(Affinity.HIT, "c1", None, PIN, 5)),
        (PIN, ELSEWHERE, False, PinDecision(Affinity.DETOUR, "c2", row=PIN)),
        (None, POOL, False,
         PinDecision(Affinity.CREATED, "c2", PinWrite.INSERT, replace(FRESH, connection_id="c2"), 1)),
        (replace(PIN, expires_at=NOW), POOL, False,
         PinDecision(Affinity.CREATED, "c2", PinWrite.INSERT, replace(FRESH, connection_id="c2"), 1)),
        (None, POOL[:1], False, PinDecision(Affinity.NONE, "c2")), (PIN, (), False, PinDecision(Affinity.NONE, "c2")),
    ],
)  # fmt: skip
def test_a_forced_connection(
    pin: PinRow | None, pool: tuple[PoolMember, ...], managed: bool, decision: PinDecision
) -> None:
    assert choose_forced(QUERY, pin, "c2", pool, NOW, managed=managed) == decision


IN_ORDER = [
    PoolMember("b", 1),
    PoolMember("a", 2),
    PoolMember("c", 2),
    PoolMember("d"),
    PoolMember("e", 9, last_used_at=5),
    PoolMember("f", 1, last_used_at=6, consecutive=1),
    PoolMember("g", 1, last_used_at=6, consecutive=2),
    PoolMember("a2", 2, last_used_at=6, consecutive=2),
    PoolMember("b2", 2, last_used_at=6, consecutive=2),
    PoolMember("h", last_used_at=7),
]
"""Never used first, then by age, uses in a row, priority and id."""


@pytest.mark.parametrize(("first", "second"), list(permutations(range(len(IN_ORDER)), 2)))
def test_the_one_used_longest_ago_is_picked(first: int, second: int) -> None:
    pool = [IN_ORDER[first], IN_ORDER[second]]
    assert least_recently_used(pool) is IN_ORDER[min(first, second)]


def wide(name: str, most: int | None, live: int = 0, priority: int | None = 1) -> PoolMember:
    return PoolMember(name, priority, max_sessions=most, live_pins=live)


@pytest.mark.parametrize(
    ("pick", "others", "chosen"),
    [
        (wide("a", None), [wide("b", 9)], "a"), (wide("a", 2), [wide("b", 3)], "b"),
        (wide("a", 3), [wide("b", 3)], "a"),
        (wide("a", 3, 1), [wide("b", 3)], "b"), (wide("a", 2), [wide("b", None)], "a"),
        (wide("a", 2), [wide("b", 9, priority=2)], "b"), (wide("a", 2), [wide("b", 9, priority=3)], "a"),
        (wide("a", 2, priority=5), [wide("b", 9, priority=1)], "b"), (wide("a", 2), [wide("b", 3), wide("c", 4)], "c"),
        (wide("a", 2), [wide("c", 4), wide("b", 4)], "b"), (wide("a", 0, 1), [wide("b", 0)], "b"),
    ],
)  # fmt: skip
def test_sessions_spread_to_the_sibling_with_most_room(pick: PoolMember, others: list[PoolMember], chosen: str) -> None:
    assert spread(pick, [pick, *others]).connection == chosen


# -- refresh and eviction ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ttl_ms", "interval"),
    [(1, 1), (100, 1), (101, 2), (1_499_900, 14_999), (1_500_000, 15_000), (9_000_000, 15_000), (0, 0)],
)
def test_a_refresh_is_written_after_a_hundredth_of_the_ttl(ttl_ms: int, interval: int) -> None:
    assert refresh_interval(ttl_ms) == interval


@pytest.mark.parametrize(
    ("age", "ttl_ms", "connection", "written"),
    [
        (600, 60_000, "c1", True), (599, 60_000, "c1", False), (600, 60_000, "c2", False), (600, 0, "c1", False),
        (600, -1, "c1", False), (1, 1, "c1", True), (0, 1, "c1", False),
    ],
)  # fmt: skip
def test_a_use_extends_its_own_pin(age: int, ttl_ms: int, connection: str, written: bool) -> None:
    pin = replace(PIN, last_used_at=NOW - age)
    found = refreshed(pin, connection, NOW, ttl_ms)
    extended = replace(pin, last_used_at=NOW, expires_at=max(NOW + 500, NOW + ttl_ms))
    assert found == (extended if written else None)
    assert refreshed(None, "c1", NOW, 60_000) is None
    assert refreshed(replace(pin, expires_at=NOW), connection, NOW, ttl_ms) is None


EVICTING = {
    (PinEvent.FAILURE, after, mode)
    for after, mode in product(Standing, OnIneligible)
    if (after, mode) != (Standing.TEMPORARY, OnIneligible.DETOUR)
} | {(PinEvent.ROUTE_TIMEOUT, after, mode) for after, mode in product(Standing, OnIneligible)}


@pytest.mark.parametrize(("event", "after", "mode"), list(product(PinEvent, Standing, OnIneligible)))
def test_what_evicts_a_pin(event: PinEvent, after: Standing, mode: OnIneligible) -> None:
    assert is_evicted(event, PIN, "c1", after, mode) is ((event, after, mode) in EVICTING)
    assert not is_evicted(event, PIN, "c2", after, mode)


# -- keys ----------------------------------------------------------------------------------------------------
def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ("a" * 180, "n:" + "a" * 180), ("a" * 181, "n:sha256:" + sha("a" * 181)), ("a b", "n:sha256:" + sha("a b")),
        (" a ", "n:a"), ("x" * 4_096, "n:sha256:" + sha("x" * 4_096)), ("x" * 4_097, None), ("", None), (" ", None),
        (5, None), (None, None), ("Az09._:-", "n:Az09._:-"),
    ],
)  # fmt: skip
def test_an_id_stands_plain_or_hashed(raw: object, key: str | None) -> None:
    assert normalized("n", raw) == key


HEADERS = ("x-codex-session-id", "x-session-id", "x-omniroute-session")
BODIES: list[tuple[dict[str, Any], str]] = [
    ({"metadata": {"session_id": "1"}}, "metadata:1"), ({"metadata": {"sessionId": "2"}}, "metadata:2"),
    ({"conversation_id": "3"}, "conversation:3"), ({"session_id": "4"}, "session:4"),
    ({"prompt_cache_key": "5"}, "prompt-cache:5"), ({"input": "6"}, f"input:sha256:{sha('6')}"),
    ({"messages": "7"}, f"input:sha256:{sha('7')}"), ({"contents": "8"}, f"input:sha256:{sha('8')}"),
    ({"prompt": "9"}, f"input:sha256:{sha('9')}"), ({"query": "10"}, f"input:sha256:{sha('10')}"),
    ({"instruction": "11"}, f"input:sha256:{sha('11')}"),
]  # fmt: skip


def test_the_first_source_gives_the_key() -> None:
    for at, (body, key) in enumerate(BODIES):
        assert session_key(SessionSources({}, body)) == key
        for later, _ in BODIES[at + 1 :]:
            metadata = {**later.get("metadata", {}), **body.get("metadata", {})}
            merged = {**later, **body} | ({"metadata": metadata} if metadata else {})
            assert session_key(SessionSources({}, merged)) == key
    for at, name in enumerate(HEADERS):
        headers = {HEADERS[later].upper(): str(later) for later in range(at, 3)}
        assert session_key(SessionSources(headers, BODIES[0][0])) == f"header:{at}", name
    assert session_key(SessionSources({HEADERS[0]: " ", HEADERS[1]: "x"}, {})) == "header:x"
    assert session_key(SessionSources({HEADERS[0]: "x" * 4_097, HEADERS[1]: "x"}, {})) is None
    assert session_key(SessionSources({}, {})) is None
    assert session_hash("p", "k") == sha("p:k")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, "u"),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]}, "s"),
        ({"messages": ["plain"]}, "plain"), ({"messages": []}, ""), ({"messages": [5]}, ""),
        ({"messages": [{"role": "user", "content": [{"text": "a"}, " ", {"text": "b"}, {"image": "c"}]}]}, "a\nb"),
        ({"contents": [{"role": "user", "parts": [{"text": "a"}]}]}, "a"), ({"prompt": " a "}, "a"),
        ({"prompt": "x" * 5_000}, "x" * 4_096), ({"prompt": " " + "x" * 5_000}, "x" * 4_096),
        ({"prompt": {"other": "a"}}, ""),
        ({"prompt": {"text": "", "content": "c"}}, "c"), ({"prompt": {"text": "t", "content": "c"}}, "t"),
        ({"prompt": 5}, ""),
    ],
)  # fmt: skip
def test_the_first_user_text_of_a_body(body: dict[str, object], text: str) -> None:
    assert first_user_text(body) == text
