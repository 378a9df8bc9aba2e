"""Shapes of errors that are no plain JSON object: XML, printed by Python, a number behind the message."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from policy_service.domain.catalogue import Catalogue, Provider
from policy_service.domain.decision_record import Reason
from policy_service.domain.error_kinds import NetworkFailure
from policy_service.domain.error_object import read_json, xml_node
from policy_service.domain.error_types import breaker_kind, reason_label
from policy_service.domain.ids import ConnectionId, ProviderId
from policy_service.domain.outcome import Origin
from policy_service.domain.outcome_parsing import RawOutcome, first_values, network_failure, parse_outcome
from policy_service.domain.policy import Policy
from policy_service.domain.reading import Reading, echoes_request
from policy_service.domain.retry_grammar import read_clock, read_stopwatch

ACME = Provider("acme", code_meanings={"1041": "rate_limit", "449": "credential"})
TABLE = Policy(Catalogue(providers={"acme": ACME}))


# --- XML --------------------------------------------------------------------------------------------------------------
def test_code_and_message_of_an_error_in_xml_are_read_with_their_entities() -> None:
    text = '<?xml version="1.0"?><Error><Code> SlowDown </Code><Message>a &lt; b</Message><Code>Later</Code></Error>'
    assert xml_node(text) == {"code": "SlowDown", "message": "a < b"}


@pytest.mark.parametrize("lead", ["<!DOCTYPE html>", "<html>", "<HTML lang='x'>", "", "text "])
def test_code_on_a_page_or_inside_other_text_is_no_error_object(lead: str) -> None:
    assert xml_node(f"{lead}x<code>SlowDown</code>") is None


def test_xml_without_code_and_message_names_nothing() -> None:
    assert xml_node("<a><b>c</b></a>") is None


def test_an_element_of_xml_is_read_up_to_1024_characters() -> None:
    assert xml_node(f"<e><code>{'c' * 1024}</code></e>") == {"code": "c" * 1024}
    assert xml_node(f"<e><code>{'c' * 1025}</code></e>") is None


def test_an_error_in_xml_gives_the_outcome_its_code() -> None:
    outcome = parse_outcome(RawOutcome(400, body="\ufeff \n<Error><Code>Throttling</Code></Error>"))
    assert outcome.code == "Throttling"


# --- printed by Python ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["{'error': {'code': 'c', 'is': None}}", "[{'error': {'code': 'c', 'is': None}}]"])
def test_an_object_printed_by_python_is_read_as_the_json_that_it_should_have_been(text: str) -> None:
    found = read_json(text)
    assert (found[0] if isinstance(found, list) else found) == {"error": {"code": "c", "is": None}}


@pytest.mark.parametrize(
    "text",
    [
        "{'a': print('run')}",
        "{'a': b'bytes'}",
        "{'a': {1, 2}}",
        "{'a': ",
        "{'a': 1}}",
        "{'a': " + "[" * 900 + "]" * 900 + "}",
        "{'a': " + "-" * 1_500 + "1}",
        "{'a': '\x00'}",
        "{'a': 10 ** 9}",
    ],
)
def test_what_is_no_plain_literal_is_not_read(text: str) -> None:
    assert read_json(text) is None


def test_a_printed_object_is_read_up_to_2048_characters() -> None:
    whole = "{'a': '" + "b" * (2_048 - 9) + "'}"
    assert len(whole) == 2_048
    assert read_json(whole) == {"a": "b" * (2_048 - 9)}
    assert read_json(whole.replace("b'", "bb'")) is None


def test_a_wait_in_a_printed_object_is_read() -> None:
    printed = "{'error': {'details': [{'@type': 'x/google.rpc.RetryInfo', 'retryDelay': '19s'}]}}"
    outcome = parse_outcome(RawOutcome(429, body=printed, provider="acme"))
    hint = Reading(outcome, TABLE.for_connection(ProviderId("acme"), ConnectionId("")), 0).hint
    assert hint is not None
    assert hint.wait_ms == 19_000


# --- a number behind the message, a status of its own -----------------------------------------------------------------
def meaning(status: int, body: object) -> str:
    outcome = parse_outcome(RawOutcome(status, body=json.dumps(body), provider="acme"))
    return Reading(outcome, TABLE.for_connection(ProviderId("acme"), ConnectionId("")), 0).meaning


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("busy (1041)", "rate_limit"),
        ("busy (1041)   ", "rate_limit"),
        ("busy (1042)", ""),
        ("busy (1041) again", ""),
        ("busy 1041", ""),
        ("busy (01041)", ""),
        ("busy (1041) (request id: 7)", "rate_limit"),
        ("busy (1041) (request id: 7) (again)", ""),
        (f"busy (1041) ({'7' * 80})", "rate_limit"),
        (f"busy (1041) ({'7' * 81})", ""),
    ],
)
def test_the_number_at_the_end_of_a_message_is_looked_up_in_the_provider_s_table(message: str, found: str) -> None:
    assert meaning(500, {"error": {"message": message}}) == found


def test_the_code_speaks_before_the_number_at_the_end() -> None:
    assert meaning(500, {"error": {"message": "busy (1041)", "code": "449"}}) == "credential"


def test_a_status_of_its_own_is_looked_up_where_it_stands_in_a_200_only() -> None:
    assert meaning(200, {"status": "449", "msg": "no"}) == "credential"
    assert meaning(449, {"msg": "no"}) == ""


# --- errors inside a 200 ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "is_error"),
    [
        ({"code": 402, "msg": "no", "data": None}, True),
        ({"code": 402, "msg": "no", "data": {}}, False),
        ({"code": 402, "msg": "no", "id": "x"}, False),
        ({"error_code": 18, "error_msg": "no", "id": "x"}, True),
        ({"status": "449", "msg": "no", "body": None}, True),
        ({"status": 400, "msg": "no"}, True),
        ({"status": 399, "msg": "no"}, False),
        ({"status": "4490", "msg": "no"}, False),
        ({"status": "done", "msg": "no"}, False),
        ({"status": "\u0664\u0664\u0669", "msg": "no"}, False),
        ({"status": "449", "msg": "no", "body": {"choices": []}}, False),
    ],
)
def test_a_code_and_a_message_are_a_failure_where_no_result_stands_beside_them(body: object, is_error: bool) -> None:
    assert parse_outcome(RawOutcome(200, body=json.dumps(body))).is_error_in_success is is_error


# --- what the caller sent ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("status", "detail", "echoes"),
    [
        (422, [{"loc": ["body"], "msg": "m"}], True),
        (400, [{"loc": ["body"], "msg": "m"}], True),
        (403, [{"loc": ["body"], "msg": "m"}], False),
        (422, [{"loc": "body", "msg": "m"}], False),
        (422, '[{"loc": ["body"]}]', True),
        (422, "[{'loc': ['body']}]", True),
        (422, "location: [", False),
        (422, "x" * 4_077 + "'loc':[", True),
        (422, "x" * 4_078 + "'loc':[", False),
    ],
)
def test_a_list_of_places_quotes_what_the_caller_sent(status: int, detail: object, echoes: bool) -> None:
    outcome = parse_outcome(RawOutcome(status, body=json.dumps({"detail": detail})))
    assert echoes_request(outcome) is echoes


# --- repeated headers -------------------------------------------------------------------------------------------------
def test_of_a_repeated_header_the_first_value_counts() -> None:
    assert first_values([("Retry-After", "5"), ("retry-after", "20"), ("x-a", "2"), ("X-A", "1")]) == {
        "retry-after": "5",
        "x-a": "2",
    }


# --- spans of time ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "wait_ms"),
    [
        ("02:11:05.", 7_865_000),
        ("0:00:01", 1_000),
        ("120:00:00", 432_000_000),
        ("1200:00:00", None),
        ("02:60:05", None),
        ("02:11:60", None),
        ("02:11:05:01", None),
        ("02:11:051", None),
        ("02:11", None),
    ],
)
def test_a_span_as_dotnet_prints_it(text: str, wait_ms: int | None) -> None:
    found = read_stopwatch(f"in {text}", 3)
    assert (found and found[0]) == wait_ms
    assert found is None or found[1] == 3 + len(text.rstrip("."))


def test_a_place_at_the_very_beginning_of_a_text_is_one() -> None:
    assert echoes_request(parse_outcome(RawOutcome(422, body="'loc': ['body'] is wrong")))


def test_a_file_that_may_not_be_opened_is_the_gateway_s_own_fault() -> None:
    assert network_failure("EACCES: permission denied") == NetworkFailure(("eacces",), 502, "EACCES", Origin.GATEWAY)


@pytest.mark.parametrize(("wait", "kind"), [("3599.999s", "rate_limit"), ("3600s", "quota_exhausted")])
def test_a_daily_limit_that_ends_within_the_hour_is_a_rate_for_the_breaker(wait: str, kind: str) -> None:
    assert breaker_kind(parse_outcome(RawOutcome(429, body=f"daily limit. please retry in {wait}")), 0) == kind


@pytest.mark.parametrize("text", ["weekly usage limit", "session limit reached"])
def test_a_quota_of_a_week_or_a_session_is_a_quota_in_listings_too(text: str) -> None:
    assert reason_label(parse_outcome(RawOutcome(429, body=text))) == Reason.QUOTA_EXHAUSTED


def test_a_clock_on_a_day_of_a_named_year_is_that_year_s() -> None:
    now = int(datetime(2026, 6, 1, tzinfo=UTC).timestamp() * 1_000)
    found = read_clock("Oct 6, 2028, 10am (UTC)", 0, now)
    assert found is not None
    assert found[0] == int(datetime(2028, 10, 6, 10, tzinfo=UTC).timestamp() * 1_000)
