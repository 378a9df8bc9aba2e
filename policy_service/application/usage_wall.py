"""The usage wall of Claude subscriptions at the edges of a report and a selection (spec/usage_wall.md).

The rules run in `wall_plan`, within the report's own transaction. Here is what they need from a report, the holding of
reports that share a claim's verdict, and the words of the answer. A connection that the wall does not concern costs
two look-ups.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from policy_service.application.commit import Reported
from policy_service.application.errors import FieldProblem, InvalidRequestError
from policy_service.application.events import OutcomeEvent, WallCase
from policy_service.application.messages import (
    Action,
    ActionKind,
    ClaimStep,
    DecisionToken,
    LimitResetReport,
    ReportRequest,
)
from policy_service.application.ports import Clock, Entropy, Store, StoreUnavailableError
from policy_service.application.report_result import ReportResult, decode
from policy_service.application.view import View
from policy_service.application.wall_plan import WallAnswer, applies, options_of
from policy_service.domain import limit_reset, usage_wall
from policy_service.domain.ids import DurationMs, Instant, Target
from policy_service.domain.usage_wall_state import Action as WallAct
from policy_service.domain.usage_wall_state import ClaimStep as Step
from policy_service.domain.usage_wall_state import Lane, WaitWindow, WallOptions

WINDOWS_KEPT = 10_000
NO_OPTIONS = WallOptions()
_STATUSES_THAT_WAIT = frozenset({429, 529})
_SLOW = tuple(usage_wall.REQUEST_HEADER.items())


class Committing(Protocol):
    """The commit, as far as a follow-up report needs it."""

    async def report(self, event: OutcomeEvent) -> Reported[ReportResult]: ...


class UsageWall:
    """The use case. Not thread-safe: one event loop owns it.

    Args:
        report_ms: time that a report waits for its commit; after it no claim is opened on its behalf.
        store_away: true while the store counts as away; then no claim is opened.
    """

    def __init__(
        self,
        view: View,
        store: Store,
        clock: Clock,
        entropy: Entropy,
        *,
        report_ms: DurationMs,
        store_away: Callable[[], bool],
    ) -> None:
        self._view = view
        self._store = store
        self._clock = clock
        self._entropy = entropy
        self._report_ms = report_ms
        self._store_away = store_away
        self._windows: OrderedDict[str, WaitWindow] = OrderedDict()
        self._moved = asyncio.Event()
        view.on_change(self._moved.set)

    # -- selection -----------------------------------------------------------------------------------
    def set_headers(self, target: Target, now: Instant) -> tuple[tuple[str, str], ...]:
        """Headers that a dispatch on the target carries: the slow header while its lane is active."""
        lane = self._lane(target)
        return () if lane is None else tuple(usage_wall.set_headers(lane, now).items())

    def _lane(self, target: Target) -> Lane | None:
        rows = self._view.provider_rows(target.provider)
        row = rows.get((Lane.KIND, target.provider, target.connection)) if rows else None
        return row if isinstance(row, Lane) else None

    # -- report --------------------------------------------------------------------------------------
    def concerns(self, target: Target) -> bool:
        """True where the connection is a subscription with an option on, or with anything remembered."""
        policy = self._view.policy.for_connection(target.provider, target.connection)
        return applies(policy) and (options_of(policy) != NO_OPTIONS or self._lane(target) is not None)

    async def prepare(self, event: OutcomeEvent, request: ReportRequest) -> OutcomeEvent:
        """The event with what the wall reads of the report; unchanged where the wall is not concerned.

        Raises:
            InvalidRequestError: the block `limit_reset` names no known step.
        """
        status, answered = request.status, request.extras.limit_reset
        if (status is None and answered is None) or not self.concerns(event.target):
            return event
        may_open = not self._store_away()
        case = WallCase(
            status or 0,
            usage_wall.unified_headers(request.headers),
            request.extras.sent_slow,
            request.extras.remaining_budget_ms,
            self._entropy.draw(),
            await self._window(request),
            self._entropy.new_id(),
            event.at + self._report_ms if may_open else 0,
            claim_report(answered) if answered is not None else None,
        )
        return replace(event, event_id=event_id(event.event_id, answered), wall=case)

    async def settle(
        self, event: OutcomeEvent, reported: Reported[ReportResult], commit: Committing
    ) -> Reported[ReportResult]:
        """The final result: a report that shares a claim's verdict is held until it is known, then judged.

        A hold ends at the claim's deadline and 5 s before the request's own. Its follow-up has an id made of the
        report's, so that a repeated report gets the same answer.
        """
        wall, case = reported.result.wall, event.wall
        if wall is None or case is None:
            return reported
        if wall.is_held:
            await self._verdict(event.target, wall)
            resumed = replace(case, resumes=wall.claim_id, claim_until=0)
            follow_up = f"{event.event_id}~{wall.claim_id}"
            reported = await commit.report(
                replace(event, event_id=follow_up, at=max(event.at, self._clock.now()), wall=resumed)
            )
        self._remember(event.decision_id, reported.result.wall)
        return reported

    async def _verdict(self, target: Target, wall: WallAnswer) -> None:
        while wall.claim_id and self._is_open(target, wall.claim_id):
            left_ms = wall.hold_until - self._clock.now()
            if left_ms <= 0:
                return
            self._moved.clear()
            try:
                await asyncio.wait_for(self._moved.wait(), left_ms / 1000)
            except TimeoutError:
                return

    def _is_open(self, target: Target, claim_id: str) -> bool:
        lane = self._lane(target)
        claim = lane.claim if lane is not None else None
        return claim is None or (claim.claim_id == claim_id and claim.granted is None)

    # -- wait windows --------------------------------------------------------------------------------
    async def _window(self, request: ReportRequest) -> WaitWindow | None:
        """Wait window of the request: of its token, as remembered here, or as answered to its attempt before this."""
        token = request.token
        if token is None:
            return None
        known = self._windows.get(token.decision_id) or _of_token(token)
        may_wait = request.attempt > 0 and request.status in _STATUSES_THAT_WAIT and request.extras.sent_slow
        if known is not None or not may_wait or self._store_away():
            return known
        return await self._answered(f"{token.decision_id}/{request.attempt - 1}")

    async def _answered(self, event_id: str) -> WaitWindow | None:
        try:
            stored = await self._store.known_answer(event_id, timeout_ms=self._report_ms)
        except StoreUnavailableError:
            return None
        wall = decode(stored).wall if stored is not None else None
        return None if wall is None or wall.window is None else WaitWindow(*wall.window)

    def _remember(self, decision_id: str, wall: WallAnswer | None) -> None:
        if not decision_id or wall is None:
            return
        if wall.window is None:
            self._windows.pop(decision_id, None)
            return
        self._windows[decision_id] = WaitWindow(*wall.window)
        self._windows.move_to_end(decision_id)
        while len(self._windows) > WINDOWS_KEPT:
            self._windows.popitem(last=False)


def action_of(wall: WallAnswer | None, ordinary: Action) -> Action:
    """Next step of the gateway: the wall's where it intercepts, else the ordinary one (with the reason of an end)."""
    if wall is None or wall.action == WallAct.NONE:
        return ordinary
    if wall.action == WallAct.ENDED:
        return replace(ordinary, reason=wall.reason)
    if wall.action == WallAct.RETRY_SAME:
        return Action(ActionKind.RETRY_SAME, wall.delay_ms, _SLOW if wall.is_slow else (), via=wall.via)
    call = ClaimStep(wall.claim_id, wall.step, wall.method, wall.url, wall.body.encode(), wall.timeout_ms)
    return Action(ActionKind.CLAIM_LIMIT_RESET, claim=call)


def event_id(base: str, answered: LimitResetReport | None) -> str:
    """Idempotency key: each call of a claim has a report of its own under the attempt that asked for it."""
    return base if answered is None else f"{base}/{answered.claim_id}.{answered.step}"


def claim_report(answered: LimitResetReport) -> limit_reset.ClaimReport:
    """Result of a claim's call in the words of the rules.

    Raises:
        InvalidRequestError: the step is none.
    """
    if answered.step not in set(Step):
        known = ", ".join(Step)
        problem = FieldProblem("details.limit_reset.step", f"{answered.step!r} is no step", f"one of {known}")
        raise InvalidRequestError((problem,))
    step = Step(answered.step)
    if step is Step.ORGANIZATION and answered.organization_uuid:
        return limit_reset.ClaimReport(answered.claim_id, step, 200, {"organization_uuid": answered.organization_uuid})
    failed = bool(answered.transport_error) or answered.http_status is None
    return limit_reset.ClaimReport(answered.claim_id, step, answered.http_status, _json(answered.body), failed)


def _json(body: bytes) -> Mapping[str, object]:
    try:
        parsed = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _of_token(token: DecisionToken) -> WaitWindow | None:
    lane = token.lane
    return None if lane is None else WaitWindow(lane.since, lane.attempts, lane.next_try_at or None)
