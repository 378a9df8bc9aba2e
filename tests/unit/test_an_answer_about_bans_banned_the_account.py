"""A model wrote about suspended accounts, then its stream broke: the account was banned for the words of its answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policy_service.application.classify import classify_record
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import Policy
from policy_service.settings.provider_data import builtin_providers

POLICY = Policy(Catalogue(providers=builtin_providers()))
WORDS = "account_deactivated, insufficient_quota, content policy, weekly usage limit"
BROKEN = {"message": "The server had an error", "type": "server_error"}


def told(body: str) -> dict[str, Any]:
    """Verdict on a 200 answer with this body."""
    return classify_record({"provider": "openai", "status": 200, "body": body}, POLICY, 0)


@pytest.mark.parametrize(
    "body",
    [
        f'data: {{"choices":[{{"delta":{{"content":"{WORDS}"}}}}]}}\n\ndata: {json.dumps({"error": BROKEN})}\n\n',
        f'event: content_block_delta\ndata: {{"delta":{{"text":"{WORDS}"}}}}\n\nevent: error\ndata: gone\n\n',
        json.dumps([{"candidates": [{"content": {"parts": [{"text": WORDS}]}}]}, {"error": BROKEN}]),
        json.dumps({"choices": [{"message": {"content": WORDS}, "error": BROKEN}]}),
        json.dumps({"choices": [{"delta": {"content": WORDS}}], "error": BROKEN}),
        json.dumps({"type": "response.failed", "response": {"output": [{"content": WORDS}], "error": BROKEN}}),
        json.dumps({"error": BROKEN, "output_text": WORDS, "candidates": [WORDS], "content": WORDS, "delta": WORDS}),
    ],
    ids=["chat stream", "error event", "chunks", "in a choice", "beside choices", "response", "beside an output"],
)
def test_what_the_model_wrote_is_held_against_nobody(body: str) -> None:
    verdict = told(body)
    assert (verdict["scope"], verdict["reason"], verdict["terminal"]) == ("provider_failure", "server_error", None)
    assert WORDS not in parse_outcome(RawOutcome(status=200, body=body)).text


@pytest.mark.parametrize(
    ("error", "terminal"),
    [
        ({"message": "Your account has been suspended"}, "banned"),
        ({"message": "您的账户已欠费"}, "credits_exhausted"),
        ({"message": "no", "code": "insufficient_quota"}, "credits_exhausted"),
    ],
)
def test_what_the_error_says_counts_after_an_answer_has_begun(error: dict[str, str], terminal: str) -> None:
    begun = 'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\n'
    assert told(f"{begun}data: {json.dumps({'error': error})}\n\n")["terminal"] == terminal
    assert told(json.dumps({"choices": [{"error": error}]}))["terminal"] == terminal


@pytest.mark.parametrize(
    ("error", "scope", "reason"),
    [
        ({"type": "invalid_request_error", "code": "invalid_api_key"}, "connection_terminal", "auth_error"),
        ({"type": "invalid_request_error", "code": "model_not_found"}, "model_lockout", "model_not_found"),
        ({"type": "server_error", "code": "rate_limit_exceeded"}, "connection_cooldown", "rate_limit"),
        ({"type": "authentication_error", "code": "invalid_request_error"}, "connection_terminal", "auth_error"),
        ({"type": "rate_limit_error", "code": "server_error"}, "connection_cooldown", "rate_limit"),
        ({"type": "invalid_request_error", "code": "a_code"}, "none", "client_error"),
        ({"code": "data_inspection_failed"}, "none", "content_policy"),
        ({"type": "odd", "message": "against our content policy"}, "none", "content_policy"),
    ],
)
def test_the_more_telling_of_type_and_code_decides(error: dict[str, str], scope: str, reason: str) -> None:
    verdict = told(f"data: {json.dumps({'error': {'message': 'no', **error}})}\n\n")
    assert (verdict["scope"], verdict["reason"]) == (scope, reason)
