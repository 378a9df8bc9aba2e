"""Edges of the strategies: infinite weights, caps, full buckets, sticky counts (spec/strategies.md, concurrency.md)."""

from __future__ import annotations

import math

import pytest

from policy_service.domain.quota_share import (
    Bucket,
    RouteDeficits,
    ShareTarget,
    bare_model,
    is_saturated,
    order_targets,
)
from policy_service.domain.stickiness import StickyTargets
from policy_service.domain.strategies import round_robin, weighted
from policy_service.domain.strategies.round_robin import Rotation


def test_an_infinite_weight_always_leads() -> None:
    assert weighted.order([3, 5], [0, 0, 0, 1, 0, math.inf], 0.5) == [5, 3]
    assert weighted.order([3, 5], [0, 0, 0, math.inf, 0, 1], 0.5) == [3, 5]


def test_a_draw_at_a_boundary_belongs_to_the_next() -> None:
    assert [weighted.order([0, 1], [1, 1], draw)[0] for draw in (0.0, 0.499, 0.5, 0.999)] == [0, 0, 1, 1]
    assert [weighted.order([4, 6], [0.0] * 7, draw)[0] for draw in (0.0, 0.5, 0.999)] == [4, 6, 6]


@pytest.mark.parametrize(
    ("cap", "in_flight", "at_cap"), [(None, 9, False), (0, 9, False), (-1, 9, False), (2, 1, False), (2, 2, True),
    (1, 1, True)],
)  # fmt: skip
def test_a_target_is_at_its_cap_from_the_last_slot_on(cap: int | None, in_flight: int, at_cap: bool) -> None:
    assert ShareTarget("t", cap=cap, in_flight=in_flight).is_at_cap is at_cap


@pytest.mark.parametrize(("weight", "share"), [(0.5, 0.5), (0, 1), (-1, 1), (math.inf, 1), (math.nan, 1)])
def test_a_weight_that_is_no_positive_number_counts_as_one(weight: float, share: float) -> None:
    assert ShareTarget("t", weight).share == share


@pytest.mark.parametrize(
    ("bucket", "full"),
    [
        (Bucket("5h", 100, 11), True), (Bucket("5h", 99.9, 11), False), (Bucket("5h", 100, 10), False),
        (Bucket("5h", None, 11), False), (Bucket("5h", 100, None), False), (Bucket("7d:opus", 100, 11), True),
        (Bucket("7d:sonnet", 100, 11), False),
    ],
)  # fmt: skip
def test_a_full_bucket_counts_until_its_reset_and_for_its_model(bucket: Bucket, full: bool) -> None:
    assert is_saturated(ShareTarget("t", model="vendor/x/opus", buckets=(bucket,)), 10) is full
    assert bare_model("vendor/x/opus") == "opus"


def test_a_round_charges_its_leader_and_the_runner_up_may_go_first() -> None:
    targets = [ShareTarget("a", 3, in_flight=1), ShareTarget("b", 1), ShareTarget("c", 1, cap=1, in_flight=1)]
    found = order_targets(targets, {"a": 0.5}, 0)
    assert [target.key for target in found.order] == ["b", "a", "c"]
    assert found.deficits == {"a": 0.25, "b": 0.25, "c": 0.0}
    alone = order_targets(targets[:1], {"a": 0.5}, 0)
    assert alone.deficits == {"a": 0.5}
    equal = [ShareTarget("a", in_flight=1), ShareTarget("b", in_flight=1)]
    assert [target.key for target in order_targets(equal, {}, 0).order] == ["a", "b"]


def test_the_route_that_was_longest_unused_is_forgotten_first() -> None:
    routes = RouteDeficits(2)
    for name in ("a", "b", "a", "c"):
        routes.put(name, {name: 1.0})
    assert [routes.get(name) for name in ("a", "b", "c")] == [{"a": 1.0}, {}, {"c": 1.0}]


def test_a_sticky_target_serves_its_limit_and_the_rotation_goes_on_behind_it() -> None:
    assert round_robin.order([0, 1, 2], 3, Rotation(1, 0, 2), 3) == ([0, 1, 2], Rotation(1, 0, 3))
    assert round_robin.order([0, 1, 2], 3, Rotation(1, 0, 3), 3) == ([1, 2, 0], Rotation(2, 1, 1))
    assert round_robin.order([0, 2], 3, Rotation(1, 1, 1), 3) == ([2, 0], Rotation(0, 2, 1))
    assert round_robin.DEFAULT_STICKY_LIMIT == 3


def test_a_conversation_sticks_until_its_time_is_over_and_only_its_own_failure_ends_it() -> None:
    sticky = StickyTargets(2)
    key = ("k", "r", "x")
    sticky.record(key, "t", 0)
    assert sticky.get(key, 899_999) == "t"
    sticky.failed(key, "other")
    assert sticky.get(key, 0) == "t"
    sticky.failed(key, "t")
    sticky.failed(key, "t")
    assert sticky.get(key, 0) is None
    sticky.record(key, "t", 0)
    assert sticky.get(key, 900_000) is None
    assert len(sticky) == 0
