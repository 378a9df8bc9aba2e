"""Edges of waits stated in a JSON body: each member, which of two decides, and how much of a large body is read."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import combinations
from typing import Any

import pytest

from policy_service.domain.ids import HintSource
from policy_service.domain.profiles import HintProfile
from policy_service.domain.retry_hints import read_hint

NOW = int(datetime(2026, 6, 1, 12, tzinfo=UTC).timestamp() * 1_000)
NOW_S = NOW // 1_000
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
CAP = 30 * DAY
RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"


def wait_of(body: object, *, extended: bool = True) -> int | None:
    hint = read_hint({}, body, "", NOW, HintProfile(extended_texts=extended))
    return hint.wait_ms if hint else None


def info(delay: object, kind: str = RETRY_INFO) -> dict[str, object]:
    return {"@type": kind, "retryDelay": delay}


MEMBERS: dict[str, object] = {
    "details": [info("101s")],
    "retryAfter": "2026-06-01T12:01:42Z",
    "retry_after_ms": 103_000,
    "retryAfterMs": "104000",
    "retry_after": 105,
    "resets_in_seconds": 107,
    "reset_after_seconds": 108,
    "retry_after_seconds": 109,
    "estimated_time": 110,
    "quotaResetDelay": "111s",
    "resets_at": NOW_S + 112,
    "reset_at": "2026-06-01T12:01:53Z",
    "reset_time": "2026-06-01 12:01:54",
    "resetsAt": NOW + 115_000,
    "resetAt": str(NOW_S + 116),
    "quotaResetTimeStamp": "2026-06-01T12:01:57Z",
}
"""In the order in which they are read; each states another wait."""
WAITS = dict(
    zip(MEMBERS, [101, 102, 103, 104, 105, 107, 108, 109, 110, 111, 112, 113, 114, 115, 116, 117], strict=True)
)
REFERENCE = ("details", "retryAfter", "retry_after_ms", "retryAfterMs")


@pytest.mark.parametrize("member", MEMBERS)
def test_each_member_is_read_alone_in_the_error_object_and_in_the_root(member: str) -> None:
    assert wait_of({"error": {member: MEMBERS[member]}}) == WAITS[member] * SECOND
    assert wait_of({member: MEMBERS[member]}) == WAITS[member] * SECOND


@pytest.mark.parametrize(("earlier", "later"), list(combinations(MEMBERS, 2)))
def test_of_two_members_the_earlier_of_the_table_decides(earlier: str, later: str) -> None:
    assert wait_of({later: MEMBERS[later], earlier: MEMBERS[earlier]}) == WAITS[earlier] * SECOND


@pytest.mark.parametrize("member", MEMBERS)
def test_only_the_reference_members_are_read_without_the_extension(member: str) -> None:
    expected = WAITS[member] * SECOND if member in REFERENCE else None
    assert wait_of({member: MEMBERS[member]}, extended=False) == expected


@pytest.mark.parametrize("member", [name for name in MEMBERS if name != "details"])
def test_what_only_some_gateways_nest_is_read_last_and_by_the_extension_alone(member: str) -> None:
    inner = {member: MEMBERS[member]}
    for nested in (
        {"error_details": inner},
        {"details": [{"error_details": inner}]},
        {"details": [{"metadata": inner}]},
    ):
        assert wait_of({"error": nested}) == WAITS[member] * SECOND
        assert wait_of({"error": nested, "resets_at": NOW_S + 7}) == 7 * SECOND
        assert wait_of({"error": nested}, extended=False) is None


@pytest.mark.parametrize("member", [name for name in MEMBERS if name != "details"])
def test_metadata_of_the_error_is_an_inner_object_and_read_first(member: str) -> None:
    nested = {"metadata": {member: MEMBERS[member]}}
    assert wait_of({"error": nested, "retry_after_ms": 7}) == WAITS[member] * SECOND


@pytest.mark.parametrize(
    ("delay", "wait"),
    [
        ({"seconds": 3}, 3_000), ({"nanos": 5}, 1), ({"nanos": 1_000_000}, 1), ({"nanos": 1_000_001}, 2), ({}, None),
        ({"seconds": "3", "nanos": "5"}, 3_001), ({"seconds": "x"}, None), ({"nanos": -5, "seconds": 3}, None),
        ({"seconds": -3}, None), ("5ms", 5), ("5 s", 5_000), ("5M", 5 * MINUTE), ("5H", 5 * HOUR), ("5", 5_000),
        ("5d", None), ("24h", DAY), ("25h", DAY), ("1.5m", 90_000), (" " * 62 + "5s", 5_000), (" " * 63 + "5s", None),
        (1, 1_000), (0.0001, 1), ([5], None), (None, None),
    ],
)  # fmt: skip
def test_a_delay_has_a_unit_or_is_seconds_or_a_protobuf_duration(delay: object, wait: int | None) -> None:
    assert wait_of({"error": {"details": [info(delay)]}}) == wait


def test_a_retry_info_is_told_apart_by_its_source() -> None:
    hint = read_hint({}, {"details": [info("5s")]}, "", NOW, HintProfile())
    assert hint is not None
    assert hint.source is HintSource.RETRY_INFO
    hint = read_hint({}, {"retry_after": 5}, "", NOW, HintProfile())
    assert hint is not None
    assert hint.source is HintSource.BODY


def test_as_many_details_are_read_as_announced() -> None:
    other = [{"@type": "ErrorInfo"}]
    assert wait_of({"details": other * 15 + [info("5s")]}) == 5 * SECOND
    assert wait_of({"details": other * 16 + [info("5s")]}) is None
    assert wait_of({"details": {"0": info("5s")}}) is None
    assert wait_of({"details": ["text", info("5s")]}) == 5 * SECOND


def test_the_type_of_a_detail_is_read_up_to_its_limit() -> None:
    assert wait_of({"details": [info("5s", "RetryInfo".rjust(200))]}) == 5 * SECOND
    assert wait_of({"details": [info("5s", "RetryInfo".rjust(201))]}) is None
    assert wait_of({"details": [info("5s", "DebugInfo")]}) is None


SECONDS_KEYS = [name for name in MEMBERS if WAITS[name] in range(105, 112)]
INSTANT_KEYS = [name for name in MEMBERS if WAITS[name] in range(112, 118)]
SIZES: list[tuple[object, int | None, int | None]] = [
    (1, SECOND, None), ("1", SECOND, None), (0, None, None), (-1, None, None), ("soon", None, None),
    (1_000_000_000, CAP, None), (1_000_000_001, None, None), (NOW_S, None, None), (NOW_S + 1, SECOND, SECOND),
    (10_000_000_000, CAP, CAP), (10_000_000_001, None, None), (NOW + 1, 1, 1), (NOW, None, None),
    ("1m", MINUTE, None), ("2026-06-01T12:00:01Z", None, SECOND), (True, None, None), ([1], None, None),
    (30 * 86_400, CAP, None), (30 * 86_400 - 1, CAP - SECOND, None), (31 * 86_400, CAP, None),
]  # fmt: skip


@pytest.mark.parametrize(("value", "seconds", "_instant"), SIZES)
@pytest.mark.parametrize("key", SECONDS_KEYS)
def test_seconds_to_go_are_told_from_times_of_the_epoch_by_size(
    key: str, value: object, seconds: int | None, _instant: int | None
) -> None:
    assert wait_of({key: value}) == seconds


@pytest.mark.parametrize(("value", "_seconds", "instant"), SIZES)
@pytest.mark.parametrize("key", INSTANT_KEYS)
def test_an_instant_is_a_date_or_a_time_of_the_epoch(
    key: str, value: object, _seconds: int | None, instant: int | None
) -> None:
    assert wait_of({key: value}) == instant


@pytest.mark.parametrize("value", ["2026-06-01T12:00:00Z", "2026-05-31T12:00:00Z", "soon"])
def test_a_date_that_is_over_leaves_the_word_to_the_next_member(value: str) -> None:
    assert wait_of({"retryAfter": value, "retry_after": 5}) == 5 * SECOND


def quoted(count: int) -> dict[str, Any]:
    headers = {f"x-other-{number}": "1" for number in range(count)} | {"Retry-After": "5"}
    return {"error": {"metadata": {"headers": headers}}}


def test_quoted_headers_are_read_up_to_their_limit() -> None:
    assert wait_of(quoted(0)) == 5 * SECOND
    assert wait_of(quoted(63)) == 5 * SECOND
    assert wait_of(quoted(64)) is None
    assert wait_of({"error": {"metadata": {"headers": "Retry-After: 5"}}}) is None
    assert wait_of({"error": {"metadata": {"headers": {"retry-after": 5}}}}) == 5 * SECOND
    assert wait_of({"error": {"metadata": {"headers": {"retry-after-ms": "5"}}}}) == 5
    assert wait_of(quoted(0), extended=False) is None


@pytest.mark.parametrize("member", ["retryAfter", *INSTANT_KEYS])
def test_a_day_without_a_time_stands_for_its_first_moment(member: str) -> None:
    assert wait_of({member: "2026-06-02"}) == 12 * HOUR
    assert wait_of({member: "2026-06-01"}) is None
