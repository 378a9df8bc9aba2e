"""Upstreams that misbehave on request: one small HTTP server a connection, each with a script of answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
ERROR = '{"error": {"message": "%s", "type": "server_error"}}'


@dataclass
class Upstream:
    """One connection's upstream. Answers are taken from `script` in order; its last one stays."""

    name: str
    script: list[Answer]
    requests: list[web.Request] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    cancelled: int = 0
    address: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        self.bodies.append(await request.read())
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        try:
            return await answer(request)
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled += 1
            raise


def says(status: int, body: str = '{"id": "1"}', headers: Mapping[str, str] | None = None) -> Answer:
    """A whole answer."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(
            status=status, text=body, headers={"content-type": "application/json", **dict(headers or {})}
        )

    return answer


def streams(*events: str, pause_s: float = 0.0, ends: bool = True) -> Answer:
    """A 200 event stream. A stream that does not end breaks its connection."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {event}\n\n".encode())
            await asyncio.sleep(pause_s)
        if ends:
            await response.write_eof()
        else:
            assert request.transport is not None
            request.transport.abort()
        return response

    return answer


def hangs(seconds: float) -> Answer:
    """Says nothing for a while."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return web.Response(text="late")

    return answer


def waits_for(event: asyncio.Event) -> Answer:
    """Says nothing until the test lets it."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await event.wait()
        return web.Response(text="at last")

    return answer


@asynccontextmanager
async def running(scripts: Mapping[str, list[Answer]]) -> AsyncIterator[dict[str, Upstream]]:
    """The upstreams by connection."""
    found = {name: Upstream(name, list(script)) for name, script in scripts.items()}
    runners = []
    try:
        for upstream in found.values():
            app = web.Application(client_max_size=64_000_000)
            app.router.add_route("*", "/{tail:.*}", upstream.answer)
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
            await runner.setup()
            runners.append(runner)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            upstream.address = f"127.0.0.1:{port}"
        yield found
    finally:
        for runner in runners:
            await runner.cleanup()
