"""Lane and limit reset of the usage wall (spec/usage_wall.md), beyond the vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_service.domain.limit_reset import (
    CLAIM_LIFE_MS,
    SHORT_MEMORY_MS,
    WEEK_MS,
    ClaimReport,
    WallContext,
    lapse_claim,
    organization_of,
    report,
    respond,
    resume,
)
from policy_service.domain.usage_wall import read_options, set_headers, unified_headers
from policy_service.domain.usage_wall_state import (
    Action,
    ClaimStep,
    Lane,
    LaneEnd,
    Via,
    WaitWindow,
    WallOptions,
    WallResponse,
)

NOW = 1_800_000_000_000
RESETS_S = 1_800_003_600
IDLE = Lane("claude", "c1")
ACTIVE = replace(IDLE, resets_at_s=RESETS_S, accepted_at=NOW)
WALL = WallResponse(429, {"status": "rejected", "reset": str(RESETS_S), "slow-offer": "treatment"})
BOTH = WallContext(WallOptions(True, True), organization="org-1")
RESET_ONLY = replace(BOTH, options=WallOptions(auto_limit_reset=True))


def _slow(status: int, **headers: str) -> WallResponse:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return WallResponse(status, named, sent_slow=True)


def _respond(lane: Lane, response: WallResponse, context: WallContext = BOTH, now: int = NOW, **more: Any) -> Any:
    return respond(lane, context, response, more.get("window"), now, more.get("claim_id", "k1"))


def _claiming(step: ClaimStep, context: WallContext = RESET_ONLY) -> Lane:
    lane: Lane = _respond(IDLE, WALL, context).lane
    assert lane.claim is not None
    return replace(lane, claim=replace(lane.claim, step=step))


@given(
    st.sampled_from([200, 429, 500, 529]),
    st.dictionaries(
        st.sampled_from(["status", "slow-status", "slow-offer", "5h-reset", "slow-retry-after", "slow-max-wait"]),
        st.sampled_from(["", "active", "slot_busy", "rejected", "treatment", "-1", "nan", "1e9", "ineligible", "new"]),
    ),
    st.booleans(),
    st.one_of(st.none(), st.integers(-10, 100_000)),
    st.floats(0, 1),
)
def test_whatever_is_reported_waits_stay_inside_their_bounds(
    status: int, headers: dict[str, str], sent_slow: bool, remaining: int | None, draw: float
) -> None:
    found = _respond(ACTIVE, WallResponse(status, headers, sent_slow, remaining, draw))
    assert 0 <= found.action.delay_ms <= found.lane.max_wait_ms
    assert remaining is None or found.action.delay_ms == 0 or found.action.delay_ms <= remaining - 5_000
    assert 5_000 <= found.lane.retry_after_ms <= 600_000
    assert 60_000 <= found.lane.max_wait_ms <= 21_600_000
    assert (found.action.action is Action.ENDED) == (found.lane.resets_at_s is None)


@pytest.mark.parametrize(("status", "reason"), [("off", LaneEnd.OFF), ("budget_exhausted", LaneEnd.BUDGET)])
def test_a_verdict_on_a_429_ends_the_lane(status: str, reason: LaneEnd) -> None:
    found = _respond(ACTIVE, _slow(429, slow_status=status))
    assert (found.action.reason, found.lane.resets_at_s, found.lane.budget_spent_until) == (reason, None, None)


def test_a_spent_budget_without_its_own_date_is_remembered_to_the_weekly_reset() -> None:
    found = _respond(ACTIVE, _slow(429, slow_status="budget_exhausted", **{"7d_reset": "1800100000"}))
    assert found.lane.budget_spent_until == 1_800_100_000_000


def test_an_unknown_verdict_is_none() -> None:
    assert _respond(ACTIVE, _slow(529, slow_status="something_new")).action.via is Via.CAPACITY_BUSY
    assert _respond(ACTIVE, _slow(429, slow_status="new", overage_status="x")).action.reason is LaneEnd.WALL


def test_a_wait_window_from_before_the_lane_starts_again() -> None:
    found = _respond(ACTIVE, _slow(429, slow_status="slot_busy"), now=NOW + 5, window=WaitWindow(NOW - 9_999_999, 7))
    assert found.window == WaitWindow(NOW + 5, 1, NOW + 5 + 20_000)


def test_a_lane_that_ran_out_meets_the_wall_as_an_idle_one() -> None:
    late = NOW + 3_660_000
    wall = WallResponse(429, {"status": "rejected", "reset": str(RESETS_S + 18_000), "slow-offer": "treatment"})
    found = _respond(ACTIVE, wall, replace(BOTH, options=WallOptions(low_priority_mode=True)), late)
    assert (found.action.via, found.lane.accepted_at) == (Via.LOW_PRIORITY_ACCEPTED, late)


def test_an_offer_whose_reset_is_past_is_not_accepted() -> None:
    context = replace(BOTH, options=WallOptions(low_priority_mode=True))
    assert _respond(IDLE, WALL, context, RESETS_S * 1_000).action.action is Action.NONE


def test_without_a_connection_or_a_subscription_there_is_no_lane() -> None:
    assert _respond(replace(IDLE, connection=""), WALL).action.action is Action.NONE
    assert _respond(IDLE, WALL, replace(BOTH, is_subscription=False)).action.action is Action.NONE


def test_every_dispatch_of_an_active_lane_carries_the_header() -> None:
    assert set_headers(ACTIVE, NOW) == {"anthropic-usage-limit": "slow"}
    assert set_headers(IDLE, NOW) == {}


def test_options_are_on_for_a_literal_true_only() -> None:
    assert read_options({"lowPriorityMode": True, "auto_limit_reset": 1}) == WallOptions(True, False)


def test_headers_are_read_by_suffix_in_any_case() -> None:
    headers = {"Anthropic-RateLimit-Unified-5h-Reset": "5", "retry-after": "7"}
    assert unified_headers(headers) == {"5h-reset": "5"}


# --- limit reset ---


def test_without_the_store_no_claim_is_opened_and_the_lane_gets_its_turn() -> None:
    found = _respond(IDLE, WALL, replace(BOTH, may_open_claim=False))
    assert (found.action.via, found.lane.claim) == (Via.LOW_PRIORITY_ACCEPTED, None)


def test_a_second_report_is_held_for_the_verdict_of_the_first() -> None:
    lane = _claiming(ClaimStep.STATUS)
    held = _respond(lane, replace(WALL, remaining_budget_ms=15_000), RESET_ONLY, NOW + 100, claim_id="k2")
    assert (held.action.action, held.action.hold_until) == (Action.HOLD, NOW + 10_100)
    assert held.action.intercepts
    without_time = _respond(lane, replace(WALL, remaining_budget_ms=5_000), RESET_ONLY, NOW + 100)
    assert without_time.action.action is Action.NONE


def test_a_held_report_shares_a_verdict_that_granted_and_else_lets_the_lane_decide() -> None:
    granted = report(
        _claiming(ClaimStep.CLAIM), RESET_ONLY, ClaimReport("k1", ClaimStep.CLAIM, 200, {"result": "reset"}), NOW
    )
    assert resume(granted.lane, RESET_ONLY, WALL, NOW, "k1").action.via is Via.LIMIT_RESET
    assert resume(_claiming(ClaimStep.CLAIM), BOTH, WALL, NOW, "k1").action.via is Via.LOW_PRIORITY_ACCEPTED


@pytest.mark.parametrize(
    ("status", "body", "verdict", "memory"),
    [
        (200, {"result": "not_limited"}, "not_limited", WEEK_MS),
        (200, {"result": "cooldown"}, "cooldown", SHORT_MEMORY_MS),
        (200, {"result": "surprise"}, "unavailable", SHORT_MEMORY_MS),
        (200, {}, "unavailable", SHORT_MEMORY_MS),
        (200, {"result": "not_offered"}, "not_offered", 86_400_000),
        (401, {}, "auth_error", SHORT_MEMORY_MS),
        (429, {}, "rate_limited", SHORT_MEMORY_MS),
        (500, {}, "error", SHORT_MEMORY_MS),
        (None, {}, "error", SHORT_MEMORY_MS),
    ],
)
def test_every_result_of_the_claim_has_its_memory(
    status: int | None, body: dict[str, object], verdict: str, memory: int
) -> None:
    context = replace(RESET_ONLY, not_offered_memo_ms=86_400_000)
    lane = report(_claiming(ClaimStep.CLAIM), context, ClaimReport("k1", ClaimStep.CLAIM, status, body), NOW).lane
    assert lane.claim is not None
    assert (lane.claim.verdict, lane.not_before) == (verdict, NOW + memory)
    assert (lane.granted_at is not None) == (verdict in ("reset", "not_limited"))


@pytest.mark.parametrize(
    ("raw", "not_before"),
    [
        ("2027-01-20T00:00:00Z", 1_800_403_200_000),
        ("2027-01-20T00:00:00", 1_800_403_200_000),
        (1_800_403_200, 1_800_403_200_000),
        (1_800_403_200_000, 1_800_403_200_000),
        ("2020-01-01T00:00:00Z", NOW + WEEK_MS),
        ("soon", NOW + WEEK_MS),
        (True, NOW + WEEK_MS),
    ],
)
def test_an_announced_date_in_the_future_beats_the_memory(raw: object, not_before: int) -> None:
    body = {"result": "already_used", "next_available_at": raw}
    found = report(_claiming(ClaimStep.CLAIM), RESET_ONLY, ClaimReport("k1", ClaimStep.CLAIM, 200, body), NOW)
    assert found.lane.not_before == not_before


def test_a_claim_whose_gateway_died_is_an_error_from_its_deadline() -> None:
    lane = _claiming(ClaimStep.STATUS)
    assert lapse_claim(lane, NOW + CLAIM_LIFE_MS - 1) is lane
    lapsed = lapse_claim(lane, NOW + CLAIM_LIFE_MS + 5)
    assert lapsed.claim is not None
    assert (lapsed.claim.granted, lapsed.not_before) == (False, NOW + CLAIM_LIFE_MS + SHORT_MEMORY_MS)


def test_a_report_after_the_deadline_gets_the_lanes_turn_and_one_of_an_unknown_claim_nothing() -> None:
    lane = _claiming(ClaimStep.CLAIM, BOTH)
    late = ClaimReport("k1", ClaimStep.CLAIM, 200, {"result": "reset"})
    assert report(lane, BOTH, late, NOW + CLAIM_LIFE_MS).action.via is Via.LOW_PRIORITY_ACCEPTED
    unknown = report(lane, BOTH, replace(late, claim_id="k9"), NOW)
    assert (unknown.action.action, unknown.lane) == (Action.NONE, lane)


def test_a_repeated_report_of_a_step_is_asked_for_the_present_one() -> None:
    found = report(_claiming(ClaimStep.CLAIM), RESET_ONLY, ClaimReport("k1", ClaimStep.STATUS, 500), NOW)
    assert found.action.call is not None
    assert found.action.call.step is ClaimStep.CLAIM


def test_a_reported_organisation_goes_into_the_url_only_if_it_may() -> None:
    lane = _claiming(ClaimStep.ORGANIZATION)
    good = report(lane, RESET_ONLY, ClaimReport("k1", ClaimStep.ORGANIZATION, 200, {"organizationUUID": "o-7"}), NOW)
    assert good.action.call is not None
    assert good.action.call.url.endswith("/organizations/o-7/reset_rate_limits")
    bad = report(lane, RESET_ONLY, ClaimReport("k1", ClaimStep.ORGANIZATION, 200, {"organization_uuid": "../x"}), NOW)
    assert (bad.action.action, bad.lane.not_before) == (Action.NONE, NOW + SHORT_MEMORY_MS)
    assert organization_of({"organizationUUID": "", "organization_uuid": "o"}) == "o"


def test_the_row_keeps_of_the_wall_only_what_the_lane_may_need() -> None:
    response = replace(WALL, headers={**WALL.headers, "overage-status": "x", "representative-claim": "five_hour"})
    lane = _respond(IDLE, response, RESET_ONLY).lane
    assert set(lane.claim.offer) == {"slow-offer", "reset"}


def test_only_a_row_that_says_nothing_is_default() -> None:
    assert IDLE.is_default
    assert not ACTIVE.is_default
    assert Lane.default(IDLE.key) == IDLE
