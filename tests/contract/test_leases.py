"""What every lease store promises (spec/leases.md section 4, fleet.md section 6), on memory and Postgres alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from hashlib import sha256

import pytest

from policy_service.application.entropy import SystemEntropy
from policy_service.application.lease_book import LeaseBook, LeaseTerms
from policy_service.application.ports import Store, StoreUnavailableError
from policy_service.application.ports_leases import LeaseScope, LeaseSight, LeaseStore, LeaseUnit, LeaseWrites
from policy_service.domain.catalogue import Caller
from policy_service.domain.facts import Cause
from policy_service.domain.lease import EndReason, Fence, LeaseCall, LeaseResult, LeaseRow, LeaseState
from policy_service.domain.lease_context import LEASE_SCOPE
from policy_service.storage.memory.lease_store import LeaseTable, MemoryLeaseStore
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from policy_service.storage.postgres.lease_store import PostgresLeaseStore
from policy_service.storage.postgres.session import StoreOptions
from policy_service.storage.postgres.store import PostgresStore
from tests.contract.units import TIMEOUT_MS

NO_TERMS = LeaseTerms()


@dataclass(frozen=True, slots=True)
class Fleet:
    """Two replicas' lease stores on one database."""

    one: LeaseStore
    two: LeaseStore
    store: Store

    @property
    def book(self) -> LeaseBook:
        return LeaseBook(self.one, SystemEntropy(), "r1", budget_ms=TIMEOUT_MS)

    @property
    def other(self) -> LeaseBook:
        return LeaseBook(self.two, SystemEntropy(), "r2", budget_ms=TIMEOUT_MS)


@pytest.fixture(params=["memory", "postgres", "pooled"])
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    """Both kinds of store; `pooled` is Postgres as seen through a pooler in transaction mode."""
    if request.param == "memory":
        memory, table = MemoryStore(MemoryDatabase()), LeaseTable()
        yield Fleet(MemoryLeaseStore(memory, table), MemoryLeaseStore(memory, table), memory)
        return
    url = request.getfixturevalue("pooled_url" if request.param == "pooled" else "embedded_url")
    options = StoreOptions(has_transaction_pooler=request.param == "pooled")
    stores = [await PostgresStore.connect(url, options) for _ in range(2)]
    yield Fleet(PostgresLeaseStore(stores[0]), PostgresLeaseStore(stores[1]), stores[0])
    for store in stores:
        await store.close()


def owner(name: str) -> str:
    return sha256(name.encode()).hexdigest()


def call(
    name: str, connection: str = "", generation: int = 0, *, key: str = "k", ttl_ms: int | None = None
) -> LeaseCall:
    return LeaseCall(owner(name), key, generation, "p", connection, ttl_ms)


async def backdate(store: LeaseStore, name: str, by_ms: int) -> None:
    """Let a lease have begun, and end, that much earlier."""

    def run(sight: LeaseSight) -> LeaseWrites[None]:
        mine = (row for row in sight.rows if row.owner_hash == owner(name) and row.state is LeaseState.ACTIVE)
        return LeaseWrites(None, tuple(replace(row, expires_at=row.expires_at - by_ms) for row in mine))

    await store.run(LeaseUnit(LeaseScope((owner(name),)), run), timeout_ms=TIMEOUT_MS)


def active(rows: Iterable[LeaseRow]) -> list[tuple[str, int]]:
    return sorted((row.connection_id, row.generation) for row in rows if row.state is LeaseState.ACTIVE)


async def test_of_many_owners_at_once_exactly_one_gets_the_connection(fleet: Fleet) -> None:
    for number in range(5):
        connection = f"c{number}"
        books = (fleet.book, fleet.other) * 4
        steps = await asyncio.gather(
            *(book.acquire(call(f"{number}/{n}", connection), NO_TERMS) for n, book in enumerate(books))
        )
        results = sorted(step.result for step in steps)
        assert results == [LeaseResult.ACQUIRED] + [LeaseResult.CONNECTION_BUSY] * 7
        assert all(step.free_at for step in steps if step.result is LeaseResult.CONNECTION_BUSY)


async def test_of_one_owners_racing_acquires_one_makes_the_lease_and_the_others_find_it(fleet: Fleet) -> None:
    steps = await asyncio.gather(
        *(book.acquire(call("o", "c"), NO_TERMS) for book in (fleet.book, fleet.other, fleet.book))
    )
    assert sorted(step.result for step in steps) == ["ACQUIRED", "REUSED", "REUSED"]
    elsewhere = await fleet.other.acquire(call("o", "d"), NO_TERMS)
    assert elsewhere.result is LeaseResult.OWNER_ALREADY_ACTIVE
    assert elsewhere.lease is not None
    assert elsewhere.lease.connection_id == "c"


async def test_generations_of_an_owner_grow_over_every_kind_of_end(fleet: Fleet) -> None:
    book, seen = fleet.book, []
    for end in ("release", "invalidate", "lapse"):
        step = await book.acquire(call("o", "c"), NO_TERMS)
        assert step.lease is not None
        seen.append(step.lease.generation)
        if end == "lapse":
            await backdate(fleet.two, "o", 200_000)
        else:
            await getattr(book, end)(call("o", generation=step.lease.generation))
    last = await fleet.other.acquire(call("o", "d"), NO_TERMS)
    assert last.lease is not None
    assert [*seen, last.lease.generation] == [1, 2, 3, 4]
    for generation in (1, 2, 3):
        check = await book.fence(call("o", "d", generation))
        assert check.verdict is Fence.STALE


async def test_a_move_keeps_the_generation_and_frees_the_old_connection(fleet: Fleet) -> None:
    await fleet.book.acquire(call("o", "c"), NO_TERMS)
    moved = await fleet.other.transition(call("o", "d", 1), NO_TERMS)
    assert moved.result is LeaseResult.TRANSITIONED
    assert (await fleet.book.fence(call("o", "c", 1))).verdict is Fence.CONNECTION_MISMATCH
    assert (await fleet.book.fence(call("o", "d", 1))).verdict is Fence.VALID
    assert (await fleet.other.acquire(call("p", "c"), NO_TERMS)).result is LeaseResult.ACQUIRED
    assert active((await fleet.book.active()).rows) == [("c", 1), ("d", 1)]


async def test_two_owners_that_swap_connections_both_stay_where_they_are(fleet: Fleet) -> None:
    await fleet.book.acquire(call("o", "c"), NO_TERMS)
    await fleet.book.acquire(call("p", "d"), NO_TERMS)
    steps = await asyncio.gather(
        fleet.book.transition(call("o", "d", 1), NO_TERMS), fleet.other.transition(call("p", "c", 1), NO_TERMS)
    )
    assert [step.result for step in steps] == [LeaseResult.CONNECTION_BUSY] * 2
    assert active((await fleet.book.active()).rows) == [("c", 1), ("d", 1)]


async def test_a_renewal_and_a_rivals_acquire_at_the_moment_of_expiry_never_both_hold(fleet: Fleet) -> None:
    for number in range(20):
        name, connection = f"o{number}", f"c{number}"
        await fleet.book.acquire(call(name, connection, ttl_ms=1_000), NO_TERMS)
        await backdate(fleet.one, name, 997)
        renewed, taken = await asyncio.gather(
            fleet.book.renew(call(name, generation=1)),
            fleet.other.acquire(call(f"rival{number}", connection), NO_TERMS),
        )
        assert (renewed.result, taken.result) in (
            (LeaseResult.RENEWED, LeaseResult.CONNECTION_BUSY),
            (LeaseResult.STALE, LeaseResult.ACQUIRED),
            (LeaseResult.STALE, LeaseResult.CONNECTION_BUSY),
        )
        holders = [row for row in (await fleet.book.active()).rows if row.connection_id == connection]
        assert len(holders) == 1


async def test_a_lapsed_lease_is_never_alive_whether_or_not_it_was_swept(fleet: Fleet) -> None:
    await fleet.book.acquire(call("o", "c"), NO_TERMS)
    await backdate(fleet.one, "o", 200_000)
    assert (await fleet.book.fence(call("o", "c", 1))).verdict is Fence.REQUIRED
    assert (await fleet.book.get(call("o", generation=1))).result is LeaseResult.STALE
    assert (await fleet.book.renew(call("o", generation=1))).result is LeaseResult.STALE


async def test_the_lock_delay_counts_from_the_expiry_and_not_from_its_discovery(fleet: Fleet) -> None:
    await fleet.book.acquire(call("o", "c", ttl_ms=10_000), NO_TERMS)
    await backdate(fleet.one, "o", 12_000)
    waits = await fleet.other.acquire(call("p", "c"), LeaseTerms(lock_delay_ms=60_000))
    assert waits.result is LeaseResult.CONNECTION_BUSY
    found = (await fleet.book.look((owner("o"),), ())).rows
    assert waits.free_at == found[0].expires_at + 60_000
    assert (await fleet.other.acquire(call("p", "c"), LeaseTerms(lock_delay_ms=1_000))).result is LeaseResult.ACQUIRED


async def test_a_release_is_repeatable_and_leaves_no_lock_delay(fleet: Fleet) -> None:
    await fleet.book.acquire(call("o", "c"), NO_TERMS)
    for book in (fleet.book, fleet.other):
        assert (await book.release(call("o", generation=1))).result is LeaseResult.RELEASED
    assert (await fleet.book.release(call("o", generation=1, key="other"))).result is LeaseResult.STALE
    assert (await fleet.other.acquire(call("p", "c"), LeaseTerms(60_000))).result is LeaseResult.ACQUIRED


async def test_a_renewal_that_raises_is_not_loss_and_one_that_says_no_is(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.book.acquire(call("o", "c"), NO_TERMS)
    with monkeypatch.context() as outage:
        outage.setattr(fleet.two, "run", _raises)
        with pytest.raises(StoreUnavailableError):
            await fleet.other.renew(call("o", generation=1))
    assert (await fleet.book.fence(call("o", "c", 1))).verdict is Fence.VALID
    assert (await fleet.other.acquire(call("rival", "c"), NO_TERMS)).result is LeaseResult.CONNECTION_BUSY
    assert (await fleet.other.renew(call("o", generation=1))).result is LeaseResult.RENEWED
    await fleet.book.invalidate(call("o", generation=1))
    for book in (fleet.book, fleet.other):
        assert (await book.renew(call("o", generation=1))).result is LeaseResult.STALE
    assert (await fleet.other.acquire(call("rival", "c"), NO_TERMS)).result is LeaseResult.ACQUIRED


async def _raises(*_: object, **__: object) -> object:
    raise StoreUnavailableError("the connection broke")


async def test_a_renewal_sent_again_gets_the_same_answer(fleet: Fleet) -> None:
    """The first answer was lost on its way; the repetition goes to another replica."""
    await fleet.book.acquire(call("o", "c", ttl_ms=10_000), NO_TERMS)
    steps = [await book.renew(call("o", generation=1, ttl_ms=60_000)) for book in (fleet.book, fleet.other, fleet.book)]
    leases = [step.lease for step in steps if step.lease]
    assert [step.result for step in steps] == [LeaseResult.RENEWED] * 3
    assert [(row.generation, row.connection_id, row.expires_at - row.renewed_at) for row in leases] == [
        (1, "c", 60_000)
    ] * 3
    assert active((await fleet.book.active()).rows) == [("c", 1)]


async def test_a_report_ends_the_lease_only_with_a_valid_fence_and_repeats_its_answer(fleet: Fleet) -> None:
    await fleet.book.acquire(call("o", "c"), NO_TERMS)
    assert (await fleet.book.release_fenced(call("o", "d", 1))).verdict is Fence.CONNECTION_MISMATCH
    assert (await fleet.book.release_fenced(call("o", "c", 2))).verdict is Fence.STALE
    assert active((await fleet.book.active()).rows) == [("c", 1)]
    for book in (fleet.book, fleet.other):
        assert (await book.release_fenced(call("o", "c", 1))).verdict is Fence.VALID
    assert active((await fleet.book.active()).rows) == []


async def test_a_sweep_ends_what_lapsed_and_what_keys_may_no_longer_hold(fleet: Fleet) -> None:
    for name, connection, key in (("a", "c1", "k"), ("b", "c2", "k"), ("c", "c3", "gone"), ("d", "c4", "k")):
        await fleet.book.acquire(call(name, connection, key=key), NO_TERMS)
    await backdate(fleet.one, "a", 200_000)
    callers = {"k": Caller("k", "0" * 64, True, frozenset({LEASE_SCOPE}), ("c1", "c2"))}
    swept = await fleet.other.sweep(callers, revision=0)
    assert (swept.expired, swept.withdrawn) == (1, 2)
    assert active((await fleet.book.active()).rows) == [("c2", 1)]
    ends = [(await fleet.book.look((owner(name),), ())).rows[0].end_reason for name in "acd"]
    assert ends == [EndReason.TTL_EXPIRED, EndReason.MANAGED_KEY_REVOKED, EndReason.AUTHORIZATION_CHANGED]


async def test_a_replica_with_an_older_catalogue_withdraws_nothing(fleet: Fleet) -> None:
    await fleet.store.import_catalogue("{}", "a" * 64, force=False, actor="test")
    await fleet.book.acquire(call("o", "c"), NO_TERMS)
    assert (await fleet.book.sweep({}, revision=0)).withdrawn == 0
    assert (await fleet.book.sweep({}, revision=1)).withdrawn == 1


async def test_a_connection_listed_just_now_is_leased_five_seconds_later(fleet: Fleet) -> None:
    revision = await fleet.store.import_catalogue("{}", "a" * 64, force=False, actor="test")
    step = await fleet.book.acquire(call("o", "c"), LeaseTerms(listed_in=revision.revision))
    assert step.result is LeaseResult.CONNECTION_BUSY
    assert step.free_at == revision.created_at + 5_000


async def test_beginnings_and_ends_leave_facts_without_the_owner_and_renewals_leave_none(fleet: Fleet) -> None:
    cause = Cause("", 0, request_id="q1")
    await fleet.book.acquire(call("o", "c"), NO_TERMS, cause)
    await fleet.book.renew(call("o", generation=1))
    await fleet.other.transition(call("o", "d", 1), NO_TERMS, cause)
    facts = [f for f in await fleet.store.facts(limit=99) if f.mechanism == "lease"]
    assert sorted((f.key, f.to_state, f.reason, f.request_id) for f in facts) == [
        ("c", "ACTIVE", "", "q1"),
        ("c", "INVALIDATED", "CONNECTION_INELIGIBLE", "q1"),
        ("d", "ACTIVE", "", "q1"),
    ]
    assert owner("o") not in repr(facts)


async def test_a_cancelled_caller_leaves_a_whole_operation_or_none(fleet: Fleet) -> None:
    for number in range(20):
        running = asyncio.create_task(fleet.book.acquire(call(f"o{number}", f"c{number}"), NO_TERMS))
        await asyncio.sleep(0.0005 * (number % 5))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    again = await asyncio.gather(*(fleet.other.acquire(call(f"o{n}", f"c{n}"), NO_TERMS) for n in range(20)))
    assert {step.result for step in again} <= {LeaseResult.ACQUIRED, LeaseResult.REUSED}
    assert {step.lease.generation for step in again if step.lease} == {1}
