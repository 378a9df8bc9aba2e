"""Whole rows and actions of the usage wall: lane, waits, claim, to the last field (spec/usage_wall.md)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policy_service.domain import limit_reset, usage_wall
from policy_service.domain.limit_reset import ClaimReport, WallContext
from policy_service.domain.usage_wall import LaneStep, accept, expire, is_at_wall, respond_in_lane, with_hints
from policy_service.domain.usage_wall_state import (
    Action,
    ClaimCall,
    ClaimStep,
    Lane,
    LaneEnd,
    LimitResetClaim,
    Via,
    WaitWindow,
    WallAction,
    WallOptions,
    WallResponse,
    is_lane_active,
    surplus,
)

SLOW = {"anthropic-usage-limit": "slow"}
NOW = 1_000_000
IDLE = Lane("claude", "c", budget_utilization=0.5, requests_served=3, requests_served_standard=4)
LANE = replace(IDLE, resets_at_s=2_000, accepted_at=900_000)
OFFER = {"status": "rejected", "slow-offer": "treatment", "reset": "2000"}
CONTEXT = WallContext(WallOptions(auto_limit_reset=True), organization="org-1")


def wall(status: int = 429, sent_slow: bool = True, budget: int | None = None, **headers: Any) -> WallResponse:
    named = {name.replace("_", "-"): str(value) for name, value in headers.items()}
    return WallResponse(status, named, sent_slow, budget)


# -- the lane ------------------------------------------------------------------------------------------------
def test_an_accepted_offer_begins_a_fresh_lane() -> None:
    found = accept(IDLE, WallResponse(429, OFFER), NOW)
    fresh = Lane("claude", "c", 2_000, NOW, requests_served=0, requests_served_standard=0, budget_utilization=None)
    assert found == LaneStep(fresh, WallAction(Action.RETRY_SAME, via=Via.LOW_PRIORITY_ACCEPTED, set_headers=SLOW))
    assert accept(replace(IDLE, retry_after_ms=7_000, max_wait_ms=60_000), WallResponse(429, OFFER), NOW) == found
    told = accept(IDLE, WallResponse(429, {**OFFER, "slow-retry-after": "7", "slow-budget-utilization": "0.9"}), NOW)
    assert (told.lane.retry_after_ms, told.lane.budget_utilization) == (7_000, 0.9)


@pytest.mark.parametrize(
    ("row", "headers", "accepted"),
    [
        ({}, {"reset": "1000"}, False), ({}, {"reset": "1001"}, True), ({}, {"reset": "", "5h-reset": "1001"}, True),
        ({}, {"reset": ""}, False), ({}, {"reset": "-1"}, False), ({}, {"slow-offer": "control"}, False),
        ({"budget_spent_until": NOW}, {}, True), ({"budget_spent_until": NOW + 1}, {}, False),
        ({"cooling_off_until": NOW}, {}, True), ({"cooling_off_until": NOW + 1}, {}, False),
    ],
)  # fmt: skip
def test_an_offer_counts_while_its_reset_is_ahead_and_nothing_speaks_against_it(
    row: dict[str, int], headers: dict[str, str], accepted: bool
) -> None:
    found = accept(replace(IDLE, **row), WallResponse(429, {**OFFER, **headers}), NOW)  # type: ignore[arg-type]
    assert (found.action.action is Action.RETRY_SAME) is accepted


def test_a_lane_lasts_until_a_minute_after_its_reset() -> None:
    assert is_lane_active(LANE, 2_059_999)
    assert not is_lane_active(LANE, 2_060_000)
    assert expire(LANE, 2_059_999) is LANE
    assert expire(LANE, 2_060_000) == replace(LANE, resets_at_s=None, accepted_at=None)


@pytest.mark.parametrize(
    ("status", "headers", "at_wall"),
    [(429, {"status": "rejected"}, True), (429, {"slow-offer": "x"}, True), (429, {"status": "allowed"}, False),
    (428, {"status": "rejected"}, False), (430, {"slow-offer": "x"}, False)],
)  # fmt: skip
def test_only_a_429_stands_at_the_wall(status: int, headers: dict[str, str], at_wall: bool) -> None:
    assert is_at_wall(WallResponse(status, headers)) is at_wall


@pytest.mark.parametrize(
    ("seconds", "retry_after", "max_wait"),
    [
        ("4.9", 5_000, 60_000), ("5", 5_000, 60_000), ("60", 60_000, 60_000), ("61", 61_000, 61_000),
        ("600", 600_000, 600_000), ("601", 600_000, 601_000), ("21600", 600_000, 21_600_000),
        ("21601", 600_000, 21_600_000), ("-1", 20_000, 1_200_000), ("inf", 20_000, 1_200_000), ("0", 5_000, 60_000),
    ],
)  # fmt: skip
def test_hints_are_kept_within_their_bounds(seconds: str, retry_after: int, max_wait: int) -> None:
    hinted = with_hints(LANE, wall(slow_retry_after=seconds, slow_max_wait=seconds))
    assert hinted == replace(LANE, retry_after_ms=retry_after, max_wait_ms=max_wait)


def test_numbers_of_headers_are_finite_and_not_negative() -> None:
    assert [wall(n=text).number("n") for text in ("0", "0.5", "-0.5", "nan", "x")] == [0, 0.5, None, None, None]


# -- one response in the lane --------------------------------------------------------------------------------
def respond(response: WallResponse, window: WaitWindow | None = None, lane: Lane = LANE) -> LaneStep:
    return respond_in_lane(lane, response, window, NOW)


def ended(reason: LaneEnd, **row: Any) -> LaneStep:
    return LaneStep(
        replace(LANE, resets_at_s=None, accepted_at=None, **row), WallAction(Action.ENDED, reason=reason), None
    )


WINDOW = WaitWindow(950_000, 2, 960_000)


def test_a_response_that_was_not_sent_slow_may_join_the_lane() -> None:
    joined = WallAction(Action.RETRY_SAME, via=Via.LANE_JOINED, set_headers=SLOW)
    assert respond(WallResponse(429, {"status": "rejected"}), WINDOW) == LaneStep(LANE, joined, WINDOW)
    assert respond(WallResponse(200), WINDOW) == LaneStep(LANE, usage_wall.NONE, WINDOW)


@pytest.mark.parametrize(
    ("headers", "step"),
    [
        ({"slow_status": "weekly_limit"}, ended(LaneEnd.WEEKLY)), ({"slow_status": "off"}, ended(LaneEnd.OFF)),
        ({"slow_status": "ineligible"}, ended(LaneEnd.INELIGIBLE)),
        ({"slow_status": "ineligible", "overage_in_use": "true"}, ended(LaneEnd.EXTRA_USAGE)),
        ({"representative_claim": "five_hour"}, ended(LaneEnd.WALL)), ({"overage_status": "x"}, ended(LaneEnd.WALL)),
        ({}, LaneStep(LANE, usage_wall.NONE, WINDOW)),
        ({"slow_status": "active", "overage_status": "x"}, LaneStep(LANE, usage_wall.NONE, WINDOW)),
        ({"slow_status": "budget_exhausted", "slow_budget_reset": "1500"},
         ended(LaneEnd.BUDGET, budget_spent_until=1_500_000)),
        ({"slow_status": "budget_exhausted", "7d_reset": "1600"}, ended(LaneEnd.BUDGET, budget_spent_until=1_600_000)),
        ({"slow_status": "budget_exhausted", "7d_reset": "9999999999"},
         ended(LaneEnd.BUDGET, budget_spent_until=NOW + 691_200_000)),
        ({"slow_status": "budget_exhausted"}, ended(LaneEnd.BUDGET)),
    ],
)  # fmt: skip
def test_a_429_in_the_lane(headers: dict[str, str], step: LaneStep) -> None:
    assert respond(WallResponse(429, {k.replace("_", "-"): v for k, v in headers.items()}, True), WINDOW) == step


@pytest.mark.parametrize(
    ("status", "headers", "served", "standard"),
    [(200, {"slow-status": "active"}, 4, 4), (200, {"slow-status": "not_needed"}, 3, 5), (200, {}, 3, 4)],
)
def test_served_requests_are_counted_by_kind(status: int, headers: dict[str, str], served: int, standard: int) -> None:
    lane = respond(WallResponse(status, headers, True)).lane
    assert (lane.requests_served, lane.requests_served_standard) == (served, standard)


def test_a_reset_that_moved_by_a_minute_is_a_new_week() -> None:
    assert respond(WallResponse(200, {"5h-reset": "2060"}, True)) == ended(LaneEnd.RESET)
    assert respond(WallResponse(200, {"5h-reset": "2059"}, True)).action is usage_wall.NONE
    first = replace(LANE, resets_at_s=0)
    resets = [WallResponse(200, {"5h-reset": at}, True) for at in ("59", "60")]
    actions = [respond_in_lane(first, response, None, 0).action for response in resets]
    assert [action.reason for action in actions] == [None, LaneEnd.RESET]


def test_a_busy_slot_waits_within_window_budget_and_jitter() -> None:
    busy = WallResponse(429, {"slow-status": "slot_busy"}, True, draw=0.5)
    again = WallAction(Action.RETRY_SAME, 20_000, Via.SLOT_BUSY, set_headers=SLOW)
    assert respond(busy) == LaneStep(LANE, again, WaitWindow(NOW, 1, NOW + 20_000))
    assert respond(busy, WINDOW) == LaneStep(LANE, again, WaitWindow(950_000, 3, NOW + 20_000))
    assert respond(busy, replace(WINDOW, since=899_999)).window == WaitWindow(NOW, 1, NOW + 20_000)
    assert respond(busy, replace(WINDOW, since=900_000)).window == WaitWindow(900_000, 3, NOW + 20_000)
    assert [respond(replace(busy, draw=draw)).action.delay_ms for draw in (0.0, 1.0)] == [14_000, 26_000]
    assert respond(replace(busy, remaining_budget_ms=5_001)).action.delay_ms == 1
    assert respond(replace(busy, remaining_budget_ms=5_000)) == ended(LaneEnd.MAX_WAIT, cooling_off_until=NOW + 600_000)
    short = replace(LANE, max_wait_ms=50_000)
    assert respond(busy, WINDOW, short).action.reason is LaneEnd.MAX_WAIT
    assert respond(busy, replace(WINDOW, since=950_001), short).action.delay_ms == 1


def test_a_window_that_began_with_the_lane_goes_on() -> None:
    busy, begun = WallResponse(429, {"slow-status": "slot_busy"}, True), WaitWindow(0, 1)
    waited = respond_in_lane(replace(LANE, accepted_at=0), busy, begun, 5).window
    assert waited is not None
    assert (waited.since, waited.attempts) == (0, 2)


@pytest.mark.parametrize(("verdict", "waits"), [("", True), ("active", True), ("off", False)])
def test_a_529_waits_while_the_lane_is_good(verdict: str, waits: bool) -> None:
    found = respond(WallResponse(529, {"slow-status": verdict}, True))
    assert (found.action.via is Via.CAPACITY_BUSY) is waits


# -- the claim -----------------------------------------------------------------------------------------------
CLAIM = LimitResetClaim("k", ClaimStep.STATUS, NOW, NOW + 40_000, "org-1", offer=OFFER)
CLAIMING = replace(IDLE, claim=CLAIM)


def answer(step: ClaimStep, status: int | None = 200, at: int = NOW, **body: Any) -> LaneStep:
    lane = replace(IDLE, claim=replace(CLAIM, step=step))
    return limit_reset.report(lane, CONTEXT, ClaimReport("k", step, status, body), at)


def test_a_claim_is_opened_with_its_deadline_and_what_the_lane_may_need() -> None:
    response = WallResponse(429, {**OFFER, "representative-claim": "five_hour"})
    found = limit_reset.respond(IDLE, CONTEXT, response, None, NOW, "k")
    assert found.lane == replace(IDLE, claim=replace(CLAIM, offer={"slow-offer": "treatment", "reset": "2000"}))
    url = "https://api.anthropic.com/api/oauth/usage?at_wall=1&skip_spend=1"
    call = ClaimCall("k", ClaimStep.STATUS, "GET", url, 5_000)
    assert found.action == WallAction(Action.CLAIM_LIMIT_RESET, call=call)
    assert CLAIM.is_open(NOW + 39_999)
    assert not CLAIM.is_open(NOW + 40_000)


def test_a_second_report_is_held_until_deadline_or_its_own_budget() -> None:
    response = WallResponse(429, OFFER)

    def held(budget: int | None) -> int | None:
        second = replace(response, remaining_budget_ms=budget)
        action = limit_reset.respond(CLAIMING, CONTEXT, second, None, NOW, "x").action
        return action.hold_until if action.action is Action.HOLD else None

    assert held(None) == NOW + 40_000
    assert held(15_000) == NOW + 10_000
    assert held(5_001) == NOW + 1
    assert held(5_000) is None


def test_a_grant_speaks_for_a_minute_and_a_refusal_until_its_time() -> None:
    response = WallResponse(429, OFFER)

    def action(lane: Lane) -> Action:
        return limit_reset.respond(lane, CONTEXT, response, None, NOW, "k").action.action

    assert action(replace(IDLE, granted_at=NOW - 59_999)) is Action.RETRY_SAME
    assert action(replace(IDLE, granted_at=NOW - 60_000)) is Action.CLAIM_LIMIT_RESET
    assert action(replace(IDLE, not_before=NOW)) is Action.CLAIM_LIMIT_RESET
    assert action(replace(IDLE, not_before=NOW + 1)) is Action.NONE


def test_the_steps_of_a_claim_ask_for_the_next_call() -> None:
    offered: dict[str, Any] = {"juniper_tide": {"eligible": True, "arm": "reset", "available": True}}
    found = answer(ClaimStep.STATUS, **offered)
    url = "https://api.anthropic.com/api/organizations/org-1/reset_rate_limits"
    call = ClaimCall("k", ClaimStep.CLAIM, "POST", url, 25_000, {"program": "juniper_tide"})
    assert found == LaneStep(
        replace(IDLE, claim=replace(CLAIM, step=ClaimStep.CLAIM)), WallAction(Action.CLAIM_LIMIT_RESET, call=call)
    )
    nameless = replace(IDLE, claim=replace(CLAIM, organization=""))
    asked = limit_reset.report(nameless, CONTEXT, ClaimReport("k", ClaimStep.STATUS, 200, offered), NOW)
    assert asked.action.call == ClaimCall("k", ClaimStep.ORGANIZATION, "", "", 5_000)


@pytest.mark.parametrize(
    ("step", "status", "body", "verdict", "memory_ms"),
    [
        (ClaimStep.CLAIM, 200, {"result": "reset"}, "reset", 604_800_000),
        (ClaimStep.CLAIM, 200, {"result": "already_used"}, "already_used", 604_800_000),
        (ClaimStep.CLAIM, 299, {"result": "cooldown"}, "cooldown", 900_000),
        (ClaimStep.CLAIM, 300, {"result": "reset"}, "error", 900_000),
        (ClaimStep.CLAIM, 199, {"result": "reset"}, "error", 900_000),
        (ClaimStep.CLAIM, 200, {"result": "nonsense"}, "unavailable", 900_000),
        (ClaimStep.CLAIM, 429, {}, "rate_limited", 900_000),
        (ClaimStep.CLAIM, 401, {}, "auth_error", 900_000),
        (ClaimStep.CLAIM, 403, {}, "auth_error", 900_000),
        (ClaimStep.CLAIM, 402, {}, "error", 900_000),
        (ClaimStep.CLAIM, None, {}, "error", 900_000),
        (ClaimStep.STATUS, 200, {}, "unreadable", 900_000),
        (ClaimStep.STATUS, 200, {"juniper_tide": {"eligible": False}}, "not_offered", 604_800_000),
        (ClaimStep.ORGANIZATION, 200, {}, "no_organization", 900_000),
    ],
)
def test_every_end_of_a_claim_has_its_verdict_and_memory(
    step: ClaimStep, status: int | None, body: dict[str, Any], verdict: str, memory_ms: int
) -> None:
    lane = answer(step, status, **body).lane
    granted = verdict == "reset"
    assert lane == replace(
        IDLE,
        claim=replace(CLAIM, step=step, granted=granted, verdict=verdict),
        granted_at=NOW if granted else None,
        not_before=NOW + memory_ms,
    )


@pytest.mark.parametrize(
    ("raw", "not_before"),
    [
        (2_000, 2_000_000), (1_000.5, 1_000_500), (1e11, 10**11), (99_999_999_999, 99_999_999_999_000),
        ("1970-01-01T00:16:41Z", 1_001_000), ("1970-01-01T00:16:41", 1_001_000), (1_000, NOW + 900_000),
        (True, NOW + 900_000), (-1, NOW + 900_000), ("soon", NOW + 900_000), (float("inf"), NOW + 900_000),
    ],
)  # fmt: skip
def test_an_announced_time_ahead_beats_the_memory(raw: object, not_before: int) -> None:
    assert answer(ClaimStep.CLAIM, result="cooldown", next_available_at=raw).lane.not_before == not_before


def test_the_rows_longest_untouched_go_first() -> None:
    lanes = [Lane("p", name, touched_at=at) for name, at in (("a", 3), ("b", 1), ("d", 2), ("c", 2))]
    assert [lane.connection for lane in surplus(lanes, 1)] == ["b", "c", "d"]
    assert surplus(lanes, 4) == surplus(lanes, 6) == []
    assert Lane("p", "a", touched_at=9).is_default
    assert not IDLE.is_default
    assert (IDLE.generation, Lane.default(IDLE.key)) == (1, Lane("claude", "c"))


@pytest.mark.parametrize("inside", [True, False])
def test_when_it_is_offered_again_may_stand_inside_or_beside_the_offer(inside: bool) -> None:
    told, block = {"next_available_at": 2_000}, {"eligible": False}
    body = {"juniper_tide": {**block, **told}} if inside else {"juniper_tide": block, **told}
    assert answer(ClaimStep.STATUS, 200, **body).lane.not_before == 2_000_000
    assert limit_reset._announced({"next_available_at": True}) is None


def test_a_time_before_the_epoch_inside_the_offer_leaves_the_word_to_the_one_beside_it() -> None:
    block = {"eligible": False, "next_available_at": -1}
    assert answer(ClaimStep.STATUS, 200, juniper_tide=block, next_available_at=2_000).lane.not_before == 2_000_000
    assert limit_reset._announced({"next_available_at": 0.5}) == 500


def test_an_answer_away_from_the_wall_keeps_the_window_of_the_request() -> None:
    found = limit_reset.respond(IDLE, CONTEXT, wall(200), WINDOW, NOW, "k")
    assert (found.window, found.action) == (WINDOW, usage_wall.NONE)
    beside = limit_reset.respond(
        IDLE, replace(CONTEXT, is_subscription=False), WallResponse(429, OFFER), WINDOW, NOW, "k"
    )
    assert beside == LaneStep(IDLE, usage_wall.NONE, WINDOW)
    assert limit_reset.NOT_OFFERED_MS == (60_000, 8 * 86_400_000)
