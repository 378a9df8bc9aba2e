"""A task that had lived through a cancel before was told that it was cancelled when the service hung, and was not
served; and somebody in line was thrown out when one of the looks of half a minute took longer than 15 ms.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from policy_client import AsyncPolicyClient, Connection, pool, wire_async
from policy_client.wire import HEALTH_MS
from policy_client.wire_async import GrpcAsyncRpc
from tests.python_client.bare_server import Bare
from tests.python_client.test_clients import Upstream

BOTH = pool("openai/main/gpt", "openai/spare/gpt")


async def test_a_task_that_lived_through_a_cancel_is_served_while_the_service_hangs(server: Bare) -> None:
    async with AsyncPolicyClient(where=Connection(server.address, select_ms=5_000)) as client:

        async def stubborn() -> bool:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                return (await client.run(BOTH, Upstream(main=200).later)).attempt.is_local
            raise AssertionError("not reached")

        await client.run(BOTH, Upstream(main=200).later)
        await client.settle()
        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        server.lose("hung")
        task.cancel()
        assert await task


async def test_somebody_in_line_is_looked_after_patiently(server: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    async def answers(_: GrpcAsyncRpc, timeout_ms: int) -> bool:
        looks.append(timeout_ms)
        return True

    monkeypatch.setattr(GrpcAsyncRpc, "answers", answers)
    monkeypatch.setattr(wire_async, "LOOK_S", 0.01)
    async with AsyncPolicyClient(where=Connection(server.address, select_ms=5_000)) as client:
        await client.run(BOTH, Upstream(main=200).later)
        server.lose("slow")
        began = time.monotonic()
        await client.run(BOTH, Upstream(main=200).later)
        assert time.monotonic() - began >= 0.1
    assert looks[0] == 15
    assert set(looks[1:]) == {HEALTH_MS}
