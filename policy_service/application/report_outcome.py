"""ReportOutcome: what came back, what it means, what to do next (spec/README.md, order for one outcome).

A failure is folded into the view at once and committed in a group; the answer waits for the commit within its
budget. A success that can change nothing is answered from memory and never reaches the database. One that bears a
permit is never judged from memory: the row of its grant may not have reached this replica's view.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from policy_service.application.commit import GroupedCommit, Reported
from policy_service.application.errors import FieldProblem, InvalidRequestError, SpoolRefusalError
from policy_service.application.events import OutcomeEvent, ProbeRef
from policy_service.application.fallback_stale import FALLBACK_STALE, is_fallback_stale
from policy_service.application.freshness import Freshness
from policy_service.application.grants import EARLY
from policy_service.application.messages import (
    Action,
    ActionKind,
    DecisionToken,
    EndKind,
    HeardSuccess,
    ReportAnswer,
    ReportRequest,
    TokenTarget,
    Verdict,
)
from policy_service.application.ports import Clock, SpoolFullError
from policy_service.application.report_endings import NO_LEASE, Endings, LeaseEnd
from policy_service.application.report_meaning import meaning_of
from policy_service.application.report_result import Preview, ReportResult, fold_report
from policy_service.application.successes import SuccessRing, Waiting
from policy_service.application.usage_wall import UsageWall, action_of
from policy_service.application.view import View
from policy_service.domain.breaker import split_name
from policy_service.domain.error_types import breaker_kind, reason_label
from policy_service.domain.ids import ConnectionId, Generations, Instant, ModelId, ProviderId, Target
from policy_service.domain.outcome import CallKind, Origin, Outcome
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.state import StateBook

_RETURN = Action(ActionKind.RETURN_TO_CLIENT)
_SUCCESS = Verdict("none", "none", is_success=True)

_FAULT_CODES = {
    "execution": "ENOENT",
    "plugin_block": "plugin_block",
    "translation": "translation_failed",
    "own_queue": "rate_limit_queue_timeout",
    "own_timeout": "own_timeout",
    "key_policy": "TOKEN_LIMIT_EXCEEDED",
    "resource_pressure": "resource_pressure",
    "not_dispatched": "not_dispatched",
}
"""Structured codes by which the guards know a fault of the gateway (spec/guards.md section 1)."""


class ReportOutcome:
    """The use case. Not thread-safe: one event loop owns it."""

    def __init__(
        self,
        view: View,
        clock: Clock,
        commit: GroupedCommit[ReportResult],
        freshness: Freshness,
        replica: str,
        endings: Endings,
        wall: UsageWall,
    ) -> None:
        self._endings = endings
        self._wall = wall
        self._view = view
        self._clock = clock
        self._commit = commit
        self._successes: SuccessRing[tuple[Callable[[], ReportRequest], Instant]] = SuccessRing(view, self._apply_held)
        self._freshness = freshness
        self._replica = replica
        self.ignored: Counter[str] = Counter()
        """Reports that were statistics only for some key, by cause, since the start (spec/README.md, Facts)."""

    def report_now(self, request: ReportRequest) -> ReportAnswer | None:
        """Answer a plain success from memory; None where `report` must be awaited.

        Raises:
            InvalidRequestError: the served target is none of the token's.
        """
        if not _is_plain_success(request):
            return None
        now = self._clock.now()
        target = self._served(request)
        if self._view.provider_rows(target.target.provider) is not None:
            return None
        self._hold(request, target.target, now)
        return self._success(request, target, now)

    def heard_now(self, success: HeardSuccess) -> bool:
        """`report_now` of a success that wants no answer; False where `report` must be awaited."""
        token, target = success.token, success.target
        if token.probes or token.permits or token.pin or self._view.provider_rows(target.provider) is not None:
            return False
        if all(known.target != target for known in token.targets):
            return False
        now = self._clock.now()
        response_at = min(now, token.started_at + success.attempt_offset_ms + success.first_byte_ms)
        self._successes.hold(Waiting(target, response_at, now, (success.request, now)))
        self._endings.heard(token, target, now)
        return True

    async def report(self, request: ReportRequest) -> ReportAnswer:
        """Answer one report; a failure waits for its commit within the budget.

        Raises:
            InvalidRequestError: the served target is none of the token's.
            SpoolRefusalError: the bounds of unstored reports are reached; nothing was recorded.
        """
        now = self._clock.now()
        target = self._served(request)
        self._endings.free(request)
        lease = await self._endings.end_lease(request)
        event = self._event(request, target, now)
        event = await self._wall.prepare(event, request)
        is_repeated = self._commit.knows(event.event_id)
        if not is_repeated and is_fallback_stale(request, target, self._view, event.started_at):
            self.ignored[FALLBACK_STALE] += 1
        if event.outcome.is_success and not is_repeated and not event.bears_permit:
            changes, causes = self._tried(event)
            if not changes:
                self._hold(request, target.target, now)
                return self._success(request, target, now, lease, causes)
        try:
            reported = await self._commit.report(event)
            reported = await self._wall.settle(event, reported, self._commit)
        except SpoolFullError as error:
            raise SpoolRefusalError(str(error)) from error
        return self._answer(request, target, reported, lease, now)

    def preview(self, request: ReportRequest, at: Instant) -> Preview:
        """What a report without a token would mean at an instant (ms), for a target without state; writes nothing."""
        event = self._event(request, self._served(request), at)
        result = fold_report(StateBook(), event, self._view.policy)
        if result.is_success:
            return Preview(_verdict_of(result), result)
        outcome = meaning_of(event, self._view.policy).outcome
        return Preview(_verdict_of(result), result, breaker_kind(outcome, at), reason_label(outcome))

    def _success(
        self,
        request: ReportRequest,
        served: TokenTarget,
        now: Instant,
        lease: LeaseEnd = NO_LEASE,
        causes: tuple[str, ...] = (),
    ) -> ReportAnswer:
        """Answer to a success that changes nothing; `causes`: why it is statistics only."""
        self.ignored.update(causes)
        pin = self._endings.affinity(request, served.target, None, now)
        age, reasons = self._freshness.stamp(now)
        return ReportAnswer(
            _SUCCESS,
            _RETURN,
            ignored=causes,
            pin=pin,
            lease_result=lease.result,
            lease_code=lease.code,
            policy_revision=self._view.policy.revision,
            view_age_ms=age,
            is_degraded=bool(reasons),
        )

    # -- successes -----------------------------------------------------------------------------------
    def judge_successes(self) -> None:
        """Judge the successes whose evidence the view has reached; called after every poll."""
        self._successes.judge(self._clock.now())

    def _hold(self, request: ReportRequest, target: Target, now: Instant) -> None:
        """Keep a success that the view cannot judge yet (fleet.md section 2)."""
        if request.token is None and request.elapsed_ms is None:
            return
        started = _started_at(request, now)
        first_byte = _first_byte_at(request, started, now)
        response_at = started if first_byte is None else first_byte
        self._successes.hold(Waiting(target, response_at, now, (lambda: request, now)))

    def _apply_held(self, held: tuple[Callable[[], ReportRequest], Instant]) -> None:
        made, at = held
        request = made()
        try:
            event = self._event(request, self._served(request), at)
            if self._tried(event)[0]:
                self._commit.submit(event)
        except (InvalidRequestError, SpoolFullError):
            self._successes.dropped += 1

    # -- the event -----------------------------------------------------------------------------------
    def _tried(self, event: OutcomeEvent) -> tuple[bool, tuple[str, ...]]:
        """Would a success change anything, and why not."""
        book = self._view.book()
        result = fold_report(book, event, self._view.policy)
        return bool(book.changes), result.ignored

    def _served(self, request: ReportRequest) -> TokenTarget:
        """The served target with the generations that the decision gave it."""
        named = request.target
        provider = ProviderId(self._view.policy.canonical(named.provider))
        target = Target(provider, ConnectionId(named.connection), ModelId(named.model))
        if request.token is None:
            return TokenTarget(target)
        for known in request.token.targets:
            if known.target == target:
                return known
        raise InvalidRequestError((_not_in_token(target, request.token),))

    def _event(self, request: ReportRequest, served: TokenTarget, now: Instant) -> OutcomeEvent:
        token = request.token
        started = _started_at(request, now)
        outcome = self._outcome(request, served.target)
        generations: Generations | None = served.generations if token else None
        event = OutcomeEvent(
            event_id=f"{token.decision_id}/{request.attempt}" if token else f"report/{request.report_id}",
            at=now,
            target=served.target,
            outcome=outcome,
            started_at=started,
            first_byte_at=_first_byte_at(request, started, now),
            generations=generations,
            probes=_probes(token, served.target, request.final),
            early_probe=_early_probe(token, served.target),
            replica=self._replica,
            decision_id=token.decision_id if token else "",
            request_id=token.request_id if token else request.request_id,
            attempt=request.attempt,
            final=request.final,
            statistics_only=token is None and outcome.is_success and request.elapsed_ms is None,
        )
        if outcome.is_success:
            return event
        # The very outcome object is kept: the meaning found here serves every fold of the event.
        return replace(event, verdict=meaning_of(event, self._view.policy).verdict)

    def _outcome(self, request: ReportRequest, target: Target) -> Outcome:
        extras = request.extras
        token = request.token
        pool = request.pool_attempt
        return parse_outcome(
            RawOutcome(
                status=_status(request),
                network_error=request.network_error,
                headers=tuple(request.headers.items()),
                body=extras.stream_error or request.body,
                code=extras.error_code or _FAULT_CODES.get(request.fault, request.fault),
                type=extras.error_type,
                name=extras.error_name,
                message=extras.error_message,
                provider=target.provider,
                connection=target.connection,
                model=target.model,
                auth_class=request.auth_class,
                origin=_origin(request),
                failure_kind=extras.failure_kind,
                call_kind=request.call_kind or (token.call_kind if token else CallKind.CLIENT),
                inner_status=extras.inner_status,
                pool_attempt=pool if pool is not None else bool(token and token.is_pool),
                next_target_same_provider=extras.next_target_same_provider,
                persist=extras.persist,
                usage=extras.usage,
                egress_address=extras.egress_address,
                circuit_open_answer=extras.circuit_open_answer,
                own_queue_timeout=extras.own_queue_timeout or request.fault == "own_queue",
                own_timeout=extras.own_timeout or request.fault == "own_timeout",
                first_output_ms=extras.first_output_ms,
                token_expires_at=extras.token_expires_at,
                quota_reset_at=extras.quota_reset_at,
            )
        )

    # -- the answer ----------------------------------------------------------------------------------
    def _answer(
        self,
        request: ReportRequest,
        served: TokenTarget,
        reported: Reported[ReportResult],
        lease: LeaseEnd,
        now: Instant,
    ) -> ReportAnswer:
        result = reported.result
        ignored = (*result.ignored, "duplicate") if reported.duplicate else result.ignored
        self.ignored.update(("duplicate",) if reported.duplicate else result.ignored)
        answer = ReportAnswer(
            _verdict_of(result),
            action_of(result.wall, _action(request, served, result)),
            result.effects,
            reported.durable,
            ignored,
            pin=self._endings.affinity(request, served.target, result, now),
            lease_result=lease.result,
            lease_code=lease.code,
        )
        return self._stamp(answer, now)

    def _stamp(self, answer: ReportAnswer, now: Instant) -> ReportAnswer:
        age, reasons = self._freshness.stamp(now)
        return replace(
            answer,
            policy_revision=self._view.policy.revision,
            view_age_ms=age,
            is_degraded=bool(reasons),
        )


def _is_plain_success(request: ReportRequest) -> bool:
    """A 2xx with nothing in it that a mechanism could want."""
    status = request.status
    return (
        status is not None
        and 200 <= status < 300
        and request.end is EndKind.HTTP_STATUS
        and not request.body
        and not (request.token and (request.token.probes or request.token.permits))
        and not request.extras.stream_error
        and not request.extras.egress_address
        and not request.extras.end_lease
    )


def _not_in_token(target: Target, token: DecisionToken) -> FieldProblem:
    known = ", ".join("/".join(t.target) for t in token.targets[:8])
    return FieldProblem(
        "target",
        f"{'/'.join(target)} is none of the decision's targets ({known})",
        "report the target that was called, as SelectTarget named it",
        "TARGET_NOT_IN_DECISION",
    )


def _started_at(request: ReportRequest, now: Instant) -> Instant:
    """Decision start + offset, never later than the arrival (fleet.md section 1)."""
    if request.token is not None:
        return min(now, request.token.started_at + (request.attempt_offset_ms or 0))
    return now - (request.elapsed_ms or 0)


def _first_byte_at(request: ReportRequest, started: Instant, now: Instant) -> Instant | None:
    """First response byte; of a call that was not streamed its end; None where neither is reported."""
    if request.first_byte_ms is not None:
        return min(now, started + request.first_byte_ms)
    if request.latency_ms is not None and not request.streamed:
        return min(now, started + request.latency_ms)
    return None


def _probes(token: DecisionToken | None, target: Target, final: bool) -> tuple[ProbeRef, ...]:
    if token is None or not token.probes:
        return ()
    if final:
        return token.probes
    return tuple(p for p in token.probes if split_name(p.breaker_key)[0] == target.provider)


def _early_probe(token: DecisionToken | None, target: Target) -> str:
    gate = f"{EARLY}{target.provider}/{target.connection}"
    held = token.permits if token else ()
    return next((permit.permit_id for permit in held if permit.gate == gate), "")


def _status(request: ReportRequest) -> int | None:
    if request.end is EndKind.CLIENT_CANCELLED:
        return 499
    if request.end is EndKind.LOCAL_FAULT:
        return request.status or 500
    return request.status


def _origin(request: ReportRequest) -> Origin:
    """Origin as stated; else what the way the attempt ended says."""
    if request.origin is not Origin.UNSET:
        return request.origin
    return _ORIGINS.get(request.end, Origin.UNSET)


_ORIGINS = {
    EndKind.HTTP_STATUS: Origin.UPSTREAM,
    EndKind.NETWORK_ERROR: Origin.TRANSPORT,
    EndKind.CLIENT_CANCELLED: Origin.CLIENT,
    EndKind.LOCAL_FAULT: Origin.GATEWAY,
}


def _verdict_of(result: ReportResult) -> Verdict:
    if result.is_success:
        return _SUCCESS
    return Verdict(
        result.reason,
        result.scope,
        result.restated_status,
        result.retry_after_ms,
        result.rule,
        result.rule_id,
        result.hint_source,
        result.failure_kind,
        terminal_state=result.terminal_state,
    )


def _action(request: ReportRequest, served: TokenTarget, result: ReportResult) -> Action:
    """Next step: the next target of the decision, else a new selection, else the client."""
    if result.is_success or request.end is EndKind.CLIENT_CANCELLED or not result.fallback:
        return replace(_RETURN, reason=result.reason)
    following = _following(request.token, served)
    if following is not None:
        return Action(ActionKind.FALL_BACK, next_target=following.target, reason=result.reason)
    if request.token is not None and not request.token.is_pool:
        # One target only: another one cannot be had, the same one may be back after its wait.
        return Action(ActionKind.WAIT_AND_SELECT, result.cooldown_ms, reason=result.reason)
    return Action(ActionKind.FALL_BACK, reason=result.reason)


def _following(token: DecisionToken | None, served: TokenTarget) -> TokenTarget | None:
    targets = token.targets if token else ()
    index = next((i for i, known in enumerate(targets) if known is served), len(targets))
    return targets[index + 1] if index + 1 < len(targets) else None
