"""HTTP as a gateway has to speak it: headers of a hop, bodies, paths, connections that end, clients that are slow."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from policy_service.generated.policy.v1 import permit_pb2, policy_pb2
from tests.polyglot.doors import Gateway
from tests.polyglot.scripted import Scripted, beside, dispatch, started, urls
from tests.polyglot.upstreams import Behaviour, Upstreams
from tests.polyglot.world import behaving

AT_ONCE_S = 4.0
PATH = "/v1/chat/completions"
BODY = '{"model": "one", "messages": []}'
OK = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 14\r\n\r\n{"object": ""}'
PIECE = json.dumps({"choices": [{"delta": {"content": "x" * 60_000}}]})


@asynccontextmanager
async def alone(
    command: Sequence[str], place: Path, path: str = "", **fields: Any
) -> AsyncIterator[tuple[Gateway, Upstreams, Scripted]]:
    """A gateway, one upstream and a scripted service."""
    async with (
        behaving("only") as upstreams,
        started(Scripted("only")) as service,
        beside(command, place, service, urls(upstreams, path), **fields) as gateway,
    ):
        yield gateway, upstreams, service


async def raw(gateway: Gateway, *pieces: bytes, within_s: float = 10.0) -> bytes:
    """What a connection answers until it ends or says nothing new for a moment; the pieces are sent one by one."""
    host, _, port = gateway.base_url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = b""
    try:
        for piece in pieces:
            writer.write(piece)
            answer += await _some(reader, within_s)
    finally:
        writer.close()
    return answer


async def _some(reader: asyncio.StreamReader, within_s: float) -> bytes:
    got = await asyncio.wait_for(reader.read(65_536), within_s)
    with contextlib.suppress(TimeoutError):
        while piece := await asyncio.wait_for(reader.read(65_536), 0.3):
            got += piece
    return got


def post(path: str = PATH, body: str = BODY, *headers: str) -> bytes:
    """A request as bytes."""
    lines = [f"POST {path} HTTP/1.1", "host: gateway", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", body]).encode()


def status(answer: bytes) -> int:
    """Of the first answer."""
    return int(answer.split(b" ", 2)[1])


# --- headers ----------------------------------------------------------------------------------------------------
async def test_headers_of_one_hop_and_of_the_client_itself_go_no_further(
    command: Sequence[str], tmp_path: Path
) -> None:
    own = {"x-forwarded-for": "192.0.2.1", "x-real-ip": "192.0.2.1", "forwarded": "for=192.0.2.1", "cookie": "a=b"}
    hop = {"connection": "keep-alive, x-private", "x-private": "1", "te": "gzip", "proxy-authorization": "Basic eA=="}
    async with alone(command, tmp_path) as (gateway, upstreams, _):
        upstreams.script("only", Behaviour(json={"object": "x"}, headers={"connection": "x-inner", "x-inner": "1"}))
        kept = {"x-custom": "stays"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{gateway.base_url}{PATH}", data=BODY, headers={**own, **hop, **kept}) as answer,
        ):
            assert answer.status == 200
            assert "x-inner" not in answer.headers
    arrived = upstreams.calls[0].headers
    assert arrived["x-custom"] == "stays"
    assert [name for name in (*own, *hop) if name != "connection" and name in arrived] == []
    assert "x-private" not in arrived.get("connection", "")


async def test_a_lease_header_that_is_there_twice_and_differs_is_refused(
    command: Sequence[str], tmp_path: Path
) -> None:
    fences = ("x-policy-lease-owner: a", "x-policy-lease-owner: b", "x-policy-lease-generation: 1")
    async with alone(command, tmp_path) as (gateway, upstreams, _):
        answer = await raw(gateway, post(PATH, BODY, *fences))
    assert status(answer) == 400
    assert b"LEASE_CONTEXT_INVALID" in answer
    assert upstreams.calls == []


async def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(command: Sequence[str], tmp_path: Path) -> None:
    head, body = post(PATH, BODY, "expect: 100-continue").split(b"\r\n\r\n")
    async with alone(command, tmp_path) as (gateway, upstreams, _):
        answer = await raw(gateway, head + b"\r\n\r\n", body)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    assert "expect" not in upstreams.calls[0].headers


async def test_a_websocket_is_refused_and_an_upgrade_is_not_passed_on(command: Sequence[str], tmp_path: Path) -> None:
    wish = ("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13")
    async with alone(command, tmp_path) as (gateway, upstreams, _):
        by_get = await raw(gateway, "\r\n".join(["GET /v1/realtime HTTP/1.1", "host: g", *wish, "", ""]).encode())
        by_post = await raw(gateway, post(PATH, BODY, *wish))
    assert status(by_get) in (404, 405)
    assert status(by_post) == 200
    assert "upgrade" not in upstreams.calls[0].headers


# --- paths and bodies -------------------------------------------------------------------------------------------
async def test_a_path_arrives_as_it_was_written_and_never_leaves_the_path_of_the_upstream(
    command: Sequence[str], tmp_path: Path
) -> None:
    async with alone(command, tmp_path, path="/inner") as (gateway, upstreams, _):
        assert status(await raw(gateway, post("/v1/files/a%2Fb?x=1"))) == 200
        for path in ("/v1/../admin", "/v1/%2e%2e/admin", "/v1/../../admin", "/admin"):
            assert status(await raw(gateway, post(path))) >= 300, path
    assert [call.path for call in upstreams.calls] == ["/inner/v1/files/a%2Fb?x=1"]


async def test_fields_that_the_gateway_does_not_know_keep_every_digit(command: Sequence[str], tmp_path: Path) -> None:
    body = '{ "seed" : 9007199254740993, "model":"one", "user":"\\"},{ \\\\", "metadata": {"a": [1, {"b": "]"}]} }'
    async with alone(command, tmp_path) as (gateway, upstreams, _):
        assert status(await raw(gateway, post(body=body))) == 200
    assert upstreams.calls[0].body == {**json.loads(body), "model": "m"}


async def test_a_body_that_is_too_large_is_told_so(command: Sequence[str], tmp_path: Path) -> None:
    size = 33_600_000
    head = post(PATH, "").replace(b"content-length: 0", f"content-length: {size}".encode())
    async with alone(command, tmp_path) as (gateway, upstreams, service):
        assert status(await raw(gateway, head + b"y" * size)) == 413
        assert status(await raw(gateway, post())) == 200
    assert len(upstreams.calls) == 1
    assert len(service.of("SelectTarget")) == 1


async def test_a_client_that_never_ends_its_body_is_given_up(command: Sequence[str], tmp_path: Path) -> None:
    half = post(PATH, BODY)[:-5]
    async with alone(command, tmp_path, request_timeout_ms=1_000) as (gateway, upstreams, _):
        answer = await raw(gateway, half, within_s=AT_ONCE_S)
    assert status(answer) == 408
    assert upstreams.calls == []


# --- connections ------------------------------------------------------------------------------------------------
async def test_a_kept_connection_that_the_upstream_has_closed_is_no_failure_of_the_account(
    command: Sequence[str], tmp_path: Path
) -> None:
    requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One answer a connection; the next request on it meets its end."""
        nonlocal requests
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.split(b":")[1]))
            requests += 1
            if requests == 2:
                break
            writer.write(OK)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with (
        server,
        started(Scripted("only")) as service,
        beside(command, tmp_path, service, {"only": address}) as gateway,
    ):
        answers = [(await gateway.send()("one", False)).status for _ in range(2)]
        reports = await service.told("ReportOutcome", 2)
    assert (answers, requests) == ([200, 200], 3)
    assert [report.http_status for report in reports] == [200, 200]


async def test_the_rest_of_an_error_that_nobody_gets_is_not_waited_for(command: Sequence[str], tmp_path: Path) -> None:
    async with (
        behaving("main", "spare") as upstreams,
        started(Scripted("main", "spare")) as service,
        beside(command, tmp_path, service, urls(upstreams)) as gateway,
    ):
        upstreams.script("main", Behaviour(status=500, events=[PIECE] * 400, event_gap_s=0.05))
        upstreams.script("spare", Behaviour(json={"object": "x"}, delay_s=AT_ONCE_S))
        sending = asyncio.create_task(gateway.send()("one", False))
        await service.told("ReportOutcome")
        await asyncio.wait_for(upstreams.calls[0].ended.wait(), AT_ONCE_S)
        assert not sending.done()
        assert (await sending).status == 200
    assert upstreams.calls[0].gone


async def test_an_address_that_does_not_answer_is_given_up_after_five_seconds(
    command: Sequence[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf, contextlib.ExitStack() as full:
        for _ in range(3):  # the line of connections that nobody accepts is full
            waiting = full.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(deaf.getsockname())
        async with (
            behaving("spare") as upstreams,
            started(Scripted("deaf", "spare")) as service,
            beside(
                command,
                tmp_path,
                service,
                {"deaf": f"http://127.0.0.1:{deaf.getsockname()[1]}", **urls(upstreams)},
            ) as gateway,
        ):
            began = time.monotonic()
            assert (await gateway.send()("one", False)).status == 200
            assert 4 < time.monotonic() - began < 15
    (failed, _) = service.of("ReportOutcome")
    assert failed.network_error == policy_pb2.NETWORK_ERROR_KIND_CONNECT_TIMEOUT


# --- streams ----------------------------------------------------------------------------------------------------
async def test_a_client_that_reads_slowly_holds_the_upstream_back_and_is_not_cut_off(
    command: Sequence[str], tmp_path: Path
) -> None:
    async with alone(command, tmp_path, idle_timeout_ms=700) as (gateway, upstreams, _):
        upstreams.script("only", Behaviour(events=[PIECE] * 600))
        async with aiohttp.ClientSession(read_bufsize=65_536) as session:
            body = {"model": "one", "stream": True}
            async with session.post(f"{gateway.base_url}{PATH}", json=body) as answer:
                length = len(await answer.content.readany())
                await asyncio.sleep(2)
                assert not upstreams.calls[0].ended.is_set(), "36 MB were taken though nobody read them"
                length += len(await answer.content.read())
    assert length == 600 * len(f"data: {PIECE}\n\n")


async def test_permits_are_renewed_for_the_one_that_ends_first(command: Sequence[str], tmp_path: Path) -> None:
    async def two(request: Any, _: Any) -> Any:
        answer = dispatch(request.request_id, "only", permit_ms=60_000)
        ends = answer.decided_at_unix_ms + 900
        answer.dispatch.permits.append(permit_pb2.Permit(permit_id="probe", expires_at_unix_ms=ends))
        return answer

    async with alone(command, tmp_path) as (gateway, upstreams, service):
        service.scripts["SelectTarget"].append(two)
        upstreams.script("only", Behaviour(json={"object": "x"}, delay_s=2.0))
        sending = asyncio.create_task(gateway.send()("one", False))
        await service.told("RenewPermit", within_s=AT_ONCE_S)
        assert (await sending).status == 200
        await service.told("ReportOutcome")
        renewed = len(service.of("RenewPermit"))
        await asyncio.sleep(0.7)
    assert len(service.of("RenewPermit")) == renewed


async def test_a_verdict_that_the_gateway_does_not_know_ends_the_request(
    command: Sequence[str], tmp_path: Path
) -> None:
    async def unknown(*_: Any) -> Any:
        return policy_pb2.SelectTargetResponse(decision_token=b"x")

    async with alone(command, tmp_path) as (gateway, upstreams, service):
        service.scripts["SelectTarget"].extend([unknown] * 1_000)
        answer = await asyncio.wait_for(gateway.send()("one", False), AT_ONCE_S)
    assert (answer.status, upstreams.calls, len(service.of("SelectTarget"))) == (503, [], 1)
