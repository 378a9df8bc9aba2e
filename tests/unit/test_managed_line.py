"""A caller with a lease stands in line at its connection's cap like anybody else (concurrency.md section 5); lease and
view are asked again after the wait (fleet.md section 4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from policy_service.application.errors import PolicyError
from policy_service.application.lease_book import LeaseTerms
from policy_service.application.messages import Dispatch, LeaseContext, Reject, SelectAnswer, SelectRequest
from policy_service.application.replica import Replica
from policy_service.domain.catalogue import Caller, Catalogue, Connection
from policy_service.domain.lease import EndReason, LeaseCall
from policy_service.domain.lease_context import LEASE_SCOPE
from policy_service.settings.catalogue_file import builtin_catalogue
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, ask, failure, make_replica, quick_settings, report, running, select

OWNER = sha256(b"owner").hexdigest()
CALLER = Caller("agent", "1" * 64, True, frozenset({LEASE_SCOPE}), ("one", "two"))


def catalogue() -> Catalogue:
    return replace(
        builtin_catalogue(),
        connections={
            "one": Connection("one", "openai", max_concurrent=1),
            "two": Connection("two", "openai", max_concurrent=1),
        },
        callers={"agent": CALLER},
    )


@pytest.fixture
def moments() -> FakeTime:
    return FakeTime()


@pytest.fixture
async def replica(moments: FakeTime) -> AsyncIterator[Replica]:
    store = MemoryStore(MemoryDatabase(clock=moments.database))
    made = make_replica(store, time_source=moments, catalogue=catalogue(), settings=quick_settings("r1"))
    async with running(made):
        await made.leases.acquire(LeaseCall(OWNER, "agent", 0, "openai", "one", 600_000), LeaseTerms())
        yield made


def asked(*connections: str, **fields: Any) -> SelectRequest:
    lease = LeaseContext(OWNER, 1)
    return ask(*(connections or ("one",)))._replace(caller_id="agent", lease=lease, allow_wait=True, **fields)


async def holding(replica: Replica) -> SelectAnswer:
    """A call of the owner that took the only slot of its connection."""
    answer = await select(replica, asked())
    assert isinstance(answer.verdict, Dispatch), answer.verdict
    return answer


async def in_line(replica: Replica, request: SelectRequest) -> asyncio.Task[SelectAnswer]:
    """A call that waits for the slot."""
    waiting = asyncio.create_task(select(replica, request))
    while not replica.permits.waiting or not replica.permits.loads.of("qsconn:one").waiting:
        await asyncio.sleep(0.001)
    return waiting


async def end(replica: Replica, answer: SelectAnswer, status: int = 200) -> None:
    await report(replica, failure("one", status, token=answer.token))
    await replica.permits.settled()


def slots(replica: Replica) -> int:
    return replica.permits.loads.of("qsconn:one").held


async def test_the_owner_waits_for_its_own_connection_and_goes_there(replica: Replica) -> None:
    first = await holding(replica)
    waiting = await in_line(replica, asked("one", "two"))
    await end(replica, first)
    answer = await waiting
    assert isinstance(answer.verdict, Dispatch)
    assert answer.verdict.target.target.connection == "one"
    assert answer.token is not None
    assert answer.token.lease is not None
    assert answer.token.permits
    assert slots(replica) == 1


async def test_the_wait_ends_with_its_budget_in_the_refusal_of_the_gate_and_the_lease_stays(
    replica: Replica, moments: FakeTime
) -> None:
    await holding(replica)
    waiting = await in_line(replica, asked(wait_budget_ms=20))
    moments.ms += 20
    answer = await waiting
    assert isinstance(answer.verdict, Reject)
    assert (answer.verdict.http_status, answer.verdict.code) == (429, "SEMAPHORE_TIMEOUT")
    assert answer.verdict.terminal_reason == "concurrency_saturated"
    assert answer.verdict.gate == "qsconn:one"
    assert (await replica.leases.active()).rows


async def test_a_lease_that_ends_while_its_owner_waits_dispatches_nothing_and_keeps_no_slot(replica: Replica) -> None:
    first = await holding(replica)
    waiting = await in_line(replica, asked())
    await replica.leases.invalidate(LeaseCall(OWNER, "agent", 1, reason=EndReason.MANAGED_KEY_REVOKED))
    await end(replica, first)
    with pytest.raises(PolicyError) as refused:
        await waiting
    assert refused.value.reason == "LEASE_REQUIRED"
    await replica.permits.settled()
    assert slots(replica) == 0


async def test_a_connection_that_goes_out_while_its_owner_waits_is_left_for_another(replica: Replica) -> None:
    first = await holding(replica)
    waiting = await in_line(replica, asked("one", "two"))
    await end(replica, first, 401)
    moved = await waiting
    assert isinstance(moved.verdict, Dispatch)
    assert moved.verdict.target.target.connection == "two"
    assert moved.verdict.lease_transitioned
    await replica.permits.settled()
    assert slots(replica) == 0


async def test_an_owner_that_does_not_wait_is_told_so_at_once(replica: Replica) -> None:
    await holding(replica)
    answer = await select(replica, asked()._replace(allow_wait=False))
    assert isinstance(answer.verdict, Reject)
    assert answer.verdict.code == "ALL_TARGETS_SKIPPED"
    assert not replica.permits.waiting
