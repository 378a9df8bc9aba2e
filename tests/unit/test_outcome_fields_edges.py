"""Every field of a report reaches the outcome; of several members of an error object the first of its list speaks."""

from __future__ import annotations

import gzip
import json
from itertools import combinations
from typing import Any

import pytest

from policy_service.domain.error_object import MAX_DEPTH, ErrorObject, describe, error_nodes, read_json
from policy_service.domain.ids import AuthClass
from policy_service.domain.outcome import CallKind, Origin, Outcome, UsageCounters
from policy_service.domain.outcome_parsing import BODY_LIMIT, RawOutcome, first_values, parse_outcome

HANDED_ON: dict[str, Any] = {
    "provider": "p",
    "connection": "c",
    "model": "m",
    "auth_class": AuthClass.OAUTH,
    "network_error": "ECONNREFUSED",
    "code": "code",
    "type": "type",
    "name": "name",
    "message": "words",
    "origin": Origin.GATEWAY,
    "failure_kind": "rate_limit",
    "call_kind": CallKind.HEALTH_CHECK,
    "inner_status": 503,
    "pool_attempt": True,
    "next_target_same_provider": True,
    "persist": False,
    "usage": UsageCounters(day=True),
    "egress_address": "192.0.2.1",
    "circuit_open_answer": True,
    "own_queue_timeout": True,
    "own_timeout": True,
    "first_output_ms": 7,
    "token_expires_at": 8,
    "quota_reset_at": 9,
}


def outcome(status: int | None = 429, body: bytes | str = b"", **more: Any) -> Outcome:
    return parse_outcome(RawOutcome(status=status, body=body, **more))


def error_of(body: object) -> ErrorObject:
    return describe(error_nodes(body))


@pytest.mark.parametrize("name", HANDED_ON)
def test_a_field_reaches_the_outcome_as_it_stands(name: str) -> None:
    assert getattr(outcome(**{name: HANDED_ON[name]}), name) == HANDED_ON[name]
    assert getattr(outcome(), name) != HANDED_ON[name]


def test_a_report_that_says_nothing_is_an_outcome_that_says_nothing() -> None:
    assert parse_outcome(RawOutcome()) == Outcome(None)
    shared = set(RawOutcome._fields) & set(Outcome._fields)
    assert shared >= HANDED_ON.keys()
    for name in HANDED_ON:
        assert getattr(RawOutcome(), name) == getattr(Outcome(None), name), name


def test_what_is_told_beats_what_a_failure_stands_for_and_what_the_body_says() -> None:
    body = json.dumps({"error": {"code": "in", "type": "t", "message": "m"}})
    failed = outcome(None, body, network_error="ECONNREFUSED")
    assert (failed.code, failed.type, failed.message, failed.origin) == ("in", "t", "m", Origin.TRANSPORT)
    bare = outcome(None, network_error="ECONNREFUSED")
    assert (bare.code, bare.message, bare.name) == ("proxy_unreachable", "ECONNREFUSED", "")
    told = outcome(None, body, network_error="ECONNREFUSED", code="mine", message="said", origin=Origin.CLIENT)
    assert (told.code, told.message, told.origin) == ("mine", "said", Origin.CLIENT)


@pytest.mark.parametrize(
    ("status", "network_error", "succeeded"),
    [(199, "", False), (200, "", True), (299, "", True), (300, "", False), (None, "", False), (200, "reset", False)],
)
def test_a_success_is_a_2xx_that_arrived(status: int | None, network_error: str, succeeded: bool) -> None:
    assert Outcome(status, network_error=network_error).is_success is succeeded


def test_headers_are_found_by_lower_case_name() -> None:
    assert first_values([(" X-A ", "1"), ("x-a", "2"), ("B", "3")]) == {"x-a": "1", "b": "3"}
    found = Outcome(429)._replace(headers={"x-a": "1"})
    assert (found.header("x-a"), found.header("b")) == ("1", None)


# -- which member speaks -------------------------------------------------------------------------------------
CODES = ("code", "error_code", "errorCode", "errorcode", "status_code", "err_code")
TYPES = ("type", "__type", "error_type", "status")
MESSAGES = (
    "message", "msg", "error_description", "detail", "status_msg", "faultstring", "errorMessage", "error", "title",
)  # fmt: skip
STATUSES = ("code", "status", "status_code", "statusCode", "http_status", "raw_status_code")


@pytest.mark.parametrize(("keys", "part"), [(CODES, "code"), (TYPES, "type"), (MESSAGES, "message")])
def test_of_two_words_the_earlier_of_the_list_speaks(keys: tuple[str, ...], part: str) -> None:
    for key in keys:
        assert getattr(error_of({key: f"says-{key}"}), part) == f"says-{key}"
        assert getattr(error_of({key[:1].upper() + key[1:]: f"says-{key}"}), part) == f"says-{key}"
    for earlier, later in combinations(keys, 2):
        body = {later: f"says-{later}", earlier: f"says-{earlier}"}
        assert getattr(error_of(body), part) == f"says-{earlier}"
        assert getattr(error_of(body | {earlier: ""}), part) == f"says-{later}"


def test_of_two_statuses_the_earlier_of_the_list_counts() -> None:
    for earlier, later in combinations(STATUSES, 2):
        assert error_of({later: 501, earlier: 502}).status == 502
        assert error_of({later: 501, earlier: "word"}).status == 501


@pytest.mark.parametrize(
    "wrapper",
    ["error", "response", "errors", "fault", "base_resp", "detail", "message", "msg", "metadata", "raw", "Error"],
)
def test_an_error_is_found_inside_every_wrapper(wrapper: str) -> None:
    inner = {"code": "inner", "message": "m"}
    for wrapped in ({wrapper: inner}, {wrapper: [inner]}, {wrapper: json.dumps(inner)}, [{wrapper: inner}]):
        assert error_of(wrapped).code == "inner"
        assert len(error_nodes(wrapped)) == 2


@pytest.mark.parametrize("word", ["", "error", "Failed", "response.failed", "<nil>", "NULL", "none", " error "])
def test_a_word_that_says_nothing_leaves_its_place_to_the_next(word: str) -> None:
    found = error_of({"code": word, "error_code": "c", "type": word, "error_type": "t"})
    assert (found.code, found.type) == ("c", "t")


def test_wrappers_are_unfolded_to_the_depth_and_no_deeper() -> None:
    def nested(depth: int) -> dict[str, object]:
        body: dict[str, object] = {"code": "deep"}
        for _ in range(depth - 1):
            body = {"error": body}
        return body

    assert MAX_DEPTH == 6
    assert error_of(nested(6)).code == "deep"
    assert error_of(nested(7)).code == ""
    assert [len(error_nodes(nested(depth))) for depth in (1, 6, 7)] == [1, 6, 6]


def test_of_a_list_the_first_four_are_looked_at() -> None:
    assert error_of({"errors": [0, 0, 0, {"code": "c"}]}).code == "c"
    assert error_of({"errors": [0, 0, 0, 0, {"code": "c"}]}).code == ""
    assert error_of([[{"code": "c"}]]).code == ""
    assert error_of({"error": '[{"code": "c"}]'}).code == "c"
    assert error_of({"error": json.dumps(json.dumps({"code": "c"}))}).code == ""


def test_json_written_into_a_text_begins_within_the_limit() -> None:
    assert error_of({"error": " " * 65_535 + '{"code": "c"}'}).code == "c"
    assert error_of({"error": " " * 65_536 + '{"code": "c"}'}).code == ""
    assert read_json("[" + " " * 65_534 + '{"code": "c"}') == {"code": "c"}
    assert read_json("[" + " " * 65_535 + '{"code": "c"}') is None


@pytest.mark.parametrize("length", [200, 201])
def test_a_type_is_a_word_of_sane_length(length: int) -> None:
    assert bool(error_of({"type": "x" * length}).type) is (length == 200)


# -- bodies --------------------------------------------------------------------------------------------------
ERROR = '{"error": {"message": "m", "code": "c"}}'


@pytest.mark.parametrize(("before", "found"), [(127, True), (128, False)])
def test_a_stream_is_read_as_far_as_announced(before: int, found: bool) -> None:
    body = 'data: {"note": "failed"}\n' * before + f"data: {ERROR}\n"
    assert (outcome(200, body).code == "c") is found


def test_plain_events_are_no_suspects_and_comments_and_empty_lines_neither() -> None:
    plain = 'data: {"delta": "x"}\n' * 500 + ': "error"\n' * 500 + "\n" * 500
    assert outcome(200, f"{plain}data: {ERROR}\n").code == "c"
    assert outcome(200, f"{plain}data:{ERROR}\n").code == "c"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("event: error\ndata: m\n", 500), ("event:error\ndata: m\n", 500), ("event: errors\ndata: m failed\n", 200),
        ("event: error\ndata:\n", 200), ("event: error\n: hi\ndata: m\n", 500), ("event: error\ndata: [1]\n", 200),
        ("event: error\n\ndata: m\n", 500), ('event: error\ndata: {"a": 1}\n', 500),
    ],
)  # fmt: skip
def test_an_error_event_tells_even_without_an_object(body: str, status: int) -> None:
    assert outcome(200, body).status == status


def test_a_body_is_read_up_to_its_limit() -> None:
    assert BODY_LIMIT == 65_536
    padded = ERROR.rjust(BODY_LIMIT)
    assert outcome(429, padded).code == outcome(429, padded.encode()).code == "c"
    assert outcome(429, f" {padded}").code == outcome(429, f" {padded}".encode()).code == ""
    compressed = gzip.compress(padded.encode())
    assert outcome(429, compressed).code == "c"
    assert outcome(429, gzip.compress(f" {padded}".encode())).code == ""
    assert outcome(429, b"\x1f\x8bjunk").text.endswith("junk")
    assert outcome(429, message="x" * 70_000).message == "x" * BODY_LIMIT
    assert len(outcome(429, "y" * 70_000, message="x" * 70_000).text) == BODY_LIMIT


@pytest.mark.parametrize(
    ("body", "message", "text"),
    [
        ("plain", "", "plain"), ("", "said", "said"), ("plain", "said", "said plain"),
        ("plain words", "plain", "plain words"),
        ('{"message": "\\u989d"}', "", '{"message": "额"}'), ('{"message": "x"}', "", '{"message": "x"}'),
        ("\\u989d", "", "\\u989d"),
    ],
)  # fmt: skip
def test_message_and_body_are_one_text(body: str, message: str, text: str) -> None:
    assert outcome(429, body, message=message).text == text


@pytest.mark.parametrize(
    ("header", "kind"),
    [("A:http://x", "A"), ("ns#A:http://x", "A"), ("A", "A"), (" A ", "A"), ("a:b:c", "a"), ("", "")],
)
def test_the_exception_of_a_header_is_the_part_before_the_colon(header: str, kind: str) -> None:
    assert outcome(429, headers=[("X-Amzn-ErrorType", header)]).type == kind
    assert outcome(429, '{"type": "t"}', headers=[("x-amzn-errortype", header)]).type == "t"


def completion(content: object) -> str:
    return json.dumps({"choices": [{"message": {"content": content}}]})


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (completion('API request failed (429): {"error": {"message": "m", "code": 429}}'), 429),
        (completion('Error: API request failed (503): {"error": {"message": "m", "code": 503}}'), 503),
        (completion('API request failed (429): {"note": "failed"}'), 200), (completion("failed"), 200),
        (completion(["failed"]), 200), ('{"choices": ["failed"]}', 200), ('{"choices": "failed"}', 200),
        ('{"choices": [], "x": "failed"}', 200), ('["failed"]', 200),
        (completion('So: API request failed (429): {"error": {"message": "m"}}'), 200),
    ],
)  # fmt: skip
def test_a_failure_quoted_as_the_whole_completion_is_one(body: str, status: int) -> None:
    assert outcome(200, body).status == status


def test_of_several_completions_the_first_may_be_a_quoted_failure() -> None:
    quoted = {"message": {"content": 'API request failed (429): {"error": {"message": "m", "code": 429}}'}}
    plain = {"message": {"content": "failed"}}
    assert outcome(200, json.dumps({"choices": [quoted, plain]})).status == 429
    assert outcome(200, json.dumps({"choices": [plain, quoted]})).status == 200


@pytest.mark.parametrize(
    ("status", "named", "told", "found"),
    [
        (429, 503, None, (429, 503)), (429, 429, None, (429, None)), (429, 400, None, (429, 400)),
        (429, 399, None, (429, None)), (429, 503, 401, (429, 401)), (200, 503, None, (503, 503)),
        (200, 503, 401, (503, 401)), (200, 399, None, (500, 500)), (None, 503, None, (None, 503)),
    ],
)  # fmt: skip
def test_the_status_inside_is_told_apart(
    status: int | None, named: int, told: int | None, found: tuple[int | None, int | None]
) -> None:
    body = json.dumps({"error": {"message": "m", "http_status": named}})
    seen = outcome(status, body, inner_status=told)
    assert (seen.status, seen.inner_status) == found
