"""Edges of the grammar of waits: zones, offsets, lengths, clocks, durations (spec/retry_hints.md)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from policy_service.domain.profiles import HintProfile
from policy_service.domain.retry_grammar import (
    read_clock,
    read_date,
    read_duration,
    read_iso,
    read_month_day,
    read_number,
    read_zone,
    whole_duration,
)
from policy_service.domain.retry_headers import read_reset
from policy_service.domain.retry_hints import read_header_hint

NOW = int(datetime(2026, 6, 1, 12, tzinfo=UTC).timestamp() * 1_000)
HOUR = 3_600_000
OFFSETS = {
    "UTC": 0, "GMT": 0, "Z": 0, "EST": -5, "EDT": -4, "CDT": -5, "MST": -7, "MDT": -6, "PST": -8, "PDT": -7,
    "CET": 1, "CEST": 2, "JST": 9, "KST": 9, "HKT": 8, "SGT": 8, "AEST": 10, "AEDT": 11,
}  # fmt: skip


def offset_of(zone: str) -> timedelta | None:
    found = read_zone(f" {zone}", 0)
    return found[0].utcoffset(datetime(2026, 6, 1)) if found else None


@pytest.mark.parametrize("name", OFFSETS)
def test_abbreviations_with_one_meaning_have_their_offset(name: str) -> None:
    assert offset_of(name) == timedelta(hours=OFFSETS[name])


@pytest.mark.parametrize(
    ("zone", "minutes"),
    [
        ("+01:30", 90), ("-01:30", -90), ("+0130", 90), ("+130", 90), ("-530", -330), ("+0530", 330),
        ("-0945", -585), ("+5", 300), ("+14", 840),
        ("-14:59", -899), ("+15:00", None), ("CST", None), ("IST", None), ("Europe/Berlin", 120), ("(UTC)", 0),
    ],
)  # fmt: skip
def test_zones_by_offset_and_place(zone: str, minutes: int | None) -> None:
    assert offset_of(zone) == (None if minutes is None else timedelta(minutes=minutes))


@pytest.mark.parametrize(
    ("text", "ms", "end"),
    [
        ("1h2m3.5s", 3_723_500, 8), ("20ms", 20, 4), ("1m1h", 60_000, 2), ("1.5h30m", 5_400_000, 4), ("5 s", 5_000, 3),
        ("5s 5s", 5_000, 2), ("5M", None, 0), ("0s", 0, 2), ("5", None, 0), ("x5s", None, 0),
    ],
)  # fmt: skip
def test_a_duration_sums_units_from_large_to_small(text: str, ms: int | None, end: int) -> None:
    assert read_duration(text) == (None if ms is None else (ms, end))


@pytest.mark.parametrize(
    ("raw", "ms"),
    [
        ("1.5", 1_500), (" 2 ", 2_000), ("-1", None), (2, 2_000), (0, 0), (1.0005, 1_001), (True, None), (-1, None),
        (10**18, None), (10**18 - 1, (10**18 - 1) * 1_000), (float("nan"), None), (None, None),
        (" " * 63 + "1", 1_000), (" " * 64 + "1", None),
    ],
)  # fmt: skip
def test_a_number_is_wholly_a_number_of_sane_length(raw: object, ms: int | None) -> None:
    assert read_number(raw, 1_000) == ms


def test_a_whole_duration_is_nothing_else_and_no_longer_than_a_value() -> None:
    assert whole_duration(" 5s ") == 5_000
    assert whole_duration("5s later") is None
    assert whole_duration(" " * 62 + "5s") == 5_000
    assert whole_duration(" " * 63 + "5s") is None


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("3pm (UTC)", 3), ("12pm (UTC)", 24), ("12am (UTC)", 12), ("11am (UTC)", 23), ("1:30pm UTC", 1.5),
        ("12:00 UTC", 24), ("12:01 UTC", 1 / 60), ("23:59:59 UTC", 12 - 1 / 3_600), ("24:00 UTC", None),
        ("12:60 UTC", None), ("0am UTC", None), ("13pm UTC", None), ("3pm", None), ("3 (UTC)", None),
        ("3pm (Europe/Berlin)", 1), ("Jun 1, 3pm (UTC)", 3), ("Jun 2, 3pm (UTC)", 27),
    ],
)  # fmt: skip
def test_a_clock_time_is_its_next_occurrence_in_its_zone(text: str, hours: float | None) -> None:
    found = read_clock(text, 0, NOW)
    assert found is None or text[found[1] :] in ("", ")")
    assert (found and found[0] - NOW) == (None if hours is None else round(hours * HOUR))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("06-01 12:00:00", datetime(2027, 6, 1, 12, tzinfo=UTC)),
        ("06-01 12:00:01", datetime(2026, 6, 1, 12, 0, 1, tzinfo=UTC)),
        ("05-31 23:00", datetime(2027, 5, 31, 23, tzinfo=UTC)),
        ("02-29 10:00", datetime(2028, 2, 29, 10, tzinfo=UTC)),
        ("13-01 10:00", None),
        ("02-30 10:00", None),
    ],
)
def test_a_month_and_day_is_its_next_occurrence(text: str, expected: datetime | None) -> None:
    found = read_month_day(text, 0, NOW)
    assert (found and found[0]) == (expected and int(expected.timestamp() * 1_000))


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("2026-06-01T12:00:01Z", 1_000), ("2026-06-01 12:00", 0), ("2026-06-01T12:00:00.5Z", 500),
        ("2026-06-01T12:00:00.0005Z", 1), ("2026-06-01T12:00:00.1234567Z", 124), ("2026-06-01T14:00:00+02:00", 0),
        ("2026-06-01", None), ("2026-13-01T00:00Z", None),
    ],
)  # fmt: skip
def test_an_iso_instant_is_rounded_up_to_the_millisecond(text: str, ms: int | None) -> None:
    found = read_iso(text)
    assert (found and found[0] - NOW) == ms


def test_a_bare_date_counts_only_where_it_is_asked_for() -> None:
    assert read_iso("2026-06-02", date_only=True) == (NOW + 12 * HOUR, 10)
    assert read_date("2026-06-01T12:00:01Z") == NOW + 1_000
    assert read_date("2026-06-01T12:00:01Z or so") is None
    assert read_date("Mon, 01 Jun 2026 12:00:01 GMT") == NOW + 1_000
    assert read_date("01 Jun 2026 12:00:01 GMT") is None


@pytest.mark.parametrize(("status", "wait"), [("rejected", 60_000), ("allowed", None), (None, 60_000)])
def test_the_window_of_a_claim_counts_only_while_it_is_rejected(status: str | None, wait: int | None) -> None:
    headers = {
        "anthropic-ratelimit-unified-representative-claim": "five_hour",
        "anthropic-ratelimit-unified-5h-reset": str(NOW // 1_000 + 60),
    }
    if status is not None:
        headers["anthropic-ratelimit-unified-status"] = status
    hint = read_header_hint(headers, NOW, HintProfile())
    assert (hint and hint.wait_ms) == wait


SECONDS = NOW // 1_000


@pytest.mark.parametrize(
    ("value", "wait"),
    [
        ("30", 30_000), (str(SECONDS + 90), 90_000), (str(NOW + 90_000), 90_000), ("2m", 120_000),
        ("1700000000", 1_700_000_000_000), ("1700000001", 1_700_000_001_000 - NOW),
        ("10000000000", 10_000_000_000_000 - NOW), ("10000000001", 10_000_000_001 - NOW), ("", None), ("soon", None),
    ],
)  # fmt: skip
def test_a_reset_is_seconds_to_go_or_an_epoch_time_by_its_size(value: str, wait: int | None) -> None:
    assert read_reset(value, NOW) == wait
