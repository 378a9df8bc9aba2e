"""One connection at the usage wall, with the gateway's calls, for the vectors of spec/usage_wall.md.

Times of the vectors are relative to the epoch of the world; the rows hold absolute milliseconds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from policy_service.domain.limit_reset import ClaimReport, WallContext, organization_of, report, respond, resume
from policy_service.domain.usage_wall import LaneStep, expire, read_options, set_headers
from policy_service.domain.usage_wall_state import (
    Action,
    ClaimStep,
    Lane,
    WaitWindow,
    WallAction,
    WallResponse,
    is_lane_active,
)

Fields = dict[str, Any]


class WallWorld:
    """Row of the connection, wait windows by request, and reports that are held for a claim's verdict."""

    def __init__(self, given: Fields) -> None:
        self.zero = given.get("epoch_s", 1_800_000_000) * 1_000
        self.now = self.zero
        self.lane = self._lane(given.get("lane") or {}, given.get("reset") or {})
        self.context = self._context(given)
        self.windows: dict[str, WaitWindow | None] = {}
        self.held: dict[str, tuple[str, WallResponse]] = {}
        self.answers: dict[str, WallAction] = {}
        self.claims_opened = 0
        self.claimant = ""

    def _lane(self, lane: Fields, reset: Fields) -> Lane:
        row = Lane(
            "claude",
            "c1",
            resets_at_s=lane.get("resets_at_s") if lane.get("active") else None,
            accepted_at=self._absolute(lane.get("accepted_at_ms")) if lane.get("active") else None,
            cooling_off_until=self._absolute(lane.get("cooling_off_until_ms")),
            budget_spent_until=lane["budget_spent_until_s"] * 1_000 if lane.get("budget_spent_until_s") else None,
            granted_at=self._absolute(reset.get("granted_at_ms")),
            not_before=self._absolute(reset.get("not_before_ms")),
        )
        hints = {name: lane[name] for name in ("retry_after_ms", "max_wait_ms") if name in lane}
        return replace(row, **hints)

    def _context(self, given: Fields) -> WallContext:
        connection = given.get("connection") or {}
        is_subscription = (
            connection.get("provider", "claude") == "claude"
            and connection.get("auth", "oauth") == "oauth"
            and not connection.get("api_key", False)
        )
        organization = {"organization_uuid": (given.get("reset") or {}).get("organization_uuid", "org-1")}
        return WallContext(
            read_options(given.get("options") or {}),
            is_subscription,
            organization_of(organization),
            (given.get("settings") or {}).get("not_offered_memo_ms", 604_800_000),
        )

    def _absolute(self, at_ms: int | None) -> int | None:
        return None if at_ms is None else self.zero + at_ms

    def _relative(self, at: int | None) -> int | None:
        return None if at is None else at - self.zero

    def run(self, step: Fields) -> Fields:
        """One step; the answer has the field names of the vectors."""
        self.now = self.zero + step.get("at_ms", self.now - self.zero)
        self._release_overdue()
        answer: Fields = getattr(self, f"on_{step['event']}")(step)
        return {**answer, **self._state()}

    def on_response(self, step: Fields) -> Fields:
        request = step.get("request", "q1")
        response = WallResponse(
            step["status"],
            step.get("headers") or {},
            step.get("sent_slow", False),
            step.get("remaining_budget_ms"),
            step.get("r", 0.5),
        )
        claim_id = f"claim-{self.claims_opened + 1}"
        found = respond(self.lane, self.context, response, self.windows.get(request), self.now, claim_id)
        if found.action.call is not None:
            self.claims_opened += 1
            self.claimant = request
        if found.action.action is Action.HOLD:
            assert self.lane.claim is not None
            self.held[request] = (self.lane.claim.claim_id, response)
        return self._folded(request, found)

    def on_limit_reset(self, step: Fields) -> Fields:
        assert self.lane.claim is not None
        result = ClaimReport(
            step.get("claim_id", self.lane.claim.claim_id),
            ClaimStep(step["step"]),
            step.get("http_status"),
            step.get("body") or {},
            bool(step.get("transport_error")),
        )
        answer = self._folded(step.get("request", self.claimant), report(self.lane, self.context, result, self.now))
        if self.lane.claim is not None and self.lane.claim.granted is not None:
            self._release_held()
        return answer

    def on_parallel(self, step: Fields) -> Fields:
        for call in step["calls"]:
            getattr(self, f"on_{call['event']}")(call)
        return {}

    def on_select(self, step: Fields) -> Fields:
        self.lane = expire(self.lane, self.now)
        return {"slow_header": bool(set_headers(self.lane, self.now))}

    def on_kill_gateway(self, step: Fields) -> Fields:
        return {}

    def on_kill_replica(self, step: Fields) -> Fields:
        return {}

    def _folded(self, request: str, found: LaneStep) -> Fields:
        self.lane = found.lane
        self.windows[request] = found.window
        self.answers[request] = found.action
        return self._shown(found.action)

    def _release_overdue(self) -> None:
        if self.lane.claim is not None and self.now >= self.lane.claim.deadline_at:
            self._release_held()

    def _release_held(self) -> None:
        for request, (claim_id, response) in list(self.held.items()):
            del self.held[request]
            self._folded(request, resume(self.lane, self.context, response, self.now, claim_id))

    def _shown(self, action: WallAction) -> Fields:
        answer: Fields = {
            "action": action.action,
            "delay_ms": action.delay_ms,
            "via": action.via,
            "slow_header": bool(action.set_headers),
            "reason": action.reason,
            "cooldown_written": not action.intercepts,
            "classified": not action.intercepts,
            "rotated": not action.intercepts,
        }
        if action.call is not None:
            answer |= {name: getattr(action.call, name) for name in ("step", "method", "url", "body", "timeout_ms")}
        return answer

    def _state(self) -> Fields:
        lane = self.lane
        spent = lane.budget_spent_until
        shown = ("resets_at_s", "retry_after_ms", "max_wait_ms", "requests_served", "requests_served_standard")
        return {
            "lane": {
                "active": is_lane_active(lane, self.now),
                "accepted_at_ms": self._relative(lane.accepted_at),
                "cooling_off_until_ms": self._relative(lane.cooling_off_until),
                "budget_spent_until_s": None if spent is None else spent // 1_000,
                "budget_utilization": lane.budget_utilization,
                **{name: getattr(lane, name) for name in shown},
            },
            "reset": {
                "granted_at_ms": self._relative(lane.granted_at),
                "not_before_ms": self._relative(lane.not_before),
            },
            "claims_opened": self.claims_opened,
            "answers": {request: _in_words(action) for request, action in self.answers.items()},
        }


def _in_words(action: WallAction) -> str:
    return f"{action.action} via {action.via}" if action.via else str(action.action)
