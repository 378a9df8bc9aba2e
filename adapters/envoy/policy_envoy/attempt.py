"""Upstream stage: one attempt at one upstream, from its request to the end of its answer. Pure phase machine.

NEW -> ACQUIRING -> SENT -> DONE                      a success: reported at its head
                         -> BODY -> JUDGING -> DONE   an error status: body read, reported, restated, maybe retried
                         -> HELD -> FLOWING -> DONE   a streamed answer; `answers` has these phases
                         -> OPEN -> DONE              a success that holds a permit: reported at its end
"""

from __future__ import annotations

from policy_envoy import local_replies, reports
from policy_envoy.actions import Acquire, Action, Begin, Hold, Mode, Pass, Release, Unanswered
from policy_envoy.answers import STREAM_TABLE, begin_stream, hold
from policy_envoy.attempt_state import Attempt, Phase, done, explained, given_back, succeeded
from policy_envoy.client_request import with_model
from policy_envoy.events import (
    Acquired,
    AttemptHeaders,
    CallFailed,
    Closed,
    Judged,
    Refused,
    RequestBody,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Selected,
    Waited,
)
from policy_envoy.flight import Flight, Step
from policy_envoy.judging import JUDGING_TABLE, judge
from policy_envoy.names import ATTEMPT_COUNT_HEADER, FALLBACK_CHAIN_HEADER
from policy_envoy.options import DoorOptions
from policy_envoy.phases import Next, Table
from policy_service.generated.policy.v1 import lease_pb2, permit_pb2

NOT_DECIDED = Refused(
    "NO_UPSTREAM_RESPONSE", 503, "no target is left: every upstream of this decision was tried and none answered"
)


def _begin(state: Attempt, event: AttemptHeaders) -> Next:
    flight = event.flight
    if flight is None:
        return Next(state._replace(phase=Phase.UNKNOWN), (Pass("request_headers"),))
    step = flight.step_of(event.attempt, event.connection)
    if step is None:
        return done(state, Begin(flight, event.attempt), local_replies.refused(NOT_DECIDED, "retry"))
    needed = _needs(flight, step, event.attempt)
    if needed is None:
        return _send(state.options, flight, step, event)
    acquiring = Attempt(state.options, Phase.ACQUIRING, flight, step, event)
    return Next(acquiring, (Begin(flight, event.attempt), needed))


def _needs(flight: Flight, step: Step, attempt: int) -> Acquire | None:
    """What has to be had before this attempt may go; a first attempt was given it with the decision."""
    permit = _permit(flight, step) if step.needs_grant else None
    fence = _fence(flight, step) if flight.lease is not None and attempt > 1 else None
    return None if permit is None and fence is None else Acquire(permit, fence)


def _permit(flight: Flight, step: Step) -> permit_pb2.AcquirePermitRequest:
    return permit_pb2.AcquirePermitRequest(
        decision_token=step.token, target_key=step.target.key, wait_budget_ms=0, caller_id=flight.caller[0]
    )


def _fence(flight: Flight, step: Step) -> lease_pb2.CheckFenceRequest:
    return lease_pb2.CheckFenceRequest(
        caller_id=flight.caller[0],
        caller_key_sha256=flight.caller[1],
        lease=flight.lease,
        connection=step.target.connection,
        decision_token=step.token,
    )


def _acquired(state: Attempt, event: Acquired) -> Next:
    sent = _send(state.options, state.flight, state.step, state.request, event.permit_ids)
    if not event.permit_ids:
        return sent
    state.flight.attempt_permits = event.permit_ids
    return Next(sent.state, (Hold(state.flight), *sent.actions))


def _refused(state: Attempt, event: Refused | CallFailed) -> Next:
    return done(state, local_replies.refused(event, "wait"), *given_back(state))


def _send(
    options: DoorOptions, flight: Flight, step: Step, request: AttemptHeaders, permit_ids: tuple[str, ...] = ()
) -> Next:
    modes: tuple[Mode, ...] = ()
    if flight.is_stream and options.holds_streams:
        modes = (Mode.HELD,)
    if options.writes_model and request.has_body and step.target.model and step.target.model != flight.model:
        modes = (*modes, Mode.REQUEST_BODY)
    sent = Pass("request_headers", _upstream_headers(flight, step, request), _removed(flight, step), modes)
    following = Attempt(options, Phase.SENT, flight, step, request, modes, permit_ids)
    flight.under_way += 1
    held = (Hold(flight),) if flight.is_carried and flight.permit_ids else ()
    return Next(following, (Begin(flight, request.attempt), *held, sent))


def _upstream_headers(flight: Flight, step: Step, request: AttemptHeaders) -> tuple[tuple[str, str], ...]:
    """Envoy keeps what an attempt before has changed, so that the path is always made from the client's."""
    path = request.base_path + flight.path if flight.path else ""
    changed = ((":path", path),) if path and path != request.headers.get(":path") else ()
    restored = _restored(flight, step) if flight.own_headers else ()
    return (*changed, *restored, *step.set_headers)


def _restored(flight: Flight, step: Step) -> tuple[tuple[str, str], ...]:
    """What the client had said in headers that another target of this request was given."""
    own = {name for name, _ in step.set_headers}
    return tuple((name, value) for name, value in flight.own_headers if name not in own)


def _removed(flight: Flight, step: Step) -> tuple[str, ...]:
    """Headers of another target of this request that an attempt before has set, and those of Envoy alone."""
    if not flight.sets_headers:
        return _OURS
    foreign = {name for each in flight.steps for name, _ in each.set_headers}
    kept = {name for name, _ in (*step.set_headers, *flight.own_headers)}
    return (*sorted(foreign - kept), *_OURS)


_OURS = (FALLBACK_CHAIN_HEADER, ATTEMPT_COUNT_HEADER)


def _write_model(state: Attempt, event: RequestBody) -> Next:
    return Next(state, (Pass("request_body", body=with_model(event.body, state.step.target.model)),))


def _head(state: Attempt, event: ResponseHeaders) -> Next:
    if Mode.HELD in state.modes:
        return hold(state._replace(head=event), event)
    if event.status >= 400:
        return _error_head(state._replace(head=event), event)
    if event.has_body and "text/event-stream" in event.headers.get("content-type", ""):
        return begin_stream(state._replace(head=event))
    return _success_head(state, event)


def _error_head(state: Attempt, event: ResponseHeaders) -> Next:
    if event.has_body:
        return Next(state._replace(phase=Phase.BODY), (Pass("response_headers", modes=(Mode.ERROR_BODY,)),))
    return judge(state._replace(answers="response_headers"), b"", event.now_ms)


def _success_head(state: Attempt, event: ResponseHeaders) -> Next:
    if not (state.flight.holds_grant or state.permit_ids) or not event.has_body:
        return done(state, Pass("response_headers", explained(state)), succeeded(state, event), *given_back(state))
    opened = Pass("response_headers", explained(state), modes=(Mode.END,))
    return Next(state._replace(phase=Phase.OPEN, head=event), (opened,))


def _end_of_open(state: Attempt, event: ResponseTrailers) -> Next:
    return Next(state, (Pass("response_trailers"),))


def _closed_open(state: Attempt, event: Closed) -> Next:
    return done(state, reports.ended(succeeded(state, state.head), state.started_ms, event.now_ms), *given_back(state))


def _error_body(state: Attempt, event: ResponseBody) -> Next:
    return judge(state._replace(answers="response_body"), event.body, event.now_ms)


def _closed_unanswered(state: Attempt, event: Closed) -> Next:
    """Failed on the way, or given up with its client: the listener stage will know."""
    unanswered = Unanswered(state.flight, state.step, state.started_ms)
    return done(state, unanswered, *given_back(state))


def _closed_acquiring(state: Attempt, event: Closed) -> Next:
    return done(state, *given_back(state))


def _pass_on(state: Attempt, event: object) -> Next:
    """Nothing is known of this request, or all is said: whatever comes goes on."""
    return Next(state, (_PASSES[type(event)],))


def _pass_chunk(state: Attempt, event: ResponseBody) -> Next:
    if Mode.HELD in state.modes:
        return Next(state, (Pass("response_body", chunk=event.body, is_end=event.is_end),))
    return Next(state, (_PASSES[ResponseBody],))


def _nothing(state: Attempt, event: object) -> Next:
    return Next(state)


_PASSES: dict[type, Action] = {
    RequestBody: Pass("request_body"),
    ResponseHeaders: Pass("response_headers"),
    ResponseBody: Pass("response_body"),
    ResponseTrailers: Pass("response_trailers"),
}

TABLE: Table = {
    (Phase.NEW, AttemptHeaders): _begin,
    (Phase.ACQUIRING, Acquired): _acquired,
    (Phase.ACQUIRING, Refused): _refused,
    (Phase.ACQUIRING, CallFailed): _refused,
    (Phase.ACQUIRING, Closed): _closed_acquiring,
    (Phase.SENT, RequestBody): _write_model,
    (Phase.SENT, ResponseHeaders): _head,
    (Phase.SENT, Closed): _closed_unanswered,
    (Phase.OPEN, ResponseTrailers): _end_of_open,
    (Phase.OPEN, Closed): _closed_open,
    (Phase.BODY, ResponseBody): _error_body,
    (Phase.BODY, Closed): _closed_unanswered,
    **JUDGING_TABLE,
    **STREAM_TABLE,
    **{(phase, Closed): _nothing for phase in (Phase.NEW, Phase.UNKNOWN, Phase.DONE)},
    **{
        (phase, kind): _pass_on for phase in (Phase.UNKNOWN, Phase.DONE) for kind in _PASSES if kind is not ResponseBody
    },
    **{(phase, ResponseBody): _pass_chunk for phase in (Phase.UNKNOWN, Phase.DONE)},
}

__all__ = ["TABLE", "Attempt", "Judged", "Phase", "Release", "Selected", "Waited"]
