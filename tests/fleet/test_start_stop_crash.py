"""A replica that starts, stops or crashes changes no decision and no stored state (spec/fleet.md section 7)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from policy_service.storage.postgres.tables import STATE_TABLES
from tests.fleet.fleet import (
    LONG_TIMEOUT_S,
    Replica,
    ask,
    catalogue_file,
    database,
    figure,
    fleet,
    form,
    settings_of_every_class,
    told,
)

NUMBERS = {"failure_threshold": 6, "degradation_threshold": 3}
CATALOGUE = settings_of_every_class({**NUMBERS, "reset_timeout_ms": 600_000})
NEWER = settings_of_every_class({**NUMBERS, "reset_timeout_ms": 700_000})
TABLES = (
    *STATE_TABLES,
    "state_feed",
    "fact",
    "report_answer",
    "catalogue_revision",
    "catalogue_import",
    "fleet_secret",
)
PROVIDERS = ("open", "degraded", "openai", "healthy")
HOUR = [{"name": "Retry-After", "value": "3600"}]


async def disturb(replica: Replica) -> None:
    """An open breaker, a degraded one, a long cooldown."""
    failures = [told("open", f"c{n}", 503) for n in range(6)] + [told("degraded", f"c{n}", 503) for n in range(3)]
    for request in (*failures, told("openai", "a", 429, headers=HOUR)):
        answer = await replica.policy.ReportOutcome(request, timeout=10)
        assert answer.durable


async def contents(connection: Any) -> dict[str, list[str]]:
    """Every row of every table of state, as text."""
    return {
        name: sorted(str(record) for record in await connection.fetch(f'SELECT * FROM "{name}"')) for name in TABLES
    }


async def decisions(replica: Replica) -> list[Any]:
    """What the replica says about every provider, without what differs from call to call."""
    found = []
    for provider in PROVIDERS:
        answer = await replica.policy.SelectTarget(ask(provider, "a", "b", explain=True), timeout=10)
        out = [(e.target.connection, e.reason_text, e.until_at_unix_ms, e.evidence_id) for e in answer.exclusions]
        chosen = answer.dispatch.target.connection, [t.connection for t in answer.dispatch.fallbacks]
        found.append((provider, answer.WhichOneof("verdict"), chosen, sorted(out), answer.policy_revision))
    return found


@pytest.mark.timeout(LONG_TIMEOUT_S)
async def test_a_replica_that_starts_stops_or_crashes_changes_no_decision_and_no_row(tmp_path: Path) -> None:
    older = catalogue_file(tmp_path, CATALOGUE, "older.yaml")
    newer = catalogue_file(tmp_path, NEWER, "newer.yaml")
    async with database() as where, where.beside() as connection:
        async with fleet(tmp_path / "first", where, 1, "--catalogue", str(older)):
            pass
        async with fleet(tmp_path, where, 1, "--catalogue", str(newer)) as (steady,):
            await disturb(steady)
            await asyncio.sleep(0.6)
            rows, said = await contents(connection), await decisions(steady)
            assert {verdict for _, verdict, *_ in said} == {"dispatch", "reject"}
            other = Replica("other", tmp_path / "other", ("--database-url", where.plain_url, "--catalogue", str(older)))
            try:
                for end in ("SIGTERM", "kill -9") * form(1, 5):
                    other.launch()
                    await other.ready()
                    assert await decisions(other) == said
                    assert await decisions(steady) == said
                    await stop(other, end)
                    assert await contents(connection) == rows
                    assert await decisions(steady) == said
            finally:
                await other.close()
    figure("start_stop_crash.rows_compared", sum(map(len, rows.values())))


async def stop(replica: Replica, how: str) -> None:
    if how == "SIGTERM":
        assert await asyncio.to_thread(replica.running.end) == 0
    else:
        await asyncio.to_thread(replica.running.kill)
