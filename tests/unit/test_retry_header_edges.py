"""Edges of waits stated in headers: which family decides, the sizes that make a number a time, what is no wait."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import permutations

import pytest

from policy_service.domain.profiles import HintProfile
from policy_service.domain.retry_headers import header_waits
from policy_service.domain.retry_hints import read_header_hint

NOW = int(datetime(2026, 6, 1, 12, tzinfo=UTC).timestamp() * 1_000)
NOW_S = NOW // 1_000
SECOND, MINUTE, DAY = 1_000, 60_000, 86_400_000
CAP = 30 * DAY
UNIFIED = "anthropic-ratelimit-unified-"


def wait_of(headers: Mapping[str, str], now: int = NOW, *, extended: bool = True) -> int | None:
    hint = read_header_hint(headers, now, HintProfile(extended_reset_headers=extended))
    return hint.wait_ms if hint else None


def ahead(seconds: int) -> str:
    return str(NOW_S + seconds)


FAMILIES: dict[str, tuple[dict[str, str], int]] = {
    "retry-after": ({"retry-after": "11"}, 11 * SECOND),
    "epoch": ({"x-ratelimit-reset": ahead(12)}, 12 * SECOND),
    "milliseconds": ({"retry-after-ms": "13"}, 13),
    "codex": ({"x-codex-primary-used-percent": "100", "x-codex-primary-reset-after-seconds": "14"}, 14 * SECOND),
    "unified": ({f"{UNIFIED}status": "rejected", f"{UNIFIED}reset": ahead(15)}, 15 * SECOND),
    "exact": ({"ratelimit-reset": "16"}, 16 * SECOND),
    "exact, second": ({"x-ratelimit-reset-after": "17"}, 17 * SECOND),
    "dimension": ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "18s"}, 18 * SECOND),
    "bare": ({"x-ratelimit-reset": "19"}, 19 * SECOND),
    "structured": ({"ratelimit": "r=0;t=20"}, 20 * SECOND),
}
ORDER = list(FAMILIES)
PAIRS = [pair for pair in permutations(ORDER, 2) if set(pair) != {"epoch", "bare"}]  # the same header


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_read_alone(family: str) -> None:
    headers, wait = FAMILIES[family]
    assert wait_of(headers) == wait


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_earlier_family_decides_in_whatever_order_the_headers_come(first: str, second: str) -> None:
    winner = min(first, second, key=ORDER.index)
    assert wait_of(FAMILIES[first][0] | FAMILIES[second][0]) == FAMILIES[winner][1]


@pytest.mark.parametrize("family", ORDER[2:])
def test_only_the_reference_headers_are_read_without_the_extension(family: str) -> None:
    assert wait_of(FAMILIES[family][0], extended=False) is None


def test_the_epoch_header_is_read_without_the_extension() -> None:
    assert wait_of(FAMILIES["epoch"][0], extended=False) == 12 * SECOND
    waits = [wait_of({"x-ratelimit-reset": str(30 * 86_400 + more)}, 0, extended=False) for more in (0, 1)]
    assert waits == [None, CAP]


@pytest.mark.parametrize(
    ("value", "wait"),
    [
        ("2592000", CAP), ("2592001", None), ("1000000000", None), (ahead(1), SECOND), (ahead(0), None),
        ("10000000000", CAP), ("10000000001", None), (str(NOW + 1), 1), (str(NOW), None), ("1", SECOND), ("0", None),
    ],
)  # fmt: skip
def test_the_size_of_a_reset_tells_seconds_from_epoch_seconds_and_milliseconds(value: str, wait: int | None) -> None:
    assert wait_of({"x-ratelimit-reset": value}) == wait


@pytest.mark.parametrize(
    ("now_ms", "seconds", "wait"),
    [
        (1_000_000, 2_592_000, CAP),  # thirty days are a number of seconds
        (1_000_000, 2_592_001, CAP - 999 * SECOND),  # one more can be a time of the epoch
        (1_000_000, 2_593_000, CAP),
        (1_000_000, 2_593_001, CAP),
        (NOW, NOW_S + 1, SECOND),
        (NOW + 999, NOW_S + 1, 1),
        (NOW, NOW_S, CAP),
        (NOW, NOW_S - 1, CAP),
        (NOW, 1, SECOND),
    ],
)
def test_retry_after_is_a_time_of_the_epoch_only_where_it_lies_in_the_next_thirty_days(
    now_ms: int, seconds: int, wait: int
) -> None:
    assert wait_of({"retry-after": str(seconds)}, now_ms) == wait


def test_the_reference_reading_of_retry_after_knows_seconds_and_dates_only() -> None:
    assert wait_of({"retry-after": ahead(60)}, extended=False) == CAP
    assert wait_of({"retry-after": "5"}, extended=False) == 5 * SECOND
    assert wait_of({"retry-after": "Mon, 01 Jun 2026 12:01:30 GMT"}, extended=False) == 90 * SECOND
    assert wait_of({"retry-after": "1.5"}, extended=False) is None


@pytest.mark.parametrize(
    ("value", "wait"),
    [
        ("0" * 16 + "60", MINUTE), ("0" * 63 + "60", None), (" 60 ", MINUTE), ("60, 70", MINUTE), ("60 , 70", MINUTE),
        (" " * 90 + "60", MINUTE), ("60," + "7" * 90, MINUTE), ("60," + "x" * 90, MINUTE), ("6٠, 7", None),
    ],
)  # fmt: skip
def test_a_value_is_the_first_of_a_list_and_no_longer_than_a_value(value: str, wait: int | None) -> None:
    assert wait_of({"retry-after": value}) == wait
    assert wait_of({"ratelimit-reset": value}) == wait


def test_a_plain_number_of_seconds_may_be_as_long_as_a_value() -> None:
    assert wait_of({"retry-after": "0" * 62 + "60"}) == MINUTE
    assert wait_of({"ratelimit-reset": "0" * 17 + "60"}) is None


def test_of_a_repeated_name_the_first_value_counts_and_a_value_that_is_no_text_does_not() -> None:
    assert wait_of({"Retry-After": "2", "retry-after": "3"}) == 2 * SECOND
    assert wait_of({"retry-after": None, "retry-after-ms": "5"}) == 5  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("primary", "secondary", "wait"),
    [
        ("100", "100", 20 * SECOND), ("100", "99", 10 * SECOND), ("99", "100", 20 * SECOND), ("99", "99", None),
        ("100.5", "", 10 * SECOND), ("99.5", "99.9", None), ("", "", None), ("full", "100", 20 * SECOND),
    ],
)  # fmt: skip
def test_a_codex_window_counts_once_it_is_used_up(primary: str, secondary: str, wait: int | None) -> None:
    headers = {
        "x-codex-primary-used-percent": primary,
        "x-codex-primary-reset-after-seconds": "10",
        "x-codex-secondary-used-percent": secondary,
        "x-codex-secondary-reset-after-seconds": "20",
    }
    assert wait_of(headers) == wait


def test_seconds_beat_the_instant_of_a_codex_window() -> None:
    headers = {"x-codex-primary-used-percent": "100", "x-codex-primary-reset-at": ahead(9)}
    assert wait_of(headers) == 9 * SECOND
    assert wait_of(headers | {"x-codex-primary-reset-after-seconds": "7"}) == 7 * SECOND
    assert wait_of(headers | {"x-codex-primary-reset-after-seconds": "soon"}) == 9 * SECOND


RESETS = {f"{UNIFIED}reset": ahead(1), f"{UNIFIED}5h-reset": ahead(5), f"{UNIFIED}7d-reset": ahead(7)}


@pytest.mark.parametrize(
    ("status", "claim", "five_hours", "week", "seconds"),
    [
        ("rejected", "five_hour", "", "", 5), ("rejected", "seven_day", "", "", 7),
        ("rejected", "SEVEN_DAY", "", "", 7), ("Rejected", "five_hour", "", "", 5),
        ("rejected", "overage", "", "", 1), ("rejected", "", "", "", 1),
        ("", "five_hour", "", "", 5), ("", "", "rejected", "", 5), ("", "", "", "rejected", 7),
        ("", "", "rejected", "REJECTED", 7), ("allowed", "five_hour", "", "", None), ("allowed", "", "", "", None),
        ("allowed", "", "rejected", "allowed", 5), ("", "", "", "", 1), ("", "", "allowed", "allowed", 1),
    ],
)  # fmt: skip
def test_the_window_of_a_subscription_by_claim_and_status(
    status: str, claim: str, five_hours: str, week: str, seconds: int | None
) -> None:
    said = {"status": status, "representative-claim": claim, "5h-status": five_hours, "7d-status": week}
    headers = RESETS | {UNIFIED + name: value for name, value in said.items() if value}
    assert wait_of(headers) == (seconds and seconds * SECOND)


def test_a_claim_whose_window_has_no_reset_falls_back_to_the_unified_one() -> None:
    headers = {f"{UNIFIED}status": "rejected", f"{UNIFIED}representative-claim": "five_hour"}
    assert wait_of(headers | {f"{UNIFIED}reset": ahead(1)}) == SECOND


DIMENSIONS = {
    "x-ratelimit": ("x-ratelimit-remaining-{}", "x-ratelimit-reset-{}"),
    "x-rate-limit": ("x-rate-limit-remaining-{}", "x-rate-limit-reset-{}"),
    "anthropic": ("anthropic-ratelimit-{}-remaining", "anthropic-ratelimit-{}-reset"),
}


@pytest.mark.parametrize("spelling", DIMENSIONS)
@pytest.mark.parametrize(
    ("requests", "tokens", "wait"),
    [
        ("0", "0", 9), ("0", "1", 5), ("1", "0", 9), ("1", "1", None), ("0", None, 5), (None, "0", 9),
        ("1", None, None), (None, None, 9), ("0.0", "0.5", 5), ("none", "0", 9),
    ],
)  # fmt: skip
def test_the_latest_reset_of_the_spent_dimensions_counts(
    spelling: str, requests: str | None, tokens: str | None, wait: int | None
) -> None:
    remaining, reset = DIMENSIONS[spelling]
    headers = {reset.format("requests"): "5s", reset.format("tokens-per-day"): "9s"}
    headers |= {remaining.format("requests"): requests} if requests is not None else {}
    headers |= {remaining.format("tokens-per-day"): tokens} if tokens is not None else {}
    assert wait_of(headers) == (wait and wait * SECOND)


def test_the_unified_status_is_a_dimension_that_tells() -> None:
    tokens = {"x-ratelimit-reset-tokens": "9s"}
    assert wait_of(tokens) == 9 * SECOND
    assert wait_of(tokens | {f"{UNIFIED}status": "rejected"}) is None
    assert wait_of(tokens | {f"{UNIFIED}status": "allowed"}) is None
    assert wait_of(tokens | {f"{UNIFIED}reset": ahead(3)}) == 9 * SECOND
    assert wait_of({f"{UNIFIED}reset": ahead(3)}) == 3 * SECOND


@pytest.mark.parametrize(
    "name",
    [
        "x-ratelimit-limit-requests", "x-ratelimit-over-limit", "x-ratelimit-reset-", "x-ratelimit-requests-reset",
        "anthropic-ratelimit-requests-limit", "anthropic-ratelimit-reset", "anthropic-ratelimit--reset",
        "x-rate-reset-d", "ratelimit-resets", "x-rate-limit-reset", "retry-after-s", "rate-limit-reset-tokens",
    ],
)  # fmt: skip
def test_a_header_of_another_name_states_no_wait(name: str) -> None:
    assert wait_of({name: "9s"}) is None


@pytest.mark.parametrize(
    ("value", "remaining", "wait"),
    [
        ("9", None, 9 * SECOND), ("9", "0", 9 * SECOND), ("9", "1", None), ("9", "many", None), ("9s", "0", 9 * SECOND),
        ("2026-06-01T12:00:09Z", "0", 9 * SECOND), ("", "0", None),
    ],
)  # fmt: skip
def test_a_reset_in_seconds_counts_unless_something_remains(
    value: str, remaining: str | None, wait: int | None
) -> None:
    headers = {"x-ratelimit-reset": value} | ({"x-ratelimit-remaining": remaining} if remaining is not None else {})
    assert wait_of(headers) == wait


@pytest.mark.parametrize(
    ("value", "wait"),
    [
        ("r=0;t=9", 9), ("remaining=0, reset=9", 9), ("R=0;T=9", 9), ("r=0.5;t=9", None), ("r=00;t=9", None),
        ("r=1;t=9", None), ("bar=0;t=9", None), ("r=0;past=9", None), ("r=0;t=9.5", None), ("t=9", None), ("r=0", None),
    ],
)  # fmt: skip
def test_a_structured_limit_counts_where_nothing_remains(value: str, wait: int | None) -> None:
    assert wait_of({"ratelimit": value}) == (wait and wait * SECOND)


LEFT = {"x-ratelimit-remaining-requests": "3"}
SPENT = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "soon"}


@pytest.mark.parametrize("others", [LEFT, SPENT, {f"{UNIFIED}status": "allowed"}])
def test_seconds_of_a_limit_that_tells_nothing_do_not_count_beside_a_limit_that_tells(others: dict[str, str]) -> None:
    assert wait_of(others | {"x-ratelimit-reset": "60"}) is None
    assert wait_of(others | {"x-ratelimit-reset": "60", "x-ratelimit-remaining": "0"}) == MINUTE
    assert wait_of(others | {"x-ratelimit-reset": ahead(60)}) == MINUTE
    assert wait_of({"x-ratelimit-reset": "60", "x-ratelimit-reset-tokens": "soon"}) == MINUTE


@pytest.mark.parametrize("dimension", ["unified", "unified-7d", "unified-overage", "unifieds"])
def test_what_begins_with_unified_is_no_dimension_of_its_own(dimension: str) -> None:
    assert wait_of(
        {f"anthropic-ratelimit-{dimension}-remaining": "0", f"anthropic-ratelimit-{dimension}-reset": "9"}
    ) == (9 * SECOND if dimension == "unified" else None)


def test_the_later_of_two_used_up_windows_is_the_wait_whichever_comes_first() -> None:
    for first, second in (("10", "20"), ("20", "10")):
        windows = {"x-codex-primary-reset-after-seconds": first, "x-codex-secondary-reset-after-seconds": second}
        used = {"x-codex-primary-used-percent": "100", "x-codex-secondary-used-percent": "100"}
        assert wait_of(windows | used) == 20 * SECOND


USELESS: dict[str, dict[str, str]] = {
    "epoch": {"x-ratelimit-reset": ahead(-60)},
    "milliseconds": {"retry-after-ms": "0"},
    "milliseconds, negative": {"retry-after-ms": "-5"},
    "codex": {"x-codex-primary-used-percent": "100", "x-codex-primary-reset-after-seconds": "0"},
    "unified": {f"{UNIFIED}status": "rejected", f"{UNIFIED}reset": ahead(-60)},
    "exact": {"ratelimit-reset": "0"},
    "dimension": {"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "0s"},
}
LATER = {
    "epoch": 2,
    "milliseconds": 3,
    "milliseconds, negative": 3,
    "codex": 4,
    "unified": 5,
    "exact": 6,
    "dimension": 8,
}


@pytest.mark.parametrize("useless", USELESS)
def test_a_zero_or_past_wait_leaves_the_word_to_the_families_behind_it(useless: str) -> None:
    for family in ORDER[LATER[useless] :]:
        if (useless, family) not in {("epoch", "bare"), ("unified", "bare"), ("dimension", "bare")}:
            assert wait_of(USELESS[useless] | FAMILIES[family][0]) == FAMILIES[family][1], family
    assert wait_of(USELESS[useless]) is None


@pytest.mark.parametrize(
    ("value", "wait"), [("900", 900), ("1.5", 2), ("0.2", 1), ("0", None), ("-1", None), ("5s", None), ("", None)]
)
def test_milliseconds_are_a_positive_number_rounded_up(value: str, wait: int | None) -> None:
    assert wait_of({"retry-after-ms": value}) == wait


def test_an_epoch_second_in_place_of_a_wait_lies_within_30_days() -> None:
    month = 30 * 86_400
    waits = [list(header_waits({"retry-after": ahead(s)}, NOW, extended=True)) for s in (month, month + 1)]
    assert waits == [[month * SECOND], [(NOW_S + month + 1) * SECOND]]


@pytest.mark.parametrize(("used", "wait"), [("100", 14 * SECOND), ("99.999", None)])
def test_a_window_is_full_at_a_hundred_per_cent_to_the_thousandth(used: str, wait: int | None) -> None:
    window = "x-codex-primary"
    assert wait_of({f"{window}-used-percent": used, f"{window}-reset-after-seconds": "14"}) == wait
