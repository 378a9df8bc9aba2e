"""Real kinds of provider errors, in own words, against the verdict that a careful reader gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from policy_service.application.classify import RecordError, classify_lines, classify_record
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.policy import Policy
from policy_service.settings.provider_data import builtin_providers

POLICY = Policy(Catalogue(providers=builtin_providers()))
CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "fixtures" / "provider_errors.jsonl").read_text("utf-8").splitlines()
]


def wait_fits(wanted: int | None, got: int | None) -> bool:
    """Equal within 2 % or a second."""
    if wanted is None or got is None:
        return wanted is got
    return abs(got - wanted) <= max(1000, wanted * 0.02)


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_every_known_kind_of_error_is_read_as_a_careful_reader_would(case: dict[str, Any]) -> None:
    verdict, wanted = classify_record(case, POLICY), case["verdict"]
    for field in ("scope", "reason", "fallback", "terminal"):
        assert verdict[field] == wanted[field], (field, verdict, case["why"])
    assert wait_fits(wanted["retry_after_ms"], verdict["retry_after_ms"]), verdict


def test_the_fixture_covers_every_scope_and_every_terminal_state() -> None:
    assert {case["verdict"]["scope"] for case in CASES} == {
        "none",
        "model_lockout",
        "connection_cooldown",
        "connection_terminal",
        "provider_failure",
    }
    assert {case["verdict"]["terminal"] for case in CASES} == {None, "banned", "expired", "credits_exhausted"}


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"status": 429}, "provider"),
        ({"provider": "openai"}, "status"),
        ({"provider": "openai", "status": 42}, "status"),
        ({"provider": "openai", "status": True}, "status"),
        ({"provider": "openai", "status": "429"}, "status"),
        ({"provider": "openai", "status": 429, "auth": "password"}, "auth"),
        ({"provider": "openai", "status": 429, "headers": []}, "headers"),
        ({"provider": "openai", "status": 429, "headers": {"retry-after": {}}}, "headers.retry-after"),
        ({"provider": "openai", "status": 429, "observed_at": "yesterday"}, "observed_at"),
        ({"provider": "openai", "status": 429, "model": 7}, "model"),
    ],
)
def test_a_record_that_cannot_be_used_names_the_field(record: dict[str, Any], field: str) -> None:
    with pytest.raises(RecordError) as caught:
        classify_record(record, POLICY)
    assert caught.value.field == field
    assert caught.value.remedy


def test_bad_lines_are_answered_with_an_error_and_do_not_stop_the_work() -> None:
    lines = ["{", "", "[]", '{"id": "a", "provider": "openai"}', '{"id": "b", "provider": "openai", "status": 500}']
    answers = [json.loads(line) for line in classify_lines(lines, POLICY)]
    assert [answer.get("error", {}).get("field") for answer in answers] == ["line", "line", "status", None]
    assert [answer.get("line") for answer in answers] == [1, 3, 4, None]
    assert answers[3]["scope"] == "provider_failure"


def test_the_wait_is_read_against_the_instant_of_the_observation() -> None:
    record = {"provider": "openai", "status": 429, "headers": {"retry-after": "Fri, 20 Nov 2026 12:00:30 GMT"}}
    seen = {**record, "observed_at": "2026-11-20T12:00:00Z"}
    dated = {**record, "headers": {**record["headers"], "date": "Fri, 20 Nov 2026 12:00:10 GMT"}}  # type: ignore[dict-item]
    assert classify_record(seen, POLICY)["retry_after_ms"] == 30_000
    assert classify_record(dated, POLICY)["retry_after_ms"] == 20_000
