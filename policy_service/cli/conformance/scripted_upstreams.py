"""Scripted upstreams: one HTTP/1.1 server a connection on loopback, which answers by the case and keeps every call."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final

from policy_service.cli.conformance.cases import CONNECTIONS, Behaviour
from policy_service.cli.conformance.http_text import encode_head, read_body, read_head
from policy_service.cli.conformance.record import Record, UpstreamCall

CLOSED: Final = "closed"
_PLAIN: Final = Behaviour()
_PLAIN_STREAM: Final = Behaviour(
    events=('{"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "hello"}}]}', "[DONE]")
)
MARK: Final = re.compile(rb"conformance case ([\w-]+);")
_LINGER_NOT: Final = struct.pack("ii", 1, 0)
_HEAD_LIMIT_S: Final = 10.0
_SILENCE_S: Final = 30.0


class PortTakenError(Exception):
    """The stage cannot listen where it is told to."""


class ScriptedUpstreams:
    """The upstreams of one run.

    Args:
        base_port: port of the first connection, the others follow; 0: free ones.
    """

    def __init__(self, base_port: int = 0) -> None:
        self._base_port = base_port
        self._records: dict[str, Record] = {}
        self._newest = ""
        self._answered: Counter[tuple[str, str]] = Counter()
        self.addresses: dict[str, str] = {}
        """host:port of each connection."""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[ScriptedUpstreams]:
        """Listen until the end of the block.

        Raises:
            PortTakenError: somebody else listens there.
        """
        async with AsyncExitStack() as stack:
            for place, connection in enumerate(CONNECTIONS):
                await self._listen(stack, connection, self._base_port + place if self._base_port else 0)
            yield self

    async def _listen(self, stack: AsyncExitStack, connection: str, port: int) -> None:
        try:
            bound = socket.create_server(("127.0.0.1", port)) if connection != CLOSED else _unheard(port)
        except OSError as error:
            raise PortTakenError(f"cannot listen on 127.0.0.1:{port}: {error.strerror}") from None
        self.addresses[connection] = f"127.0.0.1:{bound.getsockname()[1]}"
        if connection == CLOSED:
            stack.callback(bound.close)
            return

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError, ValueError, asyncio.IncompleteReadError, TimeoutError):
                await self._serve(connection, reader, writer)
            writer.close()

        server = await asyncio.start_server(answer, sock=bound)
        stack.callback(server.close)

    def begin(self, record: Record) -> None:
        """From now on calls belong to this record, but for late ones that carry the mark of an earlier case."""
        self._newest = record.case.name
        self._records[self._newest] = record

    async def _serve(self, connection: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HEAD_LIMIT_S):
            head = await read_head(reader)
            body = b"".join([piece async for piece in read_body(reader, head, until_end=False)])
        call = UpstreamCall(connection, time.monotonic(), head.headers, body)
        behaviour = self._next(call)
        answering = asyncio.create_task(_behave(behaviour, call, writer))
        leaving = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            call.left = not answering.done() or _is_broken(answering)
        finally:
            call.ended_at = time.monotonic()
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    def _next(self, call: UpstreamCall) -> Behaviour:
        """What the case says for this call; the call is kept."""
        marked = MARK.search(call.body)
        record = self._records.get(marked[1].decode() if marked else "") or self._records[self._newest]
        record.upstream.append(call)
        script = record.case.upstreams.get(call.connection, ())
        place = self._answered[record.case.name, call.connection]
        self._answered[record.case.name, call.connection] += 1
        return script[place] if place < len(script) else _plain(call)


def mark(case: str) -> str:
    """Text of the client's message, by which an upstream knows the case again."""
    return f"conformance case {case};"


def _plain(call: UpstreamCall) -> Behaviour:
    return _PLAIN_STREAM if b'"stream":true' in call.body.replace(b" ", b"") else _PLAIN


def _unheard(port: int) -> socket.socket:
    """A socket that keeps the port and takes no connection."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def _is_broken(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is not None


async def _behave(behaviour: Behaviour, call: UpstreamCall, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(behaviour.after_ms / 1000)
    call.answered_at = time.monotonic()
    if behaviour.events:
        await _stream(behaviour, call, writer)
    elif behaviour.end == "whole":
        writer.write(_whole(behaviour))
    elif behaviour.end == "garbage":
        writer.write(b"\x15\x03\x01\x00\x02\x02\x46 not http\r\n\r\n")
    await writer.drain()
    await _end(behaviour, writer)


def _whole(behaviour: Behaviour) -> bytes:
    body = behaviour.body.encode() + b"." * behaviour.padding
    headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
    return _head(behaviour, headers) + body


def _head(behaviour: Behaviour, headers: list[tuple[str, str]]) -> bytes:
    own = [(name, str(value)) for name, value in behaviour.headers.items()]
    return encode_head(f"HTTP/1.1 {behaviour.status} Scripted", [*headers, *own, ("connection", "close")])


async def _stream(behaviour: Behaviour, call: UpstreamCall, writer: asyncio.StreamWriter) -> None:
    writer.write(_head(behaviour, [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]))
    for number, event in enumerate(behaviour.events):
        await asyncio.sleep(behaviour.gap_ms / 1000 if number else 0)
        data = f"data: {event}\n\n".encode()
        call.answered_at = time.monotonic()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await writer.drain()
    if behaviour.end == "whole":
        writer.write(b"0\r\n\r\n")


async def _end(behaviour: Behaviour, writer: asyncio.StreamWriter) -> None:
    if behaviour.end == "silence":
        await asyncio.sleep(_SILENCE_S)
    elif behaviour.end == "reset":
        raw: socket.socket = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        writer.transport.abort()
