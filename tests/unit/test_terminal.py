"""Resolution of terminal states, bounded sequences, the acts that end them (spec/terminal_states.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policy_service.domain import terminal
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.ids import AuthClass
from policy_service.domain.profiles import TerminalProfile
from policy_service.domain.terminal import Evidence, Resolution
from tests.vectors.account_world import AccountWorld

ROW = ConnectionState("p", "c")
HOUR = 3_600_000


def state_of(**evidence: object) -> str | None:
    return terminal.resolve_terminal(Evidence(**evidence), ROW, 0).state  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("evidence", "state"),
    [
        ({"status": 429, "credits_exhausted": True, "per_model_quota": True}, "credits_exhausted"),
        ({"status": 402}, "credits_exhausted"),
        ({"status": 402, "per_model_quota": True}, None),
        ({"status": 402, "returns_by_itself": True}, None),
        ({"status": 503, "credits_text": True}, "credits_exhausted"),
        ({"status": 429, "credits_text": True, "per_model_quota": True}, None),
        ({"status": 500, "permanent": True}, "banned"),
        ({"status": 402, "permanent": True}, "credits_exhausted"),
        ({"status": 403, "error_type": "forbidden"}, "banned"),
        ({"status": 403, "error_type": "project_route_error"}, None),
        ({"status": 401, "error_type": "model_not_found"}, None),
        ({"status": 401, "error_type": "oauth_invalid_token"}, None),
        ({"status": 401}, "expired"),
        ({"status": 403, "error_type": "account_deactivated"}, "expired"),
        ({"status": 401, "error_type": "unauthorized", "web_cookie": True}, None),
        ({"status": 401, "error_type": "account_deactivated", "web_cookie": True}, "expired"),
        ({"status": 503, "error_type": "server_error"}, None),
    ],
)
def test_the_first_matching_row_decides(evidence: dict[str, object], state: str | None) -> None:
    assert state_of(**evidence) == state


def test_a_token_excuses_a_401_only_beyond_sixty_seconds() -> None:
    alive = terminal.resolve_terminal(Evidence(401, "unauthorized", token_expires_at=60_001), ROW, 0)
    assert alive == Resolution(live_token=True)
    assert state_of(status=401, error_type="unauthorized", token_expires_at=60_000) == "expired"


def test_three_soft_strikes_an_hour_are_forgiven_and_the_fourth_expires() -> None:
    row = ROW
    evidence = Evidence(401, "unauthorized", ambiguous_auth=True)
    for at in (0, 1, 2):
        assert terminal.resolve_terminal(evidence, row, at).soft_strike
        row = terminal.with_soft_strike(row, at)
    assert terminal.resolve_terminal(evidence, row, HOUR - 1).state == "expired"
    assert terminal.resolve_terminal(evidence, row, HOUR).soft_strike


def test_refusals_climb_to_a_ban_over_three_episodes() -> None:
    first = terminal.refuse(ROW, 0)
    row = terminal.with_refusal(ROW, first, 0)
    assert (first.streak, first.cooldown_ms) == (1, 300_000)
    assert not terminal.refuse(row, 299_999).counted
    second = terminal.refuse(row, 300_000)
    assert (second.streak, second.cooldown_ms) == (2, 900_000)
    row = terminal.with_refusal(row, second, 300_000)
    third = terminal.refuse(row, 1_200_000)
    assert third.bans
    ended = terminal.with_refusal(row, third, 1_200_000)
    assert (ended.active, ended.streak) == (False, 0)


def test_a_day_without_refusal_starts_a_new_streak() -> None:
    row = terminal.with_refusal(ROW, terminal.refuse(ROW, 0), 0)
    assert terminal.refuse(row, 24 * HOUR - 1).streak == 2
    assert terminal.refuse(row, 24 * HOUR).streak == 1


def test_a_terminal_state_has_no_timer_and_is_never_overwritten() -> None:
    row = replace(ROW, rate_limited_until=9_000, limited_since=0, hint_source="header", streak=2)
    banned = terminal.enter(row, "banned")
    assert (banned.test_status, banned.rate_limited_until, banned.streak) == ("banned", None, 0)
    assert terminal.enter(banned, "expired") is banned


@pytest.mark.parametrize(("attempts", "due"), [(0, 300_000), (1, 600_000), (2, 1_200_000)])
def test_revivals_are_due_after_five_ten_and_twenty_minutes(attempts: int, due: int) -> None:
    row = replace(ROW, test_status="expired", retry_attempts=attempts, retry_at=0)
    assert not terminal.retry_due(row, due - 1)
    assert terminal.retry_due(row, due)


def test_an_expired_connection_without_an_attempt_is_due_at_once() -> None:
    assert terminal.retry_due(replace(ROW, test_status="expired"), 0)


@pytest.mark.parametrize("state", ["banned", "credits_exhausted", "active", "unavailable"])
def test_only_expired_connections_are_revived(state: str) -> None:
    assert not terminal.retry_due(replace(ROW, test_status=state), 10**12)


def test_a_revival_is_handed_out_once_and_a_lost_one_counts_as_failed() -> None:
    row, permit = terminal.grant_retry(replace(ROW, test_status="expired"), "a", 1_000)
    assert permit is not None
    assert terminal.grant_retry(row, "b", 2_000)[1] is None
    later = 1_000 + 60_000 + 600_000
    row, permit = terminal.grant_retry(row, "b", later)
    assert permit is not None
    assert row.retry_attempts == 1


def test_revivals_end_after_three_failures_even_if_each_report_is_lost() -> None:
    row = replace(ROW, test_status="expired")
    granted = 0
    for at in range(0, 40 * HOUR, 60_000):
        row, permit = terminal.grant_retry(row, f"p{at}", at)
        granted += permit is not None
    assert granted == 3
    assert not row.active


@pytest.mark.parametrize(("expires_at", "first"), [(300_001, True), (300_000, False), (None, False)])
def test_a_revival_tests_a_valid_token_before_it_spends_a_refresh(expires_at: int | None, first: bool) -> None:
    row = replace(ROW, test_status="expired", token_expires_at=expires_at)
    _, permit = terminal.grant_retry(row, "a", 0)
    assert permit is not None
    assert permit.test_token_first is first


def test_every_act_that_ends_a_state_raises_the_generation() -> None:
    row = replace(ROW, test_status="banned", active=False, generation=4, streak=1, retry_attempts=2)
    for after in (terminal.revive(row, 5), terminal.change_credential(row, 5), terminal.retry_succeeded(row, 5)):
        assert (after.test_status, after.active, after.generation) == ("active", True, 5)
        assert (after.streak, after.retry_attempts) == (0, 0)


def test_a_new_credential_forgets_the_token_of_the_old_one() -> None:
    row = replace(ROW, token_expires_at=99, quota_reset_at=98)
    assert terminal.revive(row, 0).token_expires_at == 99
    assert terminal.change_credential(row, 0).token_expires_at is None


@pytest.mark.parametrize(
    ("profile", "auth", "disables"),
    [
        (TerminalProfile(), AuthClass.OAUTH, False),
        (TerminalProfile(auto_disable_banned=True), AuthClass.API_KEY, True),
        (TerminalProfile(auto_disable_banned=True, auto_disable_scope="subscription"), AuthClass.API_KEY, False),
        (TerminalProfile(auto_disable_banned=True, auto_disable_scope="subscription"), AuthClass.OAUTH, True),
    ],
)
def test_automatic_switch_off_follows_its_scope(profile: TerminalProfile, auth: AuthClass, disables: bool) -> None:
    assert terminal.disables(profile, auth) is disables


def test_an_ambiguous_401_takes_a_soft_strike_only_where_the_setting_is_on() -> None:
    on = AccountWorld({"provider": "mistral", "settings": {"terminal.ambiguous_401_soft_lockout": True}})
    on.failure({"status": 401, "text": "unauthorized"})
    assert (on.row().test_status, on.row().soft_strikes) == ("active", 1)
    off = AccountWorld({"provider": "mistral"})
    off.failure({"status": 401, "text": "unauthorized"})
    assert off.row().test_status == "expired"


def test_an_explicit_401_is_never_a_soft_strike() -> None:
    world = AccountWorld({"provider": "mistral", "settings": {"terminal.ambiguous_401_soft_lockout": True}})
    world.failure({"status": 401, "text": "token invalid"})
    assert world.row().test_status == "expired"


def test_attempts_survive_a_write_of_other_fields() -> None:
    world = AccountWorld({"provider": "kiro", "connection": {"test_status": "expired", "attempts": 2}})
    world.failure({"at_ms": 5, "status": 503})
    world.success({"at_ms": 9})
    assert (world.row().test_status, world.row().retry_attempts) == ("expired", 2)
