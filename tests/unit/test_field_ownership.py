"""Failures of the field around slots and leases: calls cut off, counters, busy pools, callers that only might lease."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256

import pytest

from policy_service.application.errors import PolicyError
from policy_service.application.lease_book import LeaseTerms
from policy_service.application.messages import (
    Dispatch,
    EndKind,
    LeaseContext,
    PermitKind,
    PermitUse,
    Reject,
    ReportRequest,
    SelectAnswer,
    SelectRequest,
)
from policy_service.application.replica import Replica
from policy_service.domain.catalogue import Caller, Catalogue, Connection
from policy_service.domain.inflight import InFlight
from policy_service.domain.lease import LeaseCall, LeaseResult
from policy_service.domain.lease_context import LEASE_SCOPE
from policy_service.settings.catalogue_file import builtin_catalogue
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, ask, chosen, make_replica, quick_settings, report, running, select, target

SCOPES = frozenset({LEASE_SCOPE})
PERMIT_TTL_MS = 120_000
COOLING_MS = 3_000
"""What a connection that broke a stream off sits out; far less than the life of a permit."""


def catalogue() -> Catalogue:
    return replace(
        builtin_catalogue(),
        connections={
            "one": Connection("one", "openai", max_concurrent=1),
            "two": Connection("two", "openai", max_concurrent=1),
            "shared": Connection("shared", "openai"),
            "own": Connection("own", "openai"),
        },
        callers={
            "idle": Caller("idle", "1" * 64, True, SCOPES, ("shared", "own")),
            "busy": Caller("busy", "2" * 64, True, SCOPES, ("shared",)),
            "listless": Caller("listless", "3" * 64, True, SCOPES),
        },
    )


@pytest.fixture
def moments() -> FakeTime:
    return FakeTime()


@pytest.fixture
async def replica(moments: FakeTime) -> AsyncIterator[Replica]:
    store = MemoryStore(MemoryDatabase(clock=moments.database))
    made = make_replica(store, time_source=moments, catalogue=catalogue(), settings=quick_settings("r1"))
    async with running(made):
        yield made


async def held(replica: Replica, connection: str = "one") -> SelectAnswer:
    """A call that took the only slot of a connection."""
    answer = await select(replica, ask(connection))
    assert isinstance(answer.verdict, Dispatch), answer.verdict
    assert answer.verdict.permit_use is PermitUse.HELD
    assert [permit.kind for permit in answer.verdict.permits] == [PermitKind.CONCURRENCY]
    return answer


def slots_taken(replica: Replica, connection: str = "one") -> int:
    return replica.permits.loads.of(f"qsconn:{connection}").held


async def is_free(replica: Replica, connection: str = "one") -> bool:
    """Would a call get in now? One that does leaves again."""
    answer = await select(replica, ask(connection))
    if isinstance(answer.verdict, Dispatch):
        await replica.permits.release([permit.permit_id for permit in answer.verdict.permits])
    return isinstance(answer.verdict, Dispatch)


def cut_off(answer: SelectAnswer, end: EndKind, *, final: bool = True) -> ReportRequest:
    """The end of a stream that had begun: the client left, or the upstream died before its last event."""
    return ReportRequest(
        target("one"),
        end,
        answer.token,
        final=final,
        network_error="reset" if end is EndKind.NETWORK_ERROR else "",
        streamed=True,
        bytes_streamed=2_048,
        first_byte_ms=100,
        latency_ms=900,
    )


# --- slots ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("end", [EndKind.CLIENT_CANCELLED, EndKind.NETWORK_ERROR])
async def test_a_stream_cut_off_in_the_middle_frees_its_slot_at_once(
    replica: Replica, moments: FakeTime, end: EndKind
) -> None:
    answer = await held(replica)
    assert not await is_free(replica)
    assert slots_taken(replica) == 1
    await report(replica, cut_off(answer, end))
    await replica.permits.settled()
    assert slots_taken(replica) == 0
    moments.ms += COOLING_MS
    assert await is_free(replica)


@pytest.mark.parametrize("end", [EndKind.CLIENT_CANCELLED, EndKind.NETWORK_ERROR])
async def test_a_cut_off_stream_reported_twice_frees_one_slot_and_not_its_successors(
    replica: Replica, moments: FakeTime, end: EndKind
) -> None:
    answer = await held(replica)
    await report(replica, cut_off(answer, end))
    await replica.permits.settled()
    moments.ms += COOLING_MS
    await held(replica)
    await report(replica, cut_off(answer, end))
    await replica.permits.settled()
    assert slots_taken(replica) == 1
    assert not await is_free(replica)


async def test_an_attempt_that_is_not_the_last_keeps_the_slot_of_its_decision(
    replica: Replica, moments: FakeTime
) -> None:
    answer = await held(replica)
    await report(replica, cut_off(answer, EndKind.NETWORK_ERROR, final=False))
    await replica.permits.settled()
    moments.ms += COOLING_MS
    assert slots_taken(replica) == 1
    assert not await is_free(replica)
    moments.ms += PERMIT_TTL_MS - COOLING_MS
    assert await is_free(replica)


def test_in_flight_never_falls_below_zero() -> None:
    entries = InFlight()
    for entry in ("never", "never", "counted"):
        entries.release("c", entry)
    assert entries.own("c", 0) == entries.count("c", 0) == 0
    entries.reserve("c", "counted", 0)
    for _ in range(3):
        entries.release("c", "counted")
        entries.release("c", "never")
    assert entries.own("c", 0) == 0
    entries.reserve("c", "next", 0)
    entries.release("c", "counted")
    assert entries.count("c", 0) == 1


async def test_releases_without_a_grant_never_make_room_for_two(replica: Replica) -> None:
    for _ in range(3):
        (change,) = await replica.permits.release(["never-granted"])
        assert change.already_ended or change.code
    answer = await held(replica)
    assert answer.token is not None
    await replica.permits.release(["never-granted"])
    assert not await is_free(replica)


async def test_targets_that_are_all_busy_are_a_typed_429_with_a_wait(replica: Replica, moments: FakeTime) -> None:
    await held(replica, "one")
    moments.ms += 20_000
    await held(replica, "two")
    refused = (await select(replica, ask("one", "two"))).verdict
    assert isinstance(refused, Reject)
    assert (refused.http_status, refused.terminal_reason) == (429, "all_targets_skipped")
    assert refused.retry_after_s == (PERMIT_TTL_MS - 20_000) // 1_000


async def test_targets_known_to_be_busy_are_a_typed_429_with_a_wait_too(replica: Replica) -> None:
    """A request without an id of its own: the loads at hand answer, without the store."""
    await held(replica, "one")
    answer = await select(replica, ask("one")._replace(is_retry_safe=False))
    assert isinstance(answer.verdict, Reject)
    assert (answer.verdict.http_status, answer.verdict.retry_after_s) == (429, PERMIT_TTL_MS // 1_000)
    assert [e.reason for e in answer.exclusions] == ["concurrency_cap"]


async def test_a_pool_without_targets_is_typed_and_never_a_429(replica: Replica) -> None:
    refused = (await select(replica, ask("one")._replace(allowed_connections=("elsewhere",)))).verdict
    assert isinstance(refused, Reject)
    assert (refused.http_status, refused.terminal_reason) == (503, "all_targets_skipped")
    assert refused.retry_after_s is None


# --- leases -----------------------------------------------------------------------------------------------------
def leasing(caller: str, owner: str) -> SelectRequest:
    context = LeaseContext(sha256(owner.encode()).hexdigest(), 1)
    return ask("shared", "own")._replace(caller_id=caller, lease=context)


async def leased(replica: Replica, caller: str, owner: str, connection: str) -> LeaseResult:
    call = LeaseCall(sha256(owner.encode()).hexdigest(), caller, 0, "openai", connection, None)
    return (await replica.leases.acquire(call, LeaseTerms())).result


async def test_a_caller_that_might_lease_but_does_not_reserves_nothing_against_one_that_does(replica: Replica) -> None:
    assert await leased(replica, "busy", "b", "shared") is LeaseResult.ACQUIRED
    assert chosen(await select(replica, leasing("busy", "b"))) == "shared"
    assert await leased(replica, "idle", "i", "shared") is LeaseResult.CONNECTION_BUSY
    assert await leased(replica, "idle", "i", "own") is LeaseResult.ACQUIRED
    assert chosen(await select(replica, leasing("idle", "i"))) == "own"


async def test_an_empty_list_of_connections_means_deny(replica: Replica) -> None:
    with pytest.raises(PolicyError) as caught:
        await select(replica, leasing("listless", "l"))
    assert caught.value.reason == "LEASE_KEY_CONFIGURATION_INVALID"
