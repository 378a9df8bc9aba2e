"""Counts on both sides agree: what the upstreams answered is what the service heard, request by request."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.envoy.upstreams import Answer
from tests.envoy.world import Gateway, gateway, outcome_of

AT_ONCE = 16
STAY_OPEN = {
    "breaker.api_key.failure_threshold": 1_000,
    "breaker.api_key.degradation_threshold": 1_000,
}


def faulty(seen: Counter[int], chance: float, seed: int) -> Answer:
    """Fails with 500 by chance, and counts what it says."""
    draw = random.Random(seed)

    async def answer(request: web.Request) -> web.StreamResponse:
        status = 500 if draw.random() < chance else 200
        seen[status] += 1
        return web.json_response({"error": {"message": "boom"}} if status == 500 else {"id": "1"}, status=status)

    return answer


async def counted(tmp_path: Path, database_url: str, requests: int) -> None:
    seen: Counter[int] = Counter()
    scripts = {name: [faulty(seen, 0.01, seed)] for seed, name in enumerate(("openai-one", "openai-two"))}
    connections = {name: {"disable_cooling": True} for name in scripts}
    catalogue = {"settings": STAY_OPEN, "connections": connections}
    async with gateway(tmp_path, database_url, scripts, catalogue=catalogue) as world:
        statuses = await drive(world, requests)
        await world.heard(sum(seen.values()), timeout_s=30)
        assert sum(statuses.values()) == requests
        assert Counter(outcome_of(report) for report in world.reports) == seen
        assert statuses[200] == seen[200]
        assert len({(report.decision_token, report.attempt) for report in world.reports}) == len(world.reports)
        assert seen[500] > 0


async def drive(world: Gateway, requests: int) -> Counter[int]:
    """Send requests, a few at once; statuses that clients saw."""
    statuses: Counter[int] = Counter()
    numbers = iter(range(requests))

    async def work(client: aiohttp.ClientSession) -> None:
        for _ in numbers:
            async with client.post(
                f"{world.url}/v1/chat/completions", data=b"{}", headers={"x-policy-route": "chat"}
            ) as a:
                await a.read()
                statuses[a.status] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work(world.client))
    return statuses


async def test_two_thousand_requests_with_faults_are_counted_alike(tmp_path: Path, embedded_url: str) -> None:
    await counted(tmp_path, embedded_url, 2_000)


@pytest.mark.long
async def test_ten_thousand_requests_with_faults_are_counted_alike(tmp_path: Path, embedded_url: str) -> None:
    await counted(tmp_path, embedded_url, 10_000)
