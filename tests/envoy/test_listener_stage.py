"""The listener stage without Envoy: what it asks, what it answers, what it hands on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from policy_envoy import actions, events
from policy_envoy.listener import TABLE, Listener, Phase
from policy_envoy.options import DoorOptions
from policy_envoy.phases import UnexpectedEventError
from policy_envoy.phases import step as typed_step

from policy_service.generated.policy.v1 import policy_pb2, reasons_pb2
from tests.envoy.decisions import dispatched, target

PLAIN: Mapping[str, str] = {":path": "/v1/chat/completions", "x-policy-route": "chat"}


def step(*of: Any) -> Any:
    """One step; its actions are looked at as what they turn out to be."""
    return typed_step(*of)


def asked(headers: Mapping[str, str], options: DoorOptions | None = None, body: bytes | None = None) -> Any:
    """State after the request's head (and body, if the stage asks for it)."""
    found = step(TABLE, Listener(options or DoorOptions()), events.RequestHeaders(headers, body is not None, 0.0))
    if body is not None and found.state.phase is Phase.BODY:
        return step(TABLE, found.state, events.RequestBody(body))
    return found


def request_of(found: Any) -> policy_pb2.SelectTargetRequest:
    """The selection that is asked for."""
    (select,) = found.actions
    assert isinstance(select, actions.Select)
    return select.request


@pytest.mark.parametrize(
    ("headers", "route", "path"),
    [
        ({"x-policy-route": "chat", ":path": "/v1/messages"}, "chat", "/v1/messages"),
        ({":path": "/routes/chat/v1/messages?beta=1"}, "chat", "/v1/messages?beta=1"),
        ({":path": "/v1beta/models/gemini-pro:generateContent"}, "gemini-pro", None),
        ({":path": "/openai/deployments/gpt/chat/completions?api-version=1"}, "gpt", None),
        ({":path": "/v1/chat/completions", "x-ai-eg-model": "gpt"}, "gpt", None),
        ({":path": "/routes/chat/x", "x-policy-route": "other"}, "other", "/x"),
    ],
)
def test_the_route_comes_from_header_or_path(headers: dict[str, str], route: str, path: str | None) -> None:
    found = asked(headers)
    assert request_of(found).route == route
    assert found.state.client.path == (path or headers[":path"])


def test_the_body_is_read_only_where_nothing_else_names_the_route_and_only_if_allowed() -> None:
    unnamed = {":path": "/v1/chat/completions"}
    body = json.dumps({"model": "chat", "stream": True, "tools": [{}, {}], "metadata": {"session_id": "s"}}).encode()
    request = request_of(asked(unnamed, DoorOptions(reads_body=True), body))
    assert (request.route, request.traits.tool_count, request.session.metadata_session_id) == ("chat", 2, "s")
    assert asked(PLAIN, DoorOptions(reads_body=True), body).state.phase is Phase.SELECTING
    refused = asked(unnamed, None, body)
    assert isinstance(refused.actions[0], actions.Local)
    assert refused.actions[0].status == 404
    assert request_of(asked(unnamed, DoorOptions(default_route="all"))).route == "all"


def test_ids_and_hashes_of_the_client_go_on_and_nothing_else() -> None:
    owner = "vlo_" + "a" * 43
    headers = {
        **PLAIN,
        "authorization": "Bearer secret",
        "x-session-id": "s",
        "x-policy-lease-owner": owner,
        "x-policy-lease-generation": "7",
        "x-policy-mode": "ship-fast",
        "x-policy-budget": "0.5",
        "cookie": "c",
    }
    request = request_of(asked(headers))
    assert request.caller_key_sha256 == "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"
    assert [(h.name, h.value) for h in request.session.headers] == [("x-session-id", "s")]
    assert (request.lease.owner, request.lease.generation) == (owner, 7)
    assert (request.traits.mode, request.cost_budget_usd) == ("ship-fast", 0.5)
    assert b"secret" not in request.SerializeToString()
    trusted = request_of(asked({**headers, "x-user": "u1"}, DoorOptions(caller_header="x-user")))
    assert (trusted.caller_id, trusted.caller_key_sha256) == ("u1", "")


def test_a_dispatch_hands_its_order_on_strips_control_headers_and_clears_the_route() -> None:
    headers = {**PLAIN, "x-session-id": "s", "x-kept": "1"}
    found = step(TABLE, asked(headers).state, events.Selected(dispatched("a", "b"), 5.0))
    register, passed = found.actions
    assert isinstance(register, actions.Register)
    assert isinstance(passed, actions.Pass)
    assert passed.chain is register.flight
    assert passed.clears_route
    assert dict(passed.set_headers) == {
        "x-ai-eg-fallback-chain": "a,b",
        "x-gateway-destination-endpoint": "127.0.0.1:1,127.0.0.1:1",
    }
    assert set(passed.remove_headers) == {"x-policy-route", "x-session-id"}


def test_a_reject_is_answered_in_the_shape_of_the_clients() -> None:
    reject = policy_pb2.Reject(
        http_status=503,
        code="all_targets_cooling_down",
        type="service_unavailable",
        terminal_reason_text="all_targets_cooling_down",
        recovery_text="wait",
        message="all cool down",
        retry_after_ms=3_000,
        pool_size=1,
    )
    excluded = policy_pb2.Exclusion(target=target("a"), mechanism_text="breaker", reason_text="circuit_open")
    answer = policy_pb2.SelectTargetResponse(reject=reject, exclusions=[excluded])
    (local,) = step(TABLE, asked(PLAIN).state, events.Selected(answer, 0.0)).actions
    assert isinstance(local, actions.Local)
    assert (local.status, dict(local.headers)["retry-after"]) == (503, "3")
    assert dict(local.headers)["x-policy-drop-reason"] == "all_targets_cooling_down"
    body = json.loads(local.body)
    assert body["error"] == {
        "message": "all cool down",
        "type": "service_unavailable",
        "code": "all_targets_cooling_down",
    }
    assert body["diagnostics"]["excluded"][0]["target"] == "p/a/m"


@pytest.mark.parametrize(
    ("reason", "status"),
    [(reasons_pb2.WAIT_REASON_RATE_LIMIT, 429), (reasons_pb2.WAIT_REASON_CIRCUIT_OPEN, 503)],
)
def test_a_wait_is_sat_out_within_the_budget_and_answered_beyond_it(reason: Any, status: int) -> None:
    wait = policy_pb2.Wait(wait_ms=1_200, reason=reason, reason_text="rate_limit")
    answer = policy_pb2.SelectTargetResponse(decision_token=b"w", wait=wait)
    patient = asked(PLAIN, DoorOptions(max_wait_ms=2_000))
    assert request_of(patient).allow_wait
    waiting = step(TABLE, patient.state, events.Selected(answer, 0.0))
    assert waiting.actions == (actions.Sleep(1_200),)
    again = request_of(step(TABLE, waiting.state, events.Waited()))
    assert (again.previous_decision_token, again.wait_budget_ms) == (b"w", 800)
    after = step(TABLE, waiting.state, events.Waited()).state
    (local,) = step(TABLE, after, events.Selected(answer, 0.0)).actions
    assert isinstance(local, actions.Local)
    assert (local.status, dict(local.headers)["retry-after"]) == (status, "2")
    assert not request_of(asked(PLAIN)).allow_wait


def test_an_error_of_the_service_is_answered_with_its_status() -> None:
    failed = events.CallFailed("LEASE_FENCE_STALE", 409, "stale")
    (local,) = step(TABLE, asked(PLAIN).state, failed).actions
    assert isinstance(local, actions.Local)
    assert (local.status, json.loads(local.body)["error"]["code"]) == (409, "LEASE_FENCE_STALE")


def test_the_end_of_a_request_settles_its_attempts_by_what_came_first() -> None:
    routed = step(TABLE, asked(PLAIN).state, events.Selected(dispatched("a"), 0.0)).state
    head = events.ResponseHeaders(503, {"x-envoy-attempt-count": "2"}, True, 1.0, "upstream_reset{x}")
    _, settled, leave = step(TABLE, routed, head).actions
    assert settled == actions.Settle(routed.flight, "upstream_reset{x}", False, 2)
    assert isinstance(leave, actions.Leave)
    gone, _ = step(TABLE, routed, events.Closed(1.0)).actions
    assert gone == actions.Settle(routed.flight, is_client_gone=True)


def test_an_unexpected_message_is_a_fault_of_the_configuration() -> None:
    with pytest.raises(UnexpectedEventError, match="ResponseBody in phase new"):
        step(TABLE, Listener(DoorOptions()), events.ResponseBody(b"", True, 0.0))


# -- connections that Envoy was not configured with ------------------------------------------------------------------
def decided(answer: policy_pb2.SelectTargetResponse, known: str, request: Mapping[str, str] = PLAIN) -> Any:
    """What follows a decision where Envoy knows these connections."""
    options = DoorOptions(connections=frozenset(known.split()))
    return step(TABLE, asked(request, options).state, events.Selected(answer, 0.0))


def test_a_connection_that_envoy_does_not_know_is_told_of_and_the_others_are_asked_for() -> None:
    found = decided(dispatched("new", "main"), "main spare")
    strange, select = found.actions
    assert strange == actions.Strange(("new",))
    assert (select.request.route, list(select.request.allowed_connections)) == ("chat", ["main", "spare"])
    assert (found.state.phase, found.state.asked) == (Phase.SELECTING, select.request)
    routed = step(TABLE, found.state, events.Selected(dispatched("main"), 0.0))
    assert routed.state.phase is Phase.ROUTED


def test_what_was_taken_for_a_connection_without_a_cluster_is_given_back() -> None:
    answer = dispatched("new", permits=["p"])
    kinds = [type(action) for action in decided(answer, "main").actions]
    assert kinds == [actions.Strange, actions.Release, actions.Select]


def test_a_request_is_narrowed_once_and_then_answered() -> None:
    first = decided(dispatched("new"), "main")
    _, reply = step(TABLE, first.state, events.Selected(dispatched("new"), 0.0)).actions
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (503, "UNKNOWN_TO_ENVOY")
    assert "envoy-config" in json.loads(reply.body)["error"]["message"]


def test_a_leased_request_is_not_narrowed_which_would_end_its_lease() -> None:
    leased = {**PLAIN, "x-policy-lease-owner": "vlo_" + "a" * 43, "x-policy-lease-generation": "7"}
    _, reply = decided(dispatched("new"), "main", leased).actions
    assert reply.status == 503


def test_an_envoy_that_does_not_say_what_it_knows_is_taken_to_know_everything() -> None:
    assert decided(dispatched("new"), "").state.phase is Phase.ROUTED
    assert decided(dispatched("main", "spare"), "main spare").state.phase is Phase.ROUTED
