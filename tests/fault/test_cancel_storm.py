"""Calls cancelled at random points leave nothing behind: no connection, no task, no permit, no memory.

Short form: twice 1 500 calls. Long form: twice 20 000.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.contract.beside import eventually
from tests.fleet.fleet import (
    LONG_TIMEOUT_S,
    Database,
    Replica,
    ask,
    catalogue_file,
    database,
    figure,
    fleet,
    form,
    settings_of_every_class,
    told,
)
from tests.integration.serving import config, serving

CALLS = form(1_500, 20_000)
AT_A_TIME = 25
LONGEST_S = 0.1
RESET_MS = 1_000
NUMBERS = {"failure_threshold": 1, "reset_timeout_ms": RESET_MS, "max_backoff_multiplier": 1}
CATALOGUE = settings_of_every_class(NUMBERS)
PROVIDERS = 20
LARGEST_GROWTH = 1.05


def call(policy: Any, number: int, rng: random.Random) -> Any:
    """A selection of a healthy provider, one that needs a probe permit, or the report of a failure."""
    provider = f"half-open{rng.randrange(PROVIDERS)}"
    return rng.choice(
        (
            lambda: policy.SelectTarget(ask("healthy", "a", "b")),
            lambda: policy.SelectTarget(ask(provider, "spare")),
            lambda: policy.ReportOutcome(told("failing", f"c{number % 500}", 503)),
        )
    )()


async def one(policy: Any, number: int, rng: random.Random, seen: Counter[str]) -> None:
    """One call, cancelled after a random time unless it ends before."""
    running = call(policy, number, rng)
    asyncio.get_running_loop().call_later(rng.uniform(0, LONGEST_S), running.cancel)
    try:
        await running
        seen["answered"] += 1
    except asyncio.CancelledError:
        seen["cancelled"] += 1
    except grpc.aio.AioRpcError as error:
        seen[error.code().name] += 1


async def storm(policy: Any, seed: int) -> Counter[str]:
    rng, seen = random.Random(seed), Counter[str]()
    numbers = iter(range(CALLS))

    async def caller() -> None:
        for number in numbers:
            await one(policy, number, rng, seen)

    await asyncio.gather(*(caller() for _ in range(AT_A_TIME)))
    return seen


async def half_open(policy: Any) -> None:
    """Breakers that admit probes from now on."""
    for n in range(PROVIDERS):
        await policy.ReportOutcome(told(f"half-open{n}", "c", 503), timeout=10)
    await asyncio.sleep(RESET_MS / 1000 + 0.1)


async def connections_of(where: Any, name: str) -> int:
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1"
    return int(await where.fetchval(query, f"policy-service {name}"))


async def live_permits(connection: Any) -> int:
    """Probe permits that hold a slot now."""
    query = """SELECT count(*) FROM breaker, jsonb_array_elements(permits) AS permit
      WHERE NOT (permit->>'reclaimed')::bool
      AND (permit->>'expires_at')::bigint > extract(epoch FROM clock_timestamp()) * 1000"""
    return int(await connection.fetchval(query))


@pytest.mark.timeout(LONG_TIMEOUT_S)
async def test_two_storms_of_cancelled_calls_leave_connections_permits_and_memory_as_they_were(tmp_path: Path) -> None:
    flags = ("--catalogue", str(catalogue_file(tmp_path, CATALOGUE)))
    async with database() as where, where.beside() as connection, fleet(tmp_path, where, 1, *flags) as (replica,):
        first = await storm_and_memory(replica, connection, 1)
        open_then = await connections_of(connection, replica.name)
        second = await storm_and_memory(replica, connection, 2)
        open_now = await connections_of(connection, replica.name)
    figure("cancel_storm.connections", f"{open_then} then {open_now}")
    figure("cancel_storm.rss_mib", f"{first >> 20} then {second >> 20}, x{second / first:.3f}")
    assert open_now <= max(open_then, 9)
    assert second <= first * LARGEST_GROWTH


async def storm_and_memory(replica: Replica, connection: Any, seed: int) -> int:
    await half_open(replica.policy)
    seen = await storm(replica.policy, seed)
    figure(f"cancel_storm.outcomes_{seed}", dict(seen))
    assert set(seen) == {"answered", "cancelled"}
    assert min(seen.values()) > CALLS // 50

    async def no_permit_is_held() -> bool:
        return not await live_permits(connection)

    await eventually(no_permit_is_held)
    return int(psutil.Process(replica.pid).memory_info().rss)


@pytest.mark.timeout(LONG_TIMEOUT_S)
async def test_a_storm_of_cancelled_calls_leaks_no_task(tmp_path: Path) -> None:
    path = catalogue_file(tmp_path, CATALOGUE)
    async with database() as where, serving(settings_of(where, tmp_path, path)) as (service, policy):
        await half_open(policy)
        await storm_of(policy, 200)
        tasks_then = await tasks_at_rest()
        await storm_of(policy, form(800, 5_000))
        tasks_now = await tasks_at_rest()
        assert service.replica.commit.queued == 0
    figure("cancel_storm.tasks", f"{tasks_then} then {tasks_now}")
    assert tasks_now <= tasks_then


def settings_of(where: Database, place: Path, catalogue: Path) -> Any:
    return config(place, where.plain_url, catalogue=str(catalogue))


async def storm_of(policy: Any, calls: int) -> None:
    rng, seen = random.Random(calls), Counter[str]()
    for begun in range(0, calls, AT_A_TIME):
        await asyncio.gather(*(one(policy, begun + n, rng, seen) for n in range(AT_A_TIME)))


async def tasks_at_rest() -> int:
    """Tasks of this process once what runs in the background has ended; the smallest number of a second."""
    least = len(asyncio.all_tasks())
    for _ in range(20):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)
        least = min(least, len(asyncio.all_tasks()))
    return least
