"""Whole rows of a connection: what timer, errors, streaks, revivals and acts keep and change, to the last field."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from policy_service.domain import cooldown, daily_reset, terminal
from policy_service.domain.connection_state import ConnectionState, EarlyProbe
from policy_service.domain.cooldown import ErrorFields, RecoveryView
from policy_service.domain.ids import AuthClass
from policy_service.domain.profiles import TerminalProfile
from policy_service.domain.terminal import Evidence, Refusal, Resolution, RetryPermit

PROBE = EarlyProbe("e", 1_000, 2_000)
FULL = ConnectionState(
    "p", "c", "unavailable", True, 4, 60_000, 1_000, "header", 3, "boom", "server_error", "upstream", "503", 1_000,
    1, 500, 300_500, 2, 700, "x", 900, 2, 600, 70_000, 80_000, ((429, 1_000),), PROBE, 1_000, "f.0",
)  # fmt: skip
EXPIRED = replace(FULL, test_status="expired", retry_permit="", retry_permit_until=None)
DAY = 86_400_000


# -- timer ---------------------------------------------------------------------------------------------------
def test_a_later_end_replaces_timer_and_source_and_keeps_start_and_probe_while_it_runs() -> None:
    assert cooldown.start_timer(FULL, 5_000, 60_001, "body") == replace(
        FULL, rate_limited_until=60_001, hint_source="body"
    )
    active = replace(FULL, test_status="active")
    assert cooldown.start_timer(active, 5_000, 60_000, "body") == FULL


def test_a_timer_that_was_over_begins_anew_without_the_old_probe() -> None:
    assert cooldown.start_timer(FULL, 60_000, 70_000) == replace(
        FULL, rate_limited_until=70_000, limited_since=60_000, hint_source="", early_probe=None
    )
    without_start = replace(FULL, limited_since=None)
    assert cooldown.start_timer(without_start, 5_000, 70_000).limited_since == 5_000


@pytest.mark.parametrize(("at", "covered"), [(999, False), (1_000, True), (59_999, True), (60_000, False)])
def test_a_timer_covers_the_time_from_its_start_to_before_its_end(at: int, covered: bool) -> None:
    assert cooldown.was_cooling_at(FULL, at) is covered
    assert cooldown.was_cooling_at(replace(FULL, limited_since=None), at) is (at < 60_000)
    assert cooldown.remaining_ms(ConnectionState("p", "c"), at) == 0


def test_the_newest_error_is_kept_whole() -> None:
    fields = ErrorFields("new", "quota", "local", "429", 1_000)
    newer = replace(
        FULL,
        last_error="new",
        last_error_type="quota",
        last_error_source="local",
        error_code="429",
        last_error_at=1_000,
    )
    assert cooldown.merge_error(FULL, fields) == newer
    assert cooldown.merge_error(FULL, replace(fields, at=999)) is FULL
    assert cooldown.merge_error(FULL, replace(fields, at=None)) == newer
    assert cooldown.merge_error(FULL, replace(fields, at=2_000)) == replace(newer, last_error_at=2_000)


def test_a_success_empties_timer_error_and_ladder_and_nothing_else() -> None:
    cleared = replace(
        FULL, test_status="active", rate_limited_until=None, limited_since=None, hint_source="", backoff_level=0,
        last_error="", last_error_type="", last_error_source="", error_code="", last_error_at=None, early_probe=None,
    )  # fmt: skip
    assert cooldown.success(FULL, 1_000) == cleared
    assert cooldown.success(FULL, 999) is FULL
    seen = RecoveryView("unavailable", 1_000, 60_000)
    assert cooldown.recover(FULL, seen) == cleared
    for other in (
        replace(seen, test_status="active"), replace(seen, last_error_at=1), replace(seen, rate_limited_until=None)
    ):  # fmt: skip
        assert cooldown.recover(FULL, other) is None
    assert cooldown.recover(replace(FULL, test_status="banned"), replace(seen, test_status="banned")) is None


def test_a_call_that_began_before_the_newest_failure_counted_or_not_clears_nothing() -> None:
    first = ConnectionState("p", "c", last_error_at=0)
    assert [cooldown.is_fresh(first, at) for at in (-1, 0)] == [False, True]
    prolonged = replace(FULL, failure_heard_at=2_000)
    assert [cooldown.is_fresh(prolonged, at) for at in (1_999, 2_000)] == [False, True]
    assert not cooldown.is_fresh(replace(prolonged, rate_limited_until=None), 1_999)
    assert cooldown.is_fresh(replace(FULL, last_event_at=2_000), 1_000)
    assert cooldown.is_fresh(ConnectionState("p", "c", rate_limited_until=5, last_event_at=9), -9)


def test_a_failure_is_heard_of_only_where_no_newer_one_is_known() -> None:
    heard = cooldown.heard(FULL, 1_001)
    assert heard == replace(FULL, failure_heard_at=1_001)
    assert cooldown.heard(FULL, 1_000) is FULL
    assert cooldown.heard(heard, 1_001) is heard
    assert cooldown.success(heard, 1_000) is heard
    assert cooldown.success(heard, 1_001).failure_heard_at is None


def test_the_first_failure_is_heard_of_however_early_it_is() -> None:
    assert cooldown.heard(ConnectionState("p", "c"), 1).failure_heard_at == 1
    assert cooldown.remaining_ms(ConnectionState("p", "c"), 0) == 0


@pytest.mark.parametrize(
    ("level", "error", "now", "score"), [(0, "", 60_000, 100), (3, "", 60_000, 70), (0, "x", 60_000, 80),
    (0, "", 59_999, 70), (1, "x", 59_999, 40), (9, "x", 59_999, 0)],
)  # fmt: skip
def test_each_burden_costs_its_points(level: int, error: str, now: int, score: int) -> None:
    assert cooldown.health_score(replace(FULL, backoff_level=level, last_error=error), now) == score


def test_the_rotation_window_counts_what_is_younger_than_it() -> None:
    row = replace(FULL, rotation_failures=((429, 0), (503, 1), (429, 2)))
    assert cooldown.rotation_count(row, 429, 100, 100) == 2
    assert cooldown.rotation_count(row, 429, 99, 100) == 3
    assert cooldown.note_rotation(row, 503, 101, 100) == replace(FULL, rotation_failures=((429, 2), (503, 101)))


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        (" two\n\tlines ", "two lines"),
        ("key " + "a" * 20, "key …"),
        ("key " + "a" * 19, "key " + "a" * 19),
        ("a b " * 60, ("a b " * 60)[:200]),
    ],
)
def test_an_excerpt_is_one_short_line_without_tokens(text: str, stored: str) -> None:
    assert cooldown.excerpt(text) == stored


def test_a_connection_is_default_whatever_its_generation_and_newest_event() -> None:
    kept = ConnectionState("p", "c", generation=9, last_event_at=5, fact_id="f.1")
    assert kept.is_default
    assert not replace(kept, streak=1).is_default
    assert ConnectionState.default(kept.key) == ConnectionState("p", "c")


# -- terminal states -----------------------------------------------------------------------------------------
def test_entering_a_terminal_state_drops_timer_probe_and_streaks_and_keeps_the_error() -> None:
    assert terminal.enter(FULL, "banned") == replace(
        FULL, test_status="banned", rate_limited_until=None, limited_since=None, hint_source="", early_probe=None,
        streak=0, streak_at=None, streak_until=None, soft_strikes=0, soft_since=None,
    )  # fmt: skip
    assert terminal.enter(EXPIRED, "banned") is EXPIRED


@pytest.mark.parametrize("kind", [
    "project_route_error", "geo_blocked", "oauth_invalid_token", "fingerprint_rejection", "request_rejected",
    "model_not_found",
])  # fmt: skip
def test_harmless_types_are_never_terminal(kind: str) -> None:
    assert terminal.resolve_terminal(Evidence(401, kind), FULL, 0) == Resolution()


@pytest.mark.parametrize(("expires_at", "live"), [(1_060_001, True), (1_060_000, False), (None, False)])
def test_a_token_excuses_a_401_by_what_is_left_of_it(expires_at: int | None, live: bool) -> None:
    found = terminal.resolve_terminal(Evidence(401, token_expires_at=expires_at), FULL, 1_000_000)
    assert found == (Resolution(live_token=True) if live else Resolution("expired"))


@pytest.mark.parametrize(
    ("strikes", "since", "now", "soft"), [(3, 0, 0, False), (2, 0, 0, True), (3, 0, 3_599_999, False),
    (3, 0, 3_600_000, True), (3, None, 0, True)],
)  # fmt: skip
def test_the_fourth_strike_within_the_hour_is_the_last(strikes: int, since: int | None, now: int, soft: bool) -> None:
    row = replace(FULL, soft_strikes=strikes, soft_since=since)
    found = terminal.resolve_terminal(Evidence(401, "unauthorized", ambiguous_auth=True), row, now)
    assert found == (Resolution(soft_strike=True) if soft else Resolution("expired"))


def test_strikes_are_counted_from_the_first_of_the_hour() -> None:
    assert terminal.with_soft_strike(FULL, 3_600_599) == replace(FULL, soft_strikes=3, soft_since=600)
    assert terminal.with_soft_strike(FULL, 3_600_600) == replace(FULL, soft_strikes=1, soft_since=3_600_600)
    assert terminal.with_soft_strike(ConnectionState("p", "c"), 7) == ConnectionState(
        "p", "c", soft_strikes=1, soft_since=7
    )


@pytest.mark.parametrize(
    ("scope", "banned", "auth", "off"),
    [
        ("all", True, AuthClass.API_KEY, True), ("subscription", True, AuthClass.API_KEY, False),
        ("subscription", True, AuthClass.OAUTH, True), ("all", False, AuthClass.OAUTH, False),
    ],
)  # fmt: skip
def test_a_ban_switches_off_within_its_scope(scope: str, banned: bool, auth: AuthClass, off: bool) -> None:
    profile = TerminalProfile(auto_disable_banned=banned, auto_disable_scope=scope)
    assert terminal.disables(profile, auth) is off


def test_refusals_at_the_edges_of_cooldown_and_day() -> None:
    row = replace(FULL, streak=1, streak_at=500, streak_until=300_500)
    assert terminal.refuse(row, 300_499) == Refusal(1, 1, counted=False)
    assert terminal.refuse(row, 300_500) == Refusal(2, 900_000, counted=True)
    assert terminal.refuse(row, 499 + DAY) == Refusal(2, 900_000, counted=True)
    assert terminal.refuse(row, 500 + DAY) == Refusal(1, 300_000, counted=True)
    assert terminal.refuse(replace(row, streak=2), 300_500) == Refusal(3, 0, counted=True, bans=True)
    assert terminal.with_refusal(row, Refusal(2, 900_000, counted=True), 300_500) == replace(
        row, streak=2, streak_at=300_500, streak_until=1_200_500
    )
    assert terminal.with_refusal(row, Refusal(1, 1, counted=False), 7) is row
    assert terminal.with_refusal(row, Refusal(3, 0, counted=True, bans=True), 7) == replace(
        terminal.without_streak(row), active=False
    )


# -- revivals ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("attempts", "due"), [(0, 300_700), (1, 600_700), (2, 1_200_700), (3, None)]
)  # fmt: skip
def test_revivals_wait_twice_as_long_each_time_and_end_after_three(attempts: int, due: int | None) -> None:
    assert terminal.next_retry_at(replace(EXPIRED, retry_attempts=attempts)) == due


def test_a_revival_is_due_from_its_instant_while_nobody_holds_it() -> None:
    row = replace(EXPIRED, retry_attempts=0)
    assert [terminal.retry_due(row, now) for now in (300_699, 300_700)] == [False, True]
    held = replace(row, retry_permit="x", retry_permit_until=400_000)
    assert [terminal.retry_due(held, now) for now in (399_999, 400_000)] == [False, True]
    assert not terminal.retry_due(replace(row, active=False), 9_000_000)
    assert not terminal.retry_due(replace(row, test_status="active"), 9_000_000)
    assert terminal.next_retry_at(replace(row, retry_at=None)) == 0
    assert terminal.retry_due(replace(row, retry_at=None), 0)


def test_a_revival_handed_out_is_written_with_its_end() -> None:
    row = replace(EXPIRED, retry_attempts=0, token_expires_at=700_701)
    taken, permit = terminal.grant_retry(row, "r", 400_700)
    assert permit == RetryPermit("r", 460_700, test_token_first=True)
    assert taken == replace(row, retry_permit="r", retry_permit_until=460_700, retry_at=400_700)
    assert terminal.grant_retry(replace(row, token_expires_at=700_700), "r", 400_700)[1] == RetryPermit(
        "r", 460_700, test_token_first=False
    )
    assert terminal.grant_retry(row, "r", 300_699) == (row, None)


def test_a_revival_that_was_never_reported_counts_as_failed_once_its_time_is_over() -> None:
    held = replace(EXPIRED, retry_attempts=0, retry_permit="x", retry_permit_until=60_700)
    assert terminal.grant_retry(held, "r", 60_699) == (held, None)
    failed = replace(held, retry_attempts=1, retry_permit="", retry_permit_until=None)
    assert terminal.grant_retry(held, "r", 60_700) == (failed, None)
    taken, permit = terminal.grant_retry(held, "r", 600_700)
    assert permit is not None
    assert taken == replace(failed, retry_permit="r", retry_permit_until=660_700, retry_at=600_700)


def test_the_third_failed_revival_switches_the_connection_off() -> None:
    held = replace(EXPIRED, retry_attempts=1, retry_permit="x", retry_permit_until=9_000)
    second = terminal.retry_failed(held, 800)
    assert second == replace(held, retry_attempts=2, retry_at=800, retry_permit="", retry_permit_until=None)
    assert terminal.retry_failed(held, 600).retry_at == 700
    third = terminal.retry_failed(second, 900)
    assert third == replace(second, retry_attempts=3, retry_at=900, active=False)
    assert terminal.retry_failed(third, 1_000) is third
    assert terminal.retry_failed(FULL, 1_000) is FULL
    assert not terminal.retry_failed(replace(held, active=False), 800).active


def test_a_revival_that_failed_at_once_is_dated_to_that_instant() -> None:
    assert terminal.retry_failed(replace(EXPIRED, retry_at=None), 0).retry_at == 0


def test_reviving_keeps_name_token_quota_and_newest_event() -> None:
    revived = ConnectionState(
        "p", "c", generation=5, token_expires_at=70_000, quota_reset_at=80_000, last_event_at=1_000, fact_id="f.0"
    )
    assert terminal.revive(FULL, 999) == revived
    assert terminal.revive(FULL, 1_001) == replace(revived, last_event_at=1_001)
    assert terminal.revive(replace(FULL, last_event_at=None), 7).last_event_at == 7
    assert terminal.retry_succeeded(FULL, 999) == revived
    assert terminal.change_credential(FULL, 999, 90_000) == replace(
        revived, token_expires_at=90_000, quota_reset_at=None
    )


# -- daily quotas --------------------------------------------------------------------------------------------
def at(zone: str, year: int, month: int, day: int, hour: int, minute: int = 0, second: int = 0, micro: int = 0) -> int:
    local = datetime(year, month, day, hour, minute, second, micro, ZoneInfo(zone))
    return round(local.timestamp() * 1000)


@pytest.mark.parametrize(
    ("now", "hour", "wait"),
    [
        (at("UTC", 2026, 3, 1, 12, 30, 15, 250_000), 0, 41_384_750),
        (at("UTC", 2026, 3, 1, 0), 0, DAY),
        (at("UTC", 2026, 3, 1, 0) + 1, 0, DAY - 1),
        (at("UTC", 2026, 3, 1, 8), 9, 3_600_000),
        (at("UTC", 2026, 3, 1, 9), 9, DAY),
        (at("UTC", 2026, 3, 1, 10), 9, DAY - 3_600_000),
    ],
)
def test_a_daily_quota_is_back_at_the_next_full_hour(now: int, hour: int, wait: int) -> None:
    assert daily_reset.until_hour(now, "UTC", hour) == wait
    assert hour or daily_reset.until_midnight(now, "UTC") == wait


def test_a_zone_moves_midnight_and_no_wait_is_longer_than_a_day() -> None:
    noon = at("UTC", 2026, 3, 1, 12)
    assert daily_reset.until_midnight(noon, "Europe/Berlin") == 11 * 3_600_000
    before_winter = at("Europe/Berlin", 2026, 10, 25, 0)
    assert daily_reset.until_midnight(before_winter, "Europe/Berlin") == DAY
    before_summer = at("Europe/Berlin", 2026, 3, 29, 0)
    assert daily_reset.until_midnight(before_summer, "Europe/Berlin") == DAY - 3_600_000
    host = datetime.fromtimestamp(noon / 1000, UTC).astimezone()
    assert 0 < daily_reset.until_midnight(noon, None) <= DAY
    assert host.utcoffset() or daily_reset.until_midnight(noon, None) == DAY // 2
