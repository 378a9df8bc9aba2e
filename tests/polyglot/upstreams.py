"""Upstreams that misbehave by script: one aiohttp server a connection on loopback, and the log of every call."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

_LINGER_NOT = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One way to answer.

    Args:
        status: HTTP status.
        headers: of the answer.
        json: body.
        events: data of server-sent events, instead of a body.
        event_gap_s: pause before each event.
        delay_s: pause before the answer begins.
        reset: break the connection instead of answering.
        breaks_off: break the connection after the last event.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    json: Any = None
    events: Sequence[str] = ()
    event_gap_s: float = 0.0
    delay_s: float = 0.0
    reset: bool = False
    breaks_off: bool = False


@dataclass(slots=True)
class Call:
    """One call as it arrived, header names in lower case. `gone`: the caller hung up before the answer was out."""

    connection: str
    headers: Mapping[str, str]
    body: Any
    path: str = ""
    gone: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Upstreams:
    """Running upstreams.

    Args:
        scripts: what each connection answers to its first, second, ... call.
        defaults: what it answers after that, without and with `stream` in the request.
    """

    def __init__(self, scripts: Mapping[str, Sequence[Behaviour]], defaults: tuple[Behaviour, Behaviour]) -> None:
        self._scripts = {connection: deque(script) for connection, script in scripts.items()}
        self._defaults = defaults
        self._ports: dict[str, int] = {}
        self.calls: list[Call] = []
        """Every call in order of arrival."""

    @classmethod
    @asynccontextmanager
    async def started(
        cls, scripts: Mapping[str, Sequence[Behaviour]], defaults: tuple[Behaviour, Behaviour]
    ) -> AsyncIterator[Upstreams]:
        """Listen on free loopback ports until the end of the block."""
        upstreams = cls(scripts, defaults)
        async with AsyncExitStack() as stack:
            for connection in scripts:
                await upstreams._listen(connection, stack)
            yield upstreams

    async def _listen(self, connection: str, stack: AsyncExitStack) -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            return await self._answer(connection, request)

        application = web.Application()
        application.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._ports[connection] = runner.addresses[0][1]

    def address(self, connection: str) -> str:
        """host:port."""
        return f"127.0.0.1:{self._ports[connection]}"

    @property
    def base_urls(self) -> dict[str, str]:
        """Of each connection."""
        return {connection: f"http://{self.address(connection)}" for connection in self._ports}

    @property
    def keys(self) -> dict[str, str]:
        """A credential for each connection."""
        return {connection: f"key-of-{connection}" for connection in self._ports}

    def script(self, connection: str, *behaviours: Behaviour) -> None:
        """What the connection answers from now on."""
        self._scripts[connection] = deque(behaviours)

    async def _answer(self, connection: str, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        body = json.loads(text) if text else None
        call = Call(
            connection, {name.lower(): value for name, value in request.headers.items()}, body, request.raw_path
        )
        self.calls.append(call)
        try:
            return await self._behave(self._next(connection, body), request)
        except (asyncio.CancelledError, ConnectionError):
            call.gone = True
            raise
        finally:
            call.ended.set()

    def _next(self, connection: str, body: Any) -> Behaviour:
        script = self._scripts[connection]
        is_stream = isinstance(body, dict) and bool(body.get("stream"))
        return script.popleft() if script else self._defaults[is_stream]

    async def _behave(self, behaviour: Behaviour, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(behaviour.delay_s)
        if behaviour.reset:
            return _reset(request)
        if behaviour.events:
            return await _stream(behaviour, request)
        return web.json_response(behaviour.json, status=behaviour.status, headers=behaviour.headers)


def _reset(request: web.Request) -> web.Response:
    """End the connection with RST instead of FIN."""
    assert request.transport is not None
    raw: socket.socket = request.transport.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    request.transport.abort()
    return web.Response()


async def _stream(behaviour: Behaviour, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(status=behaviour.status, headers=behaviour.headers)
    response.content_type = "text/event-stream"
    await response.prepare(request)
    for event in behaviour.events:
        await asyncio.sleep(behaviour.event_gap_s)
        await response.write(f"data: {event}\n\n".encode())
    if behaviour.breaks_off:
        return _reset(request)
    await response.write_eof()
    return response
