"""Three replicas are restarted one after the other under load; a client that honours health and GOAWAY sees nothing.

Short form: 3 restarts. Long form: 20 rounds of 3.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest

from policy_service.generated.policy.v1 import policy_pb2_grpc
from tests.fleet.fleet import LONG_TIMEOUT_S, Replica, ask, database, figure, fleet, form, told
from tests.integration.test_grpc_drain import HEALTH_CHECKS, RETRIES

REPLICAS = 3
ROUNDS = form(1, 20)
CALLERS = 8


def client_of(replicas: list[Replica]) -> grpc.aio.Channel:
    """Round robin over the replicas with health checks and the retries that the documentation names."""
    service_config = json.dumps(RETRIES | HEALTH_CHECKS)
    addresses = ",".join(replica.address for replica in replicas)
    options = [("grpc.service_config", service_config), ("grpc.max_reconnect_backoff_ms", 500)]
    return grpc.aio.insecure_channel(f"ipv4:{addresses}", options=options)


class Callers:
    """Calls without a pause, each followed by its report."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.calls = 0
        self.errors: Counter[str] = Counter()
        self.slowest_s = 0.0
        self.is_over = asyncio.Event()

    async def call_on(self, number: int) -> None:
        while not self.is_over.is_set():
            began = time.monotonic()
            try:
                await self._call(number)
            except grpc.aio.AioRpcError as error:
                self.errors[f"{error.code().name}: {error.details()}"] += 1
            self.calls += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            await asyncio.sleep(0.01)

    async def _call(self, number: int) -> None:
        answer = await self._policy.SelectTarget(ask("healthy", "a", "b"), timeout=20, wait_for_ready=True)
        failed = self.calls % 10 == 0
        connection = answer.dispatch.target.connection
        report = told("healthy", connection, 429 if failed else 200, token=answer.decision_token)
        await self._policy.ReportOutcome(report, timeout=20, wait_for_ready=True)


@pytest.mark.timeout(LONG_TIMEOUT_S)
async def test_a_rolling_restart_costs_a_client_that_honours_health_and_goaway_no_error(tmp_path: Path) -> None:
    async with database() as where, fleet(tmp_path, where, REPLICAS) as replicas, client_of(replicas) as channel:
        callers = Callers(policy_pb2_grpc.PolicyServiceStub(channel))
        running = [asyncio.create_task(callers.call_on(n)) for n in range(CALLERS)]
        for _ in range(ROUNDS):
            for replica in replicas:
                assert await asyncio.to_thread(replica.running.end) == 0
                replica.launch()
                await replica.ready()
                await asyncio.sleep(0.5)
        callers.is_over.set()
        await asyncio.gather(*running)
    figure("rolling_restart.restarts", ROUNDS * REPLICAS)
    figure("rolling_restart.calls", callers.calls)
    figure("rolling_restart.slowest_call_s", round(callers.slowest_s, 2))
    figure("rolling_restart.errors", sum(callers.errors.values()))
    assert callers.calls > 100
    assert callers.errors == {}
