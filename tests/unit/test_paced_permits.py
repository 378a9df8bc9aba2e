"""Permits of paced calls: static start slots, execution limit, refusals (spec/queue_admission.md sections 3 and 4)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policy_service.application.messages import PermitKind
from policy_service.application.permit_gates import passage_of
from policy_service.application.permit_work import Passage, known_full
from policy_service.application.start_slots import after_start_slot, start_slot
from policy_service.domain.catalogue import Catalogue, Connection, Provider
from policy_service.domain.gates import Gate, PermitState
from policy_service.domain.policy import Policy
from policy_service.domain.profiles import QueueProfile
from policy_service.domain.queue_admission import limiter_gate
from tests.unit.test_permits import NOW, World, ask, in_line, permit_id, to


@pytest.fixture
def world() -> World:
    return World()


PACE = {"queue.requests_per_minute": 60, "queue.min_time_between_requests_ms": 1}
SLOTTED = Policy(
    Catalogue(
        {"slow": Provider("slow", start_slot_ms=1_000), "fast": Provider("fast")},
        {
            "c": Connection("c", "fast", settings=PACE),
            **{name: Connection(name, "slow", settings=PACE) for name in ("a", "b")},
        },
    )
)


def slotted(name: str) -> Passage:
    return passage_of(SLOTTED, to(name, "slow"))


async def test_static_start_slots_space_the_starts_of_all_connections_of_a_provider(world: World) -> None:
    one, two = world.permits
    assert slotted("a").start_gate == slotted("b").start_gate is not None
    assert (await one.acquire(ask("first", 0, slotted("a")))).is_held
    refused = (await two.acquire(ask("second", 0, slotted("b")))).refusal
    assert refused is not None
    assert (refused.code, refused.http_status) == ("RATE_LIMIT_QUEUE_TIMEOUT", 503)
    waiting = await in_line(two, ask("third", 5_000, slotted("b")))
    world.time.at = NOW + 1_000
    await two.look()
    held = await waiting
    assert [grant.gate for grant in held.grants] == ["slow:b"]


async def test_a_call_cancelled_while_it_waits_for_a_start_slot_leaves_no_ticket(world: World) -> None:
    one, two = world.permits
    await one.acquire(ask("first", 0, slotted("a")))
    waiting = await in_line(two, ask("second", 5_000, slotted("b")))
    (left,) = await one.cancel("second")
    assert left.state is PermitState.CANCELLED
    await two.look()
    assert (await waiting).refusal is not None


def test_the_wait_for_a_start_slot_comes_off_the_budget_of_the_queue() -> None:
    asked = ask("q", 5_000, slotted("a"))
    assert start_slot(asked, Gate("start:slow")).budget_ms == 5_000
    assert start_slot(replace(asked, timeout_ms=None), Gate("start:slow")).budget_ms == 30_000
    assert after_start_slot(asked, 1_200).timeout_ms == 3_800
    assert after_start_slot(asked, 9_000).timeout_ms == 0
    endless = replace(asked, timeout_ms=None, passage=replace(asked.passage, profile=QueueProfile(unbounded_wait=True)))
    assert after_start_slot(endless, 9_000) == endless
    assert passage_of(SLOTTED, to("c", "fast")).start_gate is None


async def test_a_permit_of_a_cap_and_a_queue_is_renewed_within_its_execution_limit(world: World) -> None:
    profile = QueueProfile(execution_max_wait_ms=150_000)
    passage = Passage((limiter_gate("p:c", profile), Gate("qsconn:c", 1)), "p:c", profile)
    held = await world.permits[0].acquire(ask("a", 0, passage))
    assert [(grant.kind, grant.expires_at - NOW) for grant in held.grants] == [
        (PermitKind.QUEUE, 120_000),
        (PermitKind.CONCURRENCY, 120_000),
    ]
    world.time.at += 100_000
    (renewed,) = await world.permits[0].renew([permit_id(held)])
    assert renewed.expires_at == NOW + 150_000
    world.time.at += 50_000
    (spent,) = await world.permits[0].renew([permit_id(held)])
    assert (spent.state, spent.code) == (PermitState.EXPIRED, "RATE_LIMIT_EXECUTION_TIMEOUT")


async def test_a_permit_that_was_merely_not_renewed_is_told_so(world: World) -> None:
    profile = QueueProfile(execution_max_wait_ms=150_000)
    passage = Passage((limiter_gate("p:c", profile), Gate("qsconn:c", 1)), "p:c", profile)
    held = await world.permits[0].acquire(ask("a", 0, passage))
    world.time.at += 120_000
    (late,) = await world.permits[0].renew([permit_id(held)])
    assert (late.state, late.code) == (PermitState.EXPIRED, "PERMIT_EXPIRED")


@pytest.mark.parametrize(
    ("passage", "code", "status", "reason"),
    [
        (Passage((Gate("g", 1),)), "SEMAPHORE_TIMEOUT", 429, "concurrency_saturated"),
        (Passage((limiter_gate("p:c", QueueProfile()),), "p:c"), "RATE_LIMIT_QUEUE_TIMEOUT", 503, "queue_saturated"),
    ],
)
def test_a_gate_known_to_be_full_refuses_with_the_code_of_its_kind(
    passage: Passage, code: str, status: int, reason: str
) -> None:
    told = known_full(passage, "g", 3, 1_001)
    assert (told.code, told.http_status, told.reason) == (code, status, reason)
    assert (told.gate, told.depth, told.retry_after_s) == ("g", 3, 2)
    assert known_full(passage, "g", 0, None).retry_after_s is None
