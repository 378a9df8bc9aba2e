"""The database freezes, dies, turns read-only or has no connection left, under load; selections go on.

Short form: 2 replicas, 100 calls/s, 8 s away. Long form: 3 replicas, 500 calls/s, 30 s away.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contract.beside import eventually
from tests.fault.outage import Answered, Fault, Load, frozen, killed, read_only, whole_again, without_slots
from tests.fleet.fleet import (
    LONG_TIMEOUT_S,
    Database,
    Replica,
    catalogue_file,
    database,
    figure,
    fleet,
    form,
    quantile,
    settings_of_every_class,
    told,
)

REPLICAS = form(2, 3)
RATE = form(100, 500)
REPORTS_EVERY = form(10, 20)
BEFORE_S = form(4, 5)
AWAY_S = form(8, 30)
GOAL_MS = 25
"""Selections while the database is away, p99."""
SHARE_OF_USUAL = form(2, 0)
"""The short form, for shared machines, adds this many times what the same load took before, in the same run."""
MEDIAN_SHARE = 2
"""The median moves less than so many times: no selection waits for the database."""
RECOVERY_S = 5
AHEAD = RATE
"""Answers of one replica that lie so far apart cannot have overtaken each other."""
CATALOGUE = settings_of_every_class({"failure_threshold": 1_000})


@dataclass(frozen=True, slots=True)
class Away:
    """One way of being away. `is_blind`: reads fail as well, so that the view grows old."""

    name: str
    fault: Fault
    is_blind: bool = True


WAYS = (
    Away("frozen", frozen),
    Away("killed", killed),
    Away("read_only", read_only, is_blind=False),
    Away("without_slots", without_slots),
)


@pytest.mark.alone
@pytest.mark.timeout(LONG_TIMEOUT_S)
@pytest.mark.parametrize("away", WAYS, ids=lambda away: away.name)
async def test_selections_go_on_and_no_acknowledged_report_is_lost_while_the_database_is(
    away: Away, tmp_path: Path
) -> None:
    flags = ("--catalogue", str(catalogue_file(tmp_path, CATALOGUE)))
    async with database(max_connections="40") as where, fleet(tmp_path, where, REPLICAS, *flags) as replicas:
        load = Load(replicas, RATE, REPORTS_EVERY)
        async with load.running():
            began = time.monotonic()
            await asyncio.sleep(BEFORE_S)
            async with away.fault(where):
                left = time.monotonic()
                await asyncio.sleep(AWAY_S)
                back = time.monotonic()
            recovered_s = await whole_again(replicas)
        judge_answers(away, load, load.between(began, left), load.between(left, back))
        figure(f"outage.{away.name}.recovery_s", round(recovered_s, 2))
        assert recovered_s < RECOVERY_S
        await whole_again(replicas)
        await judge_reports(away.name, where, load)


def judge_answers(away: Away, load: Load, before: list[Answered], during: list[Answered]) -> None:
    usual, slow = (quantile([each.took_ms for each in some], 0.99) for some in (before, during))
    middle, slow_middle = (quantile([each.took_ms for each in some], 0.5) for some in (before, during))
    stamped = [each for each in during if each.degraded]
    figure(f"outage.{away.name}.selections_failed", len(load.failed))
    figure(f"outage.{away.name}.p50_ms", f"{middle:.1f} before, {slow_middle:.1f} during")
    figure(f"outage.{away.name}.p99_ms", f"{usual:.1f} before, {slow:.1f} during")
    figure(f"outage.{away.name}.load_blocked_ms", round(load.blocked.total_ms))
    figure(f"outage.{away.name}.answers_stamped_degraded", f"{len(stamped)} of {len(during)}")
    assert load.failed == []
    assert len(during) > RATE * AWAY_S / 2
    assert slow < GOAL_MS + SHARE_OF_USUAL * usual
    assert slow_middle < MEDIAN_SHARE * middle + 1
    assert {each.replica for each in stamped} == {replica.name for replica in load.replicas}
    if away.is_blind:
        for replica in load.replicas:
            own = sorted((each for each in stamped if each.replica == replica.name), key=lambda each: each.sent)
            assert all(later.age_ms > earlier.age_ms for earlier, later in zip(own, own[AHEAD:], strict=False))
            assert own[-1].age_ms - own[0].age_ms > (own[-1].sent - own[0].sent) * 900


async def judge_reports(name: str, where: Database, load: Load) -> None:
    """Every acknowledged key is there once, and every key had its effect once."""
    async with where.beside() as connection:
        stored = await keys(connection)
        counted = await connection.fetchval("SELECT sum(failure_count) FROM breaker WHERE provider LIKE 'failing%'")
    missing = set(load.acknowledged) - set(stored)
    spooled = sum(not durable for durable in load.acknowledged.values())
    figure(f"outage.{name}.reports_acknowledged", f"{len(load.acknowledged)}, {spooled} before they were durable")
    figure(f"outage.{name}.reports_lost", len(missing))
    assert load.refused_reports == 0
    assert spooled > 0
    assert missing == set()
    assert len(stored) == len(set(stored)) == counted


async def keys(connection: Any) -> list[str]:
    """Stored keys of reports without a token, without their prefix."""
    records = await connection.fetch("SELECT event_id FROM report_answer WHERE event_id LIKE 'report/%'")
    return [str(record[0]).removeprefix("report/") for record in records]


@pytest.mark.timeout(LONG_TIMEOUT_S)
async def test_reports_acknowledged_without_the_database_survive_kill_9_on_the_same_disk(tmp_path: Path) -> None:
    flags = ("--catalogue", str(catalogue_file(tmp_path, CATALOGUE)))
    names = [f"late-{n}" for n in range(form(40, 400))]
    async with database() as where, fleet(tmp_path, where, 1, *flags) as (replica,):
        async with frozen(where):
            answers = await asyncio.gather(*(report(replica, name) for name in names))
            assert not any(answer.durable for answer in answers)
            replica.running.kill()
        replica.launch()
        await replica.ready()
        async with where.beside() as connection:

            async def all_stored() -> bool:
                return set(await keys(connection)) >= set(names)

            began = time.monotonic()
            await eventually(all_stored)
            stored = await keys(connection)
            counted = await connection.fetchval("SELECT sum(failure_count) FROM breaker")
    figure("outage.kill_9.reports_taken_over", len(stored))
    figure("outage.kill_9.stored_after_ready_s", round(time.monotonic() - began, 2))
    assert sorted(stored) == sorted(names)
    assert counted == len(names)


async def report(replica: Replica, name: str) -> Any:
    return await replica.policy.ReportOutcome(told("failing0", name, 503, report_id=name), timeout=30)
