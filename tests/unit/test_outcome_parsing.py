"""From bytes on the wire to an outcome: error shapes, errors in streams, network failures."""

from __future__ import annotations

import gzip
import json
from timeit import repeat

import pytest

from policy_service.domain.outcome import CallKind, Origin
from policy_service.domain.outcome_parsing import BODY_LIMIT, RawOutcome, parse_outcome

Shape = tuple[str, str, str, int | None]


def parsed(body: object, status: int = 429) -> Shape:
    raw = body if isinstance(body, str) else json.dumps(body)
    outcome = parse_outcome(RawOutcome(status=status, body=raw.encode()))
    return outcome.code, outcome.type, outcome.message, outcome.inner_status


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ({"error": {"message": "m", "type": "t", "code": "c"}}, ("c", "t", "m", None)),
        ({"type": "error", "error": {"type": "t", "message": "m"}}, ("", "t", "m", None)),
        (
            {"error": {"code": 429, "message": "m", "status": "RESOURCE_EXHAUSTED"}},
            ("429", "RESOURCE_EXHAUSTED", "m", None),
        ),
        ([{"error": {"code": 503, "message": "m"}}], ("503", "", "m", 503)),
        ({"__type": "com.amazon.x#ThrottlingException", "message": "m"}, ("", "ThrottlingException", "m", None)),
        ({"Message": "m"}, ("", "", "m", None)),
        ({"Error": {"Message": "m", "Code": "c"}}, ("c", "", "m", None)),
        ({"detail": "m"}, ("", "", "m", None)),
        ({"detail": [{"loc": ["body"], "msg": "m", "type": "missing"}]}, ("", "missing", "m", None)),
        ({"detail": ["m", "n"]}, ("", "", "m; n", None)),
        ({"message": "m", "code": 1300}, ("1300", "", "m", None)),
        ({"error": "m"}, ("", "", "m", None)),
        ({"error": "invalid_grant", "error_description": "m"}, ("invalid_grant", "", "m", None)),
        ({"code": "c", "error": "m"}, ("c", "", "m", None)),
        ({"errors": [{"code": 4006, "message": "m"}], "success": False}, ("4006", "", "m", None)),
        ({"code": 1113, "msg": "m"}, ("1113", "", "m", None)),
        ({"title": "Too Many", "detail": "m", "status": 429}, ("", "", "m", None)),
        ({"base_resp": {"status_code": 1008, "status_msg": "m"}}, ("1008", "", "m", None)),
        ({"fault": {"faultstring": "m", "detail": {"errorcode": "c"}}}, ("c", "", "m", None)),
        ({"error": {"type": "<nil>", "message": "m"}, "type": "error"}, ("", "", "m", None)),
        ({"error": {"message": 'upstream error: {"error": {"code": 401, "message": "m"}}'}}, ("401", "", "m", 401)),
        ({"error": '{"error": {"message": "m", "code": "c"}}'}, ("c", "", "m", None)),
        (json.dumps(json.dumps({"error": {"message": "m", "code": "c"}})), ("c", "", "m", None)),
        ('\ufeff{"error": {"message": "m"}}', ("", "", "m", None)),
        (')]}\'\n{"error": {"message": "m"}}', ("", "", "m", None)),
        ('[{"error": {"message": "m"}}', ("", "", "m", None)),
        ({"error": None, "message": None}, ("", "", '{"error": null, "message": null}', None)),
        ("plain words", ("", "", "plain words", None)),
        ("", ("", "", "", None)),
    ],
)
def test_the_error_object_is_found_in_every_known_shape(body: object, shape: Shape) -> None:
    assert parsed(body) == shape


def test_what_the_gateway_parsed_itself_beats_the_body() -> None:
    raw = RawOutcome(
        status=400, body=b'{"error": {"message": "m", "code": "c"}}', code="mine", message="said", type="t"
    )
    outcome = parse_outcome(raw)
    assert (outcome.code, outcome.type, outcome.message) == ("mine", "t", "said")
    assert outcome.text.startswith("said {")


def test_header_names_are_lower_case_and_the_first_value_stays() -> None:
    raw = RawOutcome(status=429, headers=[("Retry-After", "45"), ("retry-after", "10"), ("X-A", "b")])
    assert parse_outcome(raw).headers == {"retry-after": "45", "x-a": "b"}


def test_of_equal_waits_the_first_spelling_stays() -> None:
    raw = RawOutcome(status=429, headers=[("retry-after", "45"), ("retry-after", "45.0")])
    assert parse_outcome(raw).headers == {"retry-after": "45"}


def test_the_exception_name_of_a_header_is_the_type() -> None:
    raw = RawOutcome(
        status=429, headers=[("x-amzn-errortype", "ThrottlingException:http://x/")], body=b'{"message":"m"}'
    )
    assert parse_outcome(raw).type == "ThrottlingException"


def test_escaped_characters_are_readable_in_the_text() -> None:
    body = json.dumps({"error": {"message": "\u989d\u5ea6", "note": "\u4e0d\u8db3"}}).encode()
    assert "\u4e0d\u8db3" in parse_outcome(RawOutcome(status=403, body=body)).text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"m"}}\n\n', 529),
        ('event: error\ndata: {"type":"error","error":{"type":"rate_limit_error","message":"m"}}\n\n', 429),
        (': hi\n\nevent: error\ndata: {"type":"error","error":{"type":"api_error","message":"m"}}\n\n', 500),
        ('data: {"error":{"message":"m","code":"rate_limit_exceeded","type":"tokens"}}\n\n', 429),
        ('data: {"x":1}\n\ndata: {"error":{"message":"m","code":503}}\n\n', 503),
        ('event: response.failed\ndata: {"type":"response.failed","response":{"status":"failed","error":'
         '{"code":"server_error","message":"m"}}}\n\n', 500),
        ('{"error":{"message":"m","code":400}}', 400),
        ('{"x":1}\n{"error":"m"}\n', 500),
        ('[{"error":{"code":429,"message":"m","status":"RESOURCE_EXHAUSTED"}}]', 429),
        ('{"base_resp":{"status_code":1008,"status_msg":"m"}}', 500),
        ('{"success":false,"errors":[{"message":"m"}]}', 500),
        ("event: error\ndata: m\n\n", 500),
        (json.dumps({"choices": [{"message": {"content":
            'Error: API request failed (429): {"error":{"code":429,"message":"m"}}'}}]}), 429),
    ],
)  # fmt: skip
def test_an_error_inside_a_success_takes_its_own_status(body: str, status: int) -> None:
    outcome = parse_outcome(RawOutcome(status=200, body=body.encode()))
    assert (outcome.status, outcome.inner_status, outcome.message) == (status, status, "m")
    assert not outcome.is_success


@pytest.mark.parametrize(
    "body",
    [
        "",
        '{"choices": [{"message": {"content": "the word \\"error\\" is fine"}}], "error": null}',
        '{"error": {}, "output": 1}',
        '{"base_resp": {"status_code": 0}}',
        '{"success": false}',
        'event: message\ndata: {"delta": "an error: overloaded, failed"}\n\ndata: [DONE]\n\n',
        '{"choices": [{"message": {"content": "Error: API request failed (429): no json"}}]}',
        '{"half": "error',
        "<html>error failed</html>",
    ],
)
def test_a_success_that_mentions_errors_stays_one(body: str) -> None:
    outcome = parse_outcome(RawOutcome(status=200, body=body.encode()))
    assert (outcome.status, outcome.inner_status, outcome.text) == (200, None, "")
    assert outcome.is_success


@pytest.mark.parametrize(
    ("report", "status", "code", "origin"),
    [
        ("ECONNREFUSED 127.0.0.1:11434", 502, "proxy_unreachable", Origin.TRANSPORT),
        ("proxy_unreachable", 502, "proxy_unreachable", Origin.TRANSPORT),
        ("getaddrinfo ENOTFOUND api.example", 502, "proxy_unreachable", Origin.TRANSPORT),
        ("EHOSTUNREACH", 502, "proxy_unreachable", Origin.TRANSPORT),
        ("ECONNRESET", 502, "connection_reset", Origin.TRANSPORT),
        ("EPIPE", 502, "connection_reset", Origin.TRANSPORT),
        ("hyper: connection closed before message completed", 502, "connection_reset", Origin.TRANSPORT),
        ("CERT_HAS_EXPIRED", 502, "tls_error", Origin.TRANSPORT),
        ("UND_ERR_HEADERS_TIMEOUT", 504, "timeout", Origin.TRANSPORT),
        ("context deadline exceeded (Client.Timeout exceeded)", 504, "timeout", Origin.TRANSPORT),
        ("ETIMEDOUT (connect)", 504, "connect_timeout", Origin.TRANSPORT),
        ("AbortError: client disconnected", 499, "client_abort", Origin.CLIENT),
        ("spawn codex ENOENT", 502, "ENOENT", Origin.GATEWAY),
        ("stream_readiness_timeout", 504, "STREAM_READINESS_TIMEOUT", Origin.TRANSPORT),
        ("stream_too_slow", 504, "STREAM_THROUGHPUT_TOO_LOW", Origin.TRANSPORT),
        ("STREAM_THROUGHPUT_TOO_LOW", 504, "STREAM_THROUGHPUT_TOO_LOW", Origin.TRANSPORT),
        ("gremlins", 502, "network_error", Origin.TRANSPORT),
    ],
)
def test_a_network_failure_gets_the_status_it_stands_for(report: str, status: int, code: str, origin: Origin) -> None:
    outcome = parse_outcome(RawOutcome(network_error=report))
    assert (outcome.status, outcome.code, outcome.origin, outcome.message) == (status, code, origin, report)
    assert not outcome.is_success


def test_a_break_after_a_200_status_line_is_no_success() -> None:
    outcome = parse_outcome(RawOutcome(status=200, network_error="ECONNRESET"))
    assert (outcome.status, outcome.is_success) == (502, False)


def test_a_status_that_the_gateway_gave_a_network_failure_stands() -> None:
    assert parse_outcome(RawOutcome(status=504, network_error="ECONNRESET")).status == 504


def test_only_2xx_is_a_success_whose_body_may_hide_an_error() -> None:
    body = b'{"error": {"message": "m", "type": "overloaded_error"}}'
    statuses = {outer: parse_outcome(RawOutcome(status=outer, body=body)).status for outer in (200, 299, 300, 400)}
    assert statuses == {200: 529, 299: 529, 300: 300, 400: 400}


def test_an_error_event_tells_only_of_the_data_behind_it() -> None:
    body = b"event: error\nevent: message\ndata: fine\n\n"
    assert parse_outcome(RawOutcome(status=200, body=body)).is_success


def test_a_body_is_cut_decoded_with_replacement_and_inflated() -> None:
    assert len(parse_outcome(RawOutcome(status=500, body=b"x" * 100_000)).text) == BODY_LIMIT
    assert parse_outcome(RawOutcome(status=500, body=b"a\xffb")).text == "a\ufffdb"
    assert parse_outcome(RawOutcome(status=500, body=gzip.compress(b'{"error": "m"}'))).message == "m"
    assert len(parse_outcome(RawOutcome(status=500, body=gzip.compress(b"z" * 10**6))).text) == BODY_LIMIT


@pytest.mark.parametrize("body", ["[" * 60_000, '{"a":' * 10_000, '{"error":' * 900 + "1" + "}" * 900, "9" * 60_000])
def test_absurd_nesting_and_numbers_are_junk_not_errors(body: str) -> None:
    assert parse_outcome(RawOutcome(status=500, body=body.encode())).status == 500


def test_context_is_handed_on_as_it_stands() -> None:
    raw = RawOutcome(status=500, provider="p", model="m", call_kind=CallKind.LIVE_TEST, persist=False, quota_reset_at=9)
    outcome = parse_outcome(raw)
    assert (outcome.provider, outcome.model, outcome.call_kind) == ("p", "m", CallKind.LIVE_TEST)
    assert (outcome.persist, outcome.quota_reset_at) == (False, 9)


def test_a_typical_failure_costs_microseconds() -> None:
    body = b'{"error":{"message":"Rate limit reached. Please try again in 20s.","type":"tokens","code":"rate_limited"}}'
    raw = RawOutcome(status=429, headers=[("Retry-After", "20"), ("Date", "now")], body=body)
    assert min(repeat(lambda: parse_outcome(raw), number=100, repeat=9)) / 100 < 200e-6  # ten times what is measured
