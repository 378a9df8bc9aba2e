"""Clients and upstreams that send what nobody expects: nothing of it ends Envoy, hides an answer or keeps a slot."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from policy_envoy import actions, events
from policy_envoy.attempt import TABLE
from policy_envoy.attempt_state import Attempt, Phase
from policy_envoy.client_request import read_body, read_request, select_request, with_model
from policy_envoy.listener import TABLE as LISTENER_TABLE
from policy_envoy.listener import Listener
from policy_envoy.listener import Phase as ListenerPhase
from policy_envoy.options import DoorOptions

from tests.envoy.decisions import flight_of
from tests.envoy.test_attempt_stage import begun, head, of_kind, step
from tests.envoy.upstreams import Answer, says
from tests.envoy.world import gateway

WANTED = {"accept": "text/event-stream"}
SSE = {"content-type": "text/event-stream"}
EVENT = b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % (b"x" * 900)
QUOTA = b'{"error": {"message": "You have exceeded your current quota", "code": "insufficient_quota"}}'


def whole(status: int, body: bytes, **headers: str) -> Answer:
    """An answer of bytes."""

    async def answer(request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, body=body, headers=named)

    return answer


async def compressed_if_wanted(request: web.Request) -> web.StreamResponse:
    """A misstated 403, compressed for whoever accepts that."""
    if "deflate" not in request.headers.get("accept-encoding", ""):
        return web.Response(status=403, body=QUOTA, content_type="application/json")
    headers = {"content-type": "application/json", "content-encoding": "deflate"}
    return web.Response(status=403, body=zlib.compress(QUOTA), headers=headers)


# --- real Envoy -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("headers", [WANTED, {}], ids=["held", "followed"])
async def test_a_client_that_reads_slowly_does_not_end_envoy(
    tmp_path: Path, embedded_url: str, headers: dict[str, str]
) -> None:
    body = EVENT * 25_000
    scripts = {"openai-one": [whole(200, body, content_type="text/event-stream")]}
    async with gateway(tmp_path, embedded_url, scripts, body_limit_bytes=8_388_608) as world:
        async with world.post(headers=headers) as answer:
            await asyncio.sleep(1.0)
            assert len(await answer.read()) == len(body)
        assert await world.heard(1) == [("openai-one", 200, 0)]


async def test_an_error_page_beyond_every_buffer_does_not_end_envoy(tmp_path: Path, embedded_url: str) -> None:
    scripts = {"openai-one": [whole(503, b"x" * 20_000_000)], "mistral-two": [says(200)]}
    async with gateway(tmp_path, embedded_url, scripts) as world, world.post() as answer:
        assert answer.status == 200


async def test_the_reason_of_an_error_is_read_although_the_client_accepts_compressed_answers(
    tmp_path: Path, embedded_url: str
) -> None:
    scripts: dict[str, list[Answer]] = {"openai-one": [compressed_if_wanted], "mistral-two": [says(200)]}
    async with gateway(tmp_path, embedded_url, scripts) as world:
        async with world.post(headers={"accept-encoding": "deflate"}) as answer:
            assert answer.status == 200
        await world.heard(2)
        assert world.answers[0].verdict.failure_kind_text == "quota"


async def test_half_a_surrogate_pair_passes_the_door(tmp_path: Path, embedded_url: str) -> None:
    door = {"reads_body": True, "writes_model": True}
    body = b'{"model":"chat","session_id":"\\udfff","messages":[{"content":"cut off: \\ud83d"}]}'
    async with gateway(tmp_path, embedded_url, {"openai-one": [says(200)]}, door=door) as world:
        async with world.client.post(world.url + "/v1/chat/completions", data=body) as answer:
            assert answer.status == 200
        (sent,) = world.upstreams["openai-one"].bodies
        assert json.loads(sent)["messages"] == json.loads(body)["messages"]


@pytest.mark.parametrize(
    ("head", "status"),
    [(b"GET /v1/models HTTP/1.1\r\n", 400), (b"OPTIONS * HTTP/1.1\r\nHost: a\r\n", 404)],
    ids=["without host", "of everything"],
)
async def test_a_request_that_envoy_refuses_itself_is_not_answered_as_if_the_service_were_away(
    tmp_path: Path, embedded_url: str, head: bytes, status: int
) -> None:
    async with gateway(tmp_path, embedded_url, {"openai-one": [says(200)]}) as world:
        host, port = world.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + b"Connection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.readline(), 5)
        writer.close()
        assert int(answer.split()[1]) == status


@pytest.mark.parametrize(
    ("line", "header", "status"),
    [
        (b"GET /v1/\xc3\xa9", b"x-a: b", 400),
        (b"GET /v1/x", b"x-\xe9: b", 400),
        (b"GET /v1/x", b"x-a: b\x01", 400),
        (b"GET /v1/x", b"x-a: \xe9", 200),
        (b"GET /v1/x", b"x-request-id: \xc3\xa9", 200),
    ],
    ids=["path", "name", "control character", "value", "request id"],
)
async def test_bytes_that_are_no_ascii_are_answered(
    tmp_path: Path, embedded_url: str, line: bytes, header: bytes, status: int
) -> None:
    async with gateway(tmp_path, embedded_url, {"openai-one": [says(200)]}) as world:
        host, port = world.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(line + b" HTTP/1.1\r\nHost: a\r\nx-policy-route: chat\r\n" + header + b"\r\n\r\n")
        answer = await asyncio.wait_for(reader.readline(), 5)
        writer.close()
        assert answer.split()[1:2] == [str(status).encode()], "not a closed connection"


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "chunked"])
async def test_a_body_beyond_the_buffer_is_refused_in_the_shape_that_clients_read(
    tmp_path: Path, embedded_url: str, is_named: bool
) -> None:
    body = json.dumps({"model": "chat", "messages": "x" * 20_000_000}).encode()

    async def chunks() -> AsyncIterator[bytes]:
        yield body[:10]
        await asyncio.sleep(
            0.5
        )  # what comes before the door has answered, Envoy 1.40 holds without looking at its size
        for start in range(10, len(body), 1_000_000):
            yield body[start : start + 1_000_000]

    scripts = {"openai-one": [says(200)]}
    limits: dict[str, Any] = {"door": {"reads_body": True}, "body_limit_bytes": 4_194_304}
    async with gateway(tmp_path, embedded_url, scripts, **limits) as world:
        url, headers = world.url + "/v1/chat/completions", {"content-length": str(len(body))} if is_named else {}
        async with asyncio.timeout(20), world.client.post(url, data=chunks(), headers=headers) as answer:
            assert (answer.status, answer.content_type) == (413, "application/json")
            assert (await answer.json())["error"]["code"] == "REQUEST_TOO_LARGE"
        async with world.post() as answer:
            assert answer.status == 200, "the next one is served"


@pytest.mark.parametrize("more", [b"Host: a\r\n", b""], ids=["with host", "without host"])
async def test_a_proxy_that_speaks_http_1_0_is_answered(tmp_path: Path, embedded_url: str, more: bytes) -> None:
    async with gateway(tmp_path, embedded_url, {"openai-one": [says(200)]}) as world:
        host, port = world.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/x HTTP/1.0\r\nx-policy-route: chat\r\nContent-Length: 2\r\n" + more + b"\r\n{}")
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        assert answer.split()[1] == b"200"
        assert answer.endswith(b'{"id": "1"}')


# --- the stages -------------------------------------------------------------------------------------------------
def test_a_model_that_utf8_cannot_carry_is_asked_for_all_the_same() -> None:
    options = DoorOptions(reads_body=True)
    request = read_request({":path": "/v1/chat/completions"}, options)
    assert select_request(request, read_body(b'{"model":"gpt-\\ud800"}'), options).route == "gpt-?"


def test_a_rewritten_body_keeps_the_escape_of_half_a_surrogate_pair() -> None:
    assert with_model(b'{"model":"a","m":"\\ud83d"}', "b") == b'{"model":"b","m":"\\ud83d"}'


def held(headers: dict[str, str], status: int = 200) -> Attempt:
    """A second attempt of a stream, with a permit of its own, after the head of its answer."""
    flight = flight_of("a", "b")
    flight.is_stream = True
    state = step(TABLE, begun(flight, 2, "b").state, events.Acquired(("p",))).state
    found: Attempt = step(TABLE, state, head(status, headers)).state
    return found


def test_a_held_answer_without_a_body_gives_the_permit_of_its_attempt_back() -> None:
    flight = flight_of("a", "b")
    flight.is_stream = True
    state = step(TABLE, begun(flight, 2, "b").state, events.Acquired(("p",))).state
    found = step(TABLE, state, head(204, has_body=False))
    (release,) = of_kind(found, actions.Release)
    assert release.request.permit_ids == ["p"]
    assert flight.attempt_permits == ()


def test_a_compressed_stream_is_not_held_back_until_its_end() -> None:
    found = step(TABLE, held({**SSE, "content-encoding": "gzip"}), events.ResponseBody(b"\x1f\x8b", False, 160.0))
    assert [each.kind for each in of_kind(found, actions.Pass)] == ["response_headers", "response_body"]
    assert found.state.phase is Phase.FLOWING


def test_an_error_status_that_ends_with_trailers_is_heard_as_an_error() -> None:
    state = step(TABLE, held({}, 503), events.ResponseBody(b"boom", False, 160.0)).state
    found = step(TABLE, state, events.ResponseTrailers(170.0))
    (told,) = of_kind(found, actions.Report)
    assert (told.request.http_status, told.request.body, told.request.final) == (503, b"boom", True)
    assert len(of_kind(found, actions.Pass)) == 3
    assert len(of_kind(found, actions.Release)) == 1


def test_an_error_event_without_its_blank_line_is_heard_where_trailers_follow() -> None:
    output = events.ResponseBody(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', False, 160.0)
    state = step(TABLE, held(SSE), output).state
    state = step(TABLE, state, events.ResponseBody(b'data: {"error":{"message":"busy"}}', False, 165.0)).state
    (told,) = of_kind(step(TABLE, state, events.ResponseTrailers(170.0)), actions.Report)
    assert told.request.details.stream_error


def test_a_slow_stream_that_ends_with_trailers_before_it_is_cut_off_is_no_fault_of_the_configuration() -> None:
    state = held(SSE)._replace(phase=Phase.ENDING)
    found = step(TABLE, state, events.ResponseTrailers(170.0))
    assert found.actions == (actions.Pass("response_trailers"),)
    assert found.state.phase is Phase.DONE


@pytest.mark.parametrize("phase", [ListenerPhase.NEW, ListenerPhase.BODY])
def test_an_answer_of_envoy_to_what_was_not_routed_passes_the_listener_stage(phase: ListenerPhase) -> None:
    found = step(LISTENER_TABLE, Listener(DoorOptions(), phase), head(413))
    assert [each.kind for each in of_kind(found, actions.Pass)] == ["response_headers"]
    assert found.state.is_over
