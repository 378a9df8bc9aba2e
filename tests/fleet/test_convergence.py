"""Failures spread over four replicas open at exactly the threshold, and every replica refuses soon after.

Long form: 100 breakers instead of 12 with notifications, 40 instead of 6 without.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.fleet import (
    LONG_TIMEOUT_S,
    Database,
    Replica,
    ask,
    catalogue_file,
    database,
    figure,
    fleet,
    form,
    quantile,
    refusal_of,
    settings_of_every_class,
    told,
)

REPLICAS = 4
THRESHOLD = 6
CATALOGUE = settings_of_every_class({"failure_threshold": THRESHOLD})
GOAL_MS = 250
GOAL_SILENT_MS = 2_000


async def fail(replica: Replica, provider: str, number: int) -> None:
    """One failure of a connection that nothing else was heard of, committed when this returns."""
    request = told(provider, f"c{number}", 503)
    answer = await replica.policy.ReportOutcome(request, timeout=10)
    while not answer.durable:  # a busy machine may need more than the budget; the key makes the repetition safe
        answer = await replica.policy.ReportOutcome(request, timeout=10)


async def state_of(connection: Any, provider: str) -> tuple[str, int]:
    record = await connection.fetchrow("SELECT state, failure_count FROM breaker WHERE provider = $1", provider)
    return (str(record[0]).upper(), int(record[1])) if record else ("CLOSED", 0)


async def one_opening(replicas: list[Replica], connection: Any, provider: str, first: int) -> list[float]:
    """Open one breaker by failures in turn; ms from the durable answer to each other replica's first refusal."""
    last = replicas[first % REPLICAS]
    before = [replicas[(first + n) % REPLICAS] for n in range(1, THRESHOLD)]
    await asyncio.gather(*(fail(replica, provider, n) for n, replica in enumerate(before)))
    assert await state_of(connection, provider) == ("DEGRADED", THRESHOLD - 1)
    for replica in replicas:
        answer = await replica.policy.SelectTarget(ask(provider, "spare"), timeout=10)
        assert answer.WhichOneof("verdict") == "dispatch"
    await fail(last, provider, THRESHOLD)
    answered = time.monotonic()
    assert (await state_of(connection, provider))[0] == "OPEN"
    others = [replica for replica in replicas if replica is not last]
    refused = await asyncio.gather(*(refusal_of(replica, ask(provider, "spare")) for replica in others))
    return [(instant - answered) * 1000 for instant in refused]


async def converge(place: Path, where: Database, openings: int, *flags: str) -> list[float]:
    path = catalogue_file(place, CATALOGUE)
    flags = ("--catalogue", str(path), *flags)
    async with fleet(place, where, REPLICAS, *flags) as replicas, where.beside() as connection:
        took = [await one_opening(replicas, connection, f"p{n}", n) for n in range(openings)]
    return [value for values in took for value in values]


def judge(name: str, took: list[float], goal_ms: int) -> None:
    figure(f"convergence.{name}.p50_ms", round(quantile(took, 0.50), 1))
    figure(f"convergence.{name}.p99_ms", round(quantile(took, 0.99), 1))
    assert quantile(took, 0.99) <= goal_ms


@pytest.mark.alone
@pytest.mark.timeout(LONG_TIMEOUT_S)
async def test_four_replicas_open_at_the_threshold_and_refuse_within_a_quarter_second(tmp_path: Path) -> None:
    async with database() as where:
        judge("notified", await converge(tmp_path, where, form(12, 100)), GOAL_MS)


@pytest.mark.alone
@pytest.mark.timeout(LONG_TIMEOUT_S)
async def test_four_replicas_refuse_within_two_seconds_with_notifications_off(tmp_path: Path) -> None:
    async with database() as where:
        took = await converge(tmp_path, where, form(6, 40), "--set", "store.notifications=false")
        judge("polled", took, GOAL_SILENT_MS)
