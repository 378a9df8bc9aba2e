"""Listener stage: what the service says of a client request, before Envoy chooses an upstream. Pure phase machine.

NEW --headers--> SELECTING (or BODY, if the route is in the body) --answer--> ROUTED --answer's head--> OVER
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from policy_envoy import local_replies
from policy_envoy.actions import Action, Hold, Leave, Mode, Pass, Register, Release, Select, Settle, Sleep, Strange
from policy_envoy.client_request import (
    NO_BODY,
    BodyFacts,
    ClientRequest,
    is_stream,
    read_body,
    read_request,
    select_request,
    wants_body,
    wants_explanation,
)
from policy_envoy.events import (
    CallFailed,
    Closed,
    Decided,
    RequestBody,
    RequestHeaders,
    ResponseHeaders,
    Selected,
    Waited,
)
from policy_envoy.explanation import explain
from policy_envoy.flight import NO_FLIGHT, Flight, from_answer, from_decision
from policy_envoy.names import (
    ANSWERED,
    ATTEMPT_COUNT_HEADER,
    CONTROL_HEADERS,
    CONTROL_PREFIXES,
    ENDPOINT_HEADER,
    FALLBACK_CHAIN_HEADER,
    TOO_LARGE,
)
from policy_envoy.options import DoorOptions
from policy_envoy.phases import Next, Table
from policy_service.generated.policy.v1 import permit_pb2, policy_pb2


class Phase(StrEnum):
    """Where a client request stands."""

    NEW = "new"
    BODY = "body"
    SELECTING = "selecting"
    WAITING = "waiting"
    ROUTED = "routed"
    OVER = "over"


NOT_ASKED = policy_pb2.SelectTargetRequest()


class Listener(NamedTuple):
    """State of the stage."""

    options: DoorOptions
    phase: Phase = Phase.NEW
    client: ClientRequest = ClientRequest({}, "", "")
    body: BodyFacts = NO_BODY
    answers: str = "request_headers"
    """Message of Envoy that waits for its reply."""
    asked: policy_pb2.SelectTargetRequest = NOT_ASKED
    waited_ms: int = 0
    flight: Flight = NO_FLIGHT

    @property
    def is_over(self) -> bool:
        """Nothing that Envoy may still say matters: the stream can end at once, which saves a turn."""
        return self.phase is Phase.OVER


def _read(state: Listener, event: RequestHeaders) -> Next:
    options = state.options
    client = read_request(event.headers, options)
    if wants_body(client, options, event.has_body):
        return Next(Listener(options, Phase.BODY, client), (Pass("request_headers", modes=(Mode.REQUEST_BODY,)),))
    return _select(options, client, NO_BODY, "request_headers")


def _read_body(state: Listener, event: RequestBody) -> Next:
    return _select(state.options, state.client, read_body(event.body), "request_body")


def _select(options: DoorOptions, client: ClientRequest, body: BodyFacts, answers: str) -> Next:
    request = select_request(client, body, options)
    state = Listener(options, Phase.SELECTING, client, body, answers, request)
    if not request.route:
        return _refuse(state, local_replies.NO_ROUTE)
    if options.explains_always:
        request.explain = True
    return Next(state, (Select(request),))


def _decide(state: Listener, event: Selected) -> Next:
    return _VERDICTS[event.answer.WhichOneof("verdict") or "reject"](state, event)


def _dispatch(state: Listener, event: Selected) -> Next:
    flight = from_answer(event.answer, event.now_ms)
    if state.options.explains_always or wants_explanation(state.client.headers):
        flight.explanation = explain(event.answer)
    return _route(state, flight)


def _decided(state: Listener, event: Decided) -> Next:
    return _route(state, from_decision(event.decision, event.now_ms))


def _route(state: Listener, flight: Flight) -> Next:
    if (known := state.options.connections) and not known.issuperset(flight.order[0]):
        return _without_strangers(state, flight)
    client = state.client
    flight.path, flight.model, flight.request = client.path, state.body.model, state.asked
    flight.is_stream = is_stream(client.headers, state.body)
    _put_context(flight, state)
    routed = Pass(
        state.answers,
        set_headers=_order_headers(*flight.order),
        remove_headers=_control_headers(tuple(client.headers), flight.stripped),
        modes=_ASKS_FOR_HEAD if state.answers == "request_headers" else (),
        chain=flight,
        clears_route=True,
    )
    held = (Hold(flight),) if flight.permit_ids else ()
    following = Listener(state.options, Phase.ROUTED, client, state.body, state.answers, state.asked, 0, flight)
    return Next(following, (Register(flight), *held, routed))


def _without_strangers(state: Listener, flight: Flight) -> Next:
    """The catalogue names connections that Envoy was not configured with; it would answer an empty 503 at the first of
    them. The service is asked again for the others, but not where a lease would end by that."""
    known, asked = state.options.connections, state.asked
    strange = Strange(tuple(name for name in flight.order[0] if name not in known))
    held = _abandoned(flight)
    allowed = known.intersection(asked.allowed_connections) if asked.allowed_connections else known
    is_narrowed = known.issuperset(asked.allowed_connections) and bool(asked.allowed_connections)
    if asked.HasField("lease") or is_narrowed or not allowed:
        return Next(state._replace(phase=Phase.OVER), (strange, *held, local_replies.refused(_STRANGE)))
    again = policy_pb2.SelectTargetRequest()
    again.CopyFrom(asked)
    again.ClearField("request_id")
    del again.allowed_connections[:]
    again.allowed_connections.extend(sorted(allowed))
    return Next(state._replace(asked=again), (strange, *held, Select(again)))


_STRANGE = CallFailed(
    "UNKNOWN_TO_ENVOY",
    503,
    "Envoy has no cluster of the connection that was chosen: its configuration is older than the catalogue; make it "
    "anew with `policy-service envoy-config`",
)
_ASKS_FOR_HEAD = (Mode.HEAD,)


def _put_context(flight: Flight, state: Listener) -> None:
    asked, headers = state.asked, state.client.headers
    if flight.sets_headers:
        flight.own_headers = tuple((name, headers[name]) for name, _ in flight.steps[0].set_headers if name in headers)
    flight.caller = (asked.caller_id, asked.caller_key_sha256)
    if asked.HasField("lease"):
        flight.lease = asked.lease


@lru_cache(maxsize=1_024)
def _order_headers(connections: tuple[str, ...], addresses: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The order of the upstreams for whoever reads it from headers, besides the metadata."""
    chain = ((FALLBACK_CHAIN_HEADER, ",".join(connections)),)
    return (*chain, (ENDPOINT_HEADER, ",".join(addresses))) if addresses else chain


@lru_cache(maxsize=128)
def _control_headers(names: tuple[str, ...], also: frozenset[str]) -> tuple[str, ...]:
    """Those of the client's headers that no upstream gets. Clients of one kind send the same names."""
    return tuple(
        [name for name in names if name in CONTROL_HEADERS or name in also or name.startswith(CONTROL_PREFIXES)]
    )


def _wait(state: Listener, event: Selected) -> Next:
    wait = event.answer.wait
    if state.waited_ms + wait.wait_ms > state.options.max_wait_ms:
        return _answer(state, local_replies.must_wait(wait, event.answer.exclusions))
    again = policy_pb2.SelectTargetRequest()
    again.CopyFrom(state.asked)
    again.previous_decision_token = event.answer.decision_token
    again.wait_budget_ms = state.options.max_wait_ms - state.waited_ms - wait.wait_ms
    waiting = state._replace(phase=Phase.WAITING, asked=again, waited_ms=state.waited_ms + wait.wait_ms)
    return Next(waiting, (Sleep(wait.wait_ms),))


def _ask_again(state: Listener, event: Waited) -> Next:
    return Next(state._replace(phase=Phase.SELECTING), (Select(state.asked),))


def _reject(state: Listener, event: Selected) -> Next:
    return _answer(state, local_replies.rejected(event.answer.reject, event.answer.exclusions))


def _refuse(state: Listener, event: CallFailed) -> Next:
    return _answer(state, local_replies.refused(event))


def _answer(state: Listener, reply: Action) -> Next:
    return Next(state._replace(phase=Phase.OVER), (reply,))


def _answered(state: Listener, event: ResponseHeaders) -> Next:
    """The head of the last answer: no further attempt follows."""
    count = event.headers.get(ATTEMPT_COUNT_HEADER, "")
    attempts = int(count) if count.isdigit() else 0
    settled = Settle(state.flight, event.details, attempts=attempts)
    if event.details == ANSWERED and attempts > state.flight.begun:
        state.flight.permit_ids = ()  # the process that has seen the answer renews and reports
    ended = (_last(event), *_abandoned(state.flight, attempts), settled, Leave(state.flight))
    return Next(Listener(state.options, Phase.OVER), ended)


def _last(event: ResponseHeaders) -> Pass:
    """The last answer as it came; Envoy's own text, where no upstream has given one, in the shape that clients read."""
    if not event.details.startswith(_NOBODY) or event.headers.get("content-type") != "text/plain":
        return _PASSED
    headers, body = local_replies.unanswered(event.details)
    return Pass("response_headers", tuple(headers), (ATTEMPT_COUNT_HEADER,), body=body)


_NOBODY = ("upstream_", "no_healthy_upstream", "response_timeout", "cluster_not_found")
"""Envoy's response code details of answers that it gave for want of an upstream's."""


_PASSED = Pass("response_headers", remove_headers=(ATTEMPT_COUNT_HEADER,))


def _left(state: Listener, event: Closed) -> Next:
    """Closed before the head of an answer: the client has left."""
    flight = state.flight
    settled = Settle(flight, is_client_gone=True)
    return Next(state._replace(phase=Phase.OVER), (*_abandoned(flight), settled, Leave(flight)))


def _abandoned(flight: Flight, attempts: int = 0) -> tuple[Action, ...]:
    """What a request holds whose next attempt does not come, so that no report is its last one.

    Args:
        attempts: attempts that Envoy has made; one that the door has not seen is reported now.
    """
    if not flight.permit_ids or flight.under_way or flight.unanswered or attempts > flight.begun:
        return ()
    flight.permit_ids = ()
    return (Release(permit_pb2.ReleasePermitRequest(decision_token=flight.token)),)


def _nothing(state: Listener, event: object) -> Next:
    return Next(state)


def _pass_head(state: Listener, event: ResponseHeaders) -> Next:
    """Head of an answer to a request that was not routed: Envoy gave it itself, to one without Host for example."""
    passed = _too_large() if event.details == TOO_LARGE else _PASSED
    return Next(state._replace(phase=Phase.OVER), (passed,))


def _too_large() -> Pass:
    """Envoy's 413 to a body beyond its buffer, in the shape that clients read."""
    local = local_replies.refused(_TOO_LARGE)
    return Pass("response_headers", tuple(local.headers), (ATTEMPT_COUNT_HEADER,), body=local.body)


_TOO_LARGE = CallFailed(
    "REQUEST_TOO_LARGE",
    413,
    "the request body is larger than this gateway reads: send less, or name the route in x-policy-route or the path, "
    "so that it need not be read",
)


_VERDICTS = {"dispatch": _dispatch, "wait": _wait, "reject": _reject}

TABLE: Table = {
    (Phase.NEW, RequestHeaders): _read,
    (Phase.BODY, RequestBody): _read_body,
    (Phase.SELECTING, Selected): _decide,
    (Phase.SELECTING, Decided): _decided,
    (Phase.SELECTING, CallFailed): _refuse,
    (Phase.WAITING, Waited): _ask_again,
    (Phase.ROUTED, ResponseHeaders): _answered,
    (Phase.ROUTED, Closed): _left,
    **{(phase, ResponseHeaders): _pass_head for phase in (Phase.NEW, Phase.BODY, Phase.OVER)},
    **{(phase, Closed): _nothing for phase in Phase if phase is not Phase.ROUTED},
}
