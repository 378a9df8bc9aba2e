"""Streamed answers: held back until their first output, then watched until their end. Pure but for the watch's tail.

Two ways: HELD from the request on (head and chunks wait for the door), and CHUNKS for a stream that nobody expected
(its head is through already, its chunks wait one by one).
"""

from __future__ import annotations

import json

from policy_envoy import reports
from policy_envoy.actions import Local, Mode, Pass, Report, Success, Unanswered
from policy_envoy.attempt_state import Attempt, Phase, done, explained, given_back, succeeded
from policy_envoy.events import Closed, ResponseBody, ResponseHeaders, ResponseTrailers
from policy_envoy.judging import judge, judge_report
from policy_envoy.phases import Next, Table
from policy_envoy.streams import Progress, StreamWatch, format_of
from policy_service.domain.watchdog import ABORT_CODE

MAX_HELD_BYTES = 262_144
"""An answer that has said nothing in so many bytes goes on; memory of a held answer is bounded by it."""
_CUT_OFF = Local(504, (), b"", "policy_stream_ended")


def hold(state: Attempt, event: ResponseHeaders) -> Next:
    """Keep the head back until it is known what follows."""
    if not event.has_body:
        return _headless(state, event)
    return Next(state._replace(phase=Phase.HELD, watch=_watch(state)))


def _headless(state: Attempt, event: ResponseHeaders) -> Next:
    if event.status >= 400:
        return judge(state, b"", event.now_ms)
    passed = Pass("response_headers", explained(state))
    return done(state, passed, _success(state, event.now_ms), *given_back(state))


def begin_stream(state: Attempt) -> Next:
    """Follow a stream whose head has to go at once."""
    flowing = state._replace(phase=Phase.FLOWING, watch=_watch(state))
    return Next(flowing, (Pass("response_headers", explained(state), modes=(Mode.CHUNKS, Mode.END)),))


def _watch(state: Attempt) -> StreamWatch:
    settings = state.options.watchdog(state.step.target.connection)
    return StreamWatch(format_of(state.flight.path), settings)


def _is_event_stream(state: Attempt) -> bool:
    """Of events that can be read: compressed ones, which nobody asked for, say nothing until they are whole."""
    headers = state.head.headers
    is_plain = headers.get("content-encoding", "identity") == "identity"
    return state.head.status < 400 and is_plain and "text/event-stream" in headers.get("content-type", "")


def _held_chunk(state: Attempt, event: ResponseBody) -> Next:
    state = state._replace(held=state.held + event.body, is_held_end=event.is_end)
    is_long = len(state.held) > MAX_HELD_BYTES
    if not _is_event_stream(state):
        return _held_whole(state, event, is_long)
    progress = state.watch.feed(event.body, event.is_end, event.now_ms)
    if progress.error and not progress.has_output:
        return _early_error(state, progress, event.now_ms)
    if progress.has_output or event.is_end or is_long:
        return _release(state, event)
    return Next(state)


def _held_whole(state: Attempt, event: ResponseBody, is_long: bool) -> Next:
    """A streamed answer was expected and another kind came, such as an error status with a JSON body."""
    if state.head.status >= 400:
        is_known = event.is_end or is_long
        return judge(state, state.held, event.now_ms) if is_known else Next(state)
    return _release(state, event)


def _early_error(state: Attempt, progress: Progress, now_ms: float) -> Next:
    """An error before any output: the client has seen nothing, so that the next target may still answer."""
    flight, step, head = state.flight, state.step, state.head
    times = (state.started_ms, now_ms)
    report = reports.stream_failure(flight, step, head.status, head.headers, progress.error, times)
    return judge_report(state._replace(answers="response_headers"), report)


def _release(state: Attempt, event: ResponseBody) -> Next:
    """Let head and chunks through, then watch what follows."""
    through = (
        Pass("response_headers", explained(state)),
        Pass("response_body", chunk=state.held, is_end=event.is_end),
    )
    state = state._replace(phase=Phase.FLOWING, held=b"", is_held_end=False)
    if event.is_end:
        return _finish(state, event.now_ms, through)
    return Next(state, through)


def _held_trailers(state: Attempt, event: ResponseTrailers) -> Next:
    released = _release(state, ResponseBody(b"", False, event.now_ms))
    ended = _with_trailers(released.state, event) if state.head.status < 400 else _failed_at_trailers(state, event)
    return Next(ended.state, (*released.actions, *ended.actions))


def _failed_at_trailers(state: Attempt, event: ResponseTrailers) -> Next:
    """An error status whose end is its trailers: heard, and passed on, since its head can no longer be restated."""
    flight, step, head = state.flight, state.step, state.head
    times = (state.started_ms, event.now_ms)
    report = reports.failure(flight, step, head.status, head.headers.items(), state.held, times)
    report.final = True
    return done(state, Pass("response_trailers"), Report(report), *given_back(state))


def _flowing_chunk(state: Attempt, event: ResponseBody) -> Next:
    progress = state.watch.feed(event.body, event.is_end, event.now_ms) if _is_event_stream(state) else Progress()
    through = Pass("response_body", chunk=event.body, is_end=event.is_end) if _is_held(state) else Pass("response_body")
    if progress.is_too_slow and not event.is_end:
        return _stall(state, event)
    if event.is_end:
        return _finish(state, event.now_ms, (through,))
    return Next(state, (through,))


def _is_held(state: Attempt) -> bool:
    return Mode.HELD in state.modes


def _stall(state: Attempt, event: ResponseBody) -> Next:
    """End an attempt that sends, but says hardly anything. It is never replayed: output has gone out."""
    flight, step, watch = state.flight, state.step, state.watch
    report = reports.too_slow(flight, step, (state.started_ms, event.now_ms), watch.bytes)
    report.final = True
    error = _slow_event()
    told = (
        Pass("response_body", chunk=event.body + error)
        if _is_held(state)
        else Pass("response_body", body=event.body + error)
    )
    return Next(state._replace(phase=Phase.ENDING), (told, Report(report), *given_back(state)))


def _slow_event() -> bytes:
    message = "the upstream sent too little output and was cut off"
    error = {"type": "error", "error": {"message": message, "type": "timeout", "code": ABORT_CODE}}
    return f"event: error\ndata: {json.dumps(error)}\n\n".encode()


def _cut(state: Attempt, event: ResponseBody) -> Next:
    """The event is out; now the connection to the upstream ends."""
    return done(state, _CUT_OFF)


def _ended_by_itself(state: Attempt, event: ResponseTrailers) -> Next:
    """The event is out, and nothing is left to cut off."""
    return done(state, Pass("response_trailers"))


def _finish(state: Attempt, now_ms: float, through: tuple[Pass, ...]) -> Next:
    flight, step, head, watch = state.flight, state.step, state.head, state.watch
    if not (error := watch.progress.error):
        return done(state, *through, _success(state, now_ms), *given_back(state))
    report = reports.stream_failure(flight, step, head.status, head.headers, error, (state.started_ms, now_ms))
    report.final = True
    return done(state, *through, Report(report), *given_back(state))


def _success(state: Attempt, now_ms: float) -> Success:
    return reports.ended(succeeded(state, state.head), state.started_ms, now_ms, state.watch.bytes)


def _closed_held(state: Attempt, event: Closed) -> Next:
    """Nothing has gone out: failed on the way, or given up with its client."""
    return done(state, Unanswered(state.flight, state.step, state.started_ms), *given_back(state))


def _closed_flowing(state: Attempt, event: Closed) -> Next:
    """Ended before its end. Envoy does not say by whom: an error seen in the stream counts, else the client left."""
    flight, step, watch = state.flight, state.step, state.watch
    if watch.progress.error or watch.progress.is_complete:
        return _finish(state, event.now_ms, ())
    report = reports.cancelled(flight, step, (state.started_ms, event.now_ms), watch.bytes)
    return done(state, Report(report), *given_back(state))


def _with_trailers(state: Attempt, event: ResponseTrailers) -> Next:
    if _is_event_stream(state):
        state.watch.feed(b"", True, event.now_ms)  # its last event may lack the blank line
    ended = _finish(state, event.now_ms, ())
    return Next(ended.state, (Pass("response_trailers"), *ended.actions))


def _closed_ending(state: Attempt, event: Closed) -> Next:
    return done(state)


STREAM_TABLE: Table = {
    (Phase.HELD, ResponseBody): _held_chunk,
    (Phase.HELD, ResponseTrailers): _held_trailers,
    (Phase.HELD, Closed): _closed_held,
    (Phase.FLOWING, ResponseBody): _flowing_chunk,
    (Phase.FLOWING, ResponseTrailers): _with_trailers,
    (Phase.FLOWING, Closed): _closed_flowing,
    (Phase.ENDING, ResponseBody): _cut,
    (Phase.ENDING, ResponseTrailers): _ended_by_itself,
    (Phase.ENDING, Closed): _closed_ending,
}
