"""Pool guard and panic mode (spec/guards.md section 6)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_service.domain.pool_guard import Member, PoolVerdict, judge_pool, limit_of
from policy_service.domain.profiles import PoolGuardProfile

ON = PoolGuardProfile(enabled=True)


def test_at_most_half_of_a_pool_is_softly_excluded_and_the_newest_is_waived() -> None:
    members = [Member("a", 60, 0), Member("b", 60, 0), Member("c", 60, 0), Member("d")]
    verdict = judge_pool(members, ON, 1)
    assert verdict == PoolVerdict(("a", "b"), ("c",), ("c", "d"))
    assert "c" in judge_pool(members, ON, 1).not_enforced
    assert "b" not in judge_pool(members, ON, 1).not_enforced


def test_the_oldest_waived_exclusion_is_enforced_when_another_ends() -> None:
    members = [Member("a", 50, 0), Member("b", 60, 0), Member("c", 90, 2), Member("d", 90, 1)]
    assert judge_pool(members, ON, 49).not_enforced == ("c", "d")
    assert judge_pool(members, ON, 50).excluded == ("b", "d")


def test_deadlines_stated_by_the_server_are_never_waived() -> None:
    members = [Member("a", 60, 0), Member("b", 60, 1, fixed=True), Member("c", 60, 2, fixed=True), Member("d")]
    assert judge_pool(members, ON, 3).excluded == ("b", "c")


def test_off_every_exclusion_is_enforced_and_nobody_panics() -> None:
    members = [Member("a", 60), Member("b", 50)]
    assert judge_pool(members, PoolGuardProfile(), 1) == PoolVerdict(("a", "b"), (), ())


def test_panic_offers_by_earliest_expiry_then_by_order_of_the_pool() -> None:
    everything = PoolGuardProfile(enabled=True, max_excluded_share=1.0)
    members = [Member("a", 60), Member("b", 50), Member("c", 50), Member("d", 10, fixed=True)]
    assert judge_pool(members, everything, 1).panic == ("b", "c", "a")


def test_panic_calls_are_limited_in_the_fleet() -> None:
    everything = PoolGuardProfile(enabled=True, max_excluded_share=1.0)
    assert judge_pool([Member("a", 60)], everything, 1, in_flight=1).panic == ()


def test_an_empty_pool_does_not_panic() -> None:
    assert judge_pool([], ON, 0) == PoolVerdict((), (), ())


MEMBERS = st.lists(
    st.builds(
        lambda until, since, fixed: (until, since, fixed),
        st.none() | st.integers(0, 20),
        st.integers(0, 9),
        st.booleans(),
    ),
    max_size=9,
).map(lambda drawn: [Member(str(n), *each) for n, each in enumerate(drawn)])


@given(MEMBERS, st.floats(0, 1), st.integers(0, 20))
def test_the_share_is_never_exceeded_beyond_what_may_not_be_waived(
    members: list[Member], share: float, now: int
) -> None:
    profile = PoolGuardProfile(enabled=True, max_excluded_share=share)
    verdict = judge_pool(members, profile, now)
    fixed = [m for m in members if m.fixed and m.is_excluded(now)]
    assert len(verdict.excluded) <= max(limit_of(members, profile), len(fixed))
    assert {m.name for m in fixed} <= set(verdict.excluded)
    assert set(verdict.selectable) == {m.name for m in members} - set(verdict.excluded)
    wanted = {m.name for m in members if m.is_excluded(now)}
    assert set(verdict.excluded) | set(verdict.not_enforced) == wanted


@pytest.mark.parametrize("members", [50, 90, 100, 170])
def test_a_share_in_percent_leaves_out_no_member_less_than_it_says(members: int) -> None:
    """0.29 of 100 is 28.999... in binary: the guard left one target in the pool that the share takes out."""
    pool = [Member(str(n)) for n in range(members)]
    for percent in range(101):
        guard = PoolGuardProfile(enabled=True, max_excluded_share=percent / 100)
        assert limit_of(pool, guard) == members * percent // 100
