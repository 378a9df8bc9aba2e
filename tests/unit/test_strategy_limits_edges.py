"""Numbers of route strategies, quota share and stickiness (spec/strategies.md 4, concurrency.md 4, affinity.md 8)."""

from __future__ import annotations

import hashlib

import pytest

from policy_service.domain import quota_share, stickiness
from policy_service.domain.quota_share import (
    Bucket,
    RouteDeficits,
    ShareOrder,
    ShareTarget,
    is_saturated,
    order_targets,
)
from policy_service.domain.stickiness import StickyStanding, StickyTargets, is_enabled, sticky_key
from policy_service.domain.strategies import priority, round_robin, weighted
from policy_service.domain.strategies.round_robin import Rotation


def test_the_numbers_are_those_of_the_spec() -> None:
    assert (stickiness.TTL_MS, stickiness.ENTRIES_KEPT, stickiness.USED_AT_MOST) == (900_000, 500, 0.85)
    assert quota_share.ROUTES_KEPT == 200
    assert Rotation() == Rotation(0, None, 0)
    assert ShareTarget("t") == ShareTarget("t", 1.0, None, 0, "", ())
    assert StickyStanding() == StickyStanding(None, None, False, False, False)


# -- round robin ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("eligible", "rotation", "limit", "ordered", "following"),
    [
        ([], Rotation(2, 1, 1), 3, [], Rotation(2, 1, 1)),
        ([0, 1, 2], Rotation(), 3, [0, 1, 2], Rotation(1, 0, 1)),
        ([0, 1, 2], Rotation(2), 3, [2, 0, 1], Rotation(0, 2, 1)),
        ([0, 1], Rotation(2), 3, [0, 1], Rotation(1, 0, 1)),
        ([1, 2], Rotation(1, 0, 1), 3, [1, 2], Rotation(2, 1, 1)),
        ([0, 1, 2], Rotation(1, 0, 1), 3, [0, 1, 2], Rotation(1, 0, 2)),
        ([0, 1, 2], Rotation(1, 0, 2), 3, [0, 1, 2], Rotation(1, 0, 3)),
        ([0, 1, 2], Rotation(1, 0, 3), 3, [1, 2, 0], Rotation(2, 1, 1)),
        ([0, 1, 2], Rotation(1, 0, 1), 1, [1, 2, 0], Rotation(2, 1, 1)),
        ([0, 1, 2], Rotation(1, 0, 0), 0, [1, 2, 0], Rotation(2, 1, 1)),
        ([0, 1, 2], Rotation(0, 2, 1), 3, [2, 0, 1], Rotation(0, 2, 2)),
    ],
)
def test_a_rotation_step_by_step(
    eligible: list[int], rotation: Rotation, limit: int, ordered: list[int], following: Rotation
) -> None:
    assert round_robin.order(eligible, 3, rotation, limit) == (ordered, following)


def test_the_sticky_limit_is_three_unless_told() -> None:
    leads, rotation = [], Rotation()
    for _ in range(7):
        ordered, rotation = round_robin.order([0, 1], 2, rotation)
        leads.append(ordered[0])
    assert leads == [0, 0, 0, 1, 1, 1, 0]


# -- weighted and priority -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("weights", "draw", "ordered"),
    [
        ([1, 2, 1], 0.0, [0, 1, 2]), ([1, 2, 1], 0.2499, [0, 1, 2]), ([1, 2, 1], 0.25, [1, 0, 2]),
        ([1, 2, 1], 0.7499, [1, 0, 2]), ([1, 2, 1], 0.75, [2, 1, 0]), ([1, 3, 2], 0.0, [0, 1, 2]),
        ([0, 0, 0], 0.34, [1, 0, 2]), ([0, 0, 0], 0.0, [0, 1, 2]), ([0, 0, 0], 0.99, [2, 0, 1]),
        ([0, 1, 0], 0.0, [1, 0, 2]), ([0, 0.5, 0], 0.99, [1, 0, 2]),
    ],
)  # fmt: skip
def test_a_draw_leads_and_weight_orders_the_rest(weights: list[float], draw: float, ordered: list[int]) -> None:
    assert weighted.order([0, 1, 2], weights, draw) == ordered


def test_nobody_eligible_is_nobody_ordered_and_priority_keeps_the_order() -> None:
    assert weighted.order([], [1.0], 0.5) == []
    assert priority.order([2, 0, 1]) == [2, 0, 1]


# -- quota share ---------------------------------------------------------------------------------------------
FULL, FREE = Bucket("5h", 100, 11), Bucket("5h", 99, 11)


def keys(found: ShareOrder) -> list[str]:
    return [target.key for target in found.order]


@pytest.mark.parametrize(
    ("bucket", "model", "saturated"),
    [
        (FULL, "", True), (FREE, "", False), (Bucket("5h", 101, 11), "", True), (Bucket("7d", 100, 11), "", True),
        (Bucket("5h", 100, 10), "", False), (Bucket("5h", 100, 0), "", False), (Bucket("5h", 0, 11), "", False),
        (Bucket("7d:m", 100, 11), "m", True), (Bucket("7d:m", 100, 11), "p/m", True),
        (Bucket("7d:m", 100, 11), "n", False),
        (Bucket("1d", 100, 11), "", False),
    ],
)  # fmt: skip
def test_a_bucket_saturates_while_it_is_full_and_its_reset_ahead(bucket: Bucket, model: str, saturated: bool) -> None:
    assert is_saturated(ShareTarget("t", model=model, buckets=(bucket,)), 10) is saturated
    assert is_saturated(ShareTarget("t", model=model, buckets=(FREE, bucket)), 10) is saturated


def test_front_then_capped_then_saturated_and_nobody_is_lost() -> None:
    saturated, capped = ShareTarget("s", buckets=(FULL,)), ShareTarget("c", cap=1, in_flight=1)
    free, other = ShareTarget("f"), ShareTarget("g")
    found = order_targets([saturated, capped, free, other], {}, 10)
    assert keys(found) == ["f", "g", "c", "s"]
    assert found.deficits == {"s": 0.0, "c": 0.0, "f": -0.5, "g": 0.5}
    assert keys(order_targets([saturated, capped], {}, 10)) == ["c", "s"]
    assert keys(order_targets([saturated], {}, 10)) == ["s"]
    assert order_targets([], {}, 10) == ShareOrder((), {})


@pytest.mark.parametrize(
    ("deficits", "leader"),
    [({}, "a"), ({"b": 1e-10}, "a"), ({"b": 1e-8}, "b"), ({"a": 1e-8}, "a"), ({"b": 0.5}, "b"), ({"a": -0.5}, "b")],
)
def test_the_larger_deficit_leads_beyond_a_tie(deficits: dict[str, float], leader: str) -> None:
    found = order_targets([ShareTarget("a"), ShareTarget("b")], deficits, 0)
    assert keys(found)[0] == leader
    paid = {key: deficits.get(key, 0.0) + 0.5 - (key == leader) for key in ("a", "b")}
    assert found.deficits == pytest.approx(paid)


def test_a_difference_of_the_width_of_a_tie_leads() -> None:
    """The two weigh next to nothing, so that the round adds nothing to what they have."""
    pair = ShareTarget("a", 1e-300), ShareTarget("b", 1e-300)
    found = order_targets([*pair, ShareTarget("c")], {"b": 1e-9, "c": -5.0}, 0)
    assert keys(found) == ["b", "a", "c"]


def test_a_single_target_plays_no_round() -> None:
    assert order_targets([ShareTarget("a")], {"a": 0.1}, 0).deficits == {"a": 0.1}
    assert ShareOrder(()).deficits == {}


def test_a_round_shares_by_weight() -> None:
    found = order_targets([ShareTarget("a", 3), ShareTarget("b", 1), ShareTarget("c", 0)], {}, 0)
    assert found.deficits == pytest.approx({"a": 0.6 - 1, "b": 0.2, "c": 0.2})
    assert keys(found) == ["a", "b", "c"]
    equal = ShareTarget("a", in_flight=2), ShareTarget("b", in_flight=1), ShareTarget("c")
    assert keys(order_targets(equal, {}, 0)) == ["b", "a", "c"]


def test_two_hundred_routes_are_kept() -> None:
    routes = RouteDeficits()
    for number in range(201):
        routes.put(f"r{number}", {"t": float(number)})
    assert routes.get("r0") == {}
    assert routes.get("r1") == {"t": 1.0}
    assert routes.get("r200") == {"t": 200.0}


# -- stickiness ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("standing", "reusable"),
    [
        (StickyStanding(), True), (StickyStanding(0.84, 0.84), True), (StickyStanding(0.85), False),
        (StickyStanding(None, 0.85), False), (StickyStanding(0.1, 0.9), False), (StickyStanding(0.9, 0.1), False),
        (StickyStanding(0.0, 0.0), True), (StickyStanding(is_terminal=True), False),
        (StickyStanding(is_cooling=True), False), (StickyStanding(is_quota_exhausted=True), False),
    ],
)  # fmt: skip
def test_a_target_is_used_again_while_it_is_well_and_has_something_left(
    standing: StickyStanding, reusable: bool
) -> None:
    assert standing.is_reusable is reusable


def test_a_conversation_is_known_by_caller_route_and_first_text() -> None:
    digest = hashlib.sha256(b"hi").hexdigest()[:16]
    assert sticky_key("c", "r", "hi") == ("c", "r", digest)
    assert sticky_key("", "r", "hi") == ("", "r", digest)
    assert sticky_key("", "r", "hi", require_caller=True) is None
    assert sticky_key("c", "r", "hi", require_caller=True) is not None
    assert sticky_key("c", "r", "") is None
    assert sticky_key("c", "r", "\ud800") is not None


@pytest.mark.parametrize(
    ("route", "setting", "enabled"),
    [(None, False, True), (None, True, False), (True, False, False), (False, True, True), (False, False, True),
     (True, True, False)],
)  # fmt: skip
def test_the_route_decides_where_it_says_something(route: bool | None, setting: bool, enabled: bool) -> None:
    assert is_enabled(route, setting) is enabled


def test_five_hundred_conversations_are_kept_and_the_one_longest_unused_goes() -> None:
    sticky = StickyTargets()
    names = [("c", "r", str(number)) for number in range(501)]
    for name in names[:500]:
        sticky.record(name, "t", 0)
    assert sticky.get(names[0], 0) == "t"  # a look-up keeps its place, not its time
    sticky.record(names[500], "t", 0)
    assert [sticky.get(name, 0) for name in (names[0], names[1], names[2], names[500])] == ["t", None, "t", "t"]
    assert len(sticky) == 500


def test_no_key_sticks_to_nothing_and_a_success_extends_the_time() -> None:
    sticky = StickyTargets()
    sticky.record(None, "t", 0)
    sticky.failed(None, "t")
    assert (len(sticky), sticky.get(None, 0)) == (0, None)
    key = ("c", "r", "1")
    sticky.failed(key, "t")
    sticky.record(key, "t", 0)
    sticky.record(key, "u", 500_000)
    assert sticky.get(key, 1_399_999) == "u"
    assert sticky.get(key, 1_400_000) is None
