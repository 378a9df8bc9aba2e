"""What tests of the store have at hand: a place for clusters, a plain connection, waiting for what others do."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
from sqlalchemy import make_url

SHARED_MEMORY = "/dev/shm"
ROOM_NEEDED = 2 << 30


def place_for_clusters() -> str | None:
    """Shared memory where there is plenty, else the usual place for temporary files: tests need no disk."""
    try:
        return SHARED_MEMORY if shutil.disk_usage(SHARED_MEMORY).free > ROOM_NEEDED else None
    except OSError:
        return None


@asynccontextmanager
async def driver(url: str) -> AsyncIterator[Any]:
    """A plain connection beside the store."""
    parsed = make_url(url)
    place = {"host": parsed.query.get("host") or parsed.host, "port": parsed.port or 5432}
    connection = await asyncpg.connect(
        user=parsed.username, password=parsed.password, database=parsed.database, **place
    )
    try:
        yield connection
    finally:
        await connection.close()


async def eventually(condition: Callable[[], Awaitable[object]], patience_s: float = 10) -> None:
    """Until the condition holds; fails when it does not come to hold."""
    ends_at = time.monotonic() + patience_s
    while not await condition():
        assert time.monotonic() < ends_at, "the condition did not come to hold"
        await asyncio.sleep(0.005)
