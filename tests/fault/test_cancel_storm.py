"""Calls cancelled at random points leave nothing behind: no connection, no task, no permit, no place in line, no lease,
no memory. Selections with and without a probe, at a cap, acquires of permits and leases, and reports.

Short form: twice 1 500 calls. Long form: twice 20 000.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from policy_service.generated.policy.v1 import lease_pb2, permit_pb2, policy_pb2
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
FIRST_S = 0.1
"""Within this time a call is cancelled, to begin with; `Patience` then follows what the machine can do."""
RESET_MS = 1_000
NUMBERS = {"failure_threshold": 1, "reset_timeout_ms": RESET_MS, "max_backoff_multiplier": 1}
PERMIT_TTL_MS = 3_000
"""A grant whose answer was on its way when the client hung up ends by this; every other one at once."""
LEASE_TTL_MS = 1_000
CAPPED = ("narrow", "wide")
LEASED = tuple(f"own{n}" for n in range(4))
CATALOGUE = f"""
connections:
  - {{id: narrow, provider: capped, max_concurrent: 1}}
  - {{id: wide, provider: capped, max_concurrent: 4}}
{"".join(f"  - {{id: {name}, provider: leased}}" + chr(10) for name in LEASED)}
callers:
  - id: agent
    key_sha256: {"a1" * 32}
    scopes: ["lease:exclusive"]
    allowed_connections: [{", ".join(LEASED)}]
{settings_of_every_class(NUMBERS, more={"concurrency": {"permit_ttl_ms": PERMIT_TTL_MS}})}"""
PROVIDERS = 20
LEAST_SHARE = 20
"""At least one call in so many is answered, and one cancelled."""
LARGEST_GROWTH = 1.05
MOST_CONNECTIONS = 11
"""`store.pool_size`, two that follow the others, one that listens; each is opened when it is first needed."""


class Patience:
    """Longest life of a call by its kind: shorter with each that is answered, longer with each that is cancelled, so
    that about a third is answered on a machine of any speed, and the others are cut off anywhere on their way."""

    def __init__(self) -> None:
        self._longest_s: dict[str, float] = {}

    def longest_s(self, kind: str) -> float:
        return self._longest_s.get(kind, FIRST_S)

    def note(self, kind: str, *, is_answered: bool) -> None:
        changed = self.longest_s(kind) * (0.96 if is_answered else 1.02)
        self._longest_s[kind] = min(5.0, max(0.001, changed))


def kinds(policy: Any, number: int, rng: random.Random) -> dict[str, Callable[[], Any]]:
    """One call of each kind."""
    provider = f"half-open{rng.randrange(PROVIDERS)}"
    gates = [permit_pb2.Gate(key=f"storm{rng.randrange(3)}", limit=2)]
    owner = "vlo_" + f"{rng.randrange(8)}".rjust(43, "x")
    return {
        "healthy": lambda: policy.SelectTarget(ask("healthy", "a", "b")),
        "probe": lambda: policy.SelectTarget(ask(provider, "spare")),
        "report": lambda: policy.ReportOutcome(told("failing", f"c{number % 500}", 503)),
        "capped": lambda: policy.SelectTarget(
            ask("capped", rng.choice(CAPPED), allow_wait=True, request_id=rng.choice(("", f"storm-{number}")))
        ),
        "permit": lambda: policy.AcquirePermit(permit_pb2.AcquirePermitRequest(gates=gates, wait_budget_ms=200)),
        "lease": lambda: policy.AcquireLease(
            lease_pb2.AcquireLeaseRequest(caller_id="agent", owner=owner, model="m", ttl_ms=LEASE_TTL_MS)
        ),
    }


async def one(policy: Any, number: int, rng: random.Random, seen: Counter[str], patience: Patience) -> None:
    """One call, cancelled after a random time unless it ends before."""
    name, start = rng.choice(sorted(kinds(policy, number, rng).items()))
    running = start()
    asyncio.get_running_loop().call_later(rng.uniform(0, patience.longest_s(name)), running.cancel)
    try:
        answer = await running
        patience.note(name, is_answered=True)
        seen["answered"] += 1
        seen[f"answered {name}"] += 1
        await end(policy, answer)
    except asyncio.CancelledError:
        patience.note(name, is_answered=False)
        seen["cancelled"] += 1
    except grpc.aio.AioRpcError as error:
        # Two acquires of one owner race: the lease that the slower one saw has ended.
        is_answer = (name, error.code()) == ("lease", grpc.StatusCode.FAILED_PRECONDITION)
        seen["answered" if is_answer else error.code().name] += 1


async def end(policy: Any, answer: Any) -> None:
    """The caller gives back what it was granted."""
    if isinstance(answer, policy_pb2.SelectTargetResponse) and answer.dispatch.permits:
        await policy.ReleasePermit(permit_pb2.ReleasePermitRequest(decision_token=answer.decision_token), timeout=30)
    if isinstance(answer, permit_pb2.AcquirePermitResponse) and answer.granted.permits:
        ids = {permit.permit_id for permit in answer.granted.permits}
        await policy.ReleasePermit(permit_pb2.ReleasePermitRequest(permit_ids=ids), timeout=30)


async def storm(policy: Any, seed: int) -> Counter[str]:
    rng, seen, patience = random.Random(seed), Counter[str](), Patience()
    numbers = iter(range(CALLS))

    async def caller() -> None:
        for number in numbers:
            await one(policy, number, rng, seen, patience)

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


async def left_over(connection: Any) -> dict[str, int]:
    """What calls of the storm still hold."""
    now = "extract(epoch FROM clock_timestamp()) * 1000"
    return {
        "probes": await live_permits(connection),
        "permits": await connection.fetchval("SELECT count(*) FROM permit WHERE state = 'HELD'"),
        "in line": await connection.fetchval("SELECT count(*) FROM permit WHERE state = 'WAITING'"),
        "leases": await connection.fetchval(
            f"SELECT count(*) FROM lease WHERE state = 'ACTIVE' AND expires_at > {now}"
        ),
    }


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
    assert open_now <= max(open_then, MOST_CONNECTIONS)
    assert second <= first * LARGEST_GROWTH


async def storm_and_memory(replica: Replica, connection: Any, seed: int) -> int:
    await half_open(replica.policy)
    seen = await storm(replica.policy, seed)
    figure(f"cancel_storm.outcomes_{seed}", dict(seen))
    ends = {name for name in seen if not name.startswith("answered ")}
    assert ends == {"answered", "cancelled"}
    assert min(seen["answered"], seen["cancelled"]) > CALLS // LEAST_SHARE
    assert all(seen[f"answered {name}"] for name in kinds(replica.policy, 0, random.Random(0)))
    began = time.monotonic()
    figure(f"cancel_storm.left_over_{seed}", await left_over(connection))

    async def nothing_is_left() -> bool:
        return not any((await left_over(connection)).values())

    await eventually(nothing_is_left, 20)
    figure(f"cancel_storm.clear_after_s_{seed}", round(time.monotonic() - began, 1))
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
    rng, seen, patience = random.Random(calls), Counter[str](), Patience()
    for begun in range(0, calls, AT_A_TIME):
        await asyncio.gather(*(one(policy, begun + n, rng, seen, patience) for n in range(AT_A_TIME)))


async def tasks_at_rest() -> int:
    """Tasks of this process once what runs in the background has ended; the smallest number of a second."""
    least = len(asyncio.all_tasks())
    for _ in range(20):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)
        least = min(least, len(asyncio.all_tasks()))
    return least
