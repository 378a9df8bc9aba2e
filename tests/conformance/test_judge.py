"""The judge on records made by hand: what each status means, and the checks at their edges."""

from __future__ import annotations

from typing import Any

import pytest

from policy_service.cli.conformance import table
from policy_service.cli.conformance.cases import Case
from policy_service.cli.conformance.checks import CHECKS, Finding, Status
from policy_service.cli.conformance.judge import judge
from policy_service.cli.conformance.record import (
    RELEASE,
    RENEW,
    REPORT,
    SELECT,
    ClientExchange,
    PolicyCall,
    Record,
    UpstreamCall,
)
from policy_service.cli.conformance.rules import Rule
from policy_service.generated.policy.v1 import permit_pb2, policy_pb2, types_pb2

TOKEN = b"\xff\x00token"


def record(*parts: Any, **expect: dict[str, Any]) -> Record:
    """A record of one client request, 0 s to 10 s, with these calls."""
    found = Record(Case("case", "by hand", expect=expect), clients=[ClientExchange(0.0, 200, ended_at=10.0)])
    for part in parts:
        (found.upstream if isinstance(part, UpstreamCall) else found.policy).append(part)
    found.decisions = [call.answer for call in found.policy if call.method == SELECT and call.answer is not None]
    return found


def selected(at: float, *connections: str, permits: int = 0, token: bytes = TOKEN) -> PolicyCall:
    """SelectTarget, answered 0.1 s later with a Dispatch."""
    targets = [types_pb2.Target(provider="openai", connection=name) for name in connections]
    answer = policy_pb2.SelectTargetResponse(decision_token=token)
    answer.dispatch.target.CopyFrom(targets[0])
    answer.dispatch.fallbacks.extend(targets[1:])
    answer.dispatch.permits.extend(permit_pb2.Permit(permit_id=f"p{number}") for number in range(permits))
    return PolicyCall(SELECT, policy_pb2.SelectTargetRequest(request_id="r"), at, 1.0, answer, ended_at=at + 0.1)


def called(at: float, connection: str, took: float = 1.0, **more: Any) -> UpstreamCall:
    """An upstream call."""
    return UpstreamCall(connection, at, ended_at=at + took, answered_at=at + took - 0.01, **more)


def reported(at: float, attempt: int, connection: str, status: int = 200, **fields: Any) -> PolicyCall:
    """A report that was taken."""
    request = policy_pb2.ReportOutcomeRequest(
        **{"decision_token": TOKEN, "attempt": attempt, "http_status": status, **fields}
    )
    request.target.connection = connection
    return PolicyCall(REPORT, request, at, 1.0, policy_pb2.ReportOutcomeResponse(), ended_at=at + 0.1)


def found(name: str, seen: Record, **given: Any) -> Status:
    """Status of one check."""
    return CHECKS[name](seen, given).status


# --- statuses of rules ----------------------------------------------------------------------------------------------
def rule(check: str, **more: Any) -> Rule:
    return Rule("rule", "says", ["README.md"], [check], **more)


def test_a_rule_fails_if_one_case_fails_and_passes_if_one_passes() -> None:
    good = record(selected(0, "alpha"), called(1, "alpha"))
    bad = record(called(1, "alpha"))
    always = rule("asks_first", always=True)
    assert [judge([always], seen)[0].status for seen in ([good], [good, bad])] == [Status.PASS, Status.FAIL]


def test_a_rule_that_no_case_came_to_is_not_applicable_and_says_why() -> None:
    [result] = judge([rule("asks_first", always=True)], [record()])
    assert (result.status, result.reason) == (Status.NOT_APPLICABLE, "nothing to judge was seen")
    [result] = judge([rule("asks_first")], [record(called(1, "alpha"))])
    assert (result.status, result.reason) == (Status.NOT_APPLICABLE, "no case was run that is about it")


def test_a_feature_that_the_gateway_does_without_is_not_judged() -> None:
    [result] = judge([rule("asks_first", always=True, feature="leases")], [record(called(1, "a"))], ["leases"])
    assert (result.status, result.is_breach) == (Status.NOT_APPLICABLE, False)


def test_a_breach_of_a_should_is_shown_and_is_no_breach() -> None:
    [result] = judge([rule("asks_first", always=True, level="should")], [record(called(1, "a"))])
    assert (result.status, result.is_breach) == (Status.FAIL, False)
    text = "\n".join(table.lines([result]))
    assert "FAIL" in text
    assert "should, case: expected" in text
    assert text.endswith("conforms")


def test_the_table_has_what_was_expected_and_seen_and_the_document() -> None:
    [result] = judge([rule("asks_first", always=True)], [record(called(1, "alpha"))])
    first, *_, last = table.lines([result])
    expected = "case: expected SelectTarget answered with Dispatch before each upstream call; seen alpha called without"
    assert first == f"FAIL            rule  {expected}; see README.md"
    assert last == "1 rule: 0 PASS, 1 FAIL, 0 NOT APPLICABLE; 1 must be mended"


# --- checks at their edges ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("offset", "status"), [(0, Status.FAIL), (1_400, Status.PASS), (970, Status.PASS), (1_900, Status.FAIL)]
)
def test_an_offset_lies_between_the_end_of_the_attempt_before_and_the_call(offset: int, status: Status) -> None:
    seen = record(
        selected(0, "alpha", "bravo"),
        called(0.5, "alpha"),
        reported(1.5, 0, "alpha", 503, attempt_offset_ms=395),
        called(1.55, "bravo"),
        reported(2.6, 1, "bravo", attempt_offset_ms=offset),
    )
    assert found("offsets", seen) is status


def test_a_report_that_was_not_taken_is_no_report_and_its_repetition_is_no_second_one() -> None:
    lost = reported(1.5, 0, "alpha")
    lost.answer, lost.error = None, "UNAVAILABLE"
    seen = record(selected(0, "alpha"), called(0.2, "alpha"), lost)
    assert found("reports_every_attempt", seen) is Status.FAIL
    seen.policy.append(reported(2, 0, "alpha"))
    assert [found(name, seen) for name in ("reports_every_attempt", "reports_once")] == [Status.PASS, Status.PASS]
    seen.policy.append(reported(3, 0, "alpha"))
    assert found("reports_once", seen) is Status.FAIL


def test_attempts_of_two_decisions_are_counted_apart() -> None:
    seen = record(
        selected(0, "alpha"),
        reported(1, 0, "alpha", 503),
        selected(2, "bravo", token=b"other"),
        reported(3, 0, "bravo", decision_token=b"other"),
    )
    assert found("numbers_attempts", seen) is Status.PASS
    assert found("reports_once", seen) is Status.PASS


@pytest.mark.parametrize(
    ("connections", "permits", "status"),
    [(("alpha",), 0, Status.PASS), (("alpha",), 1, Status.FAIL), (("alpha", "bravo"), 0, Status.FAIL)],
)
def test_a_final_report_may_be_followed_only_where_nothing_was_left(
    connections: tuple[str, ...], permits: int, status: Status
) -> None:
    seen = record(
        selected(0, *connections, permits=permits),
        reported(1, 0, "alpha", 503, final=True),
        reported(2, 1, "alpha", 503, final=True),
    )
    assert found("final_is_last", seen) is status


def test_a_report_without_token_is_right_only_where_the_service_was_away() -> None:
    asked = selected(0, "alpha")
    seen = record(asked, reported(1, 0, "alpha", decision_token=b"", report_id="mine"))
    assert found("keeps_the_token", seen) is Status.FAIL
    asked.answer, asked.error = None, "UNAVAILABLE"
    assert found("keeps_the_token", seen) is Status.PASS


def test_a_permit_may_be_freed_by_a_final_report_or_by_release_but_not_before_the_end() -> None:
    def release(at: float) -> PolicyCall:
        answer = permit_pb2.ReleasePermitResponse()
        return PolicyCall(RELEASE, permit_pb2.ReleasePermitRequest(permit_ids=["p0"]), at, 1.0, answer, ended_at=at)

    base = (selected(0, "alpha", permits=1), called(0.5, "alpha"))
    assert found("frees_permits", record(*base)) is Status.FAIL
    assert found("frees_permits", record(*base, reported(1.6, 0, "alpha", final=True))) is Status.PASS
    assert found("frees_permits", record(*base, release(1.6))) is Status.PASS
    assert found("frees_permits", record(*base, release(1.0))) is Status.FAIL
    assert found("frees_permits", record(*base, release(4.0))) is Status.FAIL
    assert found("frees_permits", record(selected(0, "alpha"))) is Status.NOT_APPLICABLE


@pytest.mark.parametrize(("at", "status"), [((0.9, 1.8), Status.PASS), ((0.9,), Status.FAIL), ((), Status.FAIL)])
def test_no_gap_between_renewals_is_longer_than_the_permit_lives(at: tuple[float, ...], status: Status) -> None:
    renewals = [PolicyCall(RENEW, permit_pb2.RenewPermitRequest(), each) for each in at]
    seen = record(selected(0, "alpha", permits=1), called(0.2, "alpha", 2.5), *renewals)
    assert found("renews_permits", seen, ttl_ms=1_000) is status


def test_owners_belong_into_the_lease_field_and_nowhere_else() -> None:
    question = selected(0, "alpha")
    question.request.lease.owner = "vlo_secret"
    seen = record(question)
    seen.secrets["the lease owner"] = "vlo_secret"
    assert found("tells_no_secret", seen) is Status.PASS
    question.request.session_key = "session of vlo_secret"
    assert CHECKS["tells_no_secret"](seen, {}) == Finding(
        Status.FAIL,
        "no credential and no lease owner in messages to the service",
        "the lease owner in SelectTarget",
    )


def test_a_wait_may_be_answered_to_the_client_only_with_a_time_to_come_back() -> None:
    wait = policy_pb2.SelectTargetResponse(decision_token=TOKEN, wait=policy_pb2.Wait(wait_ms=600))
    seen = record(PolicyCall(SELECT, policy_pb2.SelectTargetRequest(), 0, 1.0, wait, ended_at=0.1))
    seen.clients[0].status = 503
    assert found("waits_and_asks_again", seen, wait_ms=600) is Status.FAIL
    seen.clients[0].headers = [("retry-after", "1")]
    assert found("waits_and_asks_again", seen, wait_ms=600) is Status.PASS
