"""Connection timer, stored times, clearing, recovery, health score (spec/connection_cooldown.md)."""

from __future__ import annotations

from datetime import UTC, date, datetime

import pytest

from policy_service.domain import cooldown
from policy_service.domain.cooldown import ConnectionState, ErrorFields, RecoveryView

NOON = int(datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp() * 1000)


def failing(at: int, until: int, **fields: object) -> ConnectionState:
    row = cooldown.merge_error(ConnectionState("p", "c"), ErrorFields("boom", "server_error", "upstream", "503", at))
    row = cooldown.start_timer(row, at, until)
    return type(row)(**{**{name: getattr(row, name) for name in row.__slots__}, **fields})


@pytest.mark.parametrize(
    ("stored", "instant"),
    [
        (1781696905131, 1781696905131),
        (1781696905131.0, 1781696905131),
        ("1781696905131.0", 1781696905131),
        (" 1781696905131 ", 1781696905131),
        ("2026-01-01T12:00:00Z", NOON),
        ("2026-01-01T12:00:00", NOON),
        ("2026-01-01T13:00:00+01:00", NOON),
        (datetime(2026, 1, 1, 12, tzinfo=UTC), NOON),
        (datetime(2026, 1, 1, 12), NOON),
        (date(2026, 1, 1), NOON - 12 * 3_600_000),
    ],
)
def test_every_stored_form_of_a_time_is_read(stored: object, instant: int) -> None:
    assert cooldown.read_instant(stored) == instant


@pytest.mark.parametrize("stored", [None, "soon", "", "nan", "inf", float("nan"), True, [], {}, "2026-13-01"])
def test_an_unreadable_stored_time_is_no_time(stored: object) -> None:
    assert cooldown.read_instant(stored) is None


def test_a_timer_is_over_at_its_very_end() -> None:
    row = failing(0, 5_000)
    assert cooldown.is_cooling(row, 4_999)
    assert not cooldown.is_cooling(row, 5_000)
    assert cooldown.remaining_ms(row, 4_999) == 1
    assert cooldown.remaining_ms(row, 6_000) == 0


def test_a_shorter_timer_never_replaces_a_longer_one_nor_its_source() -> None:
    row = cooldown.start_timer(ConnectionState("p", "c"), 0, 60_000, "header")
    after = cooldown.start_timer(row, 1_000, 5_000)
    assert (after.rate_limited_until, after.hint_source) == (60_000, "header")


def test_an_extended_block_keeps_its_start_and_a_new_one_begins_anew() -> None:
    row = cooldown.start_timer(ConnectionState("p", "c"), 0, 60_000)
    assert cooldown.start_timer(row, 30_000, 90_000).limited_since == 0
    assert cooldown.start_timer(row, 60_000, 90_000).limited_since == 60_000


def test_an_older_failure_does_not_overwrite_the_error_of_a_newer_one() -> None:
    row = failing(1_000, 4_000)
    older = ErrorFields("older", "unauthorized", "upstream", "401", 500)
    assert cooldown.merge_error(row, older) is row


def test_a_fresh_success_clears_everything() -> None:
    row = failing(1_000, 4_000, backoff_level=3, test_status="unavailable")
    assert cooldown.success(row, 1_000).is_default


def test_a_success_that_began_before_the_failure_clears_nothing() -> None:
    row = failing(1_000, 4_000)
    assert cooldown.success(row, 999) is row


def test_a_success_never_clears_a_terminal_state() -> None:
    row = failing(1_000, 4_000, test_status="banned")
    assert cooldown.success(row, 2_000) is row


def test_recovery_acts_only_on_the_row_it_saw() -> None:
    row = failing(1_000, 4_000)
    seen = RecoveryView("unavailable", 1_000, 4_000)
    recovered = cooldown.recover(row, seen)
    assert recovered is not None
    assert recovered.is_default
    newer = cooldown.start_timer(row, 2_000, 9_000)
    assert cooldown.recover(newer, seen) is None
    assert cooldown.recover(failing(1_500, 4_000), seen) is None


@pytest.mark.parametrize(
    ("row", "score"),
    [
        (ConnectionState("p", "c"), 100),
        (ConnectionState("p", "c", backoff_level=2), 80),
        (ConnectionState("p", "c", last_error="x"), 80),
        (ConnectionState("p", "c", rate_limited_until=1), 70),
        (ConnectionState("p", "c", backoff_level=8, last_error="x", rate_limited_until=1), 0),
    ],
)
def test_health_score_weighs_level_error_and_timer(row: ConnectionState, score: int) -> None:
    assert cooldown.health_score(row, 0) == score


def test_an_excerpt_is_short_one_line_and_shows_no_token() -> None:
    text = cooldown.excerpt("bad key\n sk-proj-ABCDEFGHIJKLMNOPQRSTUV " + "x " * 400)
    assert "ABCDEFGHIJ" not in text
    assert "\n" not in text
    assert len(text) <= 200


def test_the_rotation_gate_counts_failures_of_one_status_within_its_window() -> None:
    row = ConnectionState("p", "c")
    for status, at in ((429, 0), (500, 10), (429, 20)):
        row = cooldown.note_rotation(row, status, at, 100)
    assert cooldown.rotation_count(row, 429, 50, 100) == 3
    assert cooldown.rotation_count(row, 429, 100, 100) == 2
    assert cooldown.rotation_count(row, 500, 50, 100) == 2
