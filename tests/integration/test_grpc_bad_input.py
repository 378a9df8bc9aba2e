"""Bad input over the wire: every case ends in a typed answer that names all wrong fields, never in INTERNAL."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from policy_service.application.errors import (
    FenceError,
    FieldProblem,
    InvalidRequestError,
    PolicyError,
    StoreLostError,
    UnknownStrategyError,
)
from policy_service.application.messages import EndKind
from policy_service.generated.policy.v1 import policy_pb2_grpc, types_pb2
from policy_service.generated.policy.v1.policy_pb2 import ReportOutcomeRequest, SelectTargetRequest
from policy_service.transport.grpc.limits import Limits
from policy_service.transport.grpc.token import TokenSeal
from tests.integration.grpc_shell import NOW, SECRET, Shell, detail, details, fields, reason, shell

OPENAI: Any = {"provider": "openai", "connection": "a", "model": "m"}


def stub(running: Shell) -> policy_pb2_grpc.PolicyServiceStub:
    return policy_pb2_grpc.PolicyServiceStub(running.channel)


async def refusal(running: Shell, request: Any) -> grpc.aio.AioRpcError:
    call = stub(running).SelectTarget if isinstance(request, SelectTargetRequest) else stub(running).ReportOutcome
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call(request)
    return failed.value


def select(**given: Any) -> SelectTargetRequest:
    return SelectTargetRequest(**{"candidates": [OPENAI], **given})


def report(**given: Any) -> ReportOutcomeRequest:
    return ReportOutcomeRequest(**{"report_id": "r", "target": OPENAI, "http_status": 503, **given})


def candidate(**given: Any) -> SelectTargetRequest:
    second: Any = {**OPENAI, **given}
    return SelectTargetRequest(candidates=[OPENAI, second])


LONG = "x" * 257
SELECTIONS = {
    "nothing to choose from": (SelectTargetRequest(), {"candidates": "FIELD_REQUIRED"}),
    "a blank route": (SelectTargetRequest(route=" "), {"candidates": "FIELD_REQUIRED"}),
    "route and candidates": (select(route="r"), {"candidates": "INVALID_FIELD"}),
    "a strategy beside a route": (SelectTargetRequest(route="r", strategy="random"), {"strategy": "INVALID_FIELD"}),
    "an empty provider": (candidate(provider=""), {"candidates[1].provider": "FIELD_REQUIRED"}),
    "a blank provider": (candidate(provider="  "), {"candidates[1].provider": "FIELD_REQUIRED"}),
    "a long connection": (candidate(connection=LONG), {"candidates[1].connection": "TOO_LARGE"}),
    "a control character": (candidate(model="a\x00b"), {"candidates[1].model": "INVALID_FIELD"}),
    "a negative weight": (candidate(weight=-0.1), {"candidates[1].weight": "INVALID_FIELD"}),
    "a weight that is no number": (candidate(weight=nan), {"candidates[1].weight": "INVALID_FIELD"}),
    "an infinite weight": (candidate(weight=inf), {"candidates[1].weight": "INVALID_FIELD"}),
    "a share above one": (
        candidate(inputs={"success_rate": 1.5}),
        {"candidates[1].inputs.success_rate": "INVALID_FIELD"},
    ),
    "a long request id": (select(request_id="x" * 129), {"request_id": "TOO_LARGE"}),
    "a negative wait budget": (select(wait_budget_ms=-1), {"wait_budget_ms": "INVALID_FIELD"}),
    "a deadline of years": (select(deadline_ms=10**12), {"deadline_ms": "INVALID_FIELD"}),
    "a cost that is no number": (select(cost_budget_usd=nan), {"cost_budget_usd": "INVALID_FIELD"}),
    "a key instead of its hash": (select(caller_key_sha256="sk-secret"), {"caller_key_sha256": "INVALID_FIELD"}),
    "a pin for years": (select(affinity_ttl_ms=10**12), {"affinity_ttl_ms": "INVALID_FIELD"}),
    "an endless session key": (select(session_key="x" * 4_097), {"session_key": "TOO_LARGE"}),
    "too many fallbacks": (select(max_fallbacks=101), {"max_fallbacks": "INVALID_FIELD"}),
    "an attempt without target": (
        select(earlier_attempts=[{"http_status": 503}]),
        {"earlier_attempts[0].target.provider": "FIELD_REQUIRED"},
    ),
    "too many attempts": (select(earlier_attempts=[{"target": OPENAI}] * 101), {"earlier_attempts": "TOO_LARGE"}),
    "a specificity beyond its scale": (select(traits={"specificity": 101}), {"traits.specificity": "INVALID_FIELD"}),
}
REPORTS = {
    "neither token nor report id": (report(report_id=""), {"report_id": "REPORT_ID_REQUIRED"}),
    "no target and no token": (report(target=None), {"target": "FIELD_REQUIRED"}),
    "an empty provider": (report(target={"connection": "a"}), {"target.provider": "FIELD_REQUIRED"}),
    "nothing that happened": (ReportOutcomeRequest(report_id="r", target=OPENAI), {"outcome": "FIELD_REQUIRED"}),
    "status zero": (report(http_status=0), {"http_status": "INVALID_FIELD"}),
    "status 1000": (report(http_status=1000), {"http_status": "INVALID_FIELD"}),
    "a negative attempt": (report(attempt=-1), {"attempt": "INVALID_FIELD"}),
    "a negative latency": (report(latency_ms=-5), {"latency_ms": "INVALID_FIELD"}),
    "an offset of years": (report(attempt_offset_ms=10**12), {"attempt_offset_ms": "INVALID_FIELD"}),
    "a long report id": (report(report_id="x" * 129), {"report_id": "TOO_LARGE"}),
    "a lease end of the service": (report(details={"end_lease": 9}), {"details.end_lease": "INVALID_FIELD"}),
    "a claim without id": (
        report(details={"limit_reset": {"step": "STATUS"}}),
        {"details.limit_reset.claim_id": "FIELD_REQUIRED"},
    ),
}


@pytest.mark.parametrize("name", [*SELECTIONS])
async def test_a_bad_selection_names_the_field(name: str) -> None:
    request, expected = SELECTIONS[name]
    async with shell() as running:
        failed = await refusal(running, request)
        assert not running.selects.seen
    assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fields(failed) == expected
    assert reason(failed) == next(iter(expected.values()))


@pytest.mark.parametrize("name", [*REPORTS])
async def test_a_bad_report_names_the_field(name: str) -> None:
    request, expected = REPORTS[name]
    async with shell() as running:
        failed = await refusal(running, request)
        assert not running.reports.seen
    assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fields(failed) == expected
    assert reason(failed) == next(iter(expected.values()))


async def test_all_wrong_fields_are_listed_at_once() -> None:
    bad = {"provider": "", "weight": -1.0, "connection": LONG}
    async with shell() as running:
        failed = await refusal(running, select(candidates=[bad, OPENAI, bad], request_id="x" * 200, wait_budget_ms=-1))
    expected = {f"candidates[{i}].{name}" for i in (0, 2) for name in ("provider", "weight", "connection")}
    assert set(fields(failed)) == {*expected, "request_id", "wait_budget_ms"}
    assert reason(failed) == "INVALID_REQUEST"


async def test_thousands_of_findings_still_fit_into_the_trailers() -> None:
    async with shell() as running:
        failed = await refusal(running, select(candidates=[{"provider": "é" * 300, "weight": -1.0}] * 3_000))
    assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert detail(details(failed), error_details_pb2.ErrorInfo).metadata["problems"] == "6000"


async def test_ten_thousand_candidates_are_taken_and_one_more_is_not() -> None:
    async with shell() as running:
        answer = await stub(running).SelectTarget(select(candidates=[OPENAI] * 10_000))
        failed = await refusal(running, select(candidates=[OPENAI] * 10_001))
    assert answer.HasField("dispatch")
    assert fields(failed) == {"candidates": "TOO_LARGE"}


async def test_a_weight_of_zero_is_kept_apart_from_no_weight() -> None:
    async with shell() as running:
        await stub(running).SelectTarget(select(candidates=[{**OPENAI, "weight": 0.0}, OPENAI]))
        weights = [each.weight for each in running.selects.seen[0].candidates]
    assert weights == [0.0, 1.0]


# --- tokens ---------------------------------------------------------------------------------------------------


async def sealed(running: Shell) -> bytes:
    return bytes((await stub(running).SelectTarget(select())).decision_token)


async def test_a_token_comes_back_as_the_decision_it_was_made_for() -> None:
    async with shell() as running:
        token = await sealed(running)
        await stub(running).ReportOutcome(ReportOutcomeRequest(decision_token=token, http_status=200))
        seen = running.reports.seen[0]
    assert seen.token is not None
    assert seen.token.decision_id == "decision-1"
    assert seen.target == ("openai", "a", "m")


FOREIGN = TokenSeal({1: b"x" * 32})
NEWER_KEY = TokenSeal({9: SECRET})


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda token: token[:-1], "DECISION_TOKEN_INVALID"),
        (lambda token: token[:5], "DECISION_TOKEN_INVALID"),
        (lambda token: token + b"x", "DECISION_TOKEN_INVALID"),
        (lambda token: token[:-1] + bytes([token[-1] ^ 1]), "DECISION_TOKEN_INVALID"),
        (lambda token: bytes([9]) + token[1:], "DECISION_TOKEN_FORMAT"),
        (lambda token: b"garbage" * 600, "DECISION_TOKEN_INVALID"),
        (lambda token: FOREIGN.seal(TokenSeal({1: SECRET}).open(token, NOW)), "DECISION_TOKEN_INVALID"),
        (lambda token: NEWER_KEY.seal(TokenSeal({1: SECRET}).open(token, NOW)), "DECISION_TOKEN_FOREIGN"),
    ],
    ids=["cut by one", "cut short", "longer", "altered", "other format", "garbage", "foreign", "unknown key"],
)
async def test_a_token_that_is_not_ours_is_refused_with_the_reason(spoil: Any, expected: str) -> None:
    async with shell() as running:
        token = spoil(await sealed(running))
        failed = await refusal(running, ReportOutcomeRequest(decision_token=token, http_status=200))
        previous = await refusal(running, select(previous_decision_token=token))
        assert not running.reports.seen
    assert failed.code() is previous.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (reason(failed), fields(failed)) == (expected, {"decision_token": expected})
    assert (reason(previous), fields(previous)) == (expected, {"previous_decision_token": expected})


async def test_a_token_beyond_its_age_is_refused() -> None:
    async with shell() as running:
        token = await sealed(running)
        running.reading.clock.at = NOW + 86_400_001  # type: ignore[attr-defined]
        failed = await refusal(running, ReportOutcomeRequest(decision_token=token, http_status=200))
    assert reason(failed) == "DECISION_TOKEN_EXPIRED"


async def test_ids_of_full_length_leave_as_many_fallbacks_as_a_token_holds() -> None:
    long = [{"provider": f"p{i}", "connection": "c" * 250, "model": "m" * 250} for i in range(30)]
    async with shell() as running:
        answer = await stub(running).SelectTarget(select(candidates=long, max_fallbacks=29))
        token = TokenSeal({1: SECRET}).open(answer.decision_token, NOW)
    assert len(answer.decision_token) <= 4_096
    dispatched = [answer.dispatch.target, *answer.dispatch.fallbacks]
    assert len(dispatched) > 1
    assert [each.provider for each in dispatched] == [entry.target.provider for entry in token.targets]


# --- sizes and bytes ------------------------------------------------------------------------------------------


async def test_a_body_is_cut_at_64_kib() -> None:
    async with shell() as running:
        await stub(running).ReportOutcome(report(body=b"\xff\x00" * 50_000))
        seen = running.reports.seen[0]
    assert (len(seen.body), seen.body_truncated) == (65_536, True)


async def test_a_body_of_ten_mebibytes_is_refused_with_its_reason() -> None:
    async with shell() as running:
        failed = await refusal(running, report(body=b"x" * 10_485_760))
    assert failed.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reason(failed) == "TOO_LARGE"


async def test_a_body_of_ten_mebibytes_is_cut_where_messages_may_be_that_large() -> None:
    async with shell(limits=Limits(message_bytes=16_777_216)) as running:
        await stub(running).ReportOutcome(report(body=b"x" * 10_485_760))
        assert len(running.reports.seen[0].body) == 65_536


async def test_a_message_far_beyond_the_limit_is_refused_before_it_is_read() -> None:
    async with shell(limits=Limits(message_bytes=65_536)) as running:
        failed = await refusal(running, report(body=b"x" * 1_000_000))
    assert failed.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_bytes_that_are_not_utf8_are_taken_in_bodies_and_header_values() -> None:
    headers = [types_pb2.Header(name="X-Odd", value_bytes=b"caf\xe9")]
    async with shell() as running:
        await stub(running).ReportOutcome(report(body=b"\xff\xfe", headers=headers))
        seen = running.reports.seen[0]
    assert (seen.body, seen.headers) == (b"\xff\xfe", {"x-odd": "café"})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        # Field 2 (route), one byte, which is not UTF-8.
        (b"\x12\x01\xff", "UTF-8"),
        # Field 3 with a length beyond the message.
        (b"\x1a\x7f\x00", "not a message of this contract"),
    ],
    ids=["invalid UTF-8 in a text", "a torn message"],
)
async def test_bytes_that_cannot_be_read_are_the_callers_fault(data: bytes, words: str) -> None:
    async with shell() as running:
        call = running.channel.unary_unary("/policy.v1.PolicyService/SelectTarget")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(data)
        assert running.server.gate.in_flight == 0
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason(failed.value) == "INVALID_FIELD"
    assert words in (failed.value.details() or "")


async def test_a_flood_of_headers_is_cut_and_counted() -> None:
    many = [types_pb2.Header(name=f"X-{i}", value="v") for i in range(5_000)]
    large = [types_pb2.Header(name=f"X-{i}", value="v" * 1_000) for i in range(100)]
    async with shell() as running:
        await stub(running).ReportOutcome(report(headers=many))
        await stub(running).ReportOutcome(report(headers=large))
        first, second = running.reports.seen
    assert (len(first.headers), first.dropped_headers) == (256, 4_744)
    assert sum(len(k) + len(v) for k, v in second.headers.items()) <= 65_536
    assert len(second.headers) + second.dropped_headers == 100


async def test_of_a_repeated_header_the_first_value_counts_whatever_its_case() -> None:
    headers = [types_pb2.Header(name="Retry-After", value="1"), types_pb2.Header(name="retry-after", value="9")]
    async with shell() as running:
        await stub(running).ReportOutcome(report(headers=headers))
        assert running.reports.seen[0].headers == {"retry-after": "1"}


# --- outcomes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "end", "text"),
    [
        ({"http_status": 503}, EndKind.HTTP_STATUS, ""),
        ({"network_error": 2, "network_error_text": "ECONNREFUSED"}, EndKind.NETWORK_ERROR, "ECONNREFUSED"),
        ({"network_error": 0}, EndKind.NETWORK_ERROR, ""),
        ({"client_cancelled": {"hedge": True}}, EndKind.CLIENT_CANCELLED, ""),
        ({"local_fault": {"kind": 3, "text": "no translation"}}, EndKind.LOCAL_FAULT, "no translation"),
    ],
)
async def test_each_kind_of_end_is_told_apart(given: dict[str, Any], end: EndKind, text: str) -> None:
    async with shell() as running:
        await stub(running).ReportOutcome(ReportOutcomeRequest(report_id="r", target=OPENAI, **given))
        seen = running.reports.seen[0]
    assert seen.end is end
    assert seen.extras.error_message == text
    assert (seen.status is not None) is (end is EndKind.HTTP_STATUS)
    assert bool(seen.network_error) is (end is EndKind.NETWORK_ERROR)
    assert seen.extras.hedge_cancelled is (end is EndKind.CLIENT_CANCELLED)


async def test_what_a_caller_leaves_unset_is_not_stated() -> None:
    async with shell() as running:
        await stub(running).SelectTarget(select())
        await stub(running).ReportOutcome(report())
        asked, told = running.selects.seen[0], running.reports.seen[0]
    assert (asked.wait_budget_ms, asked.deadline_ms, asked.allow_wait) == (None, None, True)
    assert (asked.is_retry_safe, asked.request_id) == (False, "drawn-1")
    assert (told.final, told.elapsed_ms, told.pool_attempt, told.extras.persist) == (False, None, None, True)


# --- errors of the use cases ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (FenceError("stale", reason="LEASE_REQUIRED"), grpc.StatusCode.FAILED_PRECONDITION, "LEASE_REQUIRED"),
        (StoreLostError("away", retry_after_ms=500), grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE"),
        (UnknownStrategyError("best", ("priority", "random")), grpc.StatusCode.INVALID_ARGUMENT, "UNKNOWN_STRATEGY"),
    ],
)
async def test_errors_of_use_cases_keep_code_and_reason(
    error: PolicyError, code: grpc.StatusCode, expected: str
) -> None:
    async with shell() as running:
        running.selects.error = error
        failed = await refusal(running, SelectTargetRequest(route="refused"))
    assert (failed.code(), reason(failed)) == (code, expected)
    pushback = [value for name, value in failed.trailing_metadata() if name == "grpc-retry-pushback-ms"]
    assert pushback == ([] if error.retry_after_ms is None else [str(error.retry_after_ms)])


async def test_a_route_without_target_is_an_answer_and_not_an_error() -> None:
    async with shell() as running:
        answer = await stub(running).SelectTarget(SelectTargetRequest(route="empty"))
    assert (answer.reject.http_status, answer.reject.retry_after_ms) == (503, 3_000)
    assert answer.reject.terminal_reason_text == "all_targets_cooling_down"
    assert answer.exclusions[0].reason_text == "circuit_open"
    assert answer.exclusions[0].reason != 0
    assert answer.decision_token == b""


def test_a_message_of_many_problems_stays_short() -> None:
    error = InvalidRequestError(tuple(FieldProblem(f"f{i}", "wrong") for i in range(1_000)))
    assert len(error.message) < 600
