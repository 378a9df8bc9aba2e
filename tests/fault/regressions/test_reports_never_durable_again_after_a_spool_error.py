"""An error of the spool ended the commit task: with the store up, every later report stayed not durable, silently."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence

from policy_service.application.replica import Replica
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, ListSpool, failure, make_replica, quick_settings, report, running


class LockedSpool(ListSpool):
    """Somebody else holds the spool's file while `is_locked`: nothing can be removed."""

    is_locked = True

    async def remove(self, event_ids: Sequence[str]) -> None:
        if self.is_locked:
            raise sqlite3.OperationalError("database is locked")
        await super().remove(event_ids)


async def commit(replica: Replica, report_id: str) -> None:
    """Report once more and wait until everything is committed; TimeoutError where the commit has ended."""
    await report(replica, failure("a", report_id=report_id))
    async with asyncio.timeout(5):
        await asyncio.gather(*(item.done for item in replica.commit._queue))


async def test_reports_are_committed_although_the_spool_cannot_be_cleared() -> None:
    moments, spool = FakeTime(), LockedSpool()
    database = MemoryDatabase(clock=moments.database)
    store = MemoryStore(database)
    replica = make_replica(store, time_source=moments, settings=quick_settings("r1"), spool=spool)
    async with running(replica):
        store.is_away = True
        assert not (await report(replica, failure("a", report_id="spooled"))).durable
        store.is_away = False
        await commit(replica, "second")
        await commit(replica, "third")
        assert {"report/spooled", "report/second", "report/third"} <= set(database.answers)
        assert spool.kept
        spool.is_locked = False
        await commit(replica, "fourth")
        await asyncio.sleep(0)
        assert not spool.kept
