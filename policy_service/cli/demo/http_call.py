"""One HTTP/1.1 call to a loopback upstream, with what a gateway wants to know about it afterwards."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

_REQUEST: Final = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: upstream\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class HttpResult:
    """What came back: a status with headers and body, or the kind of a network error as the contract names it."""

    latency_ms: int
    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    network_error: str = ""

    @property
    def is_success(self) -> bool:
        """A 2xx answer came in full."""
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """For the display."""
        return str(self.status) if self.status else self.network_error.lower().replace("_", " ")


async def call(port: int, timeout_s: float) -> HttpResult:
    """Make the call; every failure is a result."""
    started = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _exchange(port)
        status, headers, body = _parse(raw)
    except TimeoutError:
        return HttpResult(_since_ms(started), network_error="READ_TIMEOUT")
    except ConnectionRefusedError:
        return HttpResult(_since_ms(started), network_error="CONNECT_REFUSED")
    except OSError:
        return HttpResult(_since_ms(started), network_error="CONNECTION_RESET")
    except ValueError:
        return HttpResult(_since_ms(started), network_error="PROTOCOL_ERROR")
    return HttpResult(_since_ms(started), status, headers, body)


async def _exchange(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_REQUEST)
        return await reader.read(-1)
    finally:
        writer.close()


def _parse(raw: bytes) -> tuple[int, tuple[tuple[str, str], ...], bytes]:
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    if not first:
        raise ConnectionResetError("closed without an answer")
    pairs = (line.partition(":") for line in lines)
    return int(first.split(" ")[1]), tuple((name.strip(), value.strip()) for name, _, value in pairs), body


def _since_ms(started: float) -> int:
    return round((time.monotonic() - started) * 1000)
