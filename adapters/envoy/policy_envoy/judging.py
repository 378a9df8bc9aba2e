"""What becomes of a failed attempt: report, verdict, then the next target, a pause, or the client. Pure.

The verdict is asked for while Envoy holds the answer back: what client or retry policy see is the restated one.
"""

from __future__ import annotations

from math import ceil

from policy_envoy import reports
from policy_envoy.actions import Action, Hold, Judge, Pass, Release, Select, Sleep
from policy_envoy.attempt_state import NO_VERDICT, Attempt, Phase, done, explained, given_back
from policy_envoy.events import CallFailed, Closed, Decided, Judged, Selected, Waited
from policy_envoy.flight import decision_of, same_target
from policy_envoy.names import RETRY_HEADER
from policy_envoy.phases import Next, Table
from policy_service.generated.policy.v1 import permit_pb2, policy_pb2

MAX_PAUSE_MS = 5_000
"""Longest pause between attempts that is sat out here; the message timeout of the filter is larger."""


def judge(state: Attempt, body: bytes, now_ms: float) -> Next:
    """Report an error status and wait for the verdict."""
    flight, step, head = state.flight, state.step, state.head
    times = (state.started_ms, now_ms)
    return judge_report(state, reports.failure(flight, step, head.status, head.headers.items(), body, times))


def judge_report(state: Attempt, report: policy_pb2.ReportOutcomeRequest) -> Next:
    """Report a failure and wait for the verdict."""
    return Next(state._replace(phase=Phase.JUDGING, report=report), (Judge(report),))


def _judged(state: Attempt, event: Judged) -> Next:
    flight, step, report = state.flight, state.step, state.report
    flight.attempts += (reports.earlier_attempt(step, report, event.answer.verdict),)
    state = state._replace(verdict=event.answer)
    move = _MOVES.get(event.answer.action.kind, _to_client)
    return move(state, event.answer.action)


def _fall_back(state: Attempt, action: policy_pb2.Action) -> Next:
    flight, step = state.flight, state.step
    if not action.HasField("next_target"):
        return _select_anew(state)
    flight.put_next(step, action.next_target, _named(action.set_headers))
    return _paused(state, action.delay_ms) if action.delay_ms else _retry(state)


def _retry_same(state: Attempt, action: policy_pb2.Action) -> Next:
    flight, step = state.flight, state.step
    if action.delay_ms > MAX_PAUSE_MS:
        return _to_client(state, action)
    flight.put_next(step, step.target, _named(action.set_headers))
    return _paused(state, action.delay_ms) if action.delay_ms else _retry(state)


def _wait_and_select(state: Attempt, action: policy_pb2.Action) -> Next:
    if action.delay_ms > min(state.options.max_wait_ms, MAX_PAUSE_MS):
        return _to_client(state, action)
    return Next(state._replace(phase=Phase.PAUSING), (Sleep(action.delay_ms),))


def _paused(state: Attempt, delay_ms: int) -> Next:
    return Next(state._replace(phase=Phase.PAUSING), (Sleep(min(delay_ms, MAX_PAUSE_MS)),))


def _after_pause(state: Attempt, event: Waited) -> Next:
    is_anew = state.verdict.action.kind == policy_pb2.ACTION_KIND_WAIT_AND_SELECT
    return _select_anew(state) if is_anew else _retry(state)


def _select_anew(state: Attempt) -> Next:
    """Targets that need a grant are reached by a new selection (spec/fleet.md section 1)."""
    flight = state.flight
    if flight.request is None:  # the listener stage was in another process: nobody knows what was asked
        return _to_client(state, None)
    request = policy_pb2.SelectTargetRequest()
    request.CopyFrom(flight.request)
    request.previous_decision_token = flight.token
    request.allow_wait = False
    request.ClearField("wait_budget_ms")
    request.earlier_attempts.extend(flight.attempts)
    return Next(state._replace(phase=Phase.RESELECTING), (*_over(state), Select(request)))


def _selected(state: Attempt, event: Selected) -> Next:
    if event.answer.WhichOneof("verdict") != "dispatch":
        return _to_client(state, None)
    return _decided(state, Decided(decision_of(event.answer), event.now_ms))


def _decided(state: Attempt, event: Decided) -> Next:
    flight, step = state.flight, state.step
    flight.adopt(event.decision, flight.steps.index(step) + 1)
    flight.answered_ms = event.now_ms
    retried = _retry(state)
    held = (Hold(flight),) if flight.permit_ids else ()
    return Next(retried.state, (*held, *retried.actions))


def _retry(state: Attempt) -> Next:
    """Let the retry policy of Envoy see the restated answer, and the header that says go on."""
    again = Pass(state.answers, (*_restated(state), (RETRY_HEADER, "1")), chain=state.flight)
    # Of a held answer whose end is in, Envoy 1.40 lets the head go only when the end follows it.
    rest = (Pass("response_body", chunk=state.held, is_end=True),) if state.is_held_end else ()
    return done(state, *_leaving(state), again, *rest, *given_back(state))


def _leaving(state: Attempt) -> tuple[Action, ...]:
    """The slot of a target that failed is of no use to the next one; a new decision has given back the old one's."""
    flight, step = state.flight, state.step
    following = flight.next_after(step)
    if following is None or following.token != step.token or same_target(following.target, step.target):
        return ()
    return _freed(state)


def _freed(state: Attempt) -> tuple[Action, ...]:
    flight = state.flight
    if not flight.permit_ids:
        return ()
    ids, flight.permit_ids = flight.permit_ids, ()
    return (Release(permit_pb2.ReleasePermitRequest(permit_ids=ids)),)


def _to_client(state: Attempt, action: object) -> Next:
    """The client gets this answer, with the status and retry-after that it means."""
    headers = (*_restated(state), *explained(state))
    return done(state, *let_through(state, headers), *_over(state), *given_back(state))


def let_through(state: Attempt, headers: tuple[tuple[str, str], ...]) -> tuple[Action, ...]:
    """The reply that is waited for; of a held answer head and body."""
    if not state.held and not state.is_held_end:
        return (Pass(state.answers, headers),)
    return (
        Pass("response_headers", headers),
        Pass("response_body", chunk=state.held, is_end=state.is_held_end),
    )


def _over(state: Attempt) -> tuple[Action, ...]:
    """No further report will come: whatever the decision still holds goes back."""
    flight = state.flight
    flight.permit_ids = ()
    return (Release(permit_pb2.ReleasePermitRequest(decision_token=flight.token)),)


def _restated(state: Attempt) -> tuple[tuple[str, str], ...]:
    """Status and retry-after by the verdict; unchanged without one."""
    if state.verdict is NO_VERDICT:
        return ()
    verdict, head = state.verdict.verdict, state.head
    status = verdict.restated_status if verdict.HasField("restated_status") else head.status
    if status < 400:  # an error inside a success; a retry policy and a client understand an error status only
        status = _STATUS_OF_KIND.get(verdict.failure_kind, 502)
    found = [(":status", str(status))] if status != head.status else []
    if verdict.HasField("retry_after_ms") and status in (429, 503):
        found.append(("retry-after", str(max(1, ceil(verdict.retry_after_ms / 1000)))))
    return tuple(found)


_STATUS_OF_KIND = {1: 429, 2: 401, 3: 400, 4: 504, 5: 502, 6: 502}
"""By FailureKind: quota, auth, model, timeout, quality, upstream (spec/diagnostics.md section 4)."""


def _named(headers: object) -> tuple[tuple[str, str], ...]:
    return tuple((header.name, header.value) for header in headers)  # type: ignore[attr-defined]


def _failed(state: Attempt, event: CallFailed) -> Next:
    """No verdict: the client gets the answer as it came."""
    return _to_client(state, None)


def _closed(state: Attempt, event: Closed) -> Next:
    """The client left while the verdict was awaited; what happened is reported already."""
    return done(state, *_over(state), *given_back(state))


_MOVES = {
    policy_pb2.ACTION_KIND_FALL_BACK: _fall_back,
    policy_pb2.ACTION_KIND_RETRY_SAME: _retry_same,
    policy_pb2.ACTION_KIND_WAIT_AND_SELECT: _wait_and_select,
}

JUDGING_TABLE: Table = {
    (Phase.JUDGING, Judged): _judged,
    (Phase.JUDGING, CallFailed): _failed,
    (Phase.PAUSING, Waited): _after_pause,
    (Phase.RESELECTING, Selected): _selected,
    (Phase.RESELECTING, Decided): _decided,
    (Phase.RESELECTING, CallFailed): _failed,
    **{(phase, Closed): _closed for phase in (Phase.JUDGING, Phase.PAUSING, Phase.RESELECTING)},
}
