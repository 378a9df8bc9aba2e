"""Strategies priority, weighted and round-robin (spec/strategies.md section 4)."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from policy_service.domain.strategies import priority, round_robin, weighted
from policy_service.domain.strategies.round_robin import Rotation

positions = st.lists(st.integers(0, 30), unique=True, max_size=12).map(sorted)


def test_priority_keeps_the_configured_order() -> None:
    assert priority.order([0, 2, 5]) == [0, 2, 5]


def test_a_weight_of_zero_is_never_drawn_beside_a_positive_one_and_follows_last() -> None:
    assert weighted.order([0, 1], [0.0, 5.0], 0.0) == [1, 0]
    assert weighted.order([0, 1], [0.0, 5.0], 0.999999) == [1, 0]


def test_weights_that_are_all_zero_draw_uniformly() -> None:
    assert [weighted.order([0, 1, 2], [0.0] * 3, draw)[0] for draw in (0.0, 0.34, 0.99)] == [0, 1, 2]


def test_a_draw_walks_the_cumulative_shares_in_configured_order() -> None:
    assert weighted.order([0, 1, 2], [1, 3, 6], 0.25) == [1, 2, 0]


@given(positions, st.floats(0, 1, exclude_max=True), st.data())
def test_every_order_is_a_permutation_of_the_eligible(eligible: list[int], draw: float, data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0, 1e6), min_size=31, max_size=31))
    assert sorted(weighted.order(eligible, weights, draw)) == eligible
    ordered, _ = round_robin.order(eligible, 31, Rotation(data.draw(st.integers(0, 30))), 1)
    assert sorted(ordered) == eligible


def test_round_robin_serves_everybody_equally() -> None:
    rotation, heads = Rotation(), Counter[int]()
    for _ in range(300):
        ordered, rotation = round_robin.order([0, 1, 2], 3, rotation, 1)
        heads[ordered[0]] += 1
    assert heads == {0: 100, 1: 100, 2: 100}


def test_round_robin_passes_an_ineligible_target_over_without_shifting_the_rest() -> None:
    rotation, heads = Rotation(), []
    for eligible in ([0, 1, 2], [0, 2], [0, 2], [0, 1, 2]):
        ordered, rotation = round_robin.order(eligible, 3, rotation, 1)
        heads.append(ordered[0])
    assert heads == [0, 2, 0, 1]


def test_a_sticky_target_repeats_up_to_its_limit_and_is_dropped_when_it_becomes_ineligible() -> None:
    rotation, heads = Rotation(), []
    for eligible in ([0, 1], [0, 1], [1], [0, 1], [0, 1], [0, 1]):
        ordered, rotation = round_robin.order(eligible, 2, rotation, 3)
        heads.append(ordered[0])
    assert heads == [0, 0, 1, 1, 1, 0]


def test_nothing_eligible_gives_no_order_and_keeps_the_rotation() -> None:
    assert weighted.order([], [], 0.5) == []
    assert round_robin.order([], 3, Rotation(2), 1) == ([], Rotation(2))
