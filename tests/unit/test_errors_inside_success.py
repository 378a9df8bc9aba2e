"""Errors that come with status 200: each gateway's way of saying that the call failed after all."""

from __future__ import annotations

import json

import pytest

from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome


def parsed(body: object) -> tuple[int | None, str, str]:
    outcome = parse_outcome(RawOutcome(status=200, body=json.dumps(body).encode()))
    return outcome.status, outcome.code, outcome.message


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"id": "gen-1", "choices": [{"error": {"code": 429, "message": "slow down"}, "message": None}]}, 429),
        ({"error_code": 18, "error_msg": "Open api qps request limit reached"}, 500),
        ({"code": "Throttling.RateQuota", "message": "Requests rate limit exceeded", "request_id": "r"}, 429),
        ({"code": 503, "msg": "no channel is free"}, 503),
    ],
)
def test_a_failure_in_a_200_is_a_failure(body: object, status: int) -> None:
    assert parsed(body)[0] == status


@pytest.mark.parametrize(
    "body",
    [
        {"id": "c", "choices": [{"message": {"content": "an error occurred"}}]},
        {"code": 0, "msg": "success", "data": {}},
        {"code": "200", "message": "ok"},
        {"code": "E42", "message": "the answer", "output": {"text": "x"}},
        {"message": "hello"},
        {"choices": [{"error": None, "message": {"content": "fine"}}]},
    ],
)
def test_a_success_that_mentions_errors_stays_a_success(body: object) -> None:
    assert parsed(body)[0] == 200
