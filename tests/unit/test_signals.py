"""The matchers of text families: exact distances, lines and order."""

from __future__ import annotations

import pytest

from policy_service.domain import signals


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("daily and then limit", True),
        ("limit daily", False),
        ("daily\nlimit", False),
        ("limit daily\ndaily limit", True),
    ],
)
def test_b_must_follow_a_on_one_line(text: str, holds: bool) -> None:
    assert signals.later_on_line(text, "daily", "limit") is holds


@pytest.mark.parametrize(("gap", "holds"), [(80, True), (81, False)])
def test_the_distance_of_near_words_counts_the_characters_between_them(gap: int, holds: bool) -> None:
    assert signals.within("function" + "." * gap + "degraded", "function", "degraded", 80) is holds
    assert signals.within("degraded" + "." * gap + "function", "function", "degraded", 80) is holds


def test_weekly_quota_and_exhaust_must_share_a_line() -> None:
    assert signals.is_weekly("the quota of this week: weekly, exhausted")
    assert not signals.is_weekly("weekly quota\nexhausted")


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("invalid message format", True),
        ("format of invalid message", False),
        ("invalid " + "x" * 81 + "message format", False),
        ("invalid invalid message format", True),
    ],
)
def test_a_chain_wants_its_words_in_order_and_close(text: str, holds: bool) -> None:
    assert signals.in_order(text, ("invalid", "message", "format"), 80) is holds


def test_families_add_up() -> None:
    both = signals.one_of("a1") | signals.Family(near=(("b", "c", 1),))
    assert all(both.found_in(text) for text in ("xa1", "b-c"))
    assert not both.found_in("b--c")
