"""Error objects that are no JSON: cut off, behind a sentence, printed by Python. Their names are read all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from policy_service.application.classify import classify_record
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.error_object import json_text, loose_node
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import Policy
from policy_service.domain.restatement import restate
from policy_service.settings.provider_data import builtin_providers

POLICY = Policy(Catalogue(providers=builtin_providers()))
FIXTURE = Path(__file__).parents[1] / "fixtures" / "provider_errors.jsonl"
CASES = [json.loads(line) for line in FIXTURE.read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"error":{"code":"a_code","message":"cut in the mid', {"code": "a_code", "message": "cut in the mid"}),
        ("Error: {'type': 'a_type', 'param': None, 'code': 429}", {"type": "a_type", "code": "429"}),
        ('said {"type":"error","error":{"type":"inner"}}', {"type": "inner"}),
        ('x "status" : "GONE" y', {"status": "GONE"}),
        ('{"message":"he said \\"no\\" to', {"message": 'he said "no" to'}),
        ('"{\\"error\\":{\\"code\\":\\"in_a_string\\",\\"me', {"code": "in_a_string"}),
        ('{"encode":"x","code":"","code":"second"', {"code": "second"}),
        ("{'error_code': 7, 'status_code': 8, '__type': 'T'", {"error_code": "7", "status_code": "8", "__type": "T"}),
        ("{'msg': 'a', 'detail': 'b', 'error': 'c'", {"msg": "a", "detail": "b", "error": "c"}),
        ('"type":"Error", "type" : " <nil> ", "type":"third"', {"type": "third"}),
        ('"code"    :    "four blanks"', {"code": "four blanks"}),
        ('"code"     :"five blanks"', None),
        ('"code":123456789012345', {"code": "123456789012345"}),
        ('"code":1234567890123456', None),
        ('{"status_code":0.5', None),
        ("code: none, type: none", None),
        ('{"a": "none of these names", "b"}', None),
        ('<p class="error" data-code="5">no</p>', None),
        ('"code":', None),
        ("", None),
    ],
)
def test_named_values_are_read_without_json(text: str, named: dict[str, str] | None) -> None:
    assert loose_node(text) == named


def test_only_the_beginning_and_a_few_places_of_a_name_are_looked_at() -> None:
    assert loose_node("." * 8_183 + '"code":"a"') == {"code": "a"}
    assert loose_node("." * 8_184 + '"code":"a"') is None
    assert loose_node("code " * 8 + '"code":"a"') is None
    assert loose_node("code " * 7 + '"code":"a"') == {"code": "a"}
    assert loose_node('"message":"' + "m" * 2_000) == {"message": "m" * 1_024}


def test_the_whole_text_stays_searchable_beside_the_names() -> None:
    """A marker of a provider may stand outside of what the object names."""
    said = "额度不足 {'code': 'quota', 'message': 'no'}"
    told = parse_outcome(RawOutcome(status=403, body=said))
    assert (told.code, told.message, told.text) == ("quota", "no", said)
    assert restate(POLICY.for_connection("agentrouter").provider, 403, told.message, told.body, None).status == 429
    assert parse_outcome(RawOutcome(status=403, body="nothing named")).body is None


def test_a_body_that_is_nested_too_deeply_has_no_json_text() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert json_text(deep) == ""
    assert json_text({"ä": 1}) == '{"ä": 1}'


# --- the shape around an error does not change what it means --------------------------------------------------------
def _said(body: dict[str, Any]) -> str:
    return json.dumps(body, ensure_ascii=False)


def _with_message(body: Any, change: Callable[[str], str]) -> Any:
    if isinstance(body, list):
        return [_with_message(part, change) for part in body]
    if not isinstance(body, dict):
        return body
    told = {name: _with_message(part, change) for name, part in body.items()}
    return told | {name: change(text) for name, text in told.items() if name == "message" and isinstance(text, str)}


def _reversed(body: Any) -> Any:
    if isinstance(body, list):
        return [_reversed(part) for part in body]
    return {name: _reversed(body[name]) for name in reversed(body)} if isinstance(body, dict) else body


SHAPES: dict[str, Callable[[dict[str, Any]], str]] = {
    "pretty": lambda body: json.dumps(body, indent=4, ensure_ascii=False),
    "escaped": lambda body: json.dumps(body, separators=(",", ":")),
    "other order": lambda body: _said(_reversed(body)),
    "in a list": lambda body: _said([body]),  # type: ignore[arg-type]
    "as a string": lambda body: json.dumps(_said(body)),
    "string in an error": lambda body: _said({"error": _said(body)}),
    "as a detail": lambda body: _said({"detail": body}),
    "string in a message": lambda body: _said({"error": {"message": _said(body)}}),
    "with ids": lambda body: _said({"request_id": "req_1", **_with_message(body, lambda text: f"{text} (id: r-1)")}),
    "behind a word": lambda body: _said(_with_message(body, lambda text: f"upstream: {text}")),
    "with a mark": lambda body: "\ufeff" + _said(body) + "\r\n",
}
LOOSE: dict[str, Callable[[dict[str, Any]], str]] = {
    "behind a sentence": lambda body: f"API error: {_said(body)}",
    "printed by Python": lambda body: f"Error code: 4xx - {body!r}",
    "cut at its end": lambda body: _said(body)[:-1],
}


def _verdict(case: dict[str, Any], body: str) -> dict[str, Any]:
    verdict = classify_record(case | {"body": body}, POLICY)
    return {name: verdict[name] for name in case["verdict"]}


def _objects() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    failures = [case for case in CASES if (case["status"] or 0) >= 400 and case["body"].startswith("{")]
    return [(case, json.loads(case["body"])) for case in failures if not case["body"].endswith("allow")]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_error_means_the_same_in_every_shape(shape: str) -> None:
    changed = {
        case["id"]: verdict
        for case, body in _objects()
        if (verdict := _verdict(case, SHAPES[shape](body))) != _verdict(case, case["body"])
    }
    assert not changed


@pytest.mark.parametrize("shape", LOOSE)
def test_an_error_that_is_no_json_is_blamed_as_the_json_would_be(shape: str) -> None:
    """The wait may be lost with the structure; who is to blame is not."""
    changed = {
        case["id"]: verdict
        for case, body in _objects()
        if "RetryInfo" not in case["body"]
        and (verdict := _verdict(case, LOOSE[shape](body)) | {"retry_after_ms": 0})
        != _verdict(case, case["body"]) | {"retry_after_ms": 0}
    }
    assert not changed
