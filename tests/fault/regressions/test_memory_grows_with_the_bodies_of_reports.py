"""4,096 committed reports were remembered with their bodies of up to 64 KiB, for the sake of repeated ones: 500 MB."""

from __future__ import annotations

import gc

from policy_service.application import report_meaning
from policy_service.application.events import OutcomeEvent
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, failure, make_replica, quick_settings, report, running


def remembered(prefix: str) -> int:
    report_meaning._known.clear()
    gc.collect()
    return sum(isinstance(each, OutcomeEvent) and each.event_id.startswith(prefix) for each in gc.get_objects())


async def test_of_a_committed_report_only_the_answer_is_remembered() -> None:
    moments = FakeTime()
    store = MemoryStore(MemoryDatabase(clock=moments.database))
    async with running(make_replica(store, time_source=moments, settings=quick_settings("r1"))) as replica:
        first = [await report(replica, failure(f"c{n}", report_id=f"body-{n}")) for n in range(20)]
        assert all(answer.durable for answer in first)
        assert remembered("report/body-") <= 1  # what the commit task handled last
        again = [await report(replica, failure(f"c{n}", report_id=f"body-{n}")) for n in range(20)]
    assert [answer.effects for answer in again] == [answer.effects for answer in first]
    assert all(answer.durable and "duplicate" in answer.ignored for answer in again)
