"""Two replicas on one Postgres race for the first pins of sessions (spec/affinity.md section 3)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from policy_service.application.messages import SelectRequest
from policy_service.application.pins import PinAnswer, Pins
from policy_service.application.report_result import fold_report
from policy_service.application.view import View
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.ids import ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.policy import Policy
from policy_service.storage.postgres.pin_store import PostgresPinStore
from policy_service.storage.postgres.store import PostgresStore
from tests.contract.beside import driver

SESSIONS = [(f"s{n % 500}", f"u{n // 500}") for n in range(1_000)]
AT_A_TIME = 32
BUDGET_MS = 20_000


@asynccontextmanager
async def replica(url: str) -> AsyncIterator[tuple[Pins, PostgresStore]]:
    store = await PostgresStore.connect(url)
    view = View(Policy(Catalogue(stored_settings={"affinity.ttl_ms": 3_600_000})), fold_report)
    yield Pins(PostgresPinStore(store), view, budget_ms=BUDGET_MS, store_away=lambda: False), store
    await store.close()


async def choose(pins: Pins, now: int, session: str, caller: str, *connections: str) -> PinAnswer:
    targets = [Target(ProviderId("openai"), ConnectionId(name), ModelId("gpt")) for name in connections]
    question = pins.question(SelectRequest("r", session_key=session, caller_id=caller), targets, targets)
    assert question is not None
    return await pins.choose(question, now)


async def test_two_replicas_agree_on_one_pin_for_each_of_1000_sessions(embedded_url: str) -> None:
    async with replica(embedded_url) as (one, store), replica(embedded_url) as (two, _):
        now = (await store.read_clock(timeout_ms=BUDGET_MS)).database_ms
        gate = asyncio.Semaphore(AT_A_TIME)

        async def both(session: str, caller: str) -> tuple[PinAnswer, PinAnswer]:
            async with gate:
                return await asyncio.gather(
                    choose(one, now, session, caller, "a", "b", "c"), choose(two, now, session, caller, "c", "b", "a")
                )

        pairs = await asyncio.gather(*(both(*each) for each in SESSIONS))
        sent = store.statements
        again = [one.choose_cached(_question(one, *each), now) for each in SESSIONS]
        assert store.statements == sent
    labels = Counter(tuple(sorted((first.affinity.value, second.affinity.value))) for first, second in pairs)
    assert all(first.connection == second.connection for first, second in pairs)
    assert set(labels) <= {("created", "joined"), ("created", "hit")}
    assert labels[("created", "joined")] > 0, "nobody raced"
    assert [each.connection for each in again if each] == [first.connection for first, _ in pairs]
    async with driver(embedded_url) as database:
        stored = await database.fetchval("SELECT count(*) FROM session_pin")
    assert stored == len(SESSIONS)


def _question(pins: Pins, session: str, caller: str):  # type: ignore[no-untyped-def]
    targets = [Target(ProviderId("openai"), ConnectionId(name), ModelId("gpt")) for name in "abc"]
    return pins.question(SelectRequest("r", session_key=session, caller_id=caller), targets, targets)
