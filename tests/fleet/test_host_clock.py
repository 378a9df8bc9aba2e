"""Host clocks that jump by an hour, forth and back, change no decision and no stored instant."""

from __future__ import annotations

import ast
import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import policy_service
from tests.fleet.fleet import LONG_TIMEOUT_S, Database, Replica, ask, database, database_now, figure, told

SHIM = """
import datetime, os, time
_time, _time_ns, _datetime = time.time, time.time_ns, datetime.datetime

def _shift():
    try:
        with open(os.environ["HOST_CLOCK_SHIFT_FILE"]) as file:
            return int(file.read() or 0)
    except OSError:
        return 0

class Shifted(_datetime):
    @classmethod
    def now(cls, tz=None):
        return _datetime.now(tz) + datetime.timedelta(seconds=_shift())

time.time = lambda: _time() + _shift()
time.time_ns = lambda: _time_ns() + _shift() * 10**9
datetime.datetime = Shifted
"""
HOUR = 3_600
WAIT_MS = 120_000
TOLERANCE_MS = 100
READERS = {
    "storage/memory/store.py": "the reference store is a database of its own",
    "application/entropy.py": "ids sort by time roughly; nothing compares them",
    "application/classify.py": "the offline `classify` command has no database",
}
"""Modules that may read the host's wall clock, with the reason."""
WALL_CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}


def reads_of_the_wall_clock(source: str) -> list[int]:
    """Lines that call a wall clock."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if _name(call.func) in WALL_CLOCKS]


def _name(called: ast.expr) -> tuple[str, str]:
    if isinstance(called, ast.Attribute):
        owner = called.value
        return (owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", ""), called.attr)
    return ("", "")


def test_only_named_modules_read_the_host_s_wall_clock() -> None:
    root = Path(policy_service.__file__).parent
    readers = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if reads_of_the_wall_clock(path.read_text()) and path.relative_to(root).parts[0] not in ("generated", "cli")
    }
    assert readers == set(READERS)


class ShiftedHost:
    """A host whose wall clock this test sets."""

    def __init__(self, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        (place / "sitecustomize.py").write_text(SHIM)
        self._file = place / "shift"
        path = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])
        self.environment = {"PYTHONPATH": path, "HOST_CLOCK_SHIFT_FILE": str(self._file)}

    def jump(self, seconds: int) -> None:
        self._file.write_text(str(seconds))

    def wall(self) -> float:
        """What a Python process on this host reads."""
        command = [sys.executable, "-c", "import time; print(time.time())"]
        return float(subprocess.check_output(command, env={**os.environ, **self.environment}))


def on_host(host: ShiftedHost, name: str, where: Database, place: Path) -> Replica:
    return Replica(name, place / name, ("--database-url", where.plain_url), host.environment)


async def stored_end(connection: Any, account: str) -> int:
    query = "SELECT rate_limited_until FROM connection WHERE provider = 'openai' AND connection = $1"
    return int(await connection.fetchval(query, account))


async def check_cooldown(replica: Replica, connection: Any, account: str) -> None:
    """A stated wait ends when the database says it does."""
    wait = [{"name": "Retry-After", "value": str(WAIT_MS // 1000)}]
    before = await database_now(connection)
    answer = await replica.policy.ReportOutcome(told("openai", account, 429, headers=wait), timeout=10)
    after = await database_now(connection)
    assert answer.durable
    assert before - TOLERANCE_MS <= await stored_end(connection, account) - WAIT_MS <= after + TOLERANCE_MS


async def decision_of(replica: Replica, connection: Any, accounts: list[str]) -> list[tuple[str, str, int]]:
    """Who is out until when; the decision's own start is the database's time."""
    before = await database_now(connection)
    answer = await replica.policy.SelectTarget(ask("openai", *accounts, explain=True), timeout=10)
    after = await database_now(connection)
    assert before - TOLERANCE_MS <= answer.decided_at_unix_ms <= after + TOLERANCE_MS
    assert not answer.degraded
    return sorted((e.target.connection, e.reason_text, e.until_at_unix_ms) for e in answer.exclusions)


@pytest.mark.timeout(LONG_TIMEOUT_S)
async def test_a_host_clock_that_jumps_by_an_hour_changes_no_decision_and_no_stored_instant(tmp_path: Path) -> None:
    hosts = [ShiftedHost(tmp_path / f"host{n}") for n in range(2)]
    async with database() as where, where.beside() as connection:
        replicas = [on_host(host, f"r{n}", where, tmp_path) for n, host in enumerate(hosts)]
        hosts[1].jump(-HOUR // 6)
        try:
            for replica in replicas:
                replica.launch()
            await asyncio.gather(*(replica.ready() for replica in replicas))
            accounts: list[str] = []
            for shifts in ((0, -HOUR // 6), (HOUR, -HOUR), (-HOUR, HOUR), (0, 0)):
                for host, shift in zip(hosts, shifts, strict=True):
                    host.jump(shift)
                    assert abs(host.wall() - (await database_now(connection)) / 1000 - shift) < 60
                accounts += await one_round(replicas, connection, accounts)
        finally:
            for replica in replicas:
                await replica.close()
    figure("host_clock.jumps", 3)


async def one_round(replicas: list[Replica], connection: Any, accounts: list[str]) -> list[str]:
    """New cooldowns on each replica; all replicas then say the same of all accounts, the stored ends."""
    added = [f"a{len(accounts) + n}" for n in range(len(replicas))]
    for replica, account in zip(replicas, added, strict=True):
        await check_cooldown(replica, connection, account)
    await asyncio.sleep(0.6)
    everyone = [*accounts, *added, "spare"]
    said = [await decision_of(replica, connection, everyone) for replica in replicas]
    ends = sorted([(a, "connection_cooldown", await stored_end(connection, a)) for a in (*accounts, *added)])
    assert said == [ends] * len(replicas)
    return added
