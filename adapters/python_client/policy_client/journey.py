"""One client request as a state machine: select, call, report, fall back, wait, clean up.

Pure: `begin` and `advance` return the next state, the next step and what is sent behind; time is an argument. The
shells in `asynchronous` and `synchronous` perform the steps. Contract: policy.proto; rules: spec/fleet.md section 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from policy_client import messages, outcomes, steps
from policy_client.decision import Decision, Under, identity
from policy_client.errors import LeaseLostError, NoTargetError, RefusedWhileAwayError, ServiceAwayError
from policy_client.outcomes import Outcome
from policy_client.reports import earlier_attempt, report, report_without_token, time_as_reject, wait_as_reject
from policy_client.steps import Answer, Attempt, Behind, BehindReport, Budget, Hold, OpenReport, Result

T = TypeVar("T")


class Turn(NamedTuple, Generic[T]):
    """What comes next."""

    journey: Journey[T]
    step: steps.Step[T]
    behind: tuple[Behind, ...] = ()


@dataclass(frozen=True, slots=True)
class Journey(Generic[T]):
    """State of one client request. Make it with `begin`."""

    asked: messages.SelectTargetRequest
    budget: Budget
    base_id: str
    began_at: int
    wait_left_ms: int
    selections: int = 0
    dispatches: int = 0
    previous_token: bytes = b""
    earlier: tuple[messages.EarlierAttempt, ...] = ()
    """Failed attempts since the last wait: those that the next selection leaves out."""
    failed: tuple[messages.EarlierAttempt, ...] = ()
    """All failed attempts."""
    decision: Decision | None = None
    under: Under | None = None
    is_calling: bool = False
    next_headers: tuple[tuple[str, str], ...] = ()
    held_tokens: tuple[bytes, ...] = ()
    """Decisions whose grants were kept alive."""
    unheard: tuple[Behind, ...] = ()
    """Report of a failure whose verdict is awaited: told behind where whoever asked leaves meanwhile."""

    # -- events ----------------------------------------------------------------------------------------
    def advance(self, event: steps.Event[T], now: int) -> Turn[T]:
        """The next turn.

        Args:
            event: what came of the step before.
            now: milliseconds of a clock that does not go back.
        """
        turn: Turn[T] = _EVENTS[type(event)](self, event, now)
        return turn

    def _selected(self, event: steps.Selected, now: int) -> Turn[T]:
        response = event.response
        kind = response.WhichOneof("verdict")
        if kind == "dispatch":
            dispatch = response.dispatch
            targets = (dispatch.target, *dispatch.fallbacks)
            token = response.decision_token
            decision = Decision(targets, now, dispatch, token, response.decided_at_unix_ms)
            left_ms = max(0, self.wait_left_ms - dispatch.waited_ms)
            held = (*self.held_tokens, token) if decision.hold is not None else self.held_tokens
            journey = replace(self, decision=decision, previous_token=token, wait_left_ms=left_ms, held_tokens=held)
            return journey._go(0, 0, now)
        if kind == "wait":
            return replace(self, previous_token=response.decision_token)._wait(response, now)
        reject = response.reject if kind == "reject" else messages.Reject(http_status=503, code="no_verdict")
        return self._raise(NoTargetError(reject, response.exclusions, self.failed))

    def _ordered_locally(self, event: steps.LocalOrder, now: int) -> Turn[T]:
        tried = {identity(each.target) for each in self.failed}
        targets = tuple(each for each in event.targets if identity(each) not in tried)
        if targets:
            turn = replace(self, decision=Decision(targets, now, messages.Dispatch()))._go(0, 0, now)
        elif self.under is not None:
            turn = self._end(None)
        else:
            turn = self._raise(RefusedWhileAwayError("the service is away and no target is known to be free to use"))
        return self._withdrawn(turn, event)

    def _service_failed(self, event: steps.Failed, now: int) -> Turn[T]:
        if self.decision is not None:
            return self._not_dispatched(event.error, now)
        is_away = self.under is not None and isinstance(event.error, ServiceAwayError)
        return self._withdrawn(self._end(None) if is_away else self._raise(event.error), event)

    def _withdrawn(self, turn: Turn[T], event: steps.LocalOrder | steps.Failed) -> Turn[T]:
        """The turn after a selection without answer: what the service took for it meanwhile is given back behind."""
        if not event.may_hold:
            return turn
        return turn._replace(behind=(messages.CancelPermitRequest(request_id=self.request_id), *turn.behind))

    def _fence_checked(self, event: steps.FenceChecked, now: int) -> Turn[T]:
        status = event.response.status
        if status == messages.FENCE_STATUS_VALID:
            return self._call(now)
        name = messages.FenceStatus.Name(status).removeprefix("FENCE_STATUS_")
        return self._not_dispatched(LeaseLostError(_FENCE_CODES.get(name, name)), now)

    def _answered(self, event: steps.Answered[T], now: int) -> Turn[T]:
        under, decision = self._ended(event.answer, event.answer.outcome, now)
        journey = replace(self, under=under, is_calling=False)
        if event.answer.is_open and under.outcome.is_success:
            owed = OpenReport(journey._report(under, decision, final=True), under.called_at)
            return Turn(journey, steps.Return(journey._result(None, owed)))
        if under.outcome.is_success:
            return Turn(journey, steps.Return(journey._result(None)), (journey._behind(under, decision),))
        return journey._failed(under, decision, now)

    def _raised(self, event: steps.Raised, now: int) -> Turn[T]:
        under, decision = self._ended(event.error, outcomes.of_exception(event.error), now)
        return replace(self, under=under, is_calling=False)._failed(under, decision, now)

    def _reported(self, event: steps.Reported, now: int) -> Turn[T]:
        verdict, action = event.response.verdict, event.response.action
        move = _ACTIONS.get(action.kind, Journey._fall_back)
        turn: Turn[T] = move(self._noted(self._pair[0], verdict), action, verdict, now)
        return turn

    def _report_lost(self, event: steps.ReportLost, now: int) -> Turn[T]:
        return self._noted(self._pair[0], None)._unjudged(now)

    def _slept(self, event: steps.Slept, now: int) -> Turn[T]:
        if self.decision is None:
            return self._select(now)
        under, _ = self._pair
        return self._go(under.place, under.attempt.number, now, has_waited=True)

    def _left(self, event: steps.Left, now: int) -> Turn[T]:
        gone = steps.Raise(RefusedWhileAwayError("whoever asked has left"))
        if self.is_calling:
            under, decision = self._ended(None, outcomes.cancelled(), now)
            return Turn(self, gone, (self._behind(under, decision),))
        if self.decision is not None:
            return Turn(self, gone, (*self.unheard, *self._release()))
        return Turn(self, gone, (messages.CancelPermitRequest(request_id=self.request_id),))

    # -- selecting and waiting -------------------------------------------------------------------------
    @property
    def request_id(self) -> str:
        """Of the selection under way. A new one after each that led to an attempt: the old one holds its grants."""
        return f"{self.base_id}-{self.selections}"

    def _left_ms(self, now: int) -> int:
        return max(0, self.began_at + self.budget.total_ms - now)

    def _select(self, now: int) -> Turn[T]:
        left_ms = self._left_ms(now)
        if left_ms == 0:
            return self._out_of_time()
        request = messages.SelectTargetRequest()
        request.CopyFrom(self.asked)
        request.request_id = self.request_id
        request.previous_decision_token = self.previous_token or self.asked.previous_decision_token
        request.earlier_attempts.extend(self.earlier)
        request.deadline_ms = min(left_ms, request.deadline_ms) if request.HasField("deadline_ms") else left_ms
        line_ms = min(self.wait_left_ms, left_ms)
        request.wait_budget_ms = min(line_ms, request.wait_budget_ms) if request.HasField("wait_budget_ms") else line_ms
        may_wait = not request.HasField("allow_wait") or request.allow_wait
        return Turn(self, steps.Select(request, request.wait_budget_ms if may_wait else 0))

    def _anew(self, now: int) -> Turn[T]:
        """Another decision for the same request; what this one holds is freed."""
        turn = replace(self, decision=None, selections=self.selections + 1)._select(now)
        return turn._replace(behind=(*self._release(), *turn.behind))

    def _wait(self, response: messages.SelectTargetResponse, now: int) -> Turn[T]:
        wait = response.wait
        if not self._affords(wait.wait_ms, now):
            left_line = (messages.CancelPermitRequest(request_id=self.request_id),) if wait.HasField("ticket") else ()
            turn = self._raise(NoTargetError(wait_as_reject(wait), response.exclusions, self.failed))
            return turn._replace(behind=left_line)
        # After a wait every target may be tried again (spec/cooldown_wait.md section 3).
        return replace(self, decision=None, earlier=())._sleep(wait.wait_ms)

    def _affords(self, wait_ms: int, now: int) -> bool:
        return wait_ms <= self.wait_left_ms and wait_ms < self._left_ms(now)

    def _sleep(self, ms: int) -> Turn[T]:
        return Turn(replace(self, wait_left_ms=self.wait_left_ms - ms), steps.Sleep(ms))

    # -- calling ---------------------------------------------------------------------------------------
    @property
    def _pair(self) -> tuple[Under, Decision]:
        assert self.under is not None, "an attempt is under way"
        assert self.decision is not None, "a decision was made"
        return self.under, self.decision

    @property
    def hold(self) -> Hold | None:
        """Grants to keep alive now."""
        return self.decision.hold if self.decision is not None and self.is_calling else None

    def _go(self, place: int, number: int, now: int, *, has_waited: bool = False) -> Turn[T]:
        """Dispatch to one target of the decision, after the fence where no fresh selection covers it."""
        if self._left_ms(now) == 0 or self.dispatches >= self._most_dispatches:
            return self._out_of_time()
        attempt = self._attempt(place, number, now)
        journey = replace(self, under=Under(attempt, place), next_headers=())
        needs_fence = self.asked.HasField("lease") and (number > 0 or has_waited)
        return journey._fence() if needs_fence else journey._call(now)

    @property
    def _most_dispatches(self) -> int:
        assert self.decision is not None, "a decision was made"
        stated = self.decision.dispatch.attempt_policy.max_dispatches
        return min(self.budget.dispatches, stated) if stated else self.budget.dispatches

    def _attempt(self, place: int, number: int, now: int) -> Attempt:
        assert self.decision is not None, "a decision was made"
        decision, dispatch = self.decision, self.decision.dispatch
        own = dispatch.set_headers if place == 0 else ()
        limits = (self.budget.attempt_ms, dispatch.attempt_policy.target_timeout_ms or None)
        return Attempt(
            decision.targets[place],
            number,
            self.next_headers or tuple((header.name, header.value) for header in own),
            tuple(dispatch.strip_headers),
            tuple(dispatch.degradations),
            min((limit for limit in limits if limit is not None), default=None),
            dispatch.probe and place == 0,
            decision.is_local,
        )

    def _fence(self) -> Turn[T]:
        under, decision = self._pair
        request = messages.CheckFenceRequest(
            caller_id=self.asked.caller_id,
            caller_key_sha256=self.asked.caller_key_sha256,
            lease=self.asked.lease,
            connection=under.attempt.target.connection,
            decision_token=decision.token,
        )
        return Turn(self, steps.CheckFence(request))

    def _call(self, now: int) -> Turn[T]:
        under, _ = self._pair
        under = replace(under, called_at=now)
        journey = replace(self, under=under, is_calling=True, dispatches=self.dispatches + 1)
        return Turn(journey, steps.Call(under.attempt))

    # -- the end of an attempt -------------------------------------------------------------------------
    def _ended(self, ended: Any, outcome: Outcome, now: int) -> tuple[Under, Decision]:
        under, decision = self._pair
        timed = outcomes.timed(outcome, now - under.called_at)
        return replace(under, ended=ended, outcome=timed), decision

    def _report(self, under: Under, decision: Decision, *, final: bool) -> messages.ReportOutcomeRequest:
        attempt, offset_ms = under.attempt, under.called_at - decision.received_at
        if decision.is_local:
            report_id = f"{self.base_id}-local-{self.dispatches}"
            return report_without_token(report_id, self.asked, attempt.target, under.outcome)
        return report(decision.token, attempt.number, attempt.target, offset_ms, under.outcome, final=final)

    def _behind(self, under: Under, decision: Decision) -> BehindReport:
        began_at = under.called_at if decision.is_local else None
        return BehindReport(self._report(under, decision, final=True), began_at)

    def _failed(self, under: Under, decision: Decision, now: int) -> Turn[T]:
        if under.outcome.is_local:
            error = under.ended if isinstance(under.ended, BaseException) else None
            turn = self._raise(error) if error is not None else self._end(None)
            return turn._replace(behind=(self._behind(under, decision),))
        if decision.is_local:
            turn = self._noted(under, None)._unjudged(now)
            return turn._replace(behind=(self._behind(under, decision), *turn.behind))
        # The last target's report ends the decision, except where a retry of it would still need the slot.
        final = under.place == len(decision.targets) - 1 and not decision.holds_slots
        report = self._report(under, decision, final=final)
        journey = replace(self, under=replace(under, is_final=final), unheard=(BehindReport(report, None),))
        return Turn(journey, steps.Report(report))

    def _not_dispatched(self, error: BaseException, now: int) -> Turn[T]:
        """A fence that does not hold is local: it counts against nobody (spec/leases.md section 8)."""
        under, decision = self._ended(None, outcomes.local_fault(outcomes.NOT_DISPATCHED), now)
        under = replace(under, called_at=now, outcome=replace(under.outcome, latency_ms=None))
        return self._raise(error)._replace(behind=(self._behind(under, decision),))

    def _noted(self, under: Under, verdict: messages.Verdict | None) -> Journey[T]:
        earlier = earlier_attempt(under.attempt.target, under.outcome, verdict)
        return replace(self, earlier=(*self.earlier, earlier), failed=(*self.failed, earlier), unheard=())

    # -- what to do after a failure ----------------------------------------------------------------------
    def _return(self, action: messages.Action, verdict: messages.Verdict, now: int) -> Turn[T]:
        return self._end(verdict)

    def _fall_back(self, action: messages.Action, verdict: messages.Verdict, now: int) -> Turn[T]:
        """The next target of the decision, else a new selection. Also for actions that this client does not know."""
        under, decision = self._pair
        place = decision.place_of(action.next_target) if action.HasField("next_target") else None
        if place is None:
            return self._anew(now)
        pause_ms = action.delay_ms or decision.dispatch.attempt_policy.fallback_delay_ms
        return self._next(place, under.attempt.number + 1, pause_ms, verdict, now)

    def _retry_same(self, action: messages.Action, verdict: messages.Verdict, now: int) -> Turn[T]:
        under, _ = self._pair
        headers = tuple((header.name, header.value) for header in action.set_headers)
        journey = replace(self, next_headers=headers)
        return journey._next(under.place, under.attempt.number + 1, action.delay_ms, verdict, now)

    def _wait_and_select(self, action: messages.Action, verdict: messages.Verdict, now: int) -> Turn[T]:
        if not self._affords(action.delay_ms, now):
            return self._end(verdict)
        journey = replace(self, decision=None, earlier=(), selections=self.selections + 1)
        return journey._sleep(action.delay_ms)._replace(behind=self._release())

    def _next(self, place: int, number: int, pause_ms: int, verdict: messages.Verdict | None, now: int) -> Turn[T]:
        if pause_ms <= 0:
            return self._go(place, number, now)
        if not self._affords(pause_ms, now):
            return self._end(verdict)
        under, _ = self._pair
        attempt = replace(under.attempt, number=number)
        return replace(self, under=replace(under, attempt=attempt, place=place))._sleep(pause_ms)

    def _unjudged(self, now: int) -> Turn[T]:
        """The service did not say what to do: go on by the rules that need none of its knowledge."""
        under, decision = self._pair
        if not under.outcome.may_fall_back:
            return self._end(None)
        if under.place + 1 < len(decision.targets):
            return self._go(under.place + 1, under.attempt.number + 1, now)
        return self._end(None) if decision.is_local else self._anew(now)

    # -- ends --------------------------------------------------------------------------------------------
    def _release(self) -> tuple[Behind, ...]:
        decision = self.decision
        is_free = self.under is not None and self.under.is_final
        if decision is None or is_free or decision.is_local or not decision.holds_grants:
            return ()
        return (messages.ReleasePermitRequest(decision_token=decision.token),)

    def _end(self, verdict: messages.Verdict | None) -> Turn[T]:
        """Give back the newest answer, or raise the newest exception."""
        assert self.under is not None, "an attempt was made"
        if isinstance(self.under.ended, BaseException):
            return self._raise(self.under.ended)
        return Turn(self, steps.Return(self._result(verdict)), self._release())

    def _raise(self, error: BaseException) -> Turn[T]:
        return Turn(self, steps.Raise(error), self._release())

    def _out_of_time(self) -> Turn[T]:
        if self.under is not None and self.under.ended is not None:
            return self._end(None)
        return self._raise(NoTargetError(time_as_reject(), (), self.failed))

    def _result(self, verdict: messages.Verdict | None, owed: OpenReport | None = None) -> Result[T]:
        under = self.under
        assert under is not None, "an attempt was made"
        assert isinstance(under.ended, Answer), "it was answered"
        attempts = self.failed if under.outcome.is_success else self.failed[:-1]
        return Result(under.ended.value, under.outcome, under.attempt, attempts, verdict, owed)


_FENCE_CODES = {
    "REQUIRED": "LEASE_REQUIRED",
    "STALE": "LEASE_FENCE_STALE",
    "AUTHORIZATION_MISMATCH": "LEASE_AUTHORIZATION_MISMATCH",
    "CONNECTION_MISMATCH": "LEASE_CONNECTION_MISMATCH",
}
_EVENTS: dict[type, Any] = {
    steps.Selected: Journey._selected,
    steps.LocalOrder: Journey._ordered_locally,
    steps.Failed: Journey._service_failed,
    steps.FenceChecked: Journey._fence_checked,
    steps.Answered: Journey._answered,
    steps.Raised: Journey._raised,
    steps.Reported: Journey._reported,
    steps.ReportLost: Journey._report_lost,
    steps.Slept: Journey._slept,
    steps.Left: Journey._left,
}
_ACTIONS: dict[int, Any] = {
    messages.ACTION_KIND_RETURN_TO_CLIENT: Journey._return,
    messages.ACTION_KIND_FALL_BACK: Journey._fall_back,
    messages.ACTION_KIND_RETRY_SAME: Journey._retry_same,
    messages.ACTION_KIND_WAIT_AND_SELECT: Journey._wait_and_select,
}


def begin(asked: messages.SelectTargetRequest, budget: Budget, base_id: str, now: int) -> Turn[Any]:
    """Start a request.

    Args:
        asked: what is asked for; `request_id`, budgets and attempts are filled by the journey.
        budget: its bounds.
        base_id: unique, at most 100 characters; request and report ids are made of it.
        now: milliseconds of a clock that does not go back.
    """
    journey: Journey[Any] = Journey(asked, budget, base_id, now, budget.wait_ms)
    return journey._select(now)
