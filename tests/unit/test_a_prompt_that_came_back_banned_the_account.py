"""A caller asked about suspended accounts, the provider sent the request back in its error: the account was banned."""

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
ASKED = "why account_deactivated, why insufficient_quota?"


def _missing(**echo: Any) -> dict[str, Any]:
    return {"detail": [{"type": "missing", "loc": ["body", "model"], "msg": "Field required", **echo}]}


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (422, _missing(input={"messages": [{"role": "user", "content": ASKED}]})),
        (422, _missing(input=ASKED)),
        (400, {"error": {"message": "no", "inputs": [ASKED]}}),
        (400, {"error": {"message": "no", "metadata": {"flagged_input": ASKED}}}),
        (400, {"error": {"message": "no", "failed_generation": ASKED}}),
        (400, {"message": "no", "prompt": ASKED}),
    ],
)
def test_what_the_caller_sent_is_held_against_nobody(status: int, body: dict[str, Any]) -> None:
    verdict = classify_record({"provider": "mistral", "status": status, "body": json.dumps(body)}, POLICY, 0)
    assert (verdict["scope"], verdict["terminal"]) == ("none", None)
    outcome = parse_outcome(RawOutcome(status=status, body=json.dumps(body)))
    assert ASKED not in outcome.text
    assert outcome.body == body


def test_what_stands_beside_it_still_counts() -> None:
    body = {"message": "Your account has been suspended", "param": "input", "prompt": ASKED}
    verdict = classify_record({"provider": "mistral", "status": 400, "body": json.dumps(body)}, POLICY, 0)
    assert verdict["terminal"] == "banned"
    assert parse_outcome(RawOutcome(status=400, body=json.dumps(body))).text.count("input") == 1


def test_a_body_without_an_echo_is_kept_to_the_letter() -> None:
    text = '{"error":  {"message": "no",\n "param": 1}}'
    assert parse_outcome(RawOutcome(status=400, body=text)).text == text


@pytest.mark.parametrize("listed", [False, True])
def test_only_a_few_levels_are_looked_through(listed: bool) -> None:
    def nested(levels: int) -> str:
        deep: Any = {"prompt": "x"}
        for _ in range(levels):
            deep = [deep] if listed else {"a": deep}
        return parse_outcome(RawOutcome(status=400, body=json.dumps(deep))).text

    assert '"prompt": "x"' in nested(6)
    assert "prompt" not in nested(5)
