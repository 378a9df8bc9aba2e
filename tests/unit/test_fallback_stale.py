"""Fallbacks that went stale between the answer and the call are counted, and only those (spec/fleet.md section 1)."""

from __future__ import annotations

import pytest

from policy_service.application.messages import DecisionToken, Dispatch, ReportRequest
from policy_service.application.replica import Replica
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, ask, failure, make_replica, quick_settings, report, running, select


@pytest.fixture
def moments() -> FakeTime:
    return FakeTime()


@pytest.fixture
def replica(moments: FakeTime) -> Replica:
    store = MemoryStore(MemoryDatabase(clock=moments.database))
    return make_replica(store, time_source=moments, settings=quick_settings("r1"))


async def decided(replica: Replica) -> DecisionToken:
    """A decision for `a` with the fallback `b`."""
    answer = await select(replica, ask("a", "b"))
    assert isinstance(answer.verdict, Dispatch)
    assert [each.target.connection for each in answer.verdict.fallbacks] == ["b"]
    assert answer.token is not None
    return answer.token


def attempt(connection: str, token: DecisionToken, offset_ms: int, status: int = 500) -> ReportRequest:
    told = failure(connection, status, token=token, attempt=int(connection == "b"), final=connection == "b")
    return told._replace(attempt_offset_ms=offset_ms)


def stale(replica: Replica) -> int:
    return replica.report.ignored["fallback_stale"]


@pytest.mark.parametrize(("status", "offset_ms", "counted"), [(429, 100, 1), (401, 100, 1), (429, 10, 0), (401, 10, 0)])
async def test_a_fallback_is_stale_if_it_was_out_when_its_attempt_began(
    replica: Replica, moments: FakeTime, status: int, offset_ms: int, counted: int
) -> None:
    async with running(replica):
        token = await decided(replica)
        moments.ms += 50
        await report(replica, failure("b", status, headers={"retry-after": "60"}))
        moments.ms += 100
        told = await report(replica, attempt("b", token, offset_ms))
        assert stale(replica) == counted
        assert "fallback_stale" not in told.ignored


async def test_a_breaker_that_opened_meanwhile_makes_its_fallbacks_stale(replica: Replica, moments: FakeTime) -> None:
    async with running(replica):
        token = await decided(replica)
        moments.ms += 50
        for n in range(12):
            await report(replica, failure(f"burst{n}"))
        moments.ms += 50
        await report(replica, attempt("b", token, 90))
        assert stale(replica) == 1


async def test_the_chosen_target_is_no_fallback_and_a_repetition_counts_once(
    replica: Replica, moments: FakeTime
) -> None:
    async with running(replica):
        token = await decided(replica)
        for name in ("a", "b"):
            await report(replica, failure(name, 429, headers={"retry-after": "60"}))
        moments.ms += 50
        await report(replica, attempt("a", token, 20))
        assert stale(replica) == 0
        for _ in range(3):
            await report(replica, attempt("b", token, 40))
        assert stale(replica) == 1
