"""The usage wall within the fold: asked before anything of a report is classified (spec/usage_wall.md section 5).

Pure. The row of the connection is read and written in the transaction of the report, so that counters move once and
one claim is open over the fleet. A claim is opened only by a transaction in time for its reporter's answer; neither a
projection nor a late commit opens one: the report is then held, and its follow-up decides.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

from policy_service.application.events import OutcomeEvent, WallCase
from policy_service.domain.facts import Cause, Fact, FactLog
from policy_service.domain.ids import AuthClass, DurationMs, Instant, Target
from policy_service.domain.limit_reset import WallContext, report, respond, resume
from policy_service.domain.policy import ConnectionPolicy, Policy
from policy_service.domain.state import StateBook
from policy_service.domain.usage_wall import LaneStep
from policy_service.domain.usage_wall_state import Action, Lane, WaitWindow, WallAction, WallOptions, WallResponse

MECHANISM = "usage_wall"


class WallAnswer(NamedTuple):
    """What the wall says to one report, in a form that is stored with its idempotency key."""

    action: str = Action.NONE.value
    delay_ms: DurationMs = 0
    via: str = ""
    is_slow: bool = False
    """The next attempt carries the slow header."""
    reason: str = ""
    hold_until: Instant = 0
    claim_id: str = ""
    """Claim of the call, or the one whose verdict is awaited."""
    step: str = ""
    method: str = ""
    url: str = ""
    body: str = ""
    timeout_ms: DurationMs = 0
    window: tuple[int, int, int] | None = None
    """Wait window of the request from now on: since, attempts, next try."""

    @property
    def intercepts(self) -> bool:
        """The response never reaches classification."""
        return self.action in (Action.RETRY_SAME, Action.CLAIM_LIMIT_RESET, Action.HOLD)

    @property
    def is_held(self) -> bool:
        """The service keeps the report for a claim's verdict."""
        return self.action == Action.HOLD


def applies(policy: ConnectionPolicy) -> bool:
    """True for a declared OAuth subscription of a provider with a usage wall (section 1)."""
    return policy.provider.usage_wall and policy.auth_class is AuthClass.OAUTH and bool(policy.connection.id)


def options_of(policy: ConnectionPolicy) -> WallOptions:
    """Switches of the connection."""
    return WallOptions(policy.connection.low_priority_mode, policy.connection.auto_limit_reset)


def intercept(
    book: StateBook, event: OutcomeEvent, policy: Policy, now: Instant | None
) -> tuple[WallAnswer, tuple[Fact, ...]] | None:
    """Fold one report into the row of its connection; None where the wall is not concerned.

    Args:
        now: time of the transaction; None: a projection, which opens no claim.

    Returns:
        The answer, and the facts of what changed. Where the answer does not intercept, the ordinary fold follows.
    """
    case = event.wall
    if case is None:
        return None
    lane = book.get(Lane, event.target.provider, event.target.connection)
    step = _step(lane, context_of(policy, event.target, may_open_claim=bool(case.claim_until)), case, event.at)
    if _opens(step, case) and (now is None or now > case.claim_until):
        return WallAnswer(Action.HOLD.value, hold_until=event.at, window=_window(case.window)), ()
    if step.lane != lane:
        book.put(replace(step.lane, touched_at=max(lane.touched_at, event.at)))
    return _answer(step), _facts(event, lane, step)


def context_of(policy: Policy, target: Target, *, may_open_claim: bool) -> WallContext:
    """What the wall needs to know of a connection."""
    applied = policy.for_connection(target.provider, target.connection)
    return WallContext(
        options_of(applied),
        applied.provider.usage_wall,
        applied.connection.organization_uuid,
        int(policy.setting("usage_wall.not_offered_memo_ms")),
        may_open_claim,
    )


def _step(lane: Lane, context: WallContext, case: WallCase, at: Instant) -> LaneStep:
    if case.claim is not None:
        return report(lane, context, case.claim, at)
    response = WallResponse(case.status, case.headers, case.sent_slow, case.remaining_budget_ms, case.draw)
    if case.resumes is not None:
        return resume(lane, context, response, at, case.resumes)
    return respond(lane, context, response, case.window, at, case.claim_id)


def _opens(step: LaneStep, case: WallCase) -> bool:
    call = step.action.call
    return case.claim is None and call is not None and call.claim_id == case.claim_id


def _answer(step: LaneStep) -> WallAnswer:
    found: WallAction = step.action
    call, claim = found.call, step.lane.claim
    awaited = claim.claim_id if found.action is Action.HOLD and claim is not None else ""
    answer = WallAnswer(
        found.action.value,
        found.delay_ms,
        found.via or "",
        bool(found.set_headers),
        found.reason or "",
        found.hold_until or 0,
        awaited,
        window=_window(step.window),
    )
    if call is None:
        return answer
    body = "" if call.body is None else json.dumps(dict(call.body))
    return answer._replace(
        claim_id=call.claim_id,
        step=call.step.value,
        method=call.method,
        url=call.url,
        body=body,
        timeout_ms=call.timeout_ms,
    )


def _window(window: WaitWindow | None) -> tuple[int, int, int] | None:
    return None if window is None else (window.since, window.attempts, window.next_try_at or 0)


def _facts(event: OutcomeEvent, before: Lane, step: LaneStep) -> tuple[Fact, ...]:
    """Lane entered or left, and verdicts of claims; counters and hints are no transitions."""
    cause = Cause(
        f"{event.event_id}/wall",
        event.at,
        replica=event.replica,
        decision_id=event.decision_id,
        request_id=event.request_id,
        status=event.outcome.status,
    )
    log = FactLog(cause)
    reason = str(step.action.reason or step.action.via or "")
    until = None if step.lane.resets_at_s is None else step.lane.resets_at_s * 1_000
    _note(log, step.lane, _lane_state(before), _lane_state(step.lane), until, reason)
    claim = step.lane.claim
    named = claim.claim_id if claim is not None else ""
    _note(log, step.lane, _claim_state(before), _claim_state(step.lane), step.lane.not_before, named)
    return tuple(log.facts)


def _note(log: FactLog, lane: Lane, before: str, after: str, until: Instant | None, reason: str) -> None:
    if before != after:
        log.add(
            MECHANISM,
            f"{lane.provider}/{lane.connection}",
            before,
            after,
            provider=lane.provider,
            connection=lane.connection,
            deadline_at=until,
            reason=reason,
        )


def _lane_state(lane: Lane) -> str:
    return "idle" if lane.resets_at_s is None else "active"


def _claim_state(lane: Lane) -> str:
    return f"claim {(lane.claim.verdict or 'open') if lane.claim is not None else 'none'}"
