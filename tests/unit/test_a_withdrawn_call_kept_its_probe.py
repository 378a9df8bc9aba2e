"""CancelPermit withdrew places and slots only: a probe whose answer never arrived stayed until it ran out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policy_service.application.messages import Dispatch, ReportRequest
from policy_service.application.probe_permits import ProbePermits
from policy_service.application.replica import Replica
from policy_service.settings.catalogue_file import builtin_catalogue
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, ask, failure, make_replica, quick_settings, report, running, select

MINE = "mine"
MINUTES: int = 600_000

CASES: dict[str, tuple[dict[str, object], list[ReportRequest], int]] = {
    "breaker": ({}, [failure(f"burst{number}", 503) for number in range(12)], 30_000),
    "connection": (
        {"early_probe.enabled": True, "early_probe.include_server_stated": True},
        [failure("a", 429, headers={"retry-after": "561635"})],
        MINUTES,
    ),
    "lock": (
        {"early_probe.enabled": True, "early_probe.include_server_stated": True, "model_lockout.enabled": True},
        [failure("a", 429, provider="gemini", headers={"retry-after": "561635"})],
        MINUTES,
    ),
    "panic": ({"pool_guard.enabled": True, "pool_guard.max_excluded_share": 1.0}, [failure("a", 503)], 1),
}
"""Settings, what fails, and after how long a call may go there though the target is out."""


@pytest.mark.parametrize("case", CASES)
async def test_the_next_call_is_given_what_a_withdrawn_one_had(case: str) -> None:
    settings, failures, later_ms = CASES[case]
    moments = FakeTime()
    catalogue = replace(builtin_catalogue(), stored_settings=settings)
    replica = make_replica(
        MemoryStore(MemoryDatabase(clock=moments.database)),
        time_source=moments,
        catalogue=catalogue,
        settings=quick_settings("r"),
    )
    async with running(replica):
        for each in failures:
            await report(replica, each)
        moments.ms += later_ms
        provider = failures[0].target.provider
        probes = ProbePermits(replica.store, replica.view)
        assert await is_let_through(replica, MINE, provider), "the target is tried"
        assert not await is_let_through(replica, "another", provider), "by one call"
        assert await probes.withdraw("another") == []
        assert not await is_let_through(replica, "another", provider)
        assert len(await probes.withdraw(MINE)) == 1
        assert await probes.withdraw(MINE) == [], "there is nothing left to give back"
        assert await is_let_through(replica, "another", provider)


async def is_let_through(replica: Replica, request_id: str, provider: str) -> bool:
    answer = await select(replica, ask("a", request_id=request_id, provider=provider))
    return isinstance(answer.verdict, Dispatch)
