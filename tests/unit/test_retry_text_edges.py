"""Edges of waits stated in words: how far is read, which wording decides, what is only said under a condition."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import permutations

import pytest

from policy_service.domain.profiles import HintProfile
from policy_service.domain.retry_hints import parse_resets_in, read_hint
from policy_service.domain.retry_texts import TEXT_LIMIT, text_waits

NOW = int(datetime(2026, 6, 1, 12, tzinfo=UTC).timestamp() * 1_000)
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
READ = 24  # phrases of a text that are looked at


def wait_of(text: str) -> int | None:
    hint = read_hint({}, None, text, NOW, HintProfile())
    return hint.wait_ms if hint else None


ROWS = {
    1: ("please retry in 11s", 11 * SECOND),
    2: ("try again at 2026-06-01 12:00:12", 12 * SECOND),
    3: ("resets after 13s", 13 * SECOND),
    5: ("resets in 14s", 14 * SECOND),
    6: ("resets in 2 days", 2 * DAY),
    7: ("reset at 06-01 12:00:16 UTC", 16 * SECOND),
    8: ("wait 17 minutes", 17 * MINUTE),
    9: ("resets 3pm (UTC)", 3 * HOUR),
    9.1: ("limit reached|1780315219", 19 * SECOND),
    9.2: ("retry_delay { seconds: 20 }", 20 * SECOND),
    10: ("请在21秒后重试", 21 * SECOND),
}


@pytest.mark.parametrize("row", ROWS)
def test_each_row_is_read_alone(row: float) -> None:
    assert wait_of(ROWS[row][0]) == ROWS[row][1]


@pytest.mark.parametrize(("first", "second"), list(permutations(ROWS, 2)))
def test_of_two_wordings_the_lower_row_decides_wherever_it_stands(first: float, second: float) -> None:
    text = f"{ROWS[first][0]}. {ROWS[second][0]}."
    assert wait_of(text) == ROWS[min(first, second)][1]


@pytest.mark.parametrize("row", ROWS)
def test_of_one_wording_twice_the_first_that_lies_ahead_decides(row: float) -> None:
    words, wait = ROWS[row]
    later = words.replace("2026-06-01", "2026-06-05").replace("06-01", "06-05").replace("1 ", "9 ")
    assert wait_of(f"{words}. {later}") == wait


@pytest.mark.parametrize("words", ["please retry in 7s", "wait 7s", "请等待7秒"])
def test_a_text_is_read_to_its_limit_and_no_further(words: str) -> None:
    assert wait_of(words.rjust(TEXT_LIMIT)) == 7 * SECOND
    assert wait_of(words.rjust(TEXT_LIMIT + 1)) is None


def test_the_limit_is_the_documented_one_and_a_reset_begins_before_it() -> None:
    assert TEXT_LIMIT == 8_192
    assert parse_resets_in("resets in 7s".rjust(TEXT_LIMIT + 1)) == 7 * SECOND
    assert parse_resets_in("resets in 7s".rjust(TEXT_LIMIT + 2)) is None


def test_a_long_message_is_read_to_the_limit_too() -> None:
    message = "wait 7s".rjust(TEXT_LIMIT)
    body = {"error": {"message": message}}
    assert read_hint({}, body, f"{body} and more", NOW, HintProfile()) is not None
    body = {"error": {"message": f" {message}"}}
    assert read_hint({}, body, f"{body} and more", NOW, HintProfile()) is None


def test_as_many_occurrences_of_a_word_are_read_as_announced() -> None:
    assert wait_of("wait. " * (READ - 1) + "wait 5 minutes") == 5 * MINUTE
    assert wait_of("wait. " * READ + "wait 5 minutes") is None


def test_as_many_phrases_are_read_as_announced() -> None:
    before = "try again x, " * 12 + "retry x, " * (READ - 13)
    assert wait_of(f"{before} wait 5 minutes") == 5 * MINUTE
    assert wait_of(f"{before} retry x, wait 5 minutes") is None


def test_as_many_numbers_are_tried_in_other_languages_as_announced() -> None:
    assert wait_of("1, " * (2 * READ - 1) + "20秒后重试") == 20 * SECOND
    assert wait_of("1, " * (2 * READ) + "20秒后重试") is None


def test_as_many_resets_are_tried_as_announced() -> None:
    assert parse_resets_in("resets in 1 x, " * (READ - 1) + "resets in 5 minutes") == 5 * MINUTE
    assert parse_resets_in("resets in 1 x, " * READ + "resets in 5 minutes") is None


def test_a_limit_is_looked_for_as_often_as_a_phrase() -> None:
    assert wait_of("limit. " * (READ - 1) + "limit: 0. wait 5 minutes") is None
    assert wait_of("limit. " * READ + "limit: 0. wait 5 minutes") == 5 * MINUTE


@pytest.mark.parametrize(
    ("text", "wait"),
    [
        ("resets in 1 ms", 1), ("resets in 0 days, resets in 2 days", 2 * DAY), ("resets in 30 days", 30 * DAY),
        ("resets in 31 days", 30 * DAY), ("resets in 0.0001 s", 1),
    ],
)  # fmt: skip
def test_the_first_reset_ahead_counts_up_to_the_cap(text: str, wait: int) -> None:
    assert parse_resets_in(text) == wait


CONDITION = "recently"


def test_a_condition_at_the_beginning_of_the_text_holds() -> None:
    assert wait_of("recently changed? try again after 5 minutes") == 5 * MINUTE
    assert wait_of("recently changed, try again after 5 minutes") is None


@pytest.mark.parametrize("end", ".!?\n")
def test_a_condition_ends_with_its_sentence(end: str) -> None:
    assert wait_of(f"You recently changed the key{end} try again after 5 minutes") == 5 * MINUTE


def test_a_condition_is_looked_for_in_the_words_before_the_phrase() -> None:
    at_the_edge = "recently" + "x" * 119 + " try again after 5 minutes"
    assert wait_of(at_the_edge) is None
    assert wait_of(at_the_edge.replace("xx", "xxx", 1)) == 5 * MINUTE
    assert wait_of("-" + at_the_edge) is None
    assert wait_of("try again after 5 minutes if recently changed") == 5 * MINUTE


@pytest.mark.parametrize(
    ("stated", "fits"),
    [
        ("limit: 0", False), ("limit: 1", True), ("limit 1, requested 1", True), ("limit 1, requested 2", False),
        ("limit 10, requested: ~9", True), ("limit 9, requested: ~10", False), ("limit: 0.5", True),
        ("unlimit: 0", True), ("limit: 5, used 0", True), ("no limit at all, limit: 0", False),
        ("limit: 7, then limit: 0", False),
    ],
)  # fmt: skip
def test_a_wait_counts_only_where_the_request_can_ever_fit(stated: str, fits: bool) -> None:
    assert wait_of(f"{stated}. wait 50s") == (50 * SECOND if fits else None)


def test_what_can_never_fit_ends_the_extended_wordings_alone() -> None:
    assert wait_of("limit: 0. please retry in 50s") is None
    off = HintProfile(extended_texts=False)
    hint = read_hint({}, None, "limit: 0. please retry in 50s", NOW, off)
    assert hint is not None
    assert hint.wait_ms == 50 * SECOND


@pytest.mark.parametrize(
    ("text", "wait"),
    [
        ("retry 3 times, retry after 20 seconds", 20 * SECOND),
        ("swait 5 minutes", None),
        ("wait 5 minutes", 5 * MINUTE),
        ("available on 2026-06-02", 12 * HOUR),
        ("try again on 2026-06-02 or later", 12 * HOUR),
        ("reset in 1h1m1s", HOUR + MINUTE + SECOND),
        ("please retry in 5m", 5 * MINUTE),
        ("PLEASE RETRY IN 5S", 5 * SECOND),
        ("İ: please retry in 5s", 5 * SECOND),
        ("please retry after 2026-06-01T12:00:05Z", 5 * SECOND),
        ("retry after 2026-06-01 12:00:05", 5 * SECOND),
        ("wait until 2026-06-01 12:00:05", 5 * SECOND),
        ("available at 2026-06-01 12:00:05", 5 * SECOND),
        ("resets at 2026-06-01 12:00:05", 5 * SECOND),
        ("limit reached|1780315259", 59 * SECOND),
        ("limit reached 1780315259", None),
        ("limit reached|17803152590", None),
        ("retry_delay: { seconds: 5 }", 5 * SECOND),
        ("retry_delay { seconds: 5 } quota PerDay", None),
    ],
)
def test_wordings_at_the_edge_of_a_row(text: str, wait: int | None) -> None:
    assert wait_of(text) == wait


@pytest.mark.parametrize(
    ("text", "wait"),
    [
        ("20秒后重试", 20 * SECOND),
        ("20秒30秒后重试", 30 * SECOND),
        ("1小时30分钟后重试", 90 * MINUTE),
        ("patientez 30 secondes", 30 * SECOND),
        ("2026-06-01 13:00:00 限制，20秒后重试", 20 * SECOND),
        ("2026-06-01 13:00:00后重试", HOUR),
        ("2026-06-01 13:00:00 重试 or 2026-06-01 12:30:00 重试", HOUR),
        ("2026-06-01 13:00:00 限制", None),
        ("2026-06-01 13:00:00 noted, wait", None),
        ("30 secondes", None),
        ("Veuillez patienter pendant 2 minutes et 5 secondes", 2 * MINUTE + 5 * SECOND),
    ],
)
def test_values_between_words_of_other_languages(text: str, wait: int | None) -> None:
    assert wait_of(text) == wait


REFERENCE = {
    "please retry in 5s": 5 * SECOND, "please retry in 1.5s": 1_500, "please retry in 90000s": DAY,
    **{
        f"{phrase} {written}": HOUR
        for phrase in ("try again at", "wait until", "reset at", "resets at", "available at", "retry after")
        for written in (
            "2026-06-01 13:00", "2026-06-01T13:00:00", "2026-06-01 13:00:00.000", "2026-06-01T15:00:00+02:00",
            "2026-06-01T13:00:00Z", "2026-06-01 13:00 UTC",
        )
    },
    **{
        f"{phrase} {written}": wait
        for phrase in ("reset after", "resets after", "will reset after", "reset in", "resets in")
        for written, wait in {
            "1h2m3s": HOUR + 2 * MINUTE + 3 * SECOND, "1h": HOUR, "2m": 2 * MINUTE, "3s": 3 * SECOND,
            "1h3s": HOUR + 3 * SECOND, "2m3s": 2 * MINUTE + 3 * SECOND, "900h": 30 * DAY,
        }.items()
    },
    "reset in 1 day": DAY, "resets in 3 days": 3 * DAY, "resets in 2 day(s)": 2 * DAY,
    "reset at 06-01 12:30": 30 * MINUTE, "reset at 06-01 12:30:05 UTC": 30 * MINUTE + 5 * SECOND,
    "reset at 05-31 12:00 UTC": 30 * DAY,
}  # fmt: skip


@pytest.mark.parametrize("text", REFERENCE)
@pytest.mark.parametrize("extended", [True, False])
def test_the_reference_wordings_need_no_extension(text: str, extended: bool) -> None:
    hint = read_hint({}, None, f"Quota reached: {text}.", NOW, HintProfile(extended_texts=extended))
    assert (hint and hint.wait_ms) == REFERENCE[text]


PHRASES = ("try again", "retry", "wait", "reset", "resets", "available", "back", "cool down")


@pytest.mark.parametrize("connector", ["", "in", "after", "for", "within"])
@pytest.mark.parametrize("phrase", PHRASES)
def test_every_waiting_phrase_announces_a_duration_with_and_without_its_connectors(phrase: str, connector: str) -> None:
    for written in ("7 minutes", "7min", "420s"):
        assert wait_of(f"Too many requests, {phrase} {connector} {written}.".replace("  ", " ")) == 7 * MINUTE


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_waiting_phrase_without_a_wait_and_a_number_without_a_phrase_say_nothing(phrase: str) -> None:
    for text in (f"{phrase} later", f"decrease it and {phrase}", f"{phrase} 20 requests", f"{phrase}, 5 s used"):
        assert wait_of(text) is None, text


@pytest.mark.parametrize("text", ["please retry in 2m", "resets in 5 hours", "resets after 5 days"])
def test_the_rows_of_the_reference_take_no_other_units(text: str) -> None:
    assert list(text_waits(text, "", NOW, extended=False)) == []
    assert list(text_waits(text, "", NOW, extended=True)) != []
