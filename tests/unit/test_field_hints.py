"""Hints as operators met them in the field: one test for each symptom, the reading half."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from policy_service.domain.outcome import Outcome
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.profiles import HintProfile
from policy_service.domain.retry_hints import Hint, read_hint

NOW = int(datetime(2026, 8, 1, tzinfo=UTC).timestamp() * 1_000)


def answer(status: int, body: str = "", **headers: str) -> Outcome:
    named = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return parse_outcome(RawOutcome(status=status, headers=named, body=body.encode()))


def failure(message: str, **members: object) -> str:
    return json.dumps({"error": {"message": message, **members}})


def hint(outcome: Outcome, now: int = NOW) -> Hint | None:
    return read_hint(outcome.headers, outcome.body, outcome.text, now, HintProfile())


def wait(outcome: Outcome, now: int = NOW) -> int | None:
    found = hint(outcome, now)
    return found.wait_ms if found else None


def test_a_stated_wait_of_days_is_read_in_full() -> None:
    assert wait(answer(429, retry_after="561635")) == 561_635_000


def test_two_waits_of_one_connection_keep_their_own_ends() -> None:
    first, second = hint(answer(429, retry_after="1"), NOW), hint(answer(429, retry_after="60"), NOW + 500)
    assert first is not None
    assert second is not None
    assert (first.reset_at - NOW, second.reset_at - NOW) == (1_000, 60_500)


def test_a_window_that_is_not_used_up_states_no_wait() -> None:
    headers = {"x_codex_secondary_used_percent": "30", "x_codex_secondary_reset_after_seconds": "18000"}
    assert wait(answer(429, **headers)) is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Please try again in 6m0s.", 360_000),
        ("Try again in 20m", 1_200_000),
        ("Please try again in 1m30s.", 90_000),
        ("Please try again in 1.2s.", 1_200),
        ("Please try again in 500ms.", 500),
        ("Your limit will reset at 2026-08-17 02:56:15", 16 * 86_400_000 + 10_575_000),
    ],
)
def test_a_wait_in_words_is_read_to_the_millisecond(text: str, wanted: int) -> None:
    assert wait(answer(429, failure(f"Limit hit. {text}"))) == wanted


def test_the_date_on_which_access_returns_is_honoured() -> None:
    body = failure("API usage limits reached. You will regain access on 2026-08-03 at 00:00 UTC.")
    assert wait(answer(400, body)) == 2 * 86_400_000


def test_an_empty_purse_and_a_rate_limit_differ_by_code_and_state_no_wait() -> None:
    purse, rate = (answer(429, failure("no", code=code)) for code in ("1113", "1302"))
    assert (purse.code, rate.code) == ("1113", "1302")
    assert wait(purse) is wait(rate) is None


def test_a_gateway_answer_that_comes_back_through_a_chain_keeps_its_wait() -> None:
    inner = failure("all accounts have exhausted their quota, reset after 5m", code=429)
    outcome = answer(502, failure(f"upstream error: {inner}"))
    assert wait(outcome) == 300_000
    assert outcome.inner_status == 429
    assert outcome.message == "all accounts have exhausted their quota, reset after 5m"
