"""Usage wall of Claude OAuth subscriptions: the lower-priority lane (spec/usage_wall.md sections 1 to 7).

Pure: `respond` folds one reported response into the row of the connection and says what the gateway does next.
The once-a-week limit reset is in `limit_reset`; both share the row. Instants are database time in ms; instants
announced by the upstream come as epoch seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.usage_wall_state import (
    COOL_OFF_MS,
    DEFAULT_MAX_WAIT_MS,
    DEFAULT_RETRY_AFTER_MS,
    ROLLOVER_TOLERANCE_S,
    Action,
    Lane,
    LaneEnd,
    Via,
    WaitWindow,
    WallAction,
    WallOptions,
    WallResponse,
    is_lane_active,
)

REQUEST_HEADER = {"anthropic-usage-limit": "slow"}
RESPONSE_PREFIX = "anthropic-ratelimit-unified-"
BUDGET_MARGIN_MS: DurationMs = 5_000
"""Kept back from the request's own start timeout."""
BUDGET_MEMORY_MS: DurationMs = 8 * 86_400_000
_JITTER = 0.3
_RETRY_AFTER_MS = (5_000, 600_000)
_MAX_WAIT_MS = (60_000, 6 * 3_600_000)
_VERDICTS = frozenset({"active", "not_needed", "slot_busy", "weekly_limit", "budget_exhausted", "ineligible", "off"})
NONE = WallAction(Action.NONE)


def set_headers(lane: Lane, now: Instant) -> Mapping[str, str]:
    """Headers that every dispatch on the connection carries now."""
    return REQUEST_HEADER if is_lane_active(lane, now) else {}


def read_options(settings: Mapping[str, object]) -> WallOptions:
    """Options of a connection; only a literal true switches one on."""
    return WallOptions(
        low_priority_mode=_is_on(settings, "low_priority_mode", "lowPriorityMode"),
        auto_limit_reset=_is_on(settings, "auto_limit_reset", "autoLimitReset"),
    )


def _is_on(settings: Mapping[str, object], *names: str) -> bool:
    return any(settings.get(name) is True for name in names)


def unified_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers of the wall by their suffix, from a response's headers (any case)."""
    lowered = {name.lower(): value for name, value in headers.items()}
    return {
        name.removeprefix(RESPONSE_PREFIX): value for name, value in lowered.items() if name.startswith(RESPONSE_PREFIX)
    }


@dataclass(frozen=True, slots=True)
class LaneStep:
    """What one response does: the row, the request's wait window, and the action for the gateway."""

    lane: Lane
    action: WallAction = NONE
    window: WaitWindow | None = None


def expire(lane: Lane, now: Instant) -> Lane:
    """Lazy expiry: idle from the announced reset + 60 s (inclusive)."""
    if lane.resets_at_s is None or is_lane_active(lane, now):
        return lane
    return replace(lane, resets_at_s=None, accepted_at=None)


def is_at_wall(response: WallResponse) -> bool:
    """A 429 whose status is `rejected` or that makes any offer."""
    return response.status == 429 and (response.text("status") == "rejected" or response.has("slow-offer"))


# --- lane active (section 6) -----------------------------------------------------------------------------


def respond_in_lane(lane: Lane, response: WallResponse, window: WaitWindow | None, now: Instant) -> LaneStep:
    """One response on a connection whose lane is active; first matching row of the table.

    Args:
        lane: row of the connection, expired lazily before.
        window: wait window of the request, from its token.
    """
    if not response.sent_slow:
        joined = WallAction(Action.RETRY_SAME, via=Via.LANE_JOINED, set_headers=REQUEST_HEADER)
        return LaneStep(lane, joined if is_at_wall(response) else NONE, window)
    told = with_hints(lane, response)
    if response.status == 429:
        return _on_429(told, response, window, now)
    if response.status == 529 and _verdict(response) in ("", "active"):
        return _wait(told, response, window, Via.CAPACITY_BUSY, now)
    return _otherwise(told, response, window)


def with_hints(lane: Lane, response: WallResponse) -> Lane:
    """Row with the hints that a response gives: retry-after, max-wait, utilisation."""
    retry_after = response.number("slow-retry-after")
    max_wait = response.number("slow-max-wait")
    used = response.number("slow-budget-utilization")
    return replace(
        lane,
        retry_after_ms=lane.retry_after_ms if retry_after is None else _within(retry_after, _RETRY_AFTER_MS),
        max_wait_ms=lane.max_wait_ms if max_wait is None else _within(max_wait, _MAX_WAIT_MS),
        budget_utilization=lane.budget_utilization if used is None else used,
    )


def _within(seconds: float, bounds: tuple[int, int]) -> DurationMs:
    return int(max(bounds[0], min(bounds[1], seconds * 1_000)))


def _verdict(response: WallResponse) -> str:
    """Slow status; an unrecognised one is no verdict."""
    status = response.text("slow-status")
    return status if status in _VERDICTS else ""


_ENDS_ON_429 = {"weekly_limit": LaneEnd.WEEKLY, "off": LaneEnd.OFF, "ineligible": LaneEnd.INELIGIBLE}


def _on_429(lane: Lane, response: WallResponse, window: WaitWindow | None, now: Instant) -> LaneStep:
    verdict = _verdict(response)
    if verdict == "ineligible" and response.is_overage_in_use:
        return _end(lane, LaneEnd.EXTRA_USAGE)
    if verdict == "budget_exhausted":
        return _end(replace(lane, budget_spent_until=_spent_until(lane, response, now)), LaneEnd.BUDGET)
    if verdict in _ENDS_ON_429:
        return _end(lane, _ENDS_ON_429[verdict])
    if verdict == "slot_busy":
        return _wait(lane, response, window, Via.SLOT_BUSY, now)
    is_wall = response.has("representative-claim") or response.has("overage-status")
    return _end(lane, LaneEnd.WALL) if not verdict and is_wall else LaneStep(lane, NONE, window)


def _spent_until(lane: Lane, response: WallResponse, now: Instant) -> Instant | None:
    reset_s = response.number("slow-budget-reset")
    if reset_s is None:
        reset_s = response.number("7d-reset")
    return lane.budget_spent_until if reset_s is None else min(int(reset_s * 1_000), now + BUDGET_MEMORY_MS)


def _otherwise(lane: Lane, response: WallResponse, window: WaitWindow | None) -> LaneStep:
    verdict = _verdict(response)
    if _has_rolled_over(lane, response):
        return _end(lane, LaneEnd.RESET)
    if verdict == "active":
        return LaneStep(replace(lane, requests_served=lane.requests_served + 1))
    if verdict == "not_needed":
        return LaneStep(replace(lane, requests_served_standard=lane.requests_served_standard + 1))
    if verdict == "ineligible" and response.is_overage_in_use:
        return _end(lane, LaneEnd.EXTRA_USAGE)
    return LaneStep(lane, NONE, window)


def _has_rolled_over(lane: Lane, response: WallResponse) -> bool:
    announced = response.number("5h-reset")
    return announced is not None and announced >= (lane.resets_at_s or 0) + ROLLOVER_TOLERANCE_S


def _end(lane: Lane, reason: LaneEnd) -> LaneStep:
    idle = replace(lane, resets_at_s=None, accepted_at=None)
    return LaneStep(idle, WallAction(Action.ENDED, reason=reason))


def _wait(lane: Lane, response: WallResponse, window: WaitWindow | None, via: Via, now: Instant) -> LaneStep:
    if window is None or window.since < (lane.accepted_at or 0):
        window = WaitWindow(now)
    left = lane.max_wait_ms - (now - window.since)
    if response.remaining_budget_ms is not None:
        left = min(left, response.remaining_budget_ms - BUDGET_MARGIN_MS)
    if left <= 0:
        return _end(replace(lane, cooling_off_until=now + COOL_OFF_MS), LaneEnd.MAX_WAIT)
    delay = min(_jittered(lane.retry_after_ms, response.draw), left)
    waited = WaitWindow(window.since, window.attempts + 1, now + delay)
    return LaneStep(lane, WallAction(Action.RETRY_SAME, delay, via, set_headers=REQUEST_HEADER), waited)


def _jittered(base_ms: DurationMs, draw: float) -> DurationMs:
    return math.floor(base_ms * (1 + (2 * draw - 1) * _JITTER) + 0.5)


# --- lane idle (section 7, step 2) -----------------------------------------------------------------------


def accept(lane: Lane, response: WallResponse, now: Instant) -> LaneStep:
    """Take the offer of a wall 429 if there is one and nothing speaks against it; else NONE."""
    resets_at_s = response.number("reset")
    if resets_at_s is None:
        resets_at_s = response.number("5h-reset")
    if resets_at_s is None or resets_at_s * 1_000 <= now or not _may_accept(lane, response, now):
        return LaneStep(lane)
    fresh = replace(
        lane,
        resets_at_s=int(resets_at_s),
        accepted_at=now,
        retry_after_ms=DEFAULT_RETRY_AFTER_MS,
        max_wait_ms=DEFAULT_MAX_WAIT_MS,
        requests_served=0,
        requests_served_standard=0,
        budget_utilization=None,
    )
    accepted = WallAction(Action.RETRY_SAME, via=Via.LOW_PRIORITY_ACCEPTED, set_headers=REQUEST_HEADER)
    return LaneStep(with_hints(fresh, response), accepted)


def _may_accept(lane: Lane, response: WallResponse, now: Instant) -> bool:
    is_spent = lane.budget_spent_until is not None and lane.budget_spent_until > now
    cools_off = lane.cooling_off_until is not None and lane.cooling_off_until > now
    return response.text("slow-offer") == "treatment" and not is_spent and not cools_off
