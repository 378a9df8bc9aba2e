"""A probe granted by one replica and reported alive to another before that one had heard of the grant.

The other replica judged the success by its own view, found no such permit, and answered "void_permit" from memory: the
breaker stayed half open, and its slot was taken until it expired.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from policy_service.application.messages import Dispatch
from policy_service.application.ports import Feed, StoreSlowError
from policy_service.application.replica import Replica
from policy_service.domain.breaker import BreakerState, State
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.ids import DurationMs
from policy_service.settings.catalogue_file import builtin_catalogue
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import OPENAI, FakeTime, ask, chosen, failure, make_replica, quick_settings, report, running, select


class UnheardStore(MemoryStore):
    """A fake that brings no changes of others while the test says so."""

    is_deaf = False

    async def poll(self, watermark: str, *, timeout_ms: DurationMs) -> Feed:
        if self.is_deaf:
            raise StoreSlowError("nothing heard")
        return await super().poll(watermark, timeout_ms=timeout_ms)


class Pair:
    """Two replicas of one database; the second one goes deaf."""

    def __init__(self, catalogue: Catalogue | None = None) -> None:
        self.moments = FakeTime()
        self.database = MemoryDatabase(clock=self.moments.database)
        self.store = UnheardStore(self.database)
        self.granting = self._replica(MemoryStore(self.database), "granting", catalogue)
        self.deaf = self._replica(self.store, "deaf", catalogue)

    def _replica(self, store: MemoryStore, name: str, catalogue: Catalogue | None) -> Replica:
        settings = quick_settings(name)
        patient = replace(settings, select_ms=1_000, commit=replace(settings.commit, report_ms=1_000))
        return make_replica(store, name, time_source=self.moments, settings=patient, catalogue=catalogue)


@pytest.mark.parametrize("knows_the_breaker", [True, False])
async def test_a_probe_reported_alive_to_a_replica_that_has_not_heard_of_it_closes_the_breaker(
    knows_the_breaker: bool,
) -> None:
    pair = Pair()
    async with running(pair.granting), running(pair.deaf):
        pair.store.is_deaf = not knows_the_breaker
        for n in range(12):
            await report(pair.granting, failure(f"burst{n}"))
        pair.moments.ms += 30_000
        if knows_the_breaker:
            await pair.deaf.follower._step()
        pair.store.is_deaf = True
        answer = await select(pair.granting, ask("z"))
        assert isinstance(answer.verdict, Dispatch)
        assert answer.verdict.is_probe
        told = await report(pair.deaf, failure("z", 200, token=answer.token))
        assert told.ignored == ()
        assert [each.to_state for each in told.effects if each.mechanism == "breaker"] == ["CLOSED"]
    row = pair.database.rows.get((BreakerState.KIND, OPENAI, ""))
    assert row is None or (isinstance(row.row, BreakerState) and row.row.state is State.CLOSED)


async def test_an_early_probe_reported_alive_to_a_replica_that_has_not_heard_of_the_block_ends_it() -> None:
    stored = {"early_probe.enabled": True, "early_probe.include_server_stated": True}
    pair = Pair(replace(builtin_catalogue(), stored_settings=stored))
    async with running(pair.granting), running(pair.deaf):
        pair.store.is_deaf = True
        await report(pair.granting, failure("a", 429, headers={"retry-after": "561635"}))
        pair.moments.ms += 300_000
        trial = await select(pair.granting, ask("a", "b"))
        assert isinstance(trial.verdict, Dispatch)
        assert (chosen(trial), trial.verdict.is_probe) == ("a", True)
        pair.moments.ms += 10
        await report(pair.deaf, failure("a", 200, token=trial.token))
        await pair.granting.follower._step()
        assert chosen(await select(pair.granting, ask("a", "b"))) == "a"
