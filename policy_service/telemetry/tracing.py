"""Spans of decisions and reports: each joins the caller's trace and carries why the answer is what it is.

Wraps the use cases, so that a service without an exporter runs without a single telemetry call. Bodies, owner
tokens and keys never become attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from policy_service.application.messages import (
    Dispatch,
    Effect,
    Exclusion,
    Reject,
    ReportAnswer,
    ReportRequest,
    SelectAnswer,
    SelectRequest,
    Wait,
)
from policy_service.application.trace_context import TRACE_HEADERS
from policy_service.domain.ids import Target
from policy_service.telemetry import names

Attributes = Mapping[str, str | int | bool | float]
_PROPAGATOR = TraceContextTextMapPropagator()


class Selects(Protocol):
    """The selection use case."""

    def select_now(self, request: SelectRequest) -> SelectAnswer | None: ...

    async def select(self, request: SelectRequest) -> SelectAnswer: ...


class Reports(Protocol):
    """The report use case."""

    def report_now(self, request: ReportRequest) -> ReportAnswer | None: ...

    async def report(self, request: ReportRequest) -> ReportAnswer: ...


class TracedSelect:
    """SelectTarget with a span per decision.

    Args:
        max_events: exclusions written as events of one span; the rest is counted.
    """

    def __init__(self, inner: Selects, tracer: Tracer, max_events: int) -> None:
        self._inner = inner
        self._tracer = tracer
        self._max_events = max_events

    def select_now(self, request: SelectRequest) -> SelectAnswer | None:
        """As the inner one; a decision that must be awaited gets its span there."""
        span = self._start(request)
        try:
            answer = self._inner.select_now(request)
            if answer is None:
                return None
            self._describe(span, answer)
        except Exception as error:
            _fail(span, error)
            raise
        span.end()
        return answer

    async def select(self, request: SelectRequest) -> SelectAnswer:
        """As the inner one."""
        span = self._start(request)
        try:
            answer = await self._inner.select(request)
            self._describe(span, answer)
        except BaseException as error:
            _fail(span, error)
            raise
        span.end()
        return answer

    def _start(self, request: SelectRequest) -> Span:
        attributes: dict[str, str | int] = {
            names.REQUEST_ID: request.request_id,
            names.ROUTE: request.route,
            names.CANDIDATE_COUNT: len(request.candidates),
        }
        return self._tracer.start_span(names.SPAN_SELECT, _parent(), SpanKind.SERVER, attributes)

    def _describe(self, span: Span, answer: SelectAnswer) -> None:
        if not span.is_recording():
            return
        span.set_attributes(_decision(answer))
        _add_events(span, names.EVENT_EXCLUSION, map(_exclusion, answer.exclusions), self._max_events)


class TracedReport:
    """ReportOutcome with a span per report; `max_events` as above, for facts."""

    def __init__(self, inner: Reports, tracer: Tracer, max_events: int) -> None:
        self._inner = inner
        self._tracer = tracer
        self._max_events = max_events

    def report_now(self, request: ReportRequest) -> ReportAnswer | None:
        """As the inner one; a report that must be awaited gets its span there."""
        span = self._start(request)
        try:
            answer = self._inner.report_now(request)
            if answer is None:
                return None
            self._describe(span, answer)
        except Exception as error:
            _fail(span, error)
            raise
        span.end()
        return answer

    async def report(self, request: ReportRequest) -> ReportAnswer:
        """As the inner one."""
        span = self._start(request)
        try:
            answer = await self._inner.report(request)
            self._describe(span, answer)
        except BaseException as error:
            _fail(span, error)
            raise
        span.end()
        return answer

    def _start(self, request: ReportRequest) -> Span:
        attributes: dict[str, str | int] = {
            names.ATTEMPT: request.attempt,
            names.OUTCOME_STATUS: request.status or 0,
            names.OUTCOME_NETWORK_ERROR: request.network_error,
            **_target(request.target),
        }
        if request.token is not None:
            attributes[names.DECISION_ID] = request.token.decision_id
            attributes[names.REQUEST_ID] = request.token.request_id
            attributes[names.ROUTE] = request.token.route
        return self._tracer.start_span(names.SPAN_REPORT, _parent(), SpanKind.SERVER, attributes)

    def _describe(self, span: Span, answer: ReportAnswer) -> None:
        if not span.is_recording():
            return
        verdict = answer.verdict
        span.set_attributes(
            {
                names.REASON: verdict.reason,
                names.SCOPE_OF_BLAME: verdict.scope,
                names.RULE: verdict.rule,
                names.RULE_ID: verdict.rule_id,
                names.RESTATED_STATUS: verdict.restated_status or 0,
                names.ACTION: answer.action.kind,
                names.DURABLE: answer.durable,
                names.IGNORED: ",".join(answer.ignored),
                names.REVISION: answer.policy_revision,
                names.VIEW_AGE_MS: answer.view_age_ms,
                names.DEGRADED: answer.is_degraded,
            }
        )
        _add_events(span, names.EVENT_FACT, map(_effect, answer.effects), self._max_events)


def _parent() -> Context | None:
    headers = TRACE_HEADERS.get()
    return _PROPAGATOR.extract(headers) if headers else None


def _fail(span: Span, error: BaseException) -> None:
    span.set_status(Status(StatusCode.ERROR, type(error).__name__))
    span.end()


def _target(target: Target) -> dict[str, str]:
    return {
        names.TARGET_PROVIDER: target.provider,
        names.TARGET_CONNECTION: target.connection,
        names.TARGET_MODEL: target.model,
    }


def _decision(answer: SelectAnswer) -> dict[str, str | int | bool]:
    verdict = answer.verdict
    return {
        names.DECISION_ID: answer.decision_id,
        names.STRATEGY: answer.strategy,
        names.CANDIDATE_COUNT: answer.pool_size,
        names.VERDICT: type(verdict).__name__,
        names.EXCLUDED_COUNT: answer.excluded_count,
        names.REVISION: answer.policy_revision,
        names.VIEW_AGE_MS: answer.view_age_ms,
        names.DEGRADED: answer.is_degraded,
        **_verdict(verdict),
    }


def _verdict(verdict: Dispatch | Wait | Reject) -> dict[str, str | int | bool]:
    if isinstance(verdict, Dispatch):
        return {names.IS_PROBE: verdict.is_probe, **_target(verdict.target.target)}
    if isinstance(verdict, Wait):
        return {names.WAIT_MS: verdict.wait_ms, names.WAIT_REASON: verdict.reason}
    return {
        names.REJECT_STATUS: verdict.http_status,
        names.REJECT_CODE: verdict.code,
        names.TERMINAL_REASON: verdict.terminal_reason,
    }


def _exclusion(exclusion: Exclusion) -> Attributes:
    return {
        names.MECHANISM: exclusion.mechanism,
        names.REASON: exclusion.reason,
        names.UNTIL_MS: exclusion.until or 0,
        names.EVIDENCE_ID: exclusion.evidence_id,
        **_target(exclusion.target),
    }


def _effect(effect: Effect) -> Attributes:
    return {
        names.FACT_ID: effect.fact_id,
        names.MECHANISM: effect.mechanism,
        names.FACT_KEY: effect.key,
        names.FROM_STATE: effect.from_state,
        names.TO_STATE: effect.to_state,
        names.UNTIL_MS: effect.until or 0,
    }


def _add_events(span: Span, name: str, events: Iterable[Attributes], limit: int) -> None:
    """Write at most `limit` events; the attribute says how many were left out."""
    dropped = 0
    for count, attributes in enumerate(events):
        if count < limit:
            span.add_event(name, attributes)
        else:
            dropped += 1
    if dropped:
        span.set_attribute(names.EVENTS_DROPPED, dropped)


def tracer(provider: trace.TracerProvider) -> Tracer:
    """The service's tracer of a provider."""
    return provider.get_tracer(names.SCOPE)
