"""The state machine of one request (policy.proto, spec/fleet.md section 1, spec/cooldown_wait.md section 3)."""

from __future__ import annotations

from typing import Any

import pytest

from policy_client import messages, outcomes, steps
from policy_client.errors import (
    FenceError,
    LeaseLostError,
    NoTargetError,
    RefusedWhileAwayError,
    ServiceAwayError,
    UnavailableError,
)
from policy_client.steps import Budget
from policy_client.testing import target
from tests.python_client.walking import (
    FALL_BACK,
    POOL,
    RETURN,
    Walk,
    decided,
    is_a,
    judged,
    names,
    rejected,
    slot,
    status,
    told_to_wait,
)

RETRY_SAME = messages.ACTION_KIND_RETRY_SAME
WAIT_AND_SELECT = messages.ACTION_KIND_WAIT_AND_SELECT
BOTH = ("openai/main/gpt", "openai/spare/gpt")


def called(step: Any) -> str:
    """Target of the call that a step asks for."""
    return names([is_a(step, steps.Call).attempt.target])[0]


# --- success and failover ------------------------------------------------------------------------------------
def test_a_success_is_returned_and_reported_behind_as_final() -> None:
    walk = Walk()
    assert called(walk.on(decided(*BOTH), after_ms=3)) == "openai/main/gpt"
    result = is_a(walk.on(status(200), after_ms=40), steps.Return).result
    assert (result.value, result.http_status, result.attempts) == ("200", 200, ())
    (report,) = walk.reports()
    assert (report.attempt, report.final, report.latency_ms, report.decision_token) == (0, True, 40, b"token")
    assert report.attempt_offset_ms == 0


def test_a_failure_goes_on_where_the_service_says_and_each_attempt_has_its_number_and_offset() -> None:
    walk = Walk()
    walk.on(decided(*BOTH))
    first = is_a(walk.on(status(503), after_ms=25), steps.Report).request
    assert called(walk.on(judged(FALL_BACK, BOTH[1]), after_ms=5)) == BOTH[1]
    result = is_a(walk.on(status(200)), steps.Return).result
    assert [(each.http_status, each.target.connection) for each in result.attempts] == [(503, "main")]
    last = walk.reports()[-1]
    assert [
        (first.attempt, first.attempt_offset_ms, first.final),
        (last.attempt, last.attempt_offset_ms, last.final),
    ] == [
        (0, 0, False),
        (1, 30, True),
    ]


def test_the_last_failure_of_a_decision_is_final_and_a_new_selection_leaves_out_what_failed() -> None:
    walk = Walk()
    walk.follow(decided(*BOTH), status(503), judged(FALL_BACK, BOTH[1]), status(429))
    assert walk.reports()[-1].final
    request = is_a(walk.on(judged(FALL_BACK)), steps.Select).request
    assert [(each.target.connection, each.http_status) for each in request.earlier_attempts] == [
        ("main", 503),
        ("spare", 429),
    ]
    assert (request.request_id, request.previous_decision_token) == ("id-1", b"token")


def test_what_the_service_made_of_a_failure_travels_to_the_next_selection() -> None:
    walk = Walk()
    walk.follow(decided(BOTH[0]), status(429))
    verdict = messages.Verdict(
        reason_text="rate_limit", scope_text="connection", failure_kind_text="quota", retry_after_ms=7
    )
    response = messages.ReportOutcomeResponse(verdict=verdict, action=messages.Action(kind=FALL_BACK))
    earlier = is_a(walk.on(steps.Reported(response)), steps.Select).request.earlier_attempts[0]
    assert (earlier.reason, earlier.scope, earlier.kind, earlier.retry_hint_ms) == (
        "rate_limit",
        "connection",
        "quota",
        7,
    )


def test_a_failure_that_is_returned_carries_the_restated_status_and_frees_nothing_that_is_not_held() -> None:
    walk = Walk()
    walk.follow(decided(*BOTH), status(403))
    response = messages.ReportOutcomeResponse(
        verdict=messages.Verdict(restated_status=429, retry_after_ms=2_000), action=messages.Action(kind=RETURN)
    )
    result = is_a(walk.on(steps.Reported(response)), steps.Return).result
    assert (result.value, result.http_status, result.retry_after_ms, result.is_success) == ("403", 429, 2_000, False)
    assert walk.behind == []


def test_a_reject_after_attempts_tells_of_them() -> None:
    walk = Walk()
    error = is_a(walk.follow(decided(BOTH[0]), status(503), judged(FALL_BACK), rejected(502)), steps.Raise).error
    assert isinstance(error, NoTargetError)
    assert (error.http_status, error.code, len(error.attempts)) == (502, "all_targets_skipped", 1)
    assert error.body()["error"]["code"] == "all_targets_skipped"


def test_an_action_that_this_client_does_not_know_leads_to_a_new_selection() -> None:
    walk = Walk()
    assert isinstance(walk.follow(decided(*BOTH), status(503), judged(99)), steps.Select)


# --- network errors, faults, cancels --------------------------------------------------------------------------
def test_a_network_error_is_reported_and_raised_only_where_it_is_the_last_word() -> None:
    walk = Walk()
    refused = ConnectionRefusedError("no")
    report = is_a(walk.follow(decided(*BOTH), steps.Raised(refused)), steps.Report).request
    assert report.network_error == outcomes.CONNECT_REFUSED
    assert is_a(walk.on(judged(RETURN)), steps.Raise).error is refused


def test_a_fault_of_our_own_ends_the_request_and_is_held_against_nobody() -> None:
    walk = Walk()
    fault = KeyError("x")
    assert is_a(walk.follow(decided(*BOTH, permits=[slot()]), steps.Raised(fault)), steps.Raise).error is fault
    (report,) = walk.reports()
    assert (report.WhichOneof("outcome"), report.final) == ("local_fault", True)


def test_leaving_during_a_call_reports_a_cancel_that_frees_everything() -> None:
    walk = Walk()
    walk.follow(decided(*BOTH, permits=[slot()]), steps.Left())
    (report,) = walk.reports()
    assert (report.WhichOneof("outcome"), report.final) == ("client_cancelled", True)


def test_leaving_during_a_selection_withdraws_it() -> None:
    walk = Walk()
    walk.on(steps.Left())
    assert [each.request_id for each in walk.behind] == ["id-0"]


def test_leaving_between_two_attempts_gives_the_slot_back() -> None:
    walk = Walk()
    walk.follow(decided(*BOTH, permits=[slot()]), status(503), judged(RETRY_SAME, delay_ms=500), steps.Left())
    assert [type(each) for each in walk.behind] == [messages.ReleasePermitRequest]


# --- waits ----------------------------------------------------------------------------------------------------
def test_a_wait_sleeps_and_asks_again_with_the_same_id_its_token_and_nobody_excluded() -> None:
    walk = Walk(budget=Budget(wait_ms=1_000))
    walk.follow(decided(BOTH[0]), status(503), judged(FALL_BACK))
    asked = is_a(walk.turn.step, steps.Select).request
    assert is_a(walk.on(told_to_wait(400)), steps.Sleep).ms == 400
    again = is_a(walk.on(steps.Slept(), after_ms=400), steps.Select).request
    assert (again.request_id, again.previous_decision_token) == (asked.request_id, b"waiting")
    assert not again.earlier_attempts
    assert again.wait_budget_ms == 600


def test_a_wait_beyond_the_budget_is_refused_with_the_time_to_come_back_and_leaves_the_line() -> None:
    walk = Walk(budget=Budget(wait_ms=1_000))
    error = is_a(walk.on(told_to_wait(1_001, ticket=4)), steps.Raise).error
    assert isinstance(error, NoTargetError)
    assert (error.code, error.retry_after_ms) == ("wait_exceeds_budget", 2_000)
    assert [type(each) for each in walk.behind] == [messages.CancelPermitRequest]


def test_time_spent_in_line_counts_as_waiting() -> None:
    walk = Walk(budget=Budget(wait_ms=1_000))
    walk.follow(decided(BOTH[0], waited_ms=700), status(503), judged(FALL_BACK))
    assert is_a(walk.turn.step, steps.Select).request.wait_budget_ms == 300


def test_a_retry_of_the_same_target_waits_carries_its_headers_and_counts_as_an_attempt() -> None:
    walk = Walk()
    slow = messages.Header(name="x-slow", value="1")
    walk.follow(decided(*BOTH), status(429), judged(RETRY_SAME, delay_ms=200, set_headers=[slow]))
    assert is_a(walk.turn.step, steps.Sleep).ms == 200
    attempt = is_a(walk.on(steps.Slept(), after_ms=200), steps.Call).attempt
    assert (attempt.number, attempt.target.connection) == (1, "main")


def test_wait_and_select_begins_anew_with_the_same_target_allowed() -> None:
    walk = Walk()
    assert is_a(walk.follow(decided(BOTH[0]), status(503), judged(WAIT_AND_SELECT, delay_ms=50)), steps.Sleep).ms == 50
    request = is_a(walk.on(steps.Slept(), after_ms=50), steps.Select).request
    assert (request.request_id, len(request.earlier_attempts)) == ("id-1", 0)


def test_a_wait_that_nobody_can_afford_returns_the_failure() -> None:
    walk = Walk(budget=Budget(wait_ms=10))
    assert is_a(walk.follow(decided(BOTH[0]), status(503), judged(WAIT_AND_SELECT, delay_ms=50)), steps.Return)


def test_the_time_of_the_request_bounds_everything() -> None:
    walk = Walk(budget=Budget(total_ms=100))
    assert is_a(walk.turn.step, steps.Select).request.deadline_ms == 100
    walk.on(decided(*BOTH))
    walk.on(status(503), after_ms=100)
    assert is_a(walk.on(judged(FALL_BACK, BOTH[1])), steps.Return).result.value == "503"


def test_no_more_upstream_calls_than_allowed() -> None:
    walk = Walk(budget=Budget(dispatches=1))
    assert (
        is_a(walk.follow(decided(*BOTH), status(503), judged(FALL_BACK, BOTH[1])), steps.Return).result.value == "503"
    )


# --- grants ---------------------------------------------------------------------------------------------------
def test_a_failure_of_a_capped_target_keeps_its_slot_until_the_answer_says_that_it_is_not_needed() -> None:
    walk = Walk()
    report = is_a(walk.follow(decided(BOTH[0], permits=[slot()]), status(429)), steps.Report).request
    assert not report.final
    walk.on(judged(FALL_BACK))
    assert [type(each) for each in walk.behind] == [messages.ReleasePermitRequest]


def test_a_probe_is_reported_as_final_and_nothing_is_released_twice() -> None:
    walk = Walk()
    report = is_a(walk.follow(decided(BOTH[0], probe=True), status(503)), steps.Report).request
    assert report.final
    walk.on(judged(FALL_BACK))
    assert walk.behind == []


def test_permits_are_renewed_at_a_third_of_their_life_while_the_call_runs() -> None:
    walk = Walk()
    response = decided(BOTH[0], permits=[slot(expires_at_unix_ms=126_000)]).response
    response.decided_at_unix_ms = 6_000
    walk.on(steps.Selected(response))
    hold = walk.turn.journey.hold
    assert hold is not None
    assert (hold.token, hold.renew_ms) == (b"token", 40_000)
    walk.on(status(429))
    assert walk.turn.journey.hold is None


# --- streams --------------------------------------------------------------------------------------------------
def test_an_open_stream_is_returned_and_owes_its_report() -> None:
    walk = Walk()
    walk.on(decided(*BOTH))
    result = is_a(walk.on(steps.Answered(steps.streaming("stream"))), steps.Return).result
    assert result.owed is not None
    assert (result.owed.report.final, result.owed.called_at, walk.behind) == (True, 1_000, [])


# --- leases ---------------------------------------------------------------------------------------------------
def leased() -> messages.SelectTargetRequest:
    asked = messages.SelectTargetRequest()
    asked.CopyFrom(POOL)
    asked.lease.CopyFrom(messages.LeaseContext(owner="vlo_x", generation=3))
    return asked


def fence(status: Any) -> steps.FenceChecked:
    return steps.FenceChecked(messages.CheckFenceResponse(status=status))


def test_a_dispatch_that_no_fresh_selection_covers_checks_the_fence_first() -> None:
    walk = Walk(leased())
    assert called(walk.on(decided(*BOTH))) == BOTH[0]
    check = is_a(walk.follow(status(503), judged(FALL_BACK, BOTH[1])), steps.CheckFence).request
    assert (check.connection, check.lease.generation, check.decision_token) == ("spare", 3, b"token")
    assert called(walk.on(fence(messages.FENCE_STATUS_VALID))) == BOTH[1]


def test_a_fence_that_does_not_hold_dispatches_nothing_and_counts_against_nobody() -> None:
    walk = Walk(leased())
    walk.follow(decided(*BOTH), status(503), judged(FALL_BACK, BOTH[1]))
    error = is_a(walk.on(fence(3)), steps.Raise).error
    assert isinstance(error, LeaseLostError)
    assert error.code == "LEASE_FENCE_STALE"
    report = walk.reports()[-1]
    assert (report.local_fault.kind, report.final, report.attempt) == (outcomes.NOT_DISPATCHED, True, 1)


def test_without_an_answer_to_the_fence_nothing_is_dispatched() -> None:
    walk = Walk(leased())
    walk.follow(decided(*BOTH), status(503), judged(FALL_BACK, BOTH[1]))
    away = ServiceAwayError("gone")
    assert is_a(walk.on(steps.Failed(away)), steps.Raise).error is away


# --- without the service --------------------------------------------------------------------------------------
def local(*targets: str) -> steps.LocalOrder:
    return steps.LocalOrder(tuple(map(target, targets)))


def test_without_the_service_the_known_order_is_walked_and_reported_later_without_a_token() -> None:
    walk = Walk()
    assert called(walk.on(local(*BOTH))) == BOTH[0]
    assert called(walk.on(status(503), after_ms=10)) == BOTH[1]
    assert is_a(walk.on(status(200), after_ms=10), steps.Return).result.attempt.is_local
    assert [(each.report_id, each.decision_token, each.http_status) for each in walk.reports()] == [
        ("id-local-1", b"", 503),
        ("id-local-2", b"", 200),
    ]
    assert [each.began_at for each in walk.behind] == [1_000, 1_010]


def test_without_the_service_a_wrong_request_is_not_tried_everywhere() -> None:
    walk = Walk()
    assert is_a(walk.follow(local(*BOTH), status(400)), steps.Return).result.value == "400"


def test_without_the_service_the_last_failure_is_the_answer() -> None:
    walk = Walk()
    assert is_a(walk.follow(local(*BOTH), status(503), status(502)), steps.Return).result.value == "502"


def test_a_report_that_is_lost_goes_on_with_the_decision_then_without_what_failed() -> None:
    walk = Walk()
    walk.follow(decided(*BOTH), status(503))
    assert called(walk.on(steps.ReportLost())) == BOTH[1]
    walk.follow(status(503), steps.ReportLost())
    assert called(walk.on(local(*BOTH, "openai/third/gpt"))) == "openai/third/gpt"


def test_a_service_that_goes_away_after_a_failure_leaves_that_failure_as_the_answer() -> None:
    walk = Walk()
    walk.follow(decided(BOTH[0]), status(503), judged(FALL_BACK))
    assert is_a(walk.on(steps.Failed(RefusedWhileAwayError("closed"))), steps.Return).result.value == "503"


@pytest.mark.parametrize("error", [UnavailableError("x", "STORE_UNAVAILABLE"), FenceError("x", "LEASE_REQUIRED")])
def test_an_answer_of_the_service_that_is_an_error_is_raised(error: Exception) -> None:
    assert is_a(Walk().on(steps.Failed(error)), steps.Raise).error is error


def test_without_the_service_and_without_targets_the_request_is_refused() -> None:
    assert isinstance(is_a(Walk().on(local()), steps.Raise).error, RefusedWhileAwayError)


@pytest.mark.parametrize(
    "event",
    [
        steps.LocalOrder((target(BOTH[0]),), may_hold=True),
        steps.LocalOrder((), may_hold=True),
        steps.Failed(ServiceAwayError("late", "DEADLINE_EXCEEDED"), may_hold=True),
    ],
)
def test_what_a_selection_without_answer_may_have_taken_is_given_back(event: Any) -> None:
    walk = Walk()
    walk.on(event)
    assert walk.behind == [messages.CancelPermitRequest(request_id="id-0")]


def test_a_later_selection_without_answer_is_withdrawn_under_its_own_id() -> None:
    walk = Walk()
    walk.follow(decided(BOTH[0]), status(503), judged(FALL_BACK))
    walk.on(steps.Failed(ServiceAwayError("late", "DEADLINE_EXCEEDED"), may_hold=True))
    assert walk.behind[-1] == messages.CancelPermitRequest(request_id="id-1")


def test_a_selection_that_was_not_heard_leaves_nothing_to_give_back() -> None:
    walk = Walk()
    walk.on(local(*BOTH))
    assert walk.behind == []
