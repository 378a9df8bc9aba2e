"""A client that loads an HTTP/1.1 server: one request over and over on kept connections, as cheap as Python can."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

from policy_service.cli.bench.load import Sample
from policy_service.cli.bench.processes import BenchError

_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_GOOD = b"HTTP/1.1 200 "


class _Caller(asyncio.Protocol):
    """One connection: the next request leaves when the answer to the one before is in."""

    def __init__(self, request: bytes, sample: Sample, end: float) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._sample = sample
        self._end = end
        self._buffer = b""
        self._wanted = 0
        self._sent = 0.0
        self._transport: Any

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._buffer, self._wanted, self._sent = b"", 0, time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._wanted and (head := self._buffer.find(b"\r\n\r\n")) > 0:
            self._read_head(head)
        if self._wanted and len(self._buffer) >= self._wanted:
            self._answered()

    def _read_head(self, head: int) -> None:
        found = _LENGTH.search(self._buffer, 0, head + 2)
        if found is None or not self._buffer.startswith(_GOOD):
            self._fail(self._buffer[:200].decode(errors="replace"))
        else:
            self._wanted = head + 4 + int(found[1])

    def _answered(self) -> None:
        now = time.perf_counter()
        self._sample.latencies_us.append((now - self._sent) * 1e6)
        if now < self._end:
            self._send()
        else:
            self._close()

    def _fail(self, text: str) -> None:
        if not self.done.done():
            self.done.set_exception(BenchError(f"not answered 200 with a length: {text}"))
        self._transport.close()

    def _close(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(BenchError(f"the connection was lost: {error}"))


async def load(address: str, request: bytes, connections: int, seconds: float) -> Sample:
    """Load a server for that long.

    Raises:
        BenchError: an answer is no 200, or a connection is lost.
    """
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    sample = Sample(0, 0.0)
    started = time.perf_counter()
    made = [
        await loop.create_connection(lambda: _Caller(request, sample, started + seconds), host, int(port))
        for _ in range(connections)
    ]
    await asyncio.gather(*(protocol.done for _, protocol in made))
    sample.calls, sample.seconds = len(sample.latencies_us), time.perf_counter() - started
    return sample


def post(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """A request as bytes."""
    lines = [f"POST {path} HTTP/1.1", "host: bench", f"content-length: {len(body)}", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
