"""Upstreams on loopback that answer by a script: whole answers, event streams, broken ones. A thread of their own, so
that blocking clients can be tested too."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Reply:
    """One answer. `chunks` make it an event stream; `breaks`: the connection is cut behind them, `hangs`: it is kept
    open and silent."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    chunks: tuple[bytes, ...] | None = None
    breaks: bool = False
    hangs: bool = False
    pause_s: float = 0.0


def said(status: int, body: Any, **headers: str) -> Reply:
    """A JSON answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, json.dumps(body).encode(), {"content-type": "application/json", **named})


def streamed(*events: str, **how: Any) -> Reply:
    """An event stream; each event is one chunk."""
    return Reply(chunks=tuple(event.encode() for event in events), **how)


@dataclass
class Seen:
    """A request as it arrived; names of headers in lower case."""

    path: str
    headers: dict[str, str]
    body: Any


class UpstreamServer:
    """Answers in the order of the script of each connection; the path says which: `/CONNECTION/v1/...`."""

    def __init__(self) -> None:
        self.port = 0
        self.seen: list[tuple[str, Seen]] = []
        self.gone = 0
        """Streams that the client left."""
        self._script: dict[str, deque[Reply]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None

    def will(self, connection: str, *replies: Reply) -> None:
        """Script the next answers of a connection; the last one is given again and again."""
        self._script[connection] = deque(replies)

    def base_url(self, connection: str) -> str:
        return f"http://127.0.0.1:{self.port}/{connection}/v1"

    @property
    def order(self) -> list[str]:
        """Connections in the order they were called."""
        return [connection for connection, _ in self.seen]

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    def stop(self) -> None:
        assert self._runner is not None
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{connection}/{rest:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        connection, rest = request.match_info["connection"], request.match_info["rest"]
        text = await request.text()
        body = json.loads(text) if text.startswith("{") else text
        self.seen.append(
            (connection, Seen(f"/{rest}", {name.lower(): value for name, value in request.headers.items()}, body))
        )
        script = self._script[connection]
        reply = script.popleft() if len(script) > 1 else script[0]
        await asyncio.sleep(reply.pause_s)
        if reply.chunks is None:
            return await self._whole(request, reply)
        return await self._stream(request, reply)

    async def _whole(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        if not reply.breaks:
            return web.Response(status=reply.status, body=reply.body, headers=reply.headers)
        response = web.StreamResponse(headers={**reply.headers, "content-length": str(len(reply.body) + 10)})
        await response.prepare(request)
        await response.write(reply.body)
        return self._cut(request, response)

    async def _stream(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        response = web.StreamResponse(
            status=reply.status, headers={"content-type": "text/event-stream", **reply.headers}
        )
        await response.prepare(request)
        try:
            for chunk in reply.chunks or ():
                await response.write(chunk)
                await asyncio.sleep(0.005)
            if reply.hangs:
                await asyncio.sleep(30)
        except (asyncio.CancelledError, ConnectionError):
            self.gone += 1
            raise
        return self._cut(request, response) if reply.breaks else response

    def _cut(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return response


@contextmanager
def upstream_server() -> Iterator[UpstreamServer]:
    server = UpstreamServer()
    server.start()
    try:
        yield server
    finally:
        server.stop()


# --- answers of the real APIs, shortened --------------------------------------------------------------------
def chat(text: str) -> Reply:
    """A chat completion of OpenAI."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return said(200, {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})


def chat_event(text: str | None, finish: str | None = None) -> str:
    """One chunk of a streamed chat completion."""
    choice = {"index": 0, "delta": {"content": text} if text is not None else {}, "finish_reason": finish}
    event = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return f"data: {json.dumps(event)}\n\n"


CHAT_DONE = "data: [DONE]\n\n"
CHAT_ERROR = 'data: {"error": {"message": "overloaded", "type": "server_error", "code": "overloaded"}}\n\n'


def chat_stream(*texts: str, **how: Any) -> Reply:
    """A whole streamed chat completion."""
    return streamed(*map(chat_event, texts), chat_event(None, "stop"), CHAT_DONE, **how)


def message(text: str) -> Reply:
    """A message of Anthropic."""
    content = [{"type": "text", "text": text}]
    usage = {"input_tokens": 1, "output_tokens": 1}
    fixed = {"id": "m", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn"}
    return said(200, {**fixed, "stop_sequence": None, "content": content, "usage": usage})


def message_events(*texts: str) -> Sequence[str]:
    """A whole streamed message of Anthropic."""
    usage = {"input_tokens": 1, "output_tokens": 1}
    start = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": usage}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**start, "stop_reason": None, "stop_sequence": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    ]
    deltas = ({"type": "text_delta", "text": text} for text in texts)
    events += [{"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas]
    events += [
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 2},
        },
        {"type": "message_stop"},
    ]
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]


ANTHROPIC_OVERLOADED = (
    'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error", "message": "x"}}\n\n'
)
