"""The permit use case over the memory store under a clock that is moved by hand (spec/concurrency.md, fleet.md 5)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from itertools import count

import pytest

from policy_service.application.gate_loads import IDLE_MS
from policy_service.application.messages import PermitKind, PermitRef
from policy_service.application.permit_gates import FREE, passage_of, passage_of_keys, proceeds, profile_of
from policy_service.application.permit_work import (
    Passage,
    PermitAsk,
    PermitOutcome,
    PermitRefusal,
)
from policy_service.application.permits import Permits
from policy_service.domain.catalogue import Catalogue, Connection, Provider
from policy_service.domain.gates import HEARTBEAT_MS, WAITER_LOST_MS, Gate, PermitState
from policy_service.domain.ids import AuthClass, ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.policy import Policy
from policy_service.domain.profiles import QueueProfile
from policy_service.domain.queue_admission import FLEET_GATE, limiter_gate
from policy_service.domain.queue_learning import RateEvidence
from policy_service.domain.rate_headers import rate_evidence
from policy_service.settings.provider_data import builtin_providers
from policy_service.storage.memory.permit_store import MemoryPermits, MemoryPermitStore

NOW = 1_000_000
ONE = Passage((Gate("g", 1),))


@dataclass
class Time:
    """Database time and the host's monotonic clock, moved together."""

    at: int = NOW

    def now(self) -> int:
        return self.at

    def monotonic_ms(self) -> float:
        return float(self.at)


class Ids:
    def __init__(self) -> None:
        self._count = count(1)

    def draw(self) -> float:
        return 0.5

    def new_id(self) -> str:
        return f"p{next(self._count)}"


@dataclass
class World:
    """Replicas over one memory store; nothing looks after the line but the test."""

    time: Time = field(default_factory=Time)
    stores: list[MemoryPermitStore] = field(default_factory=list)
    permits: list[Permits] = field(default_factory=list)

    def __post_init__(self) -> None:
        shared = MemoryPermits(self.time.now)
        ids = Ids()
        self.stores = [MemoryPermitStore(shared, f"r{number}") for number in range(2)]
        self.permits = [
            Permits(store, self.time, ids, f"r{number}", monotonic_ms=self.time.monotonic_ms)
            for number, store in enumerate(self.stores)
        ]

    def state(self, request_id: str, gate: str = "g") -> PermitState:
        return self.stores[0].shared.rows[gate, request_id].state


def ask(request_id: str, timeout_ms: int | None = 10_000, passage: Passage = ONE) -> PermitAsk:
    return PermitAsk(passage, request_id, timeout_ms)


async def in_line(permits: Permits, request: PermitAsk) -> asyncio.Task[PermitOutcome]:
    """A call that has got its place in line."""
    task = asyncio.create_task(permits.acquire(request))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


def permit_id(outcome: PermitOutcome) -> str:
    assert outcome.row is not None
    return outcome.row.permit_id


@pytest.fixture
def world() -> World:
    return World()


async def test_a_dispatch_without_gates_asks_nobody(world: World) -> None:
    outcome = await world.permits[0].acquire(ask("q", passage=FREE))
    assert (outcome.grants, outcome.refusal, world.stores[0].calls) == ((), None, 0)


async def test_a_release_on_the_waiters_own_replica_serves_it_in_the_same_transaction(world: World) -> None:
    held = await world.permits[0].acquire(ask("h"))
    task = await in_line(world.permits[0], ask("w"))
    world.time.at += 700
    calls = world.stores[0].calls
    await world.permits[0].release([permit_id(held)])
    outcome = await task
    assert (outcome.is_held, outcome.waited_ms, outcome.at) == (True, 700, NOW + 700)
    assert world.stores[0].calls == calls + 1


async def test_a_hand_off_wakes_the_waiters_replica_which_claims_it(world: World) -> None:
    for permits in world.permits:
        await permits.start()
    held = await world.permits[0].acquire(ask("h"))
    task = await in_line(world.permits[1], ask("w"))
    await world.permits[0].release([permit_id(held)])
    assert world.state("w") is PermitState.WAITING
    assert (await task).is_held
    for permits in world.permits:
        await permits.stop()


async def test_a_cap_that_is_raised_or_lifted_lets_those_in_line_in_at_once(world: World) -> None:
    passage = passage_of(policy(), to("both"))
    await world.permits[0].acquire(ask("h", passage=passage))
    task = await in_line(world.permits[1], ask("w", passage=passage))
    world.time.at += 1_000
    raised = Policy(Catalogue(connections={"both": replace(CONNECTIONS["both"], max_concurrent=2)}), revision=1)
    await world.permits[1].adopt(raised)
    assert (await task).is_held
    await world.permits[1].stop()


async def test_a_waiting_replica_beats_every_five_seconds(world: World) -> None:
    await world.permits[0].acquire(ask("h", None))
    task = await in_line(world.permits[1], ask("w", 60_000))
    for _ in range(4):
        world.time.at += HEARTBEAT_MS
        await world.permits[1].look()
    assert world.state("w") is PermitState.WAITING
    world.time.at += WAITER_LOST_MS
    await world.permits[0].sweep()
    assert world.state("w") is PermitState.WAITER_LOST
    task.cancel()
    await asyncio.wait({task})
    await world.permits[1].stop()


async def test_a_waiter_is_told_how_its_wait_ended(world: World) -> None:
    await world.permits[0].acquire(ask("h"))
    task = await in_line(world.permits[1], ask("w", 1_000))
    world.time.at += 1_000
    await world.permits[1].look()
    refusal = (await task).refusal
    assert refusal is not None
    assert (refusal.code, refusal.http_status, refusal.retry_after_s) == ("SEMAPHORE_TIMEOUT", 429, 119)


async def test_two_calls_of_one_request_share_its_ticket_and_one_may_leave(world: World) -> None:
    held = await world.permits[0].acquire(ask("h"))
    first, second = await in_line(world.permits[0], ask("w")), await in_line(world.permits[0], ask("w"))
    first.cancel()
    await asyncio.wait({first})
    await world.permits[0].settled()
    await world.permits[0].release([permit_id(held)])
    assert (await second).is_held
    assert world.state("w") is PermitState.HELD


async def test_every_call_of_a_request_is_told_of_its_permit(world: World) -> None:
    held = await world.permits[0].acquire(ask("h"))
    calls = [await in_line(world.permits[0], ask("w")) for _ in range(2)]
    await world.permits[0].release([permit_id(held)])
    assert permit_id(await calls[0]) == permit_id(await calls[1])


async def test_an_acquire_without_the_store_is_refused_and_no_longer_waited_for(world: World) -> None:
    world.stores[0].is_away = True
    outcome = await world.permits[0].acquire(ask("q"))
    assert outcome.refusal is not None
    assert (outcome.refusal.code, outcome.refusal.http_status) == ("STORE_UNAVAILABLE", 503)
    assert outcome.refusal.reason == "store_unavailable"
    await world.permits[0].stop()
    assert world.permits[0].waiting == 0


async def test_a_final_report_gives_back_the_permits_of_this_store_only(world: World) -> None:
    held = await world.permits[0].acquire(ask("q"))
    refs = (PermitRef(permit_id(held), "g"), PermitRef("x", "pool:route"), PermitRef("y", "early:openai/a"))
    world.permits[1].release_decision(refs)
    await world.permits[1].settled()
    assert world.state("q") is PermitState.RELEASED


async def test_a_paced_call_that_does_not_wait_takes_a_free_start_or_leaves_no_ticket(world: World) -> None:
    profile = QueueProfile(requests_per_minute=60, min_time_between_requests_ms=500)
    passage = Passage((limiter_gate("p:c", profile),), "p:c", profile, profile.max_wait_ms)
    first = await world.permits[0].acquire(ask("a", 0, passage))
    assert [grant.kind for grant in first.grants] == [PermitKind.QUEUE]
    refused = await world.permits[0].acquire(ask("b", 0, passage))
    assert refused.refusal is not None
    assert (refused.refusal.code, refused.refusal.retry_after_s) == ("RATE_LIMIT_QUEUE_TIMEOUT", 1)
    assert ("p:c", "b") not in world.stores[0].shared.rows
    world.time.at += 500
    assert (await world.permits[0].acquire(ask("b", 0, passage))).is_held


async def test_a_line_goes_on_after_a_start_on_another_replica_moved_the_gap(world: World) -> None:
    profile = QueueProfile(min_time_between_requests_ms=500)
    passage = Passage((limiter_gate("p:c", profile),), "p:c", profile, profile.max_wait_ms)
    one, two = world.permits
    await one.acquire(ask("started", 0, passage))
    there, here = await in_line(two, ask("first", None, passage)), await in_line(one, ask("second", None, passage))
    for permits in (one, two):
        world.time.at = NOW + 500
        await permits.look()
    assert (await there).is_held
    world.time.at = NOW + 1_000
    await one.look()
    assert (await here).is_held
    assert (await here).at == NOW + 1_000


async def test_a_new_configuration_keeps_what_a_limiter_has_used(world: World) -> None:
    old = QueueProfile(requests_per_minute=3, min_time_between_requests_ms=0)
    new = replace(old, requests_per_minute=2)
    for number in range(2):
        await world.permits[0].acquire(ask(f"a{number}", 0, _paced(old, 0)))
    assert (await world.permits[0].acquire(ask("b", 0, _paced(new, 1)))).refusal is not None
    assert (await world.permits[0].acquire(ask("c", 0, _paced(old, 0)))).refusal is not None
    world.time.at += 60_000
    assert (await world.permits[0].acquire(ask("d", 0, _paced(new, 1)))).is_held


def _paced(profile: QueueProfile, revision: int) -> Passage:
    return Passage((limiter_gate("p:c", profile),), "p:c", profile, 0, revision)


async def test_a_limiter_learns_at_most_once_a_minute_but_always_from_a_429(world: World) -> None:
    profile = QueueProfile()
    await world.permits[0].acquire(ask("a", 0, _paced(profile, 0)))
    learn = world.permits[0].learn
    assert await learn("p:c", profile, RateEvidence(limit=10, remaining=5))
    assert not await learn("p:c", profile, RateEvidence(limit=20, remaining=10))
    assert await learn("p:c", profile, RateEvidence(status=429, body_hint_ms=5_000))
    world.time.at += 60_000
    assert await learn("p:c", profile, RateEvidence(limit=20, remaining=10))


async def test_loads_follow_the_transactions_of_this_replica_at_once_and_of_others_by_refresh(world: World) -> None:
    one, two = world.permits
    assert not one.loads.is_full("g", 1)
    held = await one.acquire(ask("h"))
    assert one.loads.is_full("g", 1)
    assert not two.loads.is_full("g", 1)
    await two.loads.refresh()
    assert two.loads.is_full("g", 1)
    await two.release([permit_id(held)])
    assert not two.loads.is_full("g", 1)
    await one.loads.refresh()
    assert one.loads.of("g") == (0, 0, None)
    world.time.at += IDLE_MS
    assert not one.loads.is_watched


async def test_somebody_in_line_makes_a_gate_full_whatever_its_cap(world: World) -> None:
    await world.permits[0].acquire(ask("h"))
    task = await in_line(world.permits[0], ask("w"))
    assert world.permits[0].loads.is_full("g", 5)
    task.cancel()
    await asyncio.wait({task})
    await world.permits[0].stop()


def test_rate_headers_are_read_as_evidence() -> None:
    headers = {"x-ratelimit-limit-requests": "100, 100;w=60", "x-ratelimit-remaining-requests": "7"}
    assert rate_evidence(headers, NOW) == RateEvidence(limit=100, remaining=7)
    assert rate_evidence({"x-ratelimit-limit": "soon"}, NOW, status=429) == RateEvidence(status=429)


# --- which gates ------------------------------------------------------------------------------------------

CONNECTIONS = {
    "capped": Connection("capped", "openai", max_concurrent=3),
    "paced": Connection("paced", "openai", settings={"queue.requests_per_minute": 5}),
    "both": Connection("both", "openai", max_concurrent=1, settings={"queue.concurrent_requests": 2}),
    "codex": Connection("codex", "codex", settings={"queue.concurrent_requests": 2}),
    "zai": Connection("zai", "zai-web", settings={"queue.concurrent_requests": 2}),
    "zai-own": Connection("zai-own", "zai-web", settings={"queue.max_wait_ms": 700, "queue.requests_per_minute": 1}),
    "off": Connection("off", "openai", settings={"queue.requests_per_minute": 0}),
}


def policy(**settings: object) -> Policy:
    return Policy(Catalogue(builtin_providers(), CONNECTIONS, stored_settings=settings))


def to(connection: str, provider: str = "openai", model: str = "m") -> Target:
    return Target(ProviderId(provider), ConnectionId(connection), ModelId(model))


@pytest.mark.parametrize(
    ("target", "keys"),
    [
        (to("capped"), ("qsconn:capped",)),
        (to("paced"), ("openai:paced",)),
        (to("both"), ("openai:both", "qsconn:both")),
        (to("codex", "codex", "gpt-5"), ("codex:codex:codex",)),
        (to("unknown"), ()),
        (to(""), ()),
    ],
)
def test_a_target_passes_the_gates_of_its_cap_and_its_queue(target: Target, keys: tuple[str, ...]) -> None:
    assert passage_of(policy(), target).keys == keys


def test_the_fleet_wide_queue_is_one_more_gate_of_paced_targets() -> None:
    found = policy(**{"queue.global_concurrent_requests": 9})
    assert passage_of(found, to("paced")).keys == ("openai:paced", FLEET_GATE)
    assert passage_of(found, to("capped")).keys == ("qsconn:capped",)


def test_quota_share_takes_no_permit_while_it_is_switched_off() -> None:
    off = policy(**{"concurrency.quota_share.enabled": False})
    assert passage_of(off, to("capped"), strategy="quota-share") == FREE
    assert passage_of(off, to("capped"), strategy="priority").keys == ("qsconn:capped",)


def test_quota_share_goes_on_without_a_permit_unless_it_is_told_to_reject() -> None:
    refusal = PermitRefusal("SEMAPHORE_TIMEOUT", 429)
    reject = policy(**{"concurrency.quota_share.on_saturation": "reject"})
    assert proceeds(policy(), "quota-share", refusal)
    assert not proceeds(reject, "quota-share", refusal)
    assert not proceeds(policy(), "priority", refusal)
    assert not proceeds(policy(), "quota-share", PermitRefusal("SEMAPHORE_RESET", 503))


def test_options_of_a_route_shape_its_line() -> None:
    options = {"queue_timeout_ms": 7, "queue_depth": 0, "concurrency": 4}
    passage = passage_of(policy(), to("unknown"), options=options, round_robin_key="route:key")
    assert passage.gates == (Gate("combo:route:key", 4, 0),)
    assert passage.timeout_ms == 7
    assert passage_of(policy(), to("unknown"), options=options) == FREE


def test_a_cap_stated_inline_counts_where_the_catalogue_has_none() -> None:
    assert passage_of(policy(), to("unknown"), inline_cap=2.9).gates[0].limit == 2
    assert passage_of(policy(), to("capped"), inline_cap=9).gates[0].limit == 3


def test_a_provider_raises_the_wait_and_a_connection_overrides_it() -> None:
    waits = {name: passage_of(policy(), to(name, "zai-web")).timeout_ms for name in ("zai", "zai-own")}
    assert waits == {"zai": 60_000, "zai-own": 700}


def test_only_active_api_keys_are_paced_without_being_told() -> None:
    told = policy(**{"queue.auto_enable_api_key_providers": True})
    assert passage_of(told, to("unknown"), auth_class=AuthClass.API_KEY).limiter == "openai:unknown"
    assert passage_of(told, to("unknown"), auth_class=AuthClass.OAUTH) == FREE
    assert passage_of(policy(), to("off")) == FREE


def test_a_policy_knows_whether_anybody_needs_a_gate() -> None:
    assert policy().has_gates
    assert not Policy(Catalogue(builtin_providers())).has_gates
    paced = Provider("p", profile={"queue.concurrent_requests": 1})
    assert Policy(Catalogue({"p": paced})).has_gates


def test_gates_named_by_a_caller_keep_declared_caps() -> None:
    gates = passage_of_keys(policy(), [Gate("qsconn:capped", 50), Gate("own", None), Gate("own", 2)]).gates
    assert [(gate.key, gate.limit) for gate in gates] == [("own", 2), ("qsconn:capped", 3)]


def test_a_limiter_is_found_by_its_key() -> None:
    found = profile_of(policy(), "openai:paced:some-model")
    assert found is not None
    assert found.requests_per_minute == found.rpm_override == 5
    assert profile_of(policy(), "qsconn:capped") is None
