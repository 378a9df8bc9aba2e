"""What every permit store promises (spec/concurrency.md 2, spec/fleet.md 5), on memory and on Postgres alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from policy_service.application.call_ids import call_id, start_id
from policy_service.application.entropy import SystemEntropy
from policy_service.application.permit_work import Passage, PermitAsk, PermitOutcome
from policy_service.application.permits import Permits
from policy_service.application.ports import StoreUnavailableError
from policy_service.application.ports_permits import Locked, PermitStore, PermitUnit
from policy_service.domain import line
from policy_service.domain.facts import Fact
from policy_service.domain.gates import OFFER_MS, Gate, PermitRow, PermitState
from policy_service.domain.profiles import QueueProfile
from policy_service.domain.queue_admission import limiter_gate
from policy_service.storage.memory.permit_store import MemoryPermits, MemoryPermitStore
from policy_service.storage.memory.store import host_clock
from policy_service.storage.postgres.permit_store import PostgresPermitStore
from policy_service.storage.postgres.session import StoreOptions
from policy_service.storage.postgres.store import PostgresStore

TIMEOUT_MS = 5_000
CAP = 2
GATE = Gate("qsconn:a", CAP)
PASSAGE = Passage((GATE,))


class HostClock:
    def now(self) -> int:
        return host_clock()


@dataclass
class Fleet:
    """Replicas on one database."""

    stores: list[PermitStore]
    facts: Callable[[], Awaitable[Sequence[Fact]]]
    """Facts of gates, oldest first."""
    permits: list[Permits] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.permits = [
            Permits(
                store,
                HostClock(),
                SystemEntropy(),
                f"r{number}",
                monotonic_ms=lambda: time.monotonic() * 1000,
                store_ms=TIMEOUT_MS,
            )
            for number, store in enumerate(self.stores)
        ]

    async def rows(self, key: str = GATE.key, *request_ids: str) -> dict[str, PermitRow]:
        """Rows of a gate by request id: the live ones, and the ended ones of the requests named."""

        def read(locked: Locked) -> list[PermitRow]:
            return locked.book.rows(key)

        unit = PermitUnit(read, keys=(key,), request_ids=request_ids, reads_line=True)
        found = await self.stores[0].run(unit, timeout_ms=TIMEOUT_MS)
        return {row.request_id: row for row in found.value}


@pytest.fixture(params=["memory", "postgres", "pooled"])
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    """Four replicas; `pooled` has neither notifications nor named statements."""
    if request.param == "memory":
        kept: list[Fact] = []
        shared = MemoryPermits(record=kept.extend)

        async def facts() -> Sequence[Fact]:
            return kept

        made = await started(Fleet([MemoryPermitStore(shared, f"r{number}") for number in range(4)], facts))
        yield made
        for permits in made.permits:
            await permits.stop()
        return
    url = request.getfixturevalue("pooled_url" if request.param == "pooled" else "embedded_url")
    options = StoreOptions(has_transaction_pooler=request.param == "pooled")
    stores = [await PostgresStore.connect(url, options) for _ in range(4)]
    ends = [await store.subscribe(lambda: None, lambda: None) for store in stores]

    async def stored_facts() -> Sequence[Fact]:
        return list(reversed(await stores[0].facts(limit=100, mechanism="concurrency")))

    permit_stores: list[PermitStore] = [PostgresPermitStore(store, f"r{n}") for n, store in enumerate(stores)]
    made = await started(Fleet(permit_stores, stored_facts))
    yield made
    for permits in made.permits:
        await permits.stop()
    for end in ends:
        await end()
    for store in stores:
        await store.close()


async def started(fleet: Fleet) -> Fleet:
    for permits in fleet.permits:
        await permits.start()
    return fleet


def ask(request_id: str, timeout_ms: int = 10_000, passage: Passage = PASSAGE, ttl_ms: int = 60_000) -> PermitAsk:
    return PermitAsk(passage, request_id, timeout_ms, ttl_ms, store_ms=TIMEOUT_MS)


async def waits(permits: Permits, fleet: Fleet, request: PermitAsk) -> asyncio.Task[PermitOutcome]:
    """A call that stands in line."""
    task = asyncio.create_task(permits.acquire(request))
    await until(fleet, lambda rows: request.request_id in rows, request.passage.gates[0].key)
    return task


async def until(fleet: Fleet, condition: Callable[[dict[str, PermitRow]], bool], key: str = GATE.key) -> None:
    ends_at = time.monotonic() + 10
    while not condition(await fleet.rows(key)):
        assert time.monotonic() < ends_at, "the condition did not come to hold"
        await asyncio.sleep(0.01)


def permit_of(outcome: PermitOutcome) -> str:
    assert outcome.row is not None, outcome
    return outcome.row.permit_id


async def test_four_replicas_never_hold_more_than_the_cap(fleet: Fleet) -> None:
    outcomes = await asyncio.gather(*(fleet.permits[number % 4].acquire(ask(f"q{number}", 0)) for number in range(24)))
    assert sum(outcome.is_held for outcome in outcomes) == CAP
    assert {o.refusal.code for o in outcomes if o.refusal} <= {"SEMAPHORE_TIMEOUT"}
    assert len(await fleet.rows()) == CAP


async def test_slots_are_granted_in_ticket_order_whatever_replica_waits(fleet: Fleet) -> None:
    holders = [await fleet.permits[0].acquire(ask(f"h{number}")) for number in range(CAP)]
    tasks = [await waits(fleet.permits[number % 4], fleet, ask(f"w{number}")) for number in range(8)]
    served: list[str] = []

    async def serve(number: int) -> None:
        outcome = await tasks[number]
        served.append(f"w{number}")
        await fleet.permits[(number + 1) % 4].release([permit_of(outcome)])

    for holder in holders:
        await fleet.permits[3].release([permit_of(holder)])
    await asyncio.gather(*(serve(number) for number in range(8)))
    rows = await fleet.rows(GATE.key, *(f"w{number}" for number in range(8)))
    by_ticket = sorted(rows.values(), key=lambda row: row.ticket)
    assert [row.request_id for row in by_ticket] == [f"w{number}" for number in range(8)]
    granted = [row.granted_at or 0 for row in by_ticket]
    assert granted == sorted(granted)


async def test_a_repeated_request_gets_the_same_permit_from_any_replica(fleet: Fleet) -> None:
    first = await fleet.permits[0].acquire(ask("q"))
    again = await fleet.permits[1].acquire(ask("q"))
    assert permit_of(first) == permit_of(again)
    assert (await fleet.permits[2].acquire(ask("other", 0))).is_held


async def test_a_request_whose_permit_has_ended_is_told_so(fleet: Fleet) -> None:
    first = await fleet.permits[0].acquire(ask("q"))
    await fleet.permits[1].release([permit_of(first)])
    again = await fleet.permits[2].acquire(ask("q"))
    assert (again.row, again.ended) == (None, PermitState.RELEASED)


async def test_a_waiter_that_comes_back_on_another_replica_keeps_its_place(fleet: Fleet) -> None:
    holders = [await fleet.permits[0].acquire(ask(f"h{number}")) for number in range(CAP)]
    first = await waits(fleet.permits[1], fleet, ask("first"))
    second = await waits(fleet.permits[2], fleet, ask("second"))
    moved = asyncio.create_task(fleet.permits[3].acquire(ask("first")))
    await until(fleet, lambda rows: rows["first"].replica == "r3")
    await fleet.permits[0].release([permit_of(holders[0])])
    assert permit_of(await moved) == permit_of(await first)
    assert not second.done()
    await fleet.permits[0].release([permit_of(holders[1])])
    assert (await second).is_held


async def test_a_release_frees_once(fleet: Fleet) -> None:
    held = [await fleet.permits[0].acquire(ask(f"h{number}")) for number in range(CAP)]
    changes = [(await fleet.permits[number].release([permit_of(held[0])]))[0] for number in range(3)]
    assert [change.already_ended for change in changes] == [False, True, True]
    assert {change.state for change in changes} == {PermitState.RELEASED}
    assert len(await fleet.rows()) == CAP - 1


async def test_an_unclaimed_offer_passes_to_the_next_in_line(fleet: Fleet) -> None:
    holders = [await fleet.permits[0].acquire(ask(f"h{number}")) for number in range(CAP)]
    lost = PermitUnit(
        lambda locked: line.acquire(
            locked.book,
            line.PermitRequest("lost", "lost", (GATE.key,), locked.ticket, replica="gone"),
            locked.now,
        ),
        (GATE,),
        request_ids=("lost",),
        takes_ticket=True,
    )
    await fleet.stores[0].run(lost, timeout_ms=TIMEOUT_MS)
    second = await waits(fleet.permits[2], fleet, ask("second"))
    began = time.monotonic()
    await fleet.permits[0].release([permit_of(holders[0])])
    assert (await second).is_held
    assert OFFER_MS / 1000 - 0.1 <= time.monotonic() - began < OFFER_MS / 1000 + 1
    rows = await fleet.rows()
    assert rows["lost"].missed_at is not None


async def test_a_held_permit_ends_at_its_expiry_and_serves_the_line(fleet: Fleet) -> None:
    for number in range(CAP):
        await fleet.permits[0].acquire(ask(f"h{number}", ttl_ms=400))
    second = await fleet.permits[1].acquire(ask("next"))
    assert second.is_held
    assert 300 <= second.waited_ms < 1_500


async def test_a_permit_that_lapsed_is_not_renewed(fleet: Fleet) -> None:
    held = await fleet.permits[0].acquire(ask("q", ttl_ms=300))
    (renewed,) = await fleet.permits[1].renew([permit_of(held)], 400)
    assert (renewed.state, renewed.code) == (PermitState.HELD, "")
    await asyncio.sleep(0.6)
    (late,) = await fleet.permits[1].renew([permit_of(held)])
    assert (late.state, late.code, late.already_ended) == (PermitState.EXPIRED, "PERMIT_EXPIRED", True)


async def test_a_renewal_that_raises_is_not_loss_and_one_that_says_no_is(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await fleet.permits[0].acquire(ask("q"))
    with monkeypatch.context() as outage:
        outage.setattr(fleet.stores[1], "run", _raises)
        with pytest.raises(StoreUnavailableError):
            await fleet.permits[1].renew([permit_of(held)])
    assert [row.state for row in (await fleet.rows()).values()] == [PermitState.HELD]
    (again,) = await fleet.permits[1].renew([permit_of(held)])
    assert (again.state, again.code) == (PermitState.HELD, "")
    await fleet.permits[0].release([permit_of(held)])
    for permits in fleet.permits[:2]:
        (lost,) = await permits.renew([permit_of(held)])
        assert (lost.state, lost.code, lost.already_ended) == (PermitState.RELEASED, "PERMIT_EXPIRED", True)


async def _raises(*_: object, **__: object) -> object:
    raise StoreUnavailableError("the connection broke")


async def test_a_renewal_or_release_sent_again_gets_the_same_answer(fleet: Fleet) -> None:
    """The first answer was lost on its way; the repetition goes to another replica."""
    held = await fleet.permits[0].acquire(ask("q", ttl_ms=5_000))
    renewed = [(await permits.renew([permit_of(held)], 60_000))[0] for permits in fleet.permits[:3]]
    assert {(change.permit_id, change.state, change.code) for change in renewed} == {
        (permit_of(held), PermitState.HELD, "")
    }
    ends = [change.expires_at or 0 for change in renewed]
    assert ends == sorted(ends)
    assert len(await fleet.rows()) == 1
    released = [(await permits.release([permit_of(held)]))[0] for permits in fleet.permits[:3]]
    assert {(change.state, change.code) for change in released} == {(PermitState.RELEASED, "")}


async def test_a_cancelled_call_leaves_the_line(fleet: Fleet) -> None:
    for number in range(CAP):
        await fleet.permits[0].acquire(ask(f"h{number}"))
    task = await waits(fleet.permits[1], fleet, ask("q"))
    task.cancel()
    await asyncio.wait({task})
    await fleet.permits[1].settled()
    assert (await fleet.rows(GATE.key, "q"))["q"].state is PermitState.CANCELLED
    assert fleet.permits[1].waiting == 0


async def test_a_call_cancelled_before_its_answer_gives_the_grant_back(fleet: Fleet) -> None:
    for number in range(6):
        task = asyncio.create_task(fleet.permits[0].acquire(ask(f"q{number}")))
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        await fleet.permits[0].settled()
        if not task.cancelled():
            await fleet.permits[0].release([permit_of(task.result())])
    assert await fleet.rows() == {}


async def test_a_cancelled_request_gives_back_what_its_later_calls_hold_and_nobody_elses(fleet: Fleet) -> None:
    """SelectTarget after a wait or a failed attempt: the slot had been held for its whole TTL."""
    wide = Passage((replace(GATE, key="wide", limit=9),))
    calls = [call_id("q.%", 0, 0), call_id("q.%", 0, 1), call_id("q.%", 2, 11), start_id(call_id("q.%", 1, 0))]
    others = ["q.%2", "q.%#1", "q.%#1.x", "qx%", call_id("q", 0, 1)]
    held = {each: permit_of(await fleet.permits[0].acquire(ask(each, passage=wide))) for each in (*calls, *others)}
    given_back = await fleet.permits[1].cancel("q.%")
    assert {each.permit_id for each in given_back} == {held[each] for each in calls}
    assert set(await fleet.rows("wide")) == set(others)


async def test_a_waiter_times_out_with_its_code(fleet: Fleet) -> None:
    for number in range(CAP):
        await fleet.permits[0].acquire(ask(f"h{number}"))
    outcome = await fleet.permits[1].acquire(ask("q", 300))
    assert outcome.refusal is not None
    assert (outcome.refusal.code, outcome.refusal.http_status) == ("SEMAPHORE_TIMEOUT", 429)
    assert outcome.refusal.retry_after_s == 60
    assert 250 <= outcome.waited_ms < 1_500


async def test_a_full_line_refuses_at_once(fleet: Fleet) -> None:
    passage = Passage((replace(GATE, limit=1, depth=1),))
    await fleet.permits[0].acquire(ask("h", passage=passage))
    first = await waits(fleet.permits[1], fleet, ask("w", passage=passage))
    refused = (await fleet.permits[2].acquire(ask("x", passage=passage))).refusal
    assert refused is not None
    assert (refused.code, refused.http_status, refused.depth) == ("SEMAPHORE_QUEUE_FULL", 429, 1)
    first.cancel()


async def test_a_long_line_is_counted_and_refuses_although_only_its_head_is_read(fleet: Fleet) -> None:
    passage = Passage((replace(GATE, limit=1, depth=6),))
    held = await fleet.permits[0].acquire(ask("h", passage=passage))
    tasks = [await waits(fleet.permits[n % 4], fleet, ask(f"w{n}", passage=passage)) for n in range(6)]
    refused = (await fleet.permits[2].acquire(ask("x", passage=passage))).refusal
    assert refused is not None
    assert (refused.code, refused.depth) == ("SEMAPHORE_QUEUE_FULL", 6)
    again = asyncio.create_task(fleet.permits[0].acquire(ask("w5", passage=passage)))
    await until(fleet, lambda rows: rows["w5"].replica == "r0")
    await fleet.permits[3].release([permit_of(held)])
    assert (await tasks[0]).is_held
    assert not any(task.done() for task in (*tasks[1:], again))
    for task in (*tasks, again):
        task.cancel()


async def test_gates_are_held_together_or_not_at_all(fleet: Fleet) -> None:
    one, two = Gate("x", 1), Gate("y", 1)
    await fleet.permits[0].acquire(ask("h", passage=Passage((two,))))
    both = await waits(fleet.permits[1], fleet, ask("both", passage=Passage((one, two))))
    rows = await fleet.rows("x")
    assert rows["both"].state is PermitState.WAITING
    holder = (await fleet.rows("y"))["h"]
    await fleet.permits[2].release([holder.permit_id])
    outcome = await both
    assert [grant.gate for grant in outcome.grants] == ["x", "y"]
    await fleet.permits[3].release([permit_of(outcome)])
    assert await fleet.rows("x") == await fleet.rows("y") == {}


async def test_a_reset_gate_ends_its_waiters_in_all_their_gates(fleet: Fleet) -> None:
    one, two = Gate("x", 1), Gate("y", 1)
    await fleet.permits[0].acquire(ask("h", passage=Passage((two,))))
    both = await waits(fleet.permits[1], fleet, ask("both", passage=Passage((one, two))))
    assert await fleet.permits[2].reset_gate("x") == 1
    refused = (await both).refusal
    assert refused is not None
    assert (refused.code, refused.http_status) == ("SEMAPHORE_RESET", 503)
    assert await fleet.rows("x") == {}
    assert set(await fleet.rows("y")) == {"h"}


async def test_what_an_operator_does_at_a_gate_is_recorded_with_its_effect(fleet: Fleet) -> None:
    operator, other = fleet.permits[:2]
    assert await operator.reset_gate(GATE.key, actor="alice") == 0
    end = await operator.block_gate(GATE.key, for_ms=60_000, until=None, actor="alice (too hot)")
    assert await operator.block_gate(GATE.key, for_ms=None, until=1_000, actor="alice") == end
    waiting = await waits(other, fleet, ask("w"))
    assert await operator.reset_gate(GATE.key, actor="bob") == 1
    await waiting
    blocked, reset = await fleet.facts()
    assert (blocked.key, blocked.from_state, blocked.to_state) == (GATE.key, "open", "blocked")
    assert (blocked.actor, blocked.deadline_at, blocked.replica) == ("alice (too hot)", end, "r0")
    assert (reset.from_state, reset.to_state, reset.failure_count) == ("waiting", "reset", 1)
    assert (reset.actor, reset.reason) == ("bob", "operator")
    assert reset.at > blocked.at


async def test_a_blocked_gate_admits_nobody_until_it_opens(fleet: Fleet) -> None:
    assert await fleet.permits[0].block_gate(GATE.key, for_ms=400, until=None) is not None
    outcome = await fleet.permits[1].acquire(ask("q"))
    assert outcome.is_held
    assert 300 <= outcome.waited_ms < 1_500
    assert await fleet.permits[0].block_gate(GATE.key, for_ms=None, until=1_000) is None


async def test_a_raised_cap_admits_and_a_lowered_one_revokes_nothing(fleet: Fleet) -> None:
    held = [await fleet.permits[0].acquire(ask(f"h{number}")) for number in range(CAP)]
    waiting = await waits(fleet.permits[1], fleet, ask("w"))
    raised = Passage((replace(GATE, limit=4),), revision=1)
    assert (await fleet.permits[2].acquire(ask("x", passage=raised))).is_held
    assert (await waiting).is_held
    lowered = Passage((replace(GATE, limit=1),), revision=2)
    assert (await fleet.permits[3].acquire(ask("y", 0, passage=lowered))).refusal is not None
    assert len(await fleet.rows()) == 4
    old = await fleet.permits[0].acquire(ask("z", 0, passage=raised))
    assert old.refusal is not None
    await fleet.permits[0].release([permit_of(each) for each in held])
    assert (await fleet.permits[0].acquire(ask("z2", 0, passage=raised))).refusal is not None


async def test_starts_of_a_limiter_keep_their_gap_and_their_line(fleet: Fleet) -> None:
    profile = QueueProfile(requests_per_minute=3, min_time_between_requests_ms=150, max_wait_ms=1_500)
    key = "openai:a"
    passage = Passage((limiter_gate(key, profile),), key, profile, profile.max_wait_ms)
    outcomes = await asyncio.gather(
        *(fleet.permits[number % 4].acquire(ask(f"q{number}", 1_500, passage)) for number in range(4))
    )
    starts = sorted(o.row.held_at or 0 for o in outcomes if o.row)
    assert len(starts) == 3
    assert all(later - earlier >= 150 for earlier, later in pairwise(starts))
    (refused,) = [o.refusal for o in outcomes if o.refusal]
    assert (refused.code, refused.http_status) == ("RATE_LIMIT_QUEUE_TIMEOUT", 503)
    assert refused.retry_after_s is not None
    assert 50 <= refused.retry_after_s <= 60


async def test_gates_are_listed_with_their_loads(fleet: Fleet) -> None:
    await fleet.permits[0].acquire(ask("h", passage=Passage((Gate("x", 1),))))
    task = await waits(fleet.permits[1], fleet, ask("w", passage=Passage((Gate("x", 1),))))
    await fleet.permits[0].acquire(ask("h", passage=Passage((Gate("y", 3),))))
    listed = await fleet.permits[2].list_gates()
    assert [(each.gate.key, each.gate.limit, each.load[:2]) for each in listed] == [("x", 1, (1, 1)), ("y", 3, (1, 0))]
    assert [each.gate.key for each in await fleet.permits[2].list_gates("y")] == ["y"]
    counts = await fleet.stores[3].counts(timeout_ms=TIMEOUT_MS)
    assert {key: count[:2] for key, count in counts.items()} == {"x": (1, 1), "y": (1, 0)}
    assert all(count.first_end for count in counts.values())
    task.cancel()


async def test_a_sweep_ends_what_time_has_ended(fleet: Fleet) -> None:
    await fleet.permits[0].acquire(ask("q", ttl_ms=50))
    await asyncio.sleep(0.1)
    assert await fleet.permits[1].sweep() == 1
    assert await fleet.rows() == {}
    assert await fleet.permits[1].sweep() == 0


async def test_heartbeats_keep_the_waiters_of_a_replica(fleet: Fleet) -> None:
    for number in range(CAP):
        await fleet.permits[0].acquire(ask(f"h{number}"))
    task = await waits(fleet.permits[1], fleet, ask("q"))
    before = (await fleet.rows())["q"].waiter_seen_at
    await asyncio.sleep(0.01)
    assert await fleet.stores[2].beat(["q", "h0", "unknown"], timeout_ms=TIMEOUT_MS) == 1
    after = (await fleet.rows())["q"]
    assert (after.waiter_seen_at or 0) > (before or 0)
    assert after.replica == "r2"
    task.cancel()
