"""The service is killed under traffic: as configured, Envoy passes traffic or refuses it, and comes back by itself."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import yaml
from policy_envoy.configuration import Choices, FailMode, bootstrap

from policy_service.settings.catalogue_file import load_catalogue
from tests.envoy.upstreams import Upstream, hangs, running, says
from tests.envoy.world import catalogue_of, envoy, free_port
from tests.integration.serving import Process, process, ready

ROUTED = {"x-policy-route": "chat"}
SLOTS = 4
LIFE_MS = 8_000
"""Of a slot that is not renewed."""


@dataclass
class Killable:
    """A gateway whose service is a process that can be killed and started again."""

    url: str
    port: int
    file: Path
    database: str
    directory: Path
    upstreams: dict[str, Upstream]
    stack: AsyncExitStack

    async def start(self) -> Process:
        """The service, on its port."""
        patient = ("--set", "store.select_ms=2000")  # slots are asked for on a busy machine
        flags = ("--envoy", "--catalogue", str(self.file), "--database-url", self.database, *patient)
        child = self.stack.enter_context(process(self.directory, self.port, *flags))
        await ready(child.address)
        return child

    async def call(self, client: aiohttp.ClientSession) -> int:
        """Status of one request."""
        async with client.post(f"{self.url}/v1/chat/completions", json={"model": "x"}, headers=ROUTED) as answer:
            await answer.read()
            return answer.status


@asynccontextmanager
async def killable(directory: Path, database_url: str, fail_mode: FailMode) -> AsyncIterator[Killable]:
    scripts = {"openai-capped": [says(200)], "mistral-two": [says(200)]}
    async with running(scripts) as upstreams, AsyncExitStack() as stack:
        short = {"concurrency.permit_ttl_ms": LIFE_MS}
        document = yaml.safe_dump(catalogue_of(upstreams, {"openai-capped": {"max_concurrent": SLOTS}}, short))
        file = directory / "catalogue.yaml"
        file.write_text(document)
        port = free_port()
        chosen = Choices(
            f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", f"127.0.0.1:{port}", fail_mode=fail_mode
        )
        data = bootstrap(load_catalogue(document, source="test").catalogue, chosen)
        database = database_url.replace("+asyncpg", "")
        world = Killable(f"http://{chosen.listen}", port, file, database, directory, upstreams, stack)
        async with envoy(directory, data, chosen.admin):
            yield world


async def until_served_by(world: Killable, client: aiohttp.ClientSession, connection: str) -> None:
    """Return once requests are answered 200 by a connection again."""
    async with asyncio.timeout(20):
        while True:
            before = len(world.upstreams[connection].requests)
            if await world.call(client) == 200 and len(world.upstreams[connection].requests) > before:
                return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(("fail_mode", "allowed"), [(FailMode.OPEN, {200}), (FailMode.CLOSED, {200, 503})])
async def test_a_killed_service_is_survived_as_configured_and_found_again(
    tmp_path: Path, embedded_url: str, fail_mode: FailMode, allowed: set[int]
) -> None:
    async with killable(tmp_path, embedded_url, fail_mode) as world, aiohttp.ClientSession() as client:
        service = await world.start()
        await until_served_by(world, client, "openai-capped")
        statuses: Counter[int] = Counter()
        traffic = asyncio.create_task(keep_calling(world, client, statuses))
        await asyncio.sleep(0.3)
        service.kill()
        await asyncio.sleep(0.5)
        capped, before = len(world.upstreams["openai-capped"].requests), statuses.copy()
        await asyncio.sleep(1.0)
        away = statuses - before
        assert set(away) == ({200} if fail_mode is FailMode.OPEN else {503})
        assert len(world.upstreams["openai-capped"].requests) == capped, (
            "a capped account is nobody's without the service"
        )
        await world.start()
        await until_served_by(world, client, "openai-capped")
        traffic.cancel()
        assert set(statuses) <= allowed


async def keep_calling(world: Killable, client: aiohttp.ClientSession, statuses: Counter[int]) -> None:
    """Traffic, one request at a time."""
    while True:
        statuses[await world.call(client)] += 1
        await asyncio.sleep(0.01)


async def test_the_slots_of_a_killed_service_are_free_again_when_their_life_is_over(
    tmp_path: Path, embedded_url: str
) -> None:
    async with killable(tmp_path, embedded_url, FailMode.CLOSED) as world, aiohttp.ClientSession() as client:
        service = await world.start()
        capped = world.upstreams["openai-capped"]
        capped.script[:] = [hangs(30)]
        calls = [asyncio.create_task(world.call(client)) for _ in range(SLOTS)]
        async with asyncio.timeout(10):
            while len(capped.requests) < SLOTS:
                await asyncio.sleep(0.02)
        renewed_at = time.monotonic()
        service.kill()
        assert await asyncio.gather(*calls) == [503] * SLOTS
        capped.script[:] = [says(200)]
        await world.start()
        assert await world.call(client) == 200
        if time.monotonic() - renewed_at < LIFE_MS / 1000 / 2:
            assert len(capped.requests) == SLOTS, "they are held still"
        await until_served_by(world, client, "openai-capped")
        capped.script[:] = [hangs(0.5)]
        before = len(capped.requests)
        assert await asyncio.gather(*(world.call(client) for _ in range(SLOTS))) == [200] * SLOTS
        assert len(capped.requests) - before == SLOTS, "every one of them"


async def test_a_service_that_never_ran_is_no_reason_to_stop_traffic_in_fail_open(
    tmp_path: Path, embedded_url: str
) -> None:
    async with killable(tmp_path, embedded_url, FailMode.OPEN) as world, aiohttp.ClientSession() as client:
        assert await world.call(client) == 200
        headers = {name.lower() for name in world.upstreams["mistral-two"].requests[0].headers}
        assert not [name for name in headers if name.startswith("x-policy")]
