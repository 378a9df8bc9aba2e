"""Three calls in ten thousand rounds went to a provider over 250 ms after its breaker had opened. The views lagged:
every minute each replica read and decoded the whole state on the connection of its feed, to find old sightings; every
full collection of garbage walked through some hundred thousand objects; connections were opened and closed a few times
a second, after each of which the feed first looked who the server is, in line for one row; and the signature of the
roll kept the feed waiting while it waited for the commit under way.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from policy_service.application.ports_fleet import Signer
from policy_service.domain.catalogue import Catalogue, Connection
from policy_service.domain.ids import AuthClass
from policy_service.domain.policy import Policy
from policy_service.storage.postgres import feed, statements
from policy_service.storage.postgres.session import StoreOptions
from policy_service.storage.postgres.store import PostgresStore
from tests.contract.beside import driver
from tests.contract.units import TIMEOUT_MS, count_failure

PATIENCE_MS = 1_000
USUAL_THRESHOLD = 700
"""Of the interpreter; in this process a test may have raised it."""
SIGNER = Signer("incarnation", "r0", "1")


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[PostgresStore]:
    store = await PostgresStore.connect(url)
    try:
        yield store
    finally:
        await store.close()


async def test_pruning_does_not_read_the_whole_state(embedded_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        raise AssertionError("the whole state was read")

    async with opened(embedded_url) as store:
        await store.run(count_failure(), timeout_ms=TIMEOUT_MS)
        monkeypatch.setattr(feed, "load", never)
        await store.prune(10**13, timeout_ms=TIMEOUT_MS)


class Records:
    """A session whose statement answers what the test says."""

    def __init__(self, records: Sequence[tuple[str, str]]) -> None:
        self._records = records

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[None]:
        yield None

    async def execute(self, *_: object) -> Sequence[tuple[str, str]]:
        return self._records


async def test_other_work_goes_on_while_a_large_state_is_decoded() -> None:
    head = {"as_of": 1, "epoch": 1, "snapshot": "1:1:", "pruned": "0", "revision": 0}
    progress = [("progress", json.dumps({"incarnation": f"i{n}", "number": n})) for n in range(5 * feed.AT_ONCE)]
    session: Any = Records([("head", json.dumps(head)), *progress])
    loading = asyncio.create_task(feed.load(session))
    steps = 0
    while not loading.done():
        steps += 1
        await asyncio.sleep(0)
    assert len(loading.result().progress) == 5 * feed.AT_ONCE
    assert steps > 5


async def test_bursts_of_units_open_no_more_connections_than_the_pool_keeps(embedded_url: str) -> None:
    async with opened(embedded_url) as store:
        for burst in range(6):
            units = (count_failure(f"p{n}", f"d{burst}/{n}") for n in range(20))
            await asyncio.gather(*(store.run(unit, timeout_ms=TIMEOUT_MS) for unit in units))
        assert store._sessions.connections <= StoreOptions().pool_size


async def test_the_feed_is_polled_while_a_signature_waits_for_a_commit(embedded_url: str) -> None:
    async with opened(embedded_url) as store, driver(embedded_url) as other:
        await store.sign(SIGNER, 10_000, timeout_ms=TIMEOUT_MS)
        loaded = await store.load(timeout_ms=TIMEOUT_MS)
        async with other.transaction():
            await other.execute("SELECT FROM replica FOR UPDATE")
            waiting = asyncio.create_task(store.sign(SIGNER, 10_000, timeout_ms=TIMEOUT_MS))
            await asyncio.sleep(0.2)
            assert (await store.poll(loaded.watermark, timeout_ms=PATIENCE_MS)).as_of > loaded.as_of
            assert not waiting.done()
        await waiting


async def test_a_look_at_a_server_that_is_known_waits_for_nobody(embedded_url: str) -> None:
    async with opened(embedded_url) as first, driver(embedded_url) as other:
        await first.load(timeout_ms=TIMEOUT_MS)
        async with other.transaction():
            await other.execute(statements.LOCK_FLEET)
            async with opened(embedded_url) as second:
                await second.load(timeout_ms=PATIENCE_MS)


def test_what_the_start_leaves_is_left_out_of_every_collection() -> None:
    """In a process of its own: what is frozen stays so."""
    program = (
        "import gc; from policy_service.bootstrap import running; running._spare_the_collector();"
        "print(gc.get_freeze_count(), *gc.get_threshold())"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert int(told[0]) > 50_000
    assert int(told[1]) > USUAL_THRESHOLD


def test_connections_without_settings_of_their_own_share_their_profiles() -> None:
    own = Connection("own", "p", settings={"breaker.half_open_probes": 7})
    off = Connection("off", "p", enabled=False)
    policy = Policy(Catalogue(connections={each.id: each for each in (own, off, Connection("plain", "p"))}))
    shared = policy.for_connection("p", "plain")
    other = policy.for_connection("p", "inline")
    assert (shared.connection.id, other.connection.id) == ("plain", "inline")
    assert shared.breaker is other.breaker
    assert policy.for_connection("p", "own").breaker.half_open_probes == 7
    assert not policy.for_connection("p", "off").connection.enabled
    assert policy.for_connection("p", "inline", AuthClass.OAUTH).auth_class is AuthClass.OAUTH
    assert policy.for_connection("q", "inline").provider.id == "q"
