"""A caller hung up while its panic call or early probe was granted: the place was taken until its time ran out."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from policy_service.application.replica import Replica
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.ids import DurationMs
from policy_service.domain.pool_guard import PanicState
from policy_service.settings.catalogue_file import builtin_catalogue
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import OPENAI, FakeTime, ask, failure, make_replica, quick_settings, report, running, select
from tests.unit.test_late_probes import LateStore

PATIENT: DurationMs = 5_000


class Alone:
    """One replica whose store does what it is asked at once and answers when the test lets it."""

    def __init__(self, **settings: object) -> None:
        self.moments = FakeTime()
        self.database = MemoryDatabase(clock=self.moments.database)
        self.store = LateStore(self.database)
        stored = {name.replace("__", "."): value for name, value in settings.items()}
        self.replica = self._replica(self.store, replace(builtin_catalogue(), stored_settings=stored))

    def _replica(self, store: MemoryStore, catalogue: Catalogue) -> Replica:
        settings = replace(quick_settings("r"), select_ms=PATIENT)
        return make_replica(store, time_source=self.moments, catalogue=catalogue, settings=settings)

    async def hung_up(self, request_id: str = "") -> None:
        """A selection that is cancelled when its grant is in the database and the answer is on its way."""
        self.store.answers.clear()
        before = self.database.version
        request = ask("a", request_id=request_id)._replace(is_retry_safe=bool(request_id))
        call = asyncio.create_task(select(self.replica, request))
        while self.database.version == before:
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()
        self.store.answers.set()
        await self.replica.grants.settle()

    @property
    def panicking(self) -> int:
        """Panic calls under way, by the rows."""
        rows = [each.row for each in self.database.rows.values()]
        return sum(len(row.live(self.moments.ms)) for row in rows if isinstance(row, PanicState))

    @property
    def tested(self) -> object:
        """Early-probe permit of the connection."""
        row = self.database.rows[ConnectionState.KIND, OPENAI, "a"].row
        assert isinstance(row, ConnectionState)
        return row.early_probe


@pytest.mark.parametrize(("request_id", "left"), [("", 0), ("mine", 1)])
async def test_a_panic_call_of_a_caller_that_hung_up_frees_its_place(request_id: str, left: int) -> None:
    """One that a repetition may have been given stays: its report ends it, or time."""
    alone = Alone(pool_guard__enabled=True, pool_guard__max_excluded_share=1.0)
    async with running(alone.replica):
        await report(alone.replica, failure("a", 503))
        await alone.hung_up(request_id)
        assert alone.panicking == left


async def test_an_early_probe_of_a_caller_that_hung_up_can_be_had_by_the_next() -> None:
    alone = Alone(early_probe__enabled=True, early_probe__include_server_stated=True)
    async with running(alone.replica):
        await report(alone.replica, failure("a", 429, headers={"retry-after": "561635"}))
        alone.moments.ms += 300_000
        await alone.hung_up()
        assert alone.tested is None
        answer = await select(alone.replica, ask("a"))
        assert answer.token is not None
        assert alone.tested is not None
