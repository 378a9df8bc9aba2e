"""One Envoy before two processes of the door: both stages of a request meet in one, and one may die under traffic."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.envoy.doors import in_hand, two_doors
from tests.envoy.test_counts import AT_ONCE, STAY_OPEN, drive, faulty
from tests.envoy.upstreams import Answer, hangs, says, streams, waits_for
from tests.envoy.world import Gateway, outcome_of

NAMES = ("openai-one", "mistral-two", "groq-three")
OUTPUT = '{"choices":[{"delta":{"content":"hello"}}]}'


def hot(*names: str, **fields: Any) -> dict[str, Any]:
    """Connections that nothing takes out."""
    return {"settings": dict(STAY_OPEN), "connections": {name: {"disable_cooling": True, **fields} for name in names}}


def told(world: Gateway) -> Counter[tuple[str, object, int]]:
    """(connection, outcome, attempt) that the service heard."""
    return Counter((each.target.connection, outcome_of(each), each.attempt) for each in world.reports)


async def heard(world: Gateway, upstreams: Counter[int]) -> None:
    """Return once the service has heard what the upstreams said; fails if it hears anything else."""
    async with asyncio.timeout(10):
        while len(world.reports) < sum(upstreams.values()):
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)
    assert Counter(outcome_of(report) for report in world.reports) == upstreams


async def post(world: Gateway, **headers: str) -> int:
    async with world.post(headers=headers) as answer:
        await answer.read()
        status: int = answer.status
        return status


async def test_a_request_fails_over_and_each_attempt_is_heard_once(tmp_path: Path, embedded_url: str) -> None:
    scripts: dict[str, list[Answer]] = {NAMES[0]: [says(503)], NAMES[1]: [says(429)], NAMES[2]: [says(200)]}
    async with two_doors(tmp_path, embedded_url, scripts, catalogue=hot(*NAMES)) as (world, _):
        assert [await post(world) for _ in range(10)] == [200] * 10
        await world.heard(30)
        assert told(world) == {(NAMES[0], 503, 0): 10, (NAMES[1], 429, 1): 10, (NAMES[2], 200, 2): 10}


@pytest.mark.parametrize("capped", [{}, {"max_concurrent": AT_ONCE}], ids=["free", "capped"])
async def test_counts_agree_and_every_slot_comes_back(
    tmp_path: Path, embedded_url: str, capped: dict[str, Any]
) -> None:
    seen: Counter[int] = Counter()
    scripts = {name: [faulty(seen, 0.05, seed)] for seed, name in enumerate(NAMES)}
    catalogue = hot(*NAMES, **capped)
    async with two_doors(tmp_path, embedded_url, scripts, catalogue=catalogue) as (world, _):
        statuses = await drive(world, 100 if capped else 400)
        await heard(world, seen)
        assert seen[500] > 0
        assert statuses[200] == seen[200] > 0
        await world.free_of_permits(20)


@pytest.mark.parametrize("headers", [{}, {"accept": "text/event-stream"}], ids=["plain", "stream"])
async def test_clients_that_leave_free_their_slots_and_are_heard_as_cancelled(
    tmp_path: Path, embedded_url: str, headers: dict[str, str]
) -> None:
    upstream: Answer = streams(*[OUTPUT] * 100, pause_s=0.1) if headers else hangs(30)
    catalogue = hot(NAMES[0], max_concurrent=4)
    async with two_doors(tmp_path, embedded_url, {NAMES[0]: [upstream]}, catalogue=catalogue) as (world, _):
        calls = [asyncio.create_task(post(world, **headers)) for _ in range(4)]
        async with asyncio.timeout(10):
            while len(world.upstreams[NAMES[0]].requests) < 4:
                await asyncio.sleep(0.05)
        assert await world.permits() == 4
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await world.free_of_permits()
        await world.heard(4)
        assert told(world) == {(NAMES[0], "client_cancelled", 0): 4}


async def test_a_door_that_is_killed_under_traffic_costs_what_it_had_in_hand_and_its_slots_for_their_life(
    tmp_path: Path, embedded_url: str
) -> None:
    catalogue = hot(NAMES[0], max_concurrent=8)
    catalogue["settings"]["concurrency.permit_ttl_ms"] = 5_000
    go_on = asyncio.Event()
    scripts: dict[str, list[Answer]] = {NAMES[0]: [waits_for(go_on)]}
    async with two_doors(tmp_path, embedded_url, scripts, catalogue=catalogue) as (world, doors):
        calls = [asyncio.create_task(post(world)) for _ in range(8)]
        async with asyncio.timeout(10):
            while len(world.upstreams[NAMES[0]].requests) < 8:
                await asyncio.sleep(0.02)
        held = await in_hand(world, doors)
        assert sum(held.values()) == 8
        busiest = max(doors, key=lambda door: held[door.place])
        busiest.process.kill()
        lost = held[busiest.place]
        async with asyncio.timeout(3):
            while sum(call.done() for call in calls) < lost:
                await asyncio.sleep(0.02)
        go_on.set()
        statuses = Counter(await asyncio.gather(*calls))
        assert statuses[503] == lost
        assert statuses[200] == 8 - lost
        async with asyncio.timeout(2):
            while await world.permits() > lost:
                await asyncio.sleep(0.02)
        assert await world.permits() == lost, "those of the killed one are held"
        assert await served_at_once(world) < 8
        async with asyncio.timeout(15):  # the life of a slot is 5 s
            while await served_at_once(world) < 8:
                await asyncio.sleep(0.1)


async def served_at_once(world: Gateway) -> int:
    """How many of eight simultaneous requests get a slot."""
    world.upstreams[NAMES[0]].script[:] = [hangs(0.5)]
    statuses = await asyncio.gather(*(post(world) for _ in range(8)))
    return Counter(statuses)[200]
