"""`kill -9` of the embedded Postgres left the service degraded until somebody restarted it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy_service.storage.postgres.embedded import EmbeddedServer
from policy_service.storage.postgres.embedded_host import EmbeddedServerError
from tests.contract.beside import driver, place_for_clusters
from tests.integration.serving import config, outcome, serving


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="policy-pg-", dir=place_for_clusters()) as name:
        yield Path(name)


async def kill(data: Path) -> int:
    """Kill the server's main process and wait until it is gone."""
    pid = int((data / "postmaster.pid").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}/stat").exists() and ") Z " not in Path(f"/proc/{pid}/stat").read_text():
        await asyncio.sleep(0.01)
    return pid


async def test_a_service_brings_its_killed_server_back(directory: Path) -> None:
    async with serving(config(directory, None)) as (_, stub):
        assert (await stub.ReportOutcome(outcome("a", 503))).durable
        await kill(directory / "postgres")
        async with asyncio.timeout(30):
            while not (await stub.ReportOutcome(outcome("b", 503))).durable:
                await asyncio.sleep(0.1)


async def test_only_a_server_that_is_gone_is_started_again(directory: Path) -> None:
    server = await EmbeddedServer.start(directory)
    try:
        assert not server.revive()
        killed = await kill(server.data)
        assert await asyncio.to_thread(server.revive)
        assert server.pid not in (None, killed)
        async with driver(server.url) as connection:
            assert await connection.fetchval("SELECT 1") == 1
        assert not server.revive()
    finally:
        await asyncio.to_thread(server.close)
    assert not server.revive()
    assert server.pid is None


async def test_a_server_whose_data_is_gone_is_not_replaced_by_an_empty_one(directory: Path) -> None:
    server = await EmbeddedServer.start(directory)
    try:
        await kill(server.data)
        shutil.rmtree(server.data)
        with pytest.raises(EmbeddedServerError, match="is gone"):
            server.revive()
        assert not server.data.exists()
    finally:
        await asyncio.to_thread(server.close)
