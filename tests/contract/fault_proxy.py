"""A proxy in front of Postgres with named faults, listening on a Unix socket of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from sqlalchemy import make_url

SOCKET_NAME = ".s.PGSQL.5432"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Fault(Enum):
    """What happens to the next COMMIT."""

    LOSE_COMMIT_REPLY = auto()
    """The server commits, its answer never arrives."""
    LOSE_COMMIT = auto()
    """The server never hears it."""


@dataclass(slots=True)
class FaultProxy:
    """Proxy of one server; `faults` are consumed one a COMMIT."""

    upstream: str
    directory: Path
    faults: list[Fault] = field(default_factory=list)
    seen: list[Fault] = field(default_factory=list)

    @property
    def url(self) -> str:
        """URL of the same database by way of the proxy."""
        parsed = make_url(self.upstream).set(host=None, port=None, query={"host": str(self.directory)})
        return parsed.render_as_string(hide_password=False)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[FaultProxy]:
        """Serve while in the context."""
        server = await asyncio.start_unix_server(self._serve, str(self.directory / SOCKET_NAME))
        try:
            yield self
        finally:
            server.close()

    async def _open_upstream(self) -> Stream:
        parsed = make_url(self.upstream)
        place = parsed.query.get("host")
        if place:
            return await asyncio.open_unix_connection(f"{place}/{SOCKET_NAME}")
        return await asyncio.open_connection(parsed.host, parsed.port or 5432)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        above, below = await self._open_upstream(), (reader, writer)
        answers = asyncio.create_task(_pump(above[0], writer))
        with contextlib.suppress(ConnectionError):
            await self._forward(below, above, answers)
        answers.cancel()
        for _, each in (above, below):
            each.close()

    async def _forward(self, below: Stream, above: Stream, answers: asyncio.Task[None]) -> None:
        while data := await below[0].read(65536):
            fault = self.faults.pop(0) if self.faults and b"COMMIT;" in data else None
            if fault is None:
                above[1].write(data)
                continue
            self.seen.append(fault)
            answers.cancel()
            await asyncio.wait({answers})
            if fault is Fault.LOSE_COMMIT_REPLY:
                above[1].write(data)
                await above[0].read(65536)
            return


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()
