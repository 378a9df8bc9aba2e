"""HTTP/1.1 as text: heads and bodies read from a stream, for both ends of the gateway under test.

Only what the kit needs, so that it can also send what no library sends: answers that break off, or are no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

PIECE: Final = 65_536


@dataclass(frozen=True, slots=True)
class Head:
    """Start line and headers, names in lower case."""

    start: str
    headers: tuple[tuple[str, str], ...]

    def get(self, name: str) -> str:
        """First value of a header; empty: none."""
        return next((value for each, value in self.headers if each == name), "")


async def read_head(reader: asyncio.StreamReader) -> Head:
    """Read up to the empty line.

    Raises:
        asyncio.IncompleteReadError: the stream ended before.
    """
    raw = await reader.readuntil(b"\r\n\r\n")
    start, *lines = raw.decode("latin-1").strip().split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return Head(start, tuple((name.strip().lower(), value.strip()) for name, _, value in pairs))


async def read_body(reader: asyncio.StreamReader, head: Head, *, until_end: bool) -> AsyncIterator[bytes]:
    """Pieces of the body as they arrive.

    Args:
        until_end: without a length the body lasts until the stream ends (answers), else it is empty (requests).

    Raises:
        asyncio.IncompleteReadError: it broke off.
    """
    if head.get("transfer-encoding").lower() == "chunked":
        pieces = _chunks(reader)
    elif head.get("content-length"):
        pieces = _counted(reader, int(head.get("content-length")))
    else:
        pieces = _rest(reader) if until_end else _nothing()
    async for piece in pieces:
        yield piece


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while length := int((await _line(reader)).split(b";")[0], 16):
        yield await reader.readexactly(length)
        await _line(reader)
    while await _line(reader):
        pass


async def _line(reader: asyncio.StreamReader) -> bytes:
    return (await reader.readuntil(b"\n")).strip()


async def _counted(reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    while length:
        piece = await reader.read(min(length, PIECE))
        if not piece:
            raise asyncio.IncompleteReadError(b"", length)
        length -= len(piece)
        yield piece


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(PIECE):
        yield piece


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


def encode_head(start: str, headers: list[tuple[str, str]]) -> bytes:
    """A head as bytes, the empty line included."""
    lines = [start, *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1")
