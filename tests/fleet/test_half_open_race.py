"""Three replicas race for the probe of half-open breakers; the database's own history says who had a permit.

Short form: 60 providers, 300 edges OPEN to HALF_OPEN. Long form: 200 providers, 10 000 edges.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from policy_service.generated.policy.v1 import policy_pb2
from tests.contract.beside import eventually
from tests.fleet.breaker_history import (
    HISTORY,
    RECORDING,
    Version,
    beside_stored,
    blocked_throughout,
    edges,
    ended_early,
    granted,
    over_admissions,
    read_history,
)
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

REPLICAS = 3
PROVIDERS = form(60, 200)
EDGES = form(300, 10_000)
LIMIT_S = form(90, 600)
RESET_MS = form(1_000, 5_000)
"""200 breakers that reopen every second are more than two cores can commit: that would measure the queue."""
CONVERGED_MS = 250
NUMBERS = {"failure_threshold": 1, "reset_timeout_ms": RESET_MS, "max_backoff_multiplier": 1}
CATALOGUE = settings_of_every_class(NUMBERS, {"base_cooldown_ms": 0})
PATIENT = ("--set", "store.select_ms=5000", "--set", "store.report_ms=5000")
"""Budgets that a busy machine keeps: every selection learns what became of its permit."""
AS_SHIPPED = ()
"""Many selections run out of their 20 ms here, while their permit is under way: they must be refused, not doubled."""
BUDGETS = {"patient": PATIENT, "as_shipped": AS_SHIPPED}
LEAST_EDGES = {"patient": EDGES, "as_shipped": form(EDGES, 1_000)}
"""With the shipped budgets two cores refuse most selections of 200 breakers in time, and fewer edges come about."""


def wall_ms() -> float:
    """The database's clock is this machine's."""
    return time.time() * 1000


@dataclass(frozen=True, slots=True)
class FreeCall:
    """A call without a permit; `age_ms` is the view's by the replica's own word."""

    provider: str
    replica: str
    sent: float
    answered: float
    age_ms: int


@dataclass
class Race:
    """Callers of all providers on all replicas, and what they were told."""

    replicas: list[Replica]
    random: random.Random = field(default_factory=lambda: random.Random(7))
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    probes: list[tuple[str, str]] = field(default_factory=list)
    """(provider, permit id) of each stored permit handed out."""
    local: list[tuple[str, int]] = field(default_factory=list)
    """(provider, database instant) of each permit that a replica gave out without the store."""
    free: list[FreeCall] = field(default_factory=list)
    calls: int = 0

    async def caller(self, provider: str, replica: Replica) -> None:
        while not self.is_over.is_set():
            sent = wall_ms()
            connection = f"c{self.calls}"
            self.calls += 1
            answer = await replica.policy.SelectTarget(ask(provider, connection), timeout=20)
            received = wall_ms()
            if answer.WhichOneof("verdict") == "dispatch":
                await self.called(provider, connection, answer)
                if not answer.dispatch.permits:
                    self.free.append(FreeCall(provider, replica.name, sent, received, answer.view_age_ms))
            await asyncio.sleep(self.pause_s(answer))

    def pause_s(self, answer: policy_pb2.SelectTargetResponse) -> float:
        """Three refused callers in four come back at the instant they were told, so that they meet at the edge."""
        waits = [refused.remaining_ms for refused in answer.exclusions if refused.remaining_ms]
        if waits and self.random.random() < 0.75:
            return min(waits) / 1000
        return self.random.uniform(0.0, RESET_MS / 4000)

    async def called(self, provider: str, connection: str, answer: policy_pb2.SelectTargetResponse) -> None:
        """Lose one probe outcome in ten; most others say down, some say alive; calls without a permit fail."""
        permits = answer.dispatch.permits
        self.local += [(provider, answer.decided_at_unix_ms) for permit in permits if permit.is_local]
        self.probes += [(provider, permit.permit_id) for permit in permits if not permit.is_local]
        fate = self.random.random()
        if permits and fate < 0.1:
            return
        await asyncio.sleep(self.random.uniform(0.0, 0.05))
        status = 200 if permits and fate < 0.3 else 503
        reporter = self.random.choice(self.replicas)
        report = told(provider, connection, status, token=answer.decision_token)
        await reporter.policy.ReportOutcome(report, timeout=20)


@pytest.mark.timeout(LONG_TIMEOUT_S)
@pytest.mark.parametrize("budgets", BUDGETS)
async def test_no_half_open_breaker_ever_has_two_probes_out_in_the_whole_fleet(budgets: str, tmp_path: Path) -> None:
    flags = ("--catalogue", str(catalogue_file(tmp_path, CATALOGUE)), *BUDGETS[budgets])
    async with database(**RECORDING) as where, where.beside() as connection:
        await connection.execute(HISTORY)
        async with fleet(tmp_path, where, REPLICAS, *flags) as replicas:
            race = Race(replicas)
            names = [f"p{n}" for n in range(PROVIDERS)]
            callers = [asyncio.create_task(race.caller(name, r)) for name in names for r in replicas]
            began = time.monotonic()
            while await edges_so_far(connection) < EDGES and time.monotonic() - began < LIMIT_S:
                await asyncio.wait(callers, timeout=0.5, return_when=asyncio.FIRST_EXCEPTION)
            race.is_over.set()
            await asyncio.gather(*callers)
        judge(budgets, race, await read_history(connection), await answered_at(connection))


async def edges_so_far(connection: object) -> int:
    query = "SELECT count(DISTINCT (provider, round)) FROM breaker_history WHERE state = 'HALF_OPEN'"
    return int(await connection.fetchval(query))  # type: ignore[attr-defined]


async def answered_at(connection: object) -> dict[str, set[int]]:
    """Instants at which reports of a decision were committed."""
    found: dict[str, set[int]] = {}
    for record in await connection.fetch("SELECT event_id, written_at FROM report_answer"):  # type: ignore[attr-defined]
        found.setdefault(record["event_id"].partition("/")[0], set()).add(record["written_at"])
    return found


def judge(name: str, race: Race, history: dict[str, list[Version]], answered: dict[str, set[int]]) -> None:
    seen = sum(map(edges, history.values()))
    over = sum(over_admissions(versions, 1) for versions in history.values())
    used = {permit_id for _, permit_id in race.probes}
    overwritten = [
        ended
        for versions in history.values()
        for ended in ended_early(versions)
        if ended.permit.id in used and not any(ended.at in answered.get(decision, ()) for decision in ended.deciders)
    ]
    unknown = [pair for pair in race.probes if pair[1] not in granted(history[pair[0]])]
    late = [
        call
        for call in race.free
        if blocked_throughout(history.get(call.provider, []), int(call.sent) - CONVERGED_MS, int(call.answered))
    ]
    doubled = [each for each in race.local if beside_stored(history.get(each[0], []), each[1])]
    figure(f"half_open.{name}.edges", seen)
    figure(f"half_open.{name}.calls", race.calls)
    figure(f"half_open.{name}.probes", len(race.probes))
    figure(f"half_open.{name}.over_admission", over + len(overwritten) + len(doubled))
    figure(f"half_open.{name}.permits_no_row_knows", len(unknown))
    figure(f"half_open.{name}.local_permits", len(race.local))
    figure(f"half_open.{name}.calls_without_permit_later_than_250_ms", len(late))
    figure(f"half_open.{name}.oldest_view_of_a_call_without_permit_ms", max(call.age_ms for call in race.free))
    assert seen >= LEAST_EDGES[name]
    assert over == 0
    assert overwritten == []
    assert unknown == []
    assert race.local == []
    assert late == []


@pytest.mark.timeout(LONG_TIMEOUT_S)
async def test_service_resumes_after_one_expiry_when_every_probe_outcome_is_lost(tmp_path: Path) -> None:
    flags = ("--catalogue", str(catalogue_file(tmp_path, CATALOGUE)), *PATIENT)
    async with database(**RECORDING) as where, where.beside() as connection:
        await connection.execute(HISTORY)
        async with fleet(tmp_path, where, REPLICAS, *flags) as replicas:
            assert (await replicas[0].policy.ReportOutcome(told("p", "c", 503), timeout=10)).durable
            calls, last = await denied_traffic(replicas, rounds=form(4, 12))
            alive = told("p", "spare", 200, token=last.decision_token)
            await replicas[1].policy.ReportOutcome(alive, timeout=10)
            await eventually(lambda: is_served(replicas[1]), 2)
        history = (await read_history(connection))["p"]
    grants = sorted(permit.granted_at for permit in granted(history).values())
    expiries = sorted(permit.expires_at for permit in granted(history).values())
    idle = [later - expired for expired, later in zip(expiries, grants[1:], strict=False)]
    figure("lost_probes.denied_calls", calls)
    figure("lost_probes.longest_wait_after_expiry_ms", max(idle))
    assert min(idle) >= 0
    assert max(idle) <= CONVERGED_MS
    assert calls > 50
    assert history[-1].state == "CLOSED"


async def is_served(replica: Replica) -> bool:
    """Does a call pass that is no probe?"""
    answer = await replica.policy.SelectTarget(ask("p", "spare"), timeout=10)
    return answer.WhichOneof("verdict") == "dispatch" and not answer.dispatch.probe


async def denied_traffic(replicas: list[Replica], rounds: int) -> tuple[int, policy_pb2.SelectTargetResponse]:
    """Ask on and on, on every replica; the probes that come are lost, the last one is handed back."""
    calls = 0
    while True:
        for replica in replicas:
            answer = await replica.policy.SelectTarget(ask("p", "spare"), timeout=10)
            if answer.WhichOneof("verdict") == "dispatch" and answer.dispatch.probe:
                rounds -= 1
                if not rounds:
                    return calls, answer
            else:
                calls += 1
            await asyncio.sleep(0.005)
