"""The once-a-week limit reset at the usage wall, and the wall's whole answer to one response (usage_wall.md 7, 8).

Pure. The gateway performs the calls; every report of one is folded into the row of the connection. A claim belongs
to the fleet: it is part of the row, which the caller holds locked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.usage_wall import BUDGET_MARGIN_MS, LaneStep, accept, expire, is_at_wall, respond_in_lane
from policy_service.domain.usage_wall_state import (
    Action,
    ClaimCall,
    ClaimStep,
    Lane,
    LimitResetClaim,
    Via,
    WaitWindow,
    WallAction,
    WallOptions,
    WallResponse,
    is_lane_active,
)

CLAIM_LIFE_MS: DurationMs = 40_000
GRANT_MEMORY_MS: DurationMs = 60_000
SHORT_MEMORY_MS: DurationMs = 900_000
WEEK_MS: DurationMs = 604_800_000
NOT_OFFERED_MS = (60_000, 691_200_000)
PROGRAM = "juniper_tide"
_API = "https://api.anthropic.com/api"
_STATUS_URL = f"{_API}/oauth/usage?at_wall=1&skip_spend=1"
_ORGANIZATION = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What may stand in the URL of the claim."""
_OFFER_HEADERS = frozenset(
    {"slow-offer", "reset", "5h-reset", "slow-retry-after", "slow-max-wait", "slow-budget-utilization"}
)
_GRANTING = frozenset({"reset", "not_limited"})
_RESULTS = _GRANTING | {"already_used", "not_offered", "ineligible", "unavailable", "cooldown"}
_BY_STATUS = {429: "rate_limited", 401: "auth_error", 403: "auth_error"}
_LONG_MEMORY = _GRANTING | {"already_used"}


@dataclass(frozen=True, slots=True)
class WallContext:
    """What the wall needs to know of the connection and the fleet, beside its row.

    `is_subscription`: provider `claude` with an OAuth access token and no API key (catalogue data).
    """

    options: WallOptions
    is_subscription: bool = True
    organization: str = ""
    """Organisation UUID declared for the connection; "" where unknown."""
    not_offered_memo_ms: DurationMs = WEEK_MS
    may_open_claim: bool = True
    """False while the store is away."""


@dataclass(frozen=True, slots=True)
class ClaimReport:
    """Result of one call of a claim. `transport_error` beats the status."""

    claim_id: str
    step: ClaimStep
    http_status: int | None = None
    body: Mapping[str, object] = field(default_factory=dict)
    transport_error: bool = False

    @property
    def is_success(self) -> bool:
        """Arrived with a 2xx."""
        return not self.transport_error and self.http_status is not None and 200 <= self.http_status < 300


def respond(
    lane: Lane, context: WallContext, response: WallResponse, window: WaitWindow | None, now: Instant, claim_id: str
) -> LaneStep:
    """Fold one response into the row and say what the gateway does (sections 6 and 7).

    Args:
        window: wait window of the request, from its decision token.
        claim_id: fresh id, used if a claim is opened.
    """
    if not context.is_subscription or not lane.connection:
        return LaneStep(lane, window=window)
    present = lapse_claim(expire(lane, now), now)
    if is_lane_active(present, now):
        return respond_in_lane(present, response, window, now)
    if not is_at_wall(response):
        return LaneStep(present, window=window)
    if _may_reset(context, response):
        step = _attempt(present, context, response, now, claim_id)
        if step is not None:
            return step
    return _lane_turn(present, context, response, now)


def _may_reset(context: WallContext, response: WallResponse) -> bool:
    return context.options.auto_limit_reset and response.text("representative-claim") in ("", "five_hour")


def _lane_turn(lane: Lane, context: WallContext, response: WallResponse, now: Instant) -> LaneStep:
    return accept(lane, response, now) if context.options.low_priority_mode else LaneStep(lane)


def _attempt(lane: Lane, context: WallContext, response: WallResponse, now: Instant, claim_id: str) -> LaneStep | None:
    """Section 8.1; None: not granted, the lane gets its turn."""
    if lane.granted_at is not None and now - lane.granted_at < GRANT_MEMORY_MS:
        return _granted(lane)
    if lane.not_before is not None and lane.not_before > now:
        return None
    if lane.claim is not None and lane.claim.is_open(now):
        return _share(lane, lane.claim, response, now)
    return _open(lane, context, response, now, claim_id) if context.may_open_claim else None


def _granted(lane: Lane) -> LaneStep:
    return LaneStep(lane, WallAction(Action.RETRY_SAME, via=Via.LIMIT_RESET))


def _share(lane: Lane, claim: LimitResetClaim, response: WallResponse, now: Instant) -> LaneStep | None:
    until = claim.deadline_at
    if response.remaining_budget_ms is not None:
        until = min(until, now + response.remaining_budget_ms - BUDGET_MARGIN_MS)
    return LaneStep(lane, WallAction(Action.HOLD, hold_until=until)) if until > now else None


def _open(lane: Lane, context: WallContext, response: WallResponse, now: Instant, claim_id: str) -> LaneStep:
    claim = LimitResetClaim(
        claim_id=claim_id,
        step=ClaimStep.STATUS,
        opened_at=now,
        deadline_at=now + CLAIM_LIFE_MS,
        organization=context.organization if _ORGANIZATION.fullmatch(context.organization) else "",
        offer={name: value for name, value in response.headers.items() if name in _OFFER_HEADERS},
    )
    return _ask(replace(lane, claim=claim), claim)


def _ask(lane: Lane, claim: LimitResetClaim) -> LaneStep:
    return LaneStep(lane, WallAction(Action.CLAIM_LIMIT_RESET, call=_CALLS[claim.step](claim)))


def _claim_call(claim: LimitResetClaim) -> ClaimCall:
    url = f"{_API}/organizations/{claim.organization}/reset_rate_limits"
    return ClaimCall(claim.claim_id, ClaimStep.CLAIM, "POST", url, 25_000, {"program": PROGRAM})


_CALLS = {
    ClaimStep.STATUS: lambda claim: ClaimCall(claim.claim_id, ClaimStep.STATUS, "GET", _STATUS_URL, 5_000),
    ClaimStep.ORGANIZATION: lambda claim: ClaimCall(claim.claim_id, ClaimStep.ORGANIZATION, "", "", 5_000),
    ClaimStep.CLAIM: _claim_call,
}


def resume(lane: Lane, context: WallContext, response: WallResponse, now: Instant, claim_id: str) -> LaneStep:
    """Answer to a report that was held for the verdict of `claim_id`, once it is known or the hold is over."""
    present = lapse_claim(expire(lane, now), now)
    claim = present.claim
    if claim is not None and claim.claim_id == claim_id and claim.granted:
        return _granted(present)
    return _lane_turn(present, context, response, now)


def lapse_claim(lane: Lane, now: Instant) -> Lane:
    """A claim not finished by its deadline (the gateway died) counts as an error at its deadline."""
    claim = lane.claim
    if claim is None or claim.granted is not None or claim.is_open(now):
        return lane
    return _closed(lane, claim, "error", None, WEEK_MS, claim.deadline_at)


def report(lane: Lane, context: WallContext, result: ClaimReport, now: Instant) -> LaneStep:
    """Fold the result of one call of a claim: the next call, or the final action for the request.

    A report of an unknown claim changes nothing; one that comes after the verdict gets the verdict's answer.
    """
    present = lapse_claim(expire(lane, now), now)
    claim = present.claim
    if claim is None or claim.claim_id != result.claim_id:
        return LaneStep(present)
    if claim.granted is not None:
        return _verdict_answer(present, context, claim, now)
    if result.step is not claim.step:
        return _ask(present, claim)
    return _FOLDS[claim.step](present, context, claim, result, now)


def _on_status(lane: Lane, context: WallContext, claim: LimitResetClaim, result: ClaimReport, now: Instant) -> LaneStep:
    block = result.body.get(PROGRAM) if result.is_success else None
    if not isinstance(block, Mapping) or not isinstance(block.get("eligible"), bool):
        return _conclude(lane, context, claim, "unreadable", None, now)
    is_offered = block["eligible"] and block.get("arm") == "reset" and block.get("available") is True
    if not is_offered:
        return _conclude(lane, context, claim, "not_offered", _announced(block) or _announced(result.body), now)
    step = ClaimStep.CLAIM if claim.organization else ClaimStep.ORGANIZATION
    return _advance(lane, replace(claim, step=step))


def _on_organization(
    lane: Lane, context: WallContext, claim: LimitResetClaim, result: ClaimReport, now: Instant
) -> LaneStep:
    found = organization_of(result.body) if result.is_success else ""
    if not found:
        return _conclude(lane, context, claim, "no_organization", None, now)
    return _advance(lane, replace(claim, step=ClaimStep.CLAIM, organization=found))


def organization_of(options: Mapping[str, object]) -> str:
    """Organisation UUID of a connection or a report, "" where there is none that may stand in a URL."""
    named = (options.get(name) for name in ("organizationUUID", "organization_uuid"))
    return next((each for each in named if isinstance(each, str) and _ORGANIZATION.fullmatch(each)), "")


def _on_claim(lane: Lane, context: WallContext, claim: LimitResetClaim, result: ClaimReport, now: Instant) -> LaneStep:
    return _conclude(lane, context, claim, _claim_verdict(result), _announced(result.body), now)


def _claim_verdict(result: ClaimReport) -> str:
    if result.is_success:
        found = result.body.get("result")
        return found if isinstance(found, str) and found in _RESULTS else "unavailable"
    return "error" if result.transport_error else _BY_STATUS.get(result.http_status or 0, "error")


_FOLDS = {ClaimStep.STATUS: _on_status, ClaimStep.ORGANIZATION: _on_organization, ClaimStep.CLAIM: _on_claim}


def _advance(lane: Lane, claim: LimitResetClaim) -> LaneStep:
    return _ask(replace(lane, claim=claim), claim)


def _conclude(
    lane: Lane, context: WallContext, claim: LimitResetClaim, verdict: str, announced: Instant | None, now: Instant
) -> LaneStep:
    closed = _closed(lane, claim, verdict, announced, context.not_offered_memo_ms, now)
    assert closed.claim is not None
    return _verdict_answer(closed, context, closed.claim, now)


def _closed(
    lane: Lane, claim: LimitResetClaim, verdict: str, announced: Instant | None, memo_ms: DurationMs, at: Instant
) -> Lane:
    """Row with the verdict and its memory (section 8.3)."""
    granted = verdict in _GRANTING
    memory = (
        WEEK_MS if verdict in _LONG_MEMORY else _not_offered(memo_ms) if verdict == "not_offered" else SHORT_MEMORY_MS
    )
    return replace(
        lane,
        claim=replace(claim, granted=granted, verdict=verdict),
        granted_at=at if granted else lane.granted_at,
        not_before=announced if announced is not None and announced > at else at + memory,
    )


def _not_offered(memo_ms: DurationMs) -> DurationMs:
    return max(NOT_OFFERED_MS[0], min(NOT_OFFERED_MS[1], memo_ms))


def _verdict_answer(lane: Lane, context: WallContext, claim: LimitResetClaim, now: Instant) -> LaneStep:
    if claim.granted:
        return _granted(lane)
    return _lane_turn(lane, context, WallResponse(429, claim.offer), now)


def _announced(body: Mapping[str, object]) -> Instant | None:
    """`next_available_at`: ISO-8601 (without a zone UTC), or epoch seconds; values too large for that are ms."""
    raw = body.get("next_available_at")
    if isinstance(raw, bool) or raw is None:
        return None
    if isinstance(raw, int | float):
        return _epoch(raw)
    return _date(str(raw))


def _epoch(value: float) -> Instant | None:
    if not math.isfinite(value) or value < 0:
        return None
    return int(value if value >= 1e11 else value * 1_000)


def _date(text: str) -> Instant | None:
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return round(aware.timestamp() * 1_000)
