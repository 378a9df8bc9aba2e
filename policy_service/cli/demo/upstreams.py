"""The upstreams: one tiny HTTP/1.1 server a connection on loopback, all following the script."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field

from policy_service.cli.demo.script import CONNECTIONS, Moment, Pace, moment

_LINGER_NOT = struct.pack("ii", 1, 0)
_HEAD_LIMIT_S = 5.0


@dataclass(slots=True)
class Tally:
    """What one upstream saw. `wasted`: calls that came in after this trouble had already been shown to a caller."""

    calls: int = 0
    troubled: int = 0
    wasted: int = 0


@dataclass(slots=True)
class Upstreams:
    """All upstreams of one gateway. Both gateways have their own, so that neither changes what the other meets."""

    pace: Pace
    started: float = 0.0
    addresses: dict[str, int] = field(default_factory=dict)
    """Connection to loopback port."""
    tallies: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in CONNECTIONS})
    _shown: set[tuple[str, int]] = field(default_factory=set)
    _servers: list[asyncio.Server] = field(default_factory=list)

    async def start(self) -> None:
        """Listen on free loopback ports."""
        for connection in CONNECTIONS:
            server = await asyncio.start_server(_Answering(self, connection), "127.0.0.1", 0)
            self._servers.append(server)
            self.addresses[connection] = server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening."""
        for server in self._servers:
            server.close()

    def now(self, connection: str) -> Moment:
        """What the connection does at this instant; well before the script starts."""
        return moment(connection, time.monotonic() - self.started, self.pace) if self.started else Moment()

    def count(self, connection: str, found: Moment) -> None:
        """Count a call that has just come in."""
        tally = self.tallies[connection]
        tally.calls += 1
        tally.troubled += found.is_trouble
        tally.wasted += (connection, found.phase) in self._shown

    def show(self, connection: str, found: Moment) -> None:
        """A caller has the answer, or has given up waiting: from here on a gateway could know."""
        if found.is_trouble:
            self._shown.add((connection, found.phase))

    @property
    def wasted(self) -> int:
        """Calls to blocked targets, over all connections."""
        return sum(tally.wasted for tally in self.tallies.values())

    @property
    def calls(self) -> int:
        """All calls."""
        return sum(tally.calls for tally in self.tallies.values())


@dataclass(slots=True)
class _Answering:
    upstreams: Upstreams
    connection: str

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(_HEAD_LIMIT_S):
                await reader.readuntil(b"\r\n\r\n")
            await self._answer(reader, writer)
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found = self.upstreams.now(self.connection)
        self.upstreams.count(self.connection, found)
        if found.behaviour.is_slow:
            await _until_gone(reader, self.upstreams.pace.slow_answer_s)
        if found.behaviour.status == 0:
            _reset(writer)
        else:
            writer.write(_response(found))
            await writer.drain()
        self.upstreams.show(self.connection, found)


async def _until_gone(reader: asyncio.StreamReader, delay_s: float) -> None:
    """Wait for `delay_s`, or less where the caller hangs up."""
    with suppress(TimeoutError):
        async with asyncio.timeout(delay_s):
            await reader.read(1)


def _reset(writer: asyncio.StreamWriter) -> None:
    """End the connection with RST instead of FIN."""
    raw: socket.socket = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    writer.transport.abort()


def _response(found: Moment) -> bytes:
    body = found.behaviour.body.encode()
    lines = [f"HTTP/1.1 {found.behaviour.status} Scripted", "content-type: application/json"]
    if found.behaviour.says_retry_after:
        lines.append(f"retry-after: {found.retry_after_s}")
    lines += [f"content-length: {len(body)}", "connection: close", "", ""]
    return "\r\n".join(lines).encode() + body
