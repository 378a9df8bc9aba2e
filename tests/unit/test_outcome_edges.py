"""Edges of reading an answer: lengths, places, statuses and codes at which it stops to count."""

from __future__ import annotations

import gzip
import json
import random

import pytest

from policy_service.domain.error_object import ErrorObject, describe, error_nodes, read_json
from policy_service.domain.outcome import Outcome
from policy_service.domain.outcome_parsing import (
    RawOutcome,
    network_failure,
    parse_outcome,
    status_of_kind,
)
from policy_service.domain.profiles import HintProfile
from policy_service.domain.retry_hints import read_hint
from policy_service.domain.stream_events import carries_error


def error_of(body: object) -> ErrorObject:
    return describe(error_nodes(body))


def outcome(status: int | None, body: str, **fields: object) -> Outcome:
    return parse_outcome(RawOutcome(status=status, body=body, **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("503", 503), (503, 503), ("50", None), ("5030", None), ("٥٠٣", None), (True, None), (503.0, None),
        (100, 100), (99, None), (599, 599), (600, None), ("abc", None),
    ],
)  # fmt: skip
def test_a_status_inside_a_body_is_three_digits_from_100_to_599(value: object, status: int | None) -> None:
    assert error_of({"status": value}).status == status


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("c", "c"), (5, "5"), (-5, "-5"), (10**18 - 1, "9" * 18), (10**18, ""), (-(10**18), ""), (True, ""), (1.5, ""),
        ("x" * 200, "x" * 200), ("x" * 201, ""), ("  ", ""),
    ],
)  # fmt: skip
def test_a_code_is_a_short_text_or_a_number_of_sane_length(value: object, code: str) -> None:
    assert error_of({"code": value}).code == code


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"status_code": 503}, ""),
        ({"status_code": 1008}, "1008"),
        ({"details": {"error_code": "d"}}, "d"),
        ({"details": {"error_code": 5}}, ""),
        ({"error": "word"}, ""),
        ({"status_code": 500, "err_code": "c"}, "c"),
        ({"error": "word", "error_description": "x"}, "word"),
        ({"error": '{"message": "m", "code": "c"}'}, "c"),
        ({"error": 'behind {"code": "c"}'}, "c"),
        ({"error": {"code": "in"}, "code": "out"}, "in"),
        ({"error": {"message": "m"}, "code": "out"}, "out"),
        ([1, 2, 3, {"code": "fourth"}], "fourth"),
        ([1, 2, 3, 4, {"code": "fifth"}], ""),
        ({"choices": [{"error": {"code": "choice"}}]}, "choice"),
        ({"choices": []}, ""),
        ({"choices": [{"error": {}}], "code": "c"}, "c"),
    ],
)
def test_the_code_is_the_innermost_that_says_something(body: object, code: str) -> None:
    assert error_of(body).code == code


def test_a_list_of_messages_is_joined_up_to_the_eighth() -> None:
    assert error_of({"message": [str(n) for n in range(9)]}).message == "; ".join(map(str, range(8)))
    assert error_of({"message": ["a", 1, "b"]}).message == "a; b"
    assert error_of({"message": " ", "detail": "d"}).message == "d"
    assert error_of({"type": "123"}).type == ""
    assert error_of({"type": "urn:x#kind"}).type == "kind"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('{"a": 1}', {"a": 1}), ('{"a": 1} tail', None), ('[{"a": 1}, cut', {"a": 1}), (")]}'\n{\"a\": 1}", {"a": 1}),
        ("words {\"a\": 1}", None), ('"s"', "s"), ("", None), ("[", None), ('{"a": NaN}', {"a": None}),
    ],
)  # fmt: skip
def test_json_is_read_where_it_begins_the_text(text: str, read: object) -> None:
    assert read_json(text) == read


# -- errors inside a success ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "carries"),
    [
        ({"error": {"message": "m"}}, True), ({"error": "m"}, True), ({"error": {}}, False), ({"error": ""}, False),
        ({"error": 5}, False), ({"type": "error"}, True), ({"type": "response.failed"}, True),
        ({"object": "error"}, True), ({"type": "message"}, False), ([{"error": "m"}], True),
        ([0, 0, 0, {"error": "m"}], True), ([0, 0, 0, 0, {"error": "m"}], False), ("error", False), (None, False),
        ({"base_resp": {"status_code": 0}}, False), ({"base_resp": {"status_code": "0"}}, False),
        ({"base_resp": {}}, False), ({"base_resp": {"status_code": 1008}}, True),
        ({"success": False, "message": "m"}, True), ({"success": False, "msg": "m"}, True),
        ({"success": False, "errors": [1]}, True), ({"success": False}, False),
        ({"success": True, "message": "m"}, False),
        ({"code": 1113, "msg": "m"}, True), ({"code": 0, "msg": "m"}, False), ({"code": 200, "msg": "m"}, False),
        ({"code": True, "msg": "m"}, False), ({"code": "OK", "msg": "m"}, False), ({"code": "x", "msg": "m"}, True),
        ({"code": "", "msg": "m"}, False), ({"code": 1113}, False), ({"code": 1113, "msg": "m", "data": 1}, False),
        ({"error_code": 5, "code": 0, "error_msg": "m"}, True), ({"code": None, "msg": "m"}, False),
    ],
)  # fmt: skip
def test_what_makes_a_success_an_error(body: object, carries: bool) -> None:
    assert carries_error(body) is carries


@pytest.mark.parametrize("status", [200, 299])
def test_only_a_2xx_is_looked_through_for_an_error(status: int) -> None:
    inside = outcome(status, '{"error": {"message": "m", "status": 503}}')
    assert (inside.status, inside.inner_status) == (503, 503)
    plain = outcome(status, '{"id": "x", "choices": []}')
    assert (plain.status, plain.text) == (status, "")


@pytest.mark.parametrize("status", [199, 300])
def test_another_status_keeps_its_own(status: int) -> None:
    found = outcome(status, '{"error": {"message": "m", "status": 503}}')
    assert (found.status, found.inner_status) == (status, 503)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ErrorObject(status=400), 400), (ErrorObject(status=399, type="overloaded_error"), 529),
        (ErrorObject(type="Rate_Limit_Error"), 429), (ErrorObject(code="invalid_api_key"), 401),
        (ErrorObject(type="never heard of"), 500), (ErrorObject(), 500),
    ],
)  # fmt: skip
def test_the_status_of_an_error_inside_a_success(error: ErrorObject, status: int) -> None:
    assert status_of_kind(error) == status


def test_an_inner_status_is_one_that_differs_and_is_a_failure() -> None:
    for named, inner in ((503, 503), (429, None), (399, None), (400, 400)):
        assert outcome(429, f'{{"error": {{"message": "m", "status": {named}}}}}').inner_status == inner
    assert outcome(429, '{"error": {"status": 503}}', inner_status=401).inner_status == 401


def test_a_transport_failure_gives_a_status_only_where_none_failed() -> None:
    assert outcome(None, "", network_error="ECONNREFUSED").status == network_failure("ECONNREFUSED").status
    assert outcome(399, "", network_error="ECONNREFUSED").status == network_failure("ECONNREFUSED").status
    assert outcome(400, "", network_error="ECONNREFUSED").status == 400
    known, other = network_failure("ECONNREFUSED"), network_failure("never heard of")
    assert known != other
    assert other.status == 502
    assert network_failure("x" * (1_000 - len("econnrefused")) + "econnrefused") == known
    assert network_failure("x" * (1_001 - len("econnrefused")) + "econnrefused") == other


def test_the_first_suspect_event_of_a_stream_tells_the_error() -> None:
    def told(body: str) -> tuple[int | None, str]:
        found = outcome(200, body, headers=(("content-type", "text/event-stream"),))
        return found.status, found.message

    assert told('data: {"error": {"message": "m", "status": 503}}\n\n') == (503, "m")
    assert told("event: error\ndata: gone away\n\n") == (500, "gone away")
    assert told('event: message\ndata: {"message": "m", "note": "failed"}\n\n') == (200, "")
    assert told(': "error"\n\ndata: {"delta": "failed"}\n\n') == (200, "")
    assert told('event: error\nevent: message\ndata: "failed"\n\n') == (200, "")


def test_an_error_event_whose_data_is_a_flat_object_is_no_success() -> None:
    flat = outcome(200, 'event: error\ndata: {"message": "busy", "type": "overloaded_error"}\n\n')
    assert (flat.status, flat.message, flat.type) == (529, "busy", "overloaded_error")
    bare = outcome(200, 'data: {"delta": "x"}\n\nevent: error\ndata: {"message": "m"}\n\n')
    assert (bare.status, bare.message) == (500, "m")


def test_an_indented_error_announced_as_an_event_stream_is_read() -> None:
    body = json.dumps({"error": {"message": "m", "code": "c", "status": 503}}, indent=2)
    for status in (200, 503):
        found = outcome(status, body, headers=(("content-type", "text/event-stream"),))
        assert (found.status, found.code, found.message) == (503, "c", "m")


def test_a_compressed_body_that_repeats_itself_late_is_inflated() -> None:
    noise = random.Random(1).randbytes(20_000).hex()[:20_000]
    body = gzip.compress(json.dumps({"error": {"message": "m", "code": "c"}, "echo": noise + noise}).encode())
    assert parse_outcome(RawOutcome(status=429, body=body)).code == "c"


def test_a_retry_delay_without_nanos_is_whole_seconds() -> None:
    detail = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": {"seconds": 5}}
    hint = read_hint({}, {"error": {"details": [detail]}}, "", 0, HintProfile())
    assert hint is not None
    assert hint.wait_ms == 5_000


@pytest.mark.parametrize(("gap", "wait"), [(120, None), (121, 5_000)])
def test_a_condition_close_before_a_wait_makes_it_somebody_elses(gap: int, wait: int | None) -> None:
    hint = read_hint({}, None, "recently" + " " * gap + "try again in 5s", 0, HintProfile())
    assert (hint and hint.wait_ms) == wait


def test_of_a_huge_body_the_first_64_kib_are_kept() -> None:
    for body in ("x" * 70_000, b"x" * 70_000):
        assert len(parse_outcome(RawOutcome(status=429, body=body)).text) == 65_536
