"""Failures that operators reported, as far as connections, models and addresses are concerned; each test is named
for its symptom."""

from __future__ import annotations

import pytest

from policy_service.application import connection_acts as acts
from policy_service.domain import cooldown
from policy_service.domain.state import StateBook
from tests.vectors.account_world import AccountWorld, epoch_ms

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000


def world(provider: str, **given: object) -> AccountWorld:
    return AccountWorld({"provider": provider, **given})


def probe(service: AccountWorld, at: int, permit_id: str) -> bool:
    book = StateBook(service.rows)
    permit = acts.grant_connection_probe(book, service.provider(), "c1", service.profile(), permit_id, at)
    service.rows.update(book.changes)
    return permit is not None


def blocked_for_days(**settings: object) -> AccountWorld:
    on = {"early_probe.enabled": True, "early_probe.include_server_stated": True, **settings}
    service = world("openai", settings=on)
    service.failure({"status": 429, "headers": {"Retry-After": "561635"}})
    assert service.row().rate_limited_until == 561_635 * SECOND
    return service


# -- 1: blocked for 6.5 days although the quota came back after a minute ----------------------------------------------
def test_a_key_blocked_for_days_is_back_within_one_probe_period_once_it_works_again() -> None:
    service = blocked_for_days()
    assert probe(service, 5 * MINUTE, "p1")
    service.success({"at_ms": 5 * MINUTE + SECOND, "started_at_ms": 5 * MINUTE, "permit_id": "p1"})
    assert not cooldown.is_cooling(service.row(), 5 * MINUTE + SECOND)


def test_a_key_blocked_for_days_is_tested_twelve_times_an_hour_at_most() -> None:
    service = blocked_for_days()
    granted = 0
    for at in range(0, 6 * HOUR, 10 * SECOND):
        if probe(service, at, f"p{at}"):
            granted += 1
            service.failure({"at_ms": at + SECOND, "status": 429, "permit_id": f"p{at}"})
    assert granted == 6 * 12 - 1
    assert service.row().rate_limited_until == 561_635 * SECOND
    assert service.row().backoff_level == 0


def test_a_key_blocked_for_days_is_freed_by_a_reset_call() -> None:
    service = blocked_for_days()
    book = StateBook(service.rows)
    acts.reset_connection(book, "openai", "c1", MINUTE, service.log({"at_ms": MINUTE}))
    service.rows.update(book.changes)
    assert not cooldown.is_cooling(service.row(), MINUTE)


def test_a_probe_whose_client_left_gives_its_place_back() -> None:
    service = blocked_for_days()
    assert probe(service, 5 * MINUTE, "p1")
    assert not probe(service, 5 * MINUTE + SECOND, "p2")
    assert probe(service, 5 * MINUTE + 30 * SECOND, "p2")


# -- 2: a slower 429 with a longer wait arrives while the key already cools -------------------------------------------
def test_the_later_stated_end_wins_and_a_burst_in_between_moves_nothing() -> None:
    service = world("openai")
    service.failure({"status": 429, "headers": {"Retry-After": "1"}})
    for at in (100, 200, 300):
        service.failure({"at_ms": at, "status": 503})
    assert (service.row().rate_limited_until, service.row().backoff_level) == (1_000, 0)
    service.failure({"at_ms": 500, "status": 429, "headers": {"Retry-After": "60"}})
    assert (service.row().rate_limited_until, service.row().backoff_level) == (60_500, 0)


def test_the_later_stated_end_wins_in_either_order_of_arrival() -> None:
    service = world("openai")
    service.failure({"at_ms": 500, "status": 429, "headers": {"Retry-After": "1"}})
    service.failure({"at_ms": 0, "status": 429, "headers": {"Retry-After": "60"}})
    assert service.row().rate_limited_until == 60_000
    assert service.row().last_error_at == 500


# -- 4: a short outage drains the whole pool for ten minutes ----------------------------------------------------------
def test_an_outage_of_seventeen_seconds_blocks_no_key_for_much_longer_than_itself() -> None:
    keys = {f"k{n}": {"provider": "openai"} for n in range(4)}
    service = AccountWorld({"connections": keys})
    for at in range(0, 17 * SECOND, 250):
        for name in keys:
            if not cooldown.is_cooling(service.row(name), at):
                service.failure({"at_ms": at, "connection": name, "status": 503})
    for name in keys:
        assert (service.row(name).rate_limited_until or 0) <= 21 * SECOND
        assert service.row(name).backoff_level == 3


# -- 6: a spent limit, an empty wallet and a short rate limit are taken for each other --------------------------------
NOW = "2026-06-01T00:00:00Z"


def test_a_400_that_names_the_day_of_return_blocks_until_that_day() -> None:
    service = world("anthropic", now=NOW)
    text = "You have reached your specified API usage limits. You will regain access on 2026-06-09 at 00:00 UTC."
    service.failure(
        {"status": 400, "body": {"type": "error", "error": {"type": "invalid_request_error", "message": text}}}
    )
    assert service.row().test_status == "unavailable"
    assert service.row().rate_limited_until == epoch_ms("2026-06-09T00:00:00Z")


def test_a_402_out_of_credits_ends_the_account() -> None:
    service = world("openrouter", connection={"passthrough_models": False})
    service.failure({"status": 402, "body": {"error": {"message": "Insufficient credits", "code": 402}}})
    assert service.row().test_status == "credits_exhausted"


@pytest.mark.parametrize(
    ("code", "message", "status", "until"),
    [
        ("1113", "余额不足或无可用资源包,请充值。", "credits_exhausted", None),
        ("1302", "您当前使用该API的并发数过高", "unavailable", 3_000),
    ],
)
def test_a_429_is_an_empty_wallet_or_a_rate_limit_by_its_body_code(
    code: str, message: str, status: str, until: int | None
) -> None:
    service = world("glm")
    service.failure({"status": 429, "body": {"error": {"code": code, "message": message}}})
    assert (service.row().test_status, service.row().rate_limited_until) == (status, until)


# -- 8: one broken model takes every key out of service ---------------------------------------------------------------
@pytest.mark.parametrize("provider", ["gemini", "openrouter", "codex"])
def test_a_model_that_always_answers_500_leaves_the_keys_usable_for_other_models(provider: str) -> None:
    keys = {f"k{n}": {"provider": provider} for n in range(3)}
    service = AccountWorld({"connections": keys})
    for name in keys:
        step = {"connection": name, "status": 500, "model": "broken", "pool_attempt": True, "persist": False}
        service.failure(step)
    for name in keys:
        assert not cooldown.is_cooling(service.row(name), 0)
        assert service.lock("other", 0, name) is None


def test_in_a_pool_a_failing_model_of_an_ordinary_provider_is_locked_instead_of_its_keys() -> None:
    keys = {f"k{n}": {"provider": "openai"} for n in range(3)}
    service = AccountWorld({"connections": keys})
    for name in keys:
        step = {"connection": name, "status": 500, "model": "broken", "pool_attempt": True, "persist": False}
        service.failure(step)
    for name in keys:
        assert not cooldown.is_cooling(service.row(name), 0)
        assert service.lock("broken", 0, name) is not None
        assert service.lock("other", 0, name) is None


# -- 16: an old call that ends well lifts the cooldown of a newer refusal ---------------------------------------------
def test_a_success_that_began_before_the_refusal_leaves_the_cooldown_standing() -> None:
    service = world("openai")
    service.failure({"at_ms": 5_000, "status": 429, "headers": {"Retry-After": "60"}})
    service.success({"at_ms": 9_000, "started_at_ms": 0})
    assert service.row().rate_limited_until == 65_000
    assert service.row().last_error


# -- 17: a restart forgets who is blocked -----------------------------------------------------------------------------
def test_a_key_blocked_before_a_restart_is_blocked_after_it_and_the_others_serve() -> None:
    service = AccountWorld({"connections": {"a": {"provider": "openai"}, "b": {"provider": "openai"}}})
    service.failure({"connection": "a", "status": 429, "headers": {"Retry-After": "1200"}})
    service.restart()
    assert cooldown.is_cooling(service.row("a"), 5 * MINUTE)
    assert not cooldown.is_cooling(service.row("b"), 5 * MINUTE)
    assert not cooldown.is_cooling(service.row("a"), 20 * MINUTE)


def test_a_locked_model_and_its_count_survive_a_restart() -> None:
    service = world("gemini")
    service.failure({"status": 429, "model": "m"})
    service.restart()
    assert service.lock("m", 3_000) is not None
    service.failure({"at_ms": 3_001, "status": 429, "model": "m"})
    assert service.count("m") == 2
