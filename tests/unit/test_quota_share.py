"""Order of quota-share targets and the bounded in-flight entries (spec/concurrency.md sections 3 and 4.1)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_service.domain.inflight import ENTRY_LIFE_MS, MAX_ENTRIES, InFlight
from policy_service.domain.quota_share import Bucket, RouteDeficits, ShareTarget, order_targets


def _heads(weights: list[float], picks: int) -> list[str]:
    targets = [ShareTarget(f"t{n}", weight) for n, weight in enumerate(weights)]
    deficits: dict[str, float] = {}
    heads = []
    for _ in range(picks):
        found = order_targets(targets, deficits, 0)
        deficits = dict(found.deficits)
        heads.append(found.order[0].key)
    return heads


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_over_a_whole_round_every_target_gets_exactly_its_weight(weights: list[int]) -> None:
    counts = Counter(_heads([float(weight) for weight in weights], sum(weights)))
    assert [counts[f"t{n}"] for n in range(len(weights))] == weights


@given(st.lists(st.floats(0.1, 9), min_size=2, max_size=6), st.integers(1, 200))
def test_at_no_time_is_a_target_more_than_a_pick_per_rival_away_from_its_share(
    weights: list[float], picks: int
) -> None:
    counts = Counter(_heads(weights, picks))
    for n, weight in enumerate(weights):
        assert abs(counts[f"t{n}"] - picks * weight / sum(weights)) < len(weights)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([None, 1, 2]), st.sampled_from([None, 50.0, 100.0])),
        min_size=1,
        max_size=6,
    )
)
def test_the_order_holds_every_target_once(shapes: list[tuple[int, int | None, float | None]]) -> None:
    targets = [
        ShareTarget(f"t{n}", 1, cap, flying, buckets=(Bucket("5h", percent, 10),))
        for n, (flying, cap, percent) in enumerate(shapes)
    ]
    order = order_targets(targets, {}, 0).order
    assert sorted(target.key for target in order) == sorted(target.key for target in targets)


def test_tiers_are_front_then_at_cap_then_saturated() -> None:
    full = (Bucket("7d:opus", 100, 5_000),)
    targets = [
        ShareTarget("saturated", model="vendor/opus", buckets=full),
        ShareTarget("at-cap", cap=1, in_flight=1),
        ShareTarget("front"),
    ]
    assert [target.key for target in order_targets(targets, {}, 0).order] == ["front", "at-cap", "saturated"]


def test_a_bucket_without_a_reset_saturates_nothing() -> None:
    targets = [ShareTarget("a", buckets=(Bucket("5h", 100, None),)), ShareTarget("b")]
    assert order_targets(targets, {}, 0).order[0].key == "a"


def test_a_single_target_pays_nothing() -> None:
    assert order_targets([ShareTarget("a")], {"a": 0.25}, 0).deficits == {"a": 0.25}


def test_others_follow_by_their_deficit_before_payment() -> None:
    targets = [ShareTarget("a"), ShareTarget("b"), ShareTarget("c")]
    order = order_targets(targets, {"a": 0.0, "b": 0.2, "c": 0.5}, 0).order
    assert [target.key for target in order] == ["c", "b", "a"]


def test_of_too_many_routes_the_one_unused_longest_goes() -> None:
    kept = RouteDeficits(capacity=2)
    for route in ("r1", "r2", "r1", "r3"):
        kept.put(route, {"t": 1.0})
    assert (kept.get("r1"), kept.get("r2"), kept.get("r3")) == ({"t": 1.0}, {}, {"t": 1.0})


def test_dispatches_beyond_the_entries_are_routed_but_not_counted() -> None:
    entries = InFlight()
    assert all(entries.reserve("c", f"e{n}", 0) for n in range(MAX_ENTRIES))
    assert not entries.reserve("c", "one more", 0)
    assert (entries.own("c", 0), entries.uncounted) == (MAX_ENTRIES, 1)
    assert entries.reserve("c", "later", ENTRY_LIFE_MS)
    assert entries.own("c", ENTRY_LIFE_MS) == 1


def test_reserving_an_entry_again_moves_its_end_and_counts_once() -> None:
    entries = InFlight()
    entries.reserve("c", "a", 0)
    entries.reserve("c", "b", 1_000)
    entries.reserve("c", "a", 2_000)
    assert entries.own("c", 2_000) == 2
    assert entries.own("c", 1_000 + ENTRY_LIFE_MS) == 1


def test_the_count_is_the_greater_of_permits_and_entries_of_the_fleet() -> None:
    entries = InFlight()
    entries.reserve("c", "a", 0)
    entries.set_peers({"c": 3})
    assert entries.count("c", 0) == 4
    assert entries.count("c", 0, permits_held=6) == 6
    assert entries.snapshot(0) == {"c": 1}
    entries.release("c", "a")
    assert entries.snapshot(0) == {}


@pytest.mark.parametrize("times", [1, 3])
def test_releasing_an_expired_entry_changes_nothing(times: int) -> None:
    entries = InFlight()
    entries.reserve("c", "a", 0)
    entries.reserve("c", "b", ENTRY_LIFE_MS)
    for _ in range(times):
        entries.release("c", "a")
    assert entries.own("c", ENTRY_LIFE_MS) == 1
