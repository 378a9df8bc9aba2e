"""Many probes asked for at once held every pooled connection while they waited for their guard rows; the poll of the
change feed stood in the same line, and the replica went on calling a provider 700 ms after its breaker had opened.
"""

from __future__ import annotations

import asyncio

from policy_service.application.ports import Scope, Unit, UnitResult
from policy_service.storage.postgres.session import StoreOptions
from policy_service.storage.postgres.store import PostgresStore
from tests.contract.beside import driver

SMALL = StoreOptions(pool_size=1)
UNIT: Unit[None] = Unit(Scope(frozenset({"p"})), lambda _book, _now, _known: UnitResult(None))


async def test_the_feed_is_polled_while_every_pooled_connection_waits_for_a_guard(embedded_url: str) -> None:
    store = await PostgresStore.connect(embedded_url, SMALL)
    await store.run(UNIT, timeout_ms=5_000)
    loaded = await store.load(timeout_ms=5_000)
    async with driver(embedded_url) as other:
        async with other.transaction():
            await other.execute("SELECT FROM guard WHERE provider = 'p' FOR UPDATE")
            waiting = asyncio.create_task(store.run(UNIT, timeout_ms=10_000))
            await asyncio.sleep(0.2)
            polled = await store.poll(loaded.watermark, timeout_ms=1_000)
            assert not waiting.done()
        await waiting
    await store.close()
    assert polled.as_of > loaded.as_of
