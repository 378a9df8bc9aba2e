"""Who is alive in a fleet of real processes, and what the evidence quorum makes of it (spec/breaker.md section 12)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from policy_service.generated.policy.v1 import admin_pb2
from tests.fleet.fleet import LONG_TIMEOUT_S, Replica, ask, catalogue_file, database, figure, fleet, told

SETTINGS = """settings:
  breaker.quorum.enabled: true
  breaker.quorum.min_replicas: 2
  breaker.quorum.min_connections: 100
  breaker.default.failure_threshold: 2
  breaker.api_key.failure_threshold: 2
"""
GONE_S = 13
"""A signature stands for ten seconds; the others look every two."""


async def health(replica: Replica) -> admin_pb2.GetHealthResponse:
    found: admin_pb2.GetHealthResponse = await replica.admin.GetHealth(admin_pb2.GetHealthRequest(), timeout=5)
    return found


async def until_alive(replica: Replica, names: list[str], within_s: float) -> float:
    """Seconds until the replica lists exactly these."""
    began = time.monotonic()
    while [each.replica for each in (await health(replica)).replicas] != names:
        assert time.monotonic() - began < within_s
        await asyncio.sleep(0.05)
    return time.monotonic() - began


async def opens(replica: Replica, connection: str) -> str:
    """Report a failure; the state of the breaker of the fleet after it."""
    answer = await replica.policy.ReportOutcome(told("acme", connection, 503), timeout=10)
    assert answer.durable
    return next((each.state_text for each in (await health(replica)).breakers if each.key == "acme"), "CLOSED")


@pytest.mark.timeout(LONG_TIMEOUT_S)
async def test_a_killed_replica_is_gone_from_health_and_from_the_quorum(tmp_path: Path) -> None:
    catalogue = catalogue_file(tmp_path, SETTINGS)
    async with database() as where, fleet(tmp_path, where, 2, "--catalogue", str(catalogue)) as (one, two):
        await until_alive(one, ["r0", "r1"], 5)
        await until_alive(two, ["r1", "r0"], 5)
        seen = (await health(one)).replicas
        assert all(each.last_seen_ms < 5_000 and each.version for each in seen)
        assert await opens(one, "a") != "OPEN"
        assert await opens(one, "b") != "OPEN"
        refused = await one.policy.SelectTarget(ask("acme", "z"), timeout=5)
        admitted = await two.policy.SelectTarget(ask("acme", "z"), timeout=5)
        assert (refused.WhichOneof("verdict"), admitted.WhichOneof("verdict")) == ("reject", "dispatch")
        await asyncio.to_thread(two.running.kill)
        figure("liveness.killed_replica_gone_s", round(await until_alive(one, ["r0"], GONE_S), 1))
        assert await opens(one, "c") == "OPEN"


@pytest.mark.timeout(LONG_TIMEOUT_S)
async def test_a_stopped_replica_is_gone_at_the_next_look(tmp_path: Path) -> None:
    async with database() as where, fleet(tmp_path, where, 2) as (one, two):
        await until_alive(one, ["r0", "r1"], 5)
        assert await asyncio.to_thread(two.running.end) == 0
        await until_alive(one, ["r0"], 5)
