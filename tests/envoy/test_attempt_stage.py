"""The upstream stage without Envoy: what an attempt takes, reports, restates and gives back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from policy_envoy import actions, events
from policy_envoy.actions import Mode
from policy_envoy.attempt import TABLE
from policy_envoy.attempt_state import Attempt, Phase
from policy_envoy.flight import Flight
from policy_envoy.options import DoorOptions
from policy_envoy.phases import step as typed_step

from policy_service.domain.watchdog import WatchdogSettings
from policy_service.generated.policy.v1 import policy_pb2
from tests.envoy.decisions import dispatched, flight_of, judged

FALL_BACK = policy_pb2.ACTION_KIND_FALL_BACK
RETURN = policy_pb2.ACTION_KIND_RETURN_TO_CLIENT
SSE = {"content-type": "text/event-stream"}


def step(*of: Any) -> Any:
    """One step; its actions are looked at as what they turn out to be."""
    return typed_step(*of)


def begun(flight: Flight | None, attempt: int = 1, connection: str = "a", **options: Any) -> Any:
    """State after the head of an attempt's request."""
    headers = {":path": "/v1/chat/completions"}
    event = events.AttemptHeaders(headers, True, 100.0, flight, attempt, connection, options.pop("base_path", ""))
    return step(TABLE, Attempt(DoorOptions(**options)), event)


def head(status: int, headers: Mapping[str, str] | None = None, *, has_body: bool = True) -> events.ResponseHeaders:
    return events.ResponseHeaders(status, {":status": str(status), **(headers or {})}, has_body, 150.0)


def of_kind(found: Any, kind: type[Any]) -> list[Any]:
    """Actions of a kind."""
    return [action for action in found.actions if isinstance(action, kind)]


def failed(flight: Flight, attempt: int = 1, connection: str = "a") -> Any:
    """State after a 503 with its body, the verdict still unknown."""
    state = begun(flight, attempt, connection).state
    if state.phase is Phase.ACQUIRING:
        state = step(TABLE, state, events.Acquired()).state
    state = step(TABLE, state, head(503)).state
    return step(TABLE, state, events.ResponseBody(b"boom", True, 200.0))


def test_a_success_is_reported_at_its_head_and_passes_unchanged() -> None:
    found = step(TABLE, begun(flight_of("a", "b")).state, head(200, {"x-ratelimit-limit": "5", "x-other": "1"}))
    passed, told = found.actions
    assert passed == actions.Pass("response_headers")
    assert isinstance(told, actions.Success)
    assert (told.request.http_status, told.request.final, told.request.attempt) == (200, True, 0)
    assert (told.request.attempt_offset_ms, told.request.first_byte_ms) == (100, 50)
    assert [header.name for header in told.request.headers] == ["x-ratelimit-limit"]
    assert found.state.phase is Phase.DONE


def test_an_error_is_read_reported_and_goes_on_where_the_verdict_says() -> None:
    flight = flight_of("a", "b", "c")
    asked = step(TABLE, begun(flight).state, head(503))
    assert asked.actions == (actions.Pass("response_headers", modes=(Mode.ERROR_BODY,)),)
    found = failed(flight)
    (told,) = of_kind(found, actions.Judge)
    assert (told.request.http_status, told.request.body, told.request.final) == (503, b"boom", False)
    retried = step(TABLE, found.state, events.Judged(judged(FALL_BACK, following="c", status=429)))
    (passed,) = of_kind(retried, actions.Pass)
    assert passed.kind == "response_body"
    assert dict(passed.set_headers) == {":status": "429", "x-policy-retry": "1"}
    assert [each.target.connection for each in flight.steps] == ["a", "c", "b"]
    assert [each.number for each in flight.steps] == [0, 1, 2]


def test_a_second_try_of_the_same_target_is_an_attempt_of_its_own() -> None:
    flight = flight_of("a", "b")
    again = policy_pb2.ACTION_KIND_RETRY_SAME
    found = step(TABLE, failed(flight).state, events.Judged(judged(again, delay_ms=10)))
    assert found.actions == (actions.Sleep(10),)
    step(TABLE, found.state, events.Waited())
    assert [(s.target.connection, s.number) for s in flight.steps] == [("a", 0), ("a", 1), ("b", 2)]
    assert not flight.steps[1].needs_grant


def test_a_verdict_for_the_client_restates_and_retries_nothing() -> None:
    verdict = judged(RETURN, status=429)
    verdict.verdict.retry_after_ms = 2_500
    passed, release = step(TABLE, failed(flight_of("a")).state, events.Judged(verdict)).actions
    assert isinstance(passed, actions.Pass)
    assert release.request.decision_token == b"t1", "no report is the last one, so the decision is given back"
    assert dict(passed.set_headers) == {":status": "429", "retry-after": "3"}


def test_a_fallback_takes_a_grant_first_and_is_refused_without_one() -> None:
    found = begun(flight_of("a", "b"), 2, "b")
    (acquire,) = of_kind(found, actions.Acquire)
    assert (acquire.permit.target_key, acquire.permit.wait_budget_ms, acquire.fence) == ("b", 0, None)
    gone = step(TABLE, found.state, events.Acquired(("p1",)))
    (sent,) = of_kind(gone, actions.Pass)
    assert sent.kind == "request_headers"
    assert of_kind(gone, actions.Hold)
    (released,) = of_kind(step(TABLE, gone.state, head(200, has_body=False)), actions.Release)
    assert list(released.request.permit_ids) == ["p1"]
    refused = step(TABLE, found.state, events.Refused("SEMAPHORE_QUEUE_FULL", 429, "full", 1_000))
    (local,) = of_kind(refused, actions.Local)
    assert (local.status, dict(local.headers)["retry-after"]) == (429, "1")


def test_a_leased_fallback_is_checked_by_its_fence() -> None:
    flight = flight_of("a", "b")
    flight.lease = policy_pb2.SelectTargetRequest().lease
    (acquire,) = of_kind(begun(flight, 2, "b"), actions.Acquire)
    assert acquire.fence.connection == "b"


def test_an_attempt_that_nobody_decided_is_answered_here() -> None:
    (local,) = of_kind(begun(flight_of("a"), 2, "a"), actions.Local)
    assert local.status == 503
    (local,) = of_kind(begun(flight_of("a"), 1, "z"), actions.Local)
    assert json.loads(local.body)["error"]["code"] == "NO_UPSTREAM_RESPONSE"


def test_without_a_decision_everything_passes_and_nothing_is_reported() -> None:
    found = begun(None)
    assert found.actions == (actions.Pass("request_headers"),)
    for event in (head(500), events.ResponseBody(b"x", True, 1.0)):
        found = step(TABLE, found.state, event)
        assert of_kind(found, actions.Report) == []
    assert step(TABLE, found.state, events.Closed(1.0)).actions == ()


def test_a_new_selection_follows_where_the_next_target_needs_a_grant() -> None:
    flight = flight_of("a", permits=["p1"])
    found = step(TABLE, failed(flight).state, events.Judged(judged(FALL_BACK)))
    release, select = found.actions
    assert isinstance(release, actions.Release)
    assert release.request.decision_token == b"t1"
    assert isinstance(select, actions.Select)
    assert select.request.previous_decision_token == b"t1"
    assert [each.target.connection for each in select.request.earlier_attempts] == ["a"]
    fresh = dispatched("b", permits=["p2"], token=b"t2")
    retried = step(TABLE, found.state, events.Selected(fresh, 300.0))
    assert [type(action) for action in retried.actions] == [actions.Hold, actions.Pass]
    assert [(s.target.connection, s.token, s.number) for s in flight.steps] == [("a", b"t1", 0), ("b", b"t2", 0)]
    assert flight.permit_ids == ("p2",)


def test_a_success_that_holds_a_permit_is_reported_when_it_ends() -> None:
    opened = step(TABLE, begun(flight_of("a", permits=["p"])).state, head(200))
    assert opened.actions == (actions.Pass("response_headers", modes=(Mode.END,)),)
    (told,) = step(TABLE, opened.state, events.Closed(900.0)).actions
    assert isinstance(told, actions.Success)
    assert (told.request.latency_ms, told.request.final) == (800, True)


@pytest.mark.parametrize("phase", ["sent", "body", "held"])
def test_an_attempt_that_ends_without_an_answer_is_left_to_the_listener_stage(phase: str) -> None:
    flight = flight_of("a")
    flight.is_stream = phase == "held"
    state = begun(flight).state
    if phase != "sent":
        state = step(TABLE, state, head(503 if phase == "body" else 200, SSE)).state
    (left,) = step(TABLE, state, events.Closed(1.0)).actions
    assert left == actions.Unanswered(flight, flight.steps[0], 100.0)


def test_a_second_try_of_a_leased_target_is_checked_and_takes_no_second_permit() -> None:
    flight = flight_of("a")
    flight.lease = policy_pb2.SelectTargetRequest().lease
    assert of_kind(begun(flight), actions.Acquire) == []
    flight.put_next(flight.steps[0], flight.steps[0].target)
    (acquire,) = of_kind(begun(flight, 2), actions.Acquire)
    assert (acquire.permit, acquire.fence.connection) == (None, "a")


def test_path_and_headers_are_made_anew_for_every_attempt() -> None:
    flight = flight_of("a", "b")
    flight.steps[0] = flight.steps[0]._replace(set_headers=(("x-lane", "slow"), ("x-own", "ours")))
    flight.own_headers, flight.sets_headers = (("x-own", "of-the-client"),), True
    (first,) = of_kind(begun(flight, base_path="/api"), actions.Pass)
    assert dict(first.set_headers) == {":path": "/api/v1/chat/completions", "x-lane": "slow", "x-own": "ours"}
    headers = {":path": "/api/v1/chat/completions", "x-lane": "slow", "x-envoy-attempt-count": "2"}
    second = events.AttemptHeaders(headers, True, 1.0, flight, 2, "b", "")
    state = step(TABLE, Attempt(DoorOptions()), second).state
    (sent,) = of_kind(step(TABLE, state, events.Acquired()), actions.Pass)
    assert dict(sent.set_headers) == {":path": "/v1/chat/completions", "x-own": "of-the-client"}
    assert set(sent.remove_headers) == {"x-lane", "x-envoy-attempt-count", "x-ai-eg-fallback-chain"}


def streaming(**options: Any) -> tuple[Flight, Attempt]:
    """An attempt whose streamed answer is held back."""
    flight = flight_of("a", "b")
    flight.is_stream = True
    return flight, step(TABLE, begun(flight, **options).state, head(200, SSE)).state


def chunk(*events_: str, is_end: bool = False, now_ms: float = 200.0) -> events.ResponseBody:
    return events.ResponseBody("".join(f"data: {each}\n\n" for each in events_).encode(), is_end, now_ms)


def content(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}]})


def test_a_held_answer_goes_with_its_first_output_and_an_early_error_never_does() -> None:
    _, state = streaming()
    assert step(TABLE, state, chunk('{"choices": [{"delta": {"role": "assistant"}}]}')).actions == ()
    state = step(TABLE, state, chunk('{"choices": [{"delta": {"role": "assistant"}}]}')).state
    released = step(TABLE, state, chunk(content("x")))
    first, second = released.actions
    assert (first.kind, second.kind) == ("response_headers", "response_body")
    assert second.chunk.count(b"data: ") == 2
    _, state = streaming()
    error = step(TABLE, state, chunk('{"error": {"message": "overloaded"}}'))
    (told,) = error.actions
    assert told.request.details.stream_error
    retried = step(TABLE, error.state, events.Judged(judged(FALL_BACK, following="b")))
    (passed,) = of_kind(retried, actions.Pass)
    assert dict(passed.set_headers) == {":status": "502", "x-policy-retry": "1"}


def test_a_stream_that_hardly_says_anything_is_ended_with_an_event() -> None:
    watchdog = WatchdogSettings(True, 0, 1_000, 100, 1)
    _, state = streaming(watchdog=lambda connection: watchdog)
    state = step(TABLE, state, chunk(content("x"), now_ms=0.0)).state
    told, report = step(TABLE, state, chunk(content("x"), now_ms=1_000.0)).actions
    assert b"STREAM_THROUGHPUT_TOO_LOW" in told.chunk
    assert report.request.network_error == policy_pb2.NETWORK_ERROR_KIND_STREAM_TOO_SLOW
    assert report.request.final
    ending = step(TABLE, state, chunk(content("x"), now_ms=1_000.0)).state
    (cut,) = step(TABLE, ending, chunk(content("x"), now_ms=1_100.0)).actions
    assert isinstance(cut, actions.Local)


def test_a_stream_whose_client_leaves_is_a_cancellation_and_a_complete_one_is_not() -> None:
    _, state = streaming()
    flowing = step(TABLE, state, chunk(content("x"))).state
    (told,) = step(TABLE, flowing, events.Closed(400.0)).actions
    assert told.request.WhichOneof("outcome") == "client_cancelled"
    complete = step(TABLE, flowing, chunk('{"choices": [{"delta": {}, "finish_reason": "stop"}]}')).state
    (told,) = step(TABLE, complete, events.Closed(400.0)).actions
    assert told.request.http_status == 200
