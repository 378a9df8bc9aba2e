"""Units, months, zones and clocks of stated waits, word by word (spec/retry_hints.md sections 2 and 4)."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

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

NOW = int(datetime(2026, 6, 1, 12, tzinfo=UTC).timestamp() * 1_000)
SECOND, MINUTE, HOUR, DAY, WEEK = 1_000, 60_000, 3_600_000, 86_400_000, 604_800_000
WORDS = {
    1: "ms msec msecs millisecond milliseconds миллисекунд",
    SECOND: "s sec secs second seconds seconde sekunden segundos secondo saniye giây detik сек секунды",
    MINUTE: "m min mins minute minutes minuten minutos minuti minuut minuty dakika phút menit мин минуты хвилини",
    HOUR: "h hr hrs hour hours heure heures stunde stunden horas ore uur godzin saat giờ jam час часа годин",
    DAY: "d day days jour jours tag tage día dias giorno giorni dag dni gün ngày hari день дня днів",
    WEEK: "w wk wks week weeks semaine woche wochen semana settimana неделю недели",
}
CHARACTERS = {
    1: "毫秒 ミリ秒", SECOND: "秒 秒钟 秒鐘 초", MINUTE: "分 分钟 分鐘 分間 분",
    HOUR: "小时 小時 个小时 個小時 時間 시간", DAY: "天 日 일", WEEK: "周 星期 週間 주",
}  # fmt: skip
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")


@pytest.mark.parametrize(("unit_ms", "words"), WORDS.items())
def test_every_unit_word_has_its_length(unit_ms: int, words: str) -> None:
    for word in words.split():
        assert read_duration(f"3 {word}") == (3 * unit_ms, len(word) + 2), word


@pytest.mark.parametrize(("unit_ms", "words"), CHARACTERS.items())
def test_a_unit_without_spaces_is_the_longest_that_the_characters_begin_with(unit_ms: int, words: str) -> None:
    for word in words.split():
        assert read_duration(f"3{word}") == (3 * unit_ms, len(word) + 1), word
        assert read_duration(f"3 {word}后重试") == (3 * unit_ms, len(word) + 2), word


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("5 apples", None), ("5后", None), ("5 M", None), ("5 m", (5 * MINUTE, 3)), ("5 MIN", (5 * MINUTE, 5)),
        ("1h and 5 min", (65 * MINUTE, 12)), ("1h and x", (HOUR, 2)), ("1h, 5 min", (65 * MINUTE, 9)),
        ("1h et 5 min", (65 * MINUTE, 11)), ("1w1d1h1m1s1ms", (WEEK + DAY + HOUR + MINUTE + SECOND + 1, 13)),
        ("1h 60m", (2 * HOUR, 6)), ("1m 1m", (MINUTE, 2)), ("1s1h", (SECOND, 2)), ("1.5s", (1_500, 4)),
        ("0.5h30m", (30 * MINUTE, 4)), ("0.0001s", (1, 7)), ("0ms", (0, 3)), ("1小时30分钟后", (90 * MINUTE, 7)),
        ("5   s", None), ("5\ts", (5_000, 3)), ("", None),
    ],
)  # fmt: skip
def test_a_duration_ends_with_its_last_unit(text: str, found: tuple[int, int] | None) -> None:
    assert read_duration(text) == found


def test_a_duration_is_read_at_its_position() -> None:
    assert read_duration("x 5s y", 2) == (5_000, 4)
    assert read_duration("x 5s y", 1) is None
    assert whole_duration("5s.") is None


@pytest.mark.parametrize(
    ("raw", "unit_ms", "ms"),
    [
        ("0.1", 1_000, 100), ("1.", 1_000, 1_000), (".5", 1_000, None), ("1e3", 1_000, None), ("+1", 1_000, None),
        ("1.0001", 1_000, 1_001), ("7", 1, 7), (0.1 + 0.2, 1_000, 300), (1.0000000004, 1_000, 1_000),
        (1.000000004, 1_000, 1_001), (1e17, 1, 10**17), (1e18, 1, None), (0.0, 1_000, 0), (-0.5, 1_000, None),
        ("1" * 18, 1, int("1" * 18)), ("1" * 19, 1, None), ("", 1_000, None), (False, 1_000, None),
    ],
)  # fmt: skip
def test_a_number_is_scaled_without_binary_noise(raw: object, unit_ms: int, ms: int | None) -> None:
    assert read_number(raw, unit_ms) == ms


@pytest.mark.parametrize("number", range(12))
def test_every_month_has_its_number(number: int) -> None:
    name = MONTHS[number]
    year = 2027 if number < 5 else 2026
    expected = int(datetime(year, number + 1, 28, 15, tzinfo=UTC).timestamp() * 1_000)
    for written in (f"{name} 28, 3pm (UTC)", f"{name.upper()}. 28th at 3pm (UTC)", f"{name} 28, {year}, 3pm (UTC)"):
        found = read_clock(written, 0, NOW)
        assert (found and found[0]) == expected, written


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("foo 28, 3pm (UTC)", None), ("Jun 2, 3pm (Europe/Berlin)", 25), ("Jun 2, 3pm (America/New_York)", 31),
        ("Jun 31, 3pm (UTC)", None), ("Jun 2, 2025, 3pm (UTC)", None), ("Jun 1, 12pm (UTC)", 365 * 24),
        ("Jun 1, 2026, 12pm (UTC)", None), ("Jun 1, 2027, 12pm (UTC)", 365 * 24), ("Jun 2, 3pm", None),
        ("1am (Pacific/Kiritimati)", 23), ("3am (Pacific/Kiritimati)", 1), ("2am (Pacific/Kiritimati)", 24),
        ("1am (America/New_York)", 17), ("12:00:59 UTC", 59 / 3_600), ("12:00:60 UTC", None), ("12:59 UTC", 59 / 60),
        ("1am UTC", 13), ("12:30 a.m. UTC", 12.5), ("12:30 p.m. UTC", 0.5), ("11:59:59 PM UTC", 12 - 1 / 3_600),
        ("3pm (Mars/Base)", None), ("3pm (Europe/Nowhere)", None), ("3pm UTC", 3), ("15 UTC", None), ("noon UTC", None),
        ("0:00 UTC", 12), ("00:30 GMT", 12.5), ("23:00 UTC+1", 10), ("5pm CEST", 3), ("13:00 CST", None),
    ],
)  # fmt: skip
def test_a_clock_strikes_next_in_its_zone(text: str, hours: float | None) -> None:
    found = read_clock(text, 0, NOW)
    assert (found and found[0] - NOW) == (None if hours is None else round(hours * HOUR))


@pytest.mark.parametrize(
    ("now", "text", "expected"),
    [
        (datetime(2096, 3, 1, tzinfo=UTC), "02-29 10:00", datetime(2104, 2, 29, 10, tzinfo=UTC)),
        (datetime(2026, 12, 31, 23, tzinfo=UTC), "01-01 00:30", datetime(2027, 1, 1, 0, 30, tzinfo=UTC)),
        (datetime(2026, 1, 1, tzinfo=UTC), "12-31 23:59:59", datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC)),
        (datetime(2026, 1, 1, tzinfo=UTC), "01-01 00:00:01 UTC", datetime(2026, 1, 1, 0, 0, 1, tzinfo=UTC)),
        (datetime(2026, 1, 1, tzinfo=UTC), "00-10 00:00", None),
        (datetime(2026, 1, 1, tzinfo=UTC), "01-00 00:00", None),
        (datetime(2026, 1, 1, tzinfo=UTC), "01-01 24:00", None),
        (datetime(2026, 1, 1, tzinfo=UTC), "1-1 10:00", None),
    ],
)
def test_a_day_of_the_year_comes_next_whatever_the_calendar(
    now: datetime, text: str, expected: datetime | None
) -> None:
    found = read_month_day(text, 0, int(now.timestamp() * 1_000))
    assert (found and found[0]) == (expected and int(expected.timestamp() * 1_000))


def test_an_instant_ends_behind_its_zone() -> None:
    assert read_month_day("x 06-01 12:00:01 UTC", 2, NOW) == (NOW + 1_000, 16)
    assert read_iso("2026-06-01 12:00:01 UTC, then") == (NOW + 1_000, 23)
    assert read_iso("2026-06-01 12:00:01, then") == (NOW + 1_000, 19)
    assert read_iso("x 2026-06-01T12:00:01Z", 2) == (NOW + 1_000, 22)
    assert read_clock("x 3pm UTC y", 2, NOW) == (NOW + 3 * HOUR, 9)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("2026-06-01T12:00:00.001Z", 1), ("2026-06-01T12:00:00.0010001Z", 1), ("2026-06-01T12:00:00.001001Z", 2),
        ("2026-06-01T12:00:00,25Z", 250), ("2026/06/01 12:00:01", 1_000), ("2026-6-1 12:00:01", 1_000),
        ("2026-06-01 at 12:00:01", 1_000), ("2026-06-01, 12:00:01", 1_000), ("2026-06-01T11:59:59.9995Z", 0),
        ("2026-06-01T12:00:00.000000001Z", 0), ("2026-06-01T24:00:00Z", None), ("2026-06-01T12:60:00Z", None),
        ("2026-06-01T12:00:60Z", None), ("0000-01-01T00:00Z", None), ("9999-12-31T23:59:59-14:00", 251_607_131_999_000),
    ],
)  # fmt: skip
def test_an_iso_instant_to_the_millisecond(text: str, ms: int | None) -> None:
    found = read_iso(text)
    if text.startswith("9999"):  # beyond the calendar in UTC, but an instant all the same
        assert found is not None
        assert found[0] > NOW
    else:
        assert (found and found[0] - NOW) == ms


@pytest.mark.parametrize(
    ("raw", "ms"),
    [
        ("2026-06-01T12:00:01Z".ljust(64), 1_000), ("2026-06-01T12:00:01Z".ljust(65), None),
        (" Mon, 01 Jun 2026 12:00:01 GMT ", 1_000), ("Mon, 01 Jun 2026 14:00:01 +0200", 1_000),
        ("Mon, 01 Jun 2026 12:00:01", 1_000), ("Mon", None), ("Monday", None), ("", None), ("12:00", None),
        ("Mon, 32 Jun 2026 12:00:01 GMT", None), ("2026-06-02", 12 * HOUR), ("2026-06-02, noon", None),
        ("2026-13-02", None),
    ],
)  # fmt: skip
def test_a_date_is_the_whole_value(raw: str, ms: int | None) -> None:
    found = read_date(raw)
    assert (found and found - NOW) == ms


@pytest.mark.parametrize(
    ("text", "end"),
    [(" UTC", 4), ("  (UTC)", 6), ("Z", 1), (" UTCx", None), (" +02:00", 7), (" Europe/Berlin", 14), ("   UTC", None)],
)
def test_a_zone_ends_behind_its_name(text: str, end: int | None) -> None:
    found = read_zone(text, 0)
    assert (found and found[1]) == end


@pytest.mark.parametrize("region", ["Africa/Cairo", "America/Lima", "Antarctica/Troll", "Arctic/Longyearbyen",
    "Asia/Tokyo", "Atlantic/Azores", "Australia/Sydney", "Canada/Eastern", "Etc/UTC", "Europe/Paris",
    "Indian/Maldives", "Pacific/Auckland", "US/Pacific", "America/Argentina/Salta"])  # fmt: skip
def test_a_place_of_every_region_is_a_zone(region: str) -> None:
    assert read_zone(region, 0) is not None


def test_an_abbreviation_of_a_zone_has_its_hours() -> None:
    hours = {
        "UTC": 0, "GMT": 0, "Z": 0, "EST": -5, "EDT": -4, "CDT": -5, "MST": -7, "MDT": -6, "PST": -8, "PDT": -7,
        "CET": 1, "CEST": 2, "JST": 9, "KST": 9, "HKT": 8, "SGT": 8, "AEST": 10, "AEDT": 11,
    }  # fmt: skip
    for name, expected in hours.items():
        assert read_iso(f"2026-06-02 12:00 {name}", 0) == (NOW + DAY - expected * HOUR, 17 + len(name)), name


def test_a_date_of_http_begins_with_a_day_of_three_letters() -> None:
    assert read_date("Tue, 02 Jun 2026 12:00:00 GMT") == NOW + DAY
    assert read_date("Tu, 02 Jun 2026 12:00:00 GMT") is None
