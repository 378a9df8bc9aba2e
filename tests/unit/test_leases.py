"""The lease use cases over the reference store: order of checks, selection, capacity, reports, operators."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import pytest

from policy_service.application.admin import Actor
from policy_service.application.callers import Registry
from policy_service.application.entropy import SystemEntropy
from policy_service.application.errors import InvalidRequestError, PolicyError, StoreLostError
from policy_service.application.giving_back import GivingBack
from policy_service.application.lease_book import LeaseBook
from policy_service.application.lease_terms import Offer
from policy_service.application.lease_upkeep import LeaseAdmin, LeaseUpkeep
from policy_service.application.leases import Leases
from policy_service.application.managed_selection import LeaseReports, ManagedRun, ManagedSelection
from policy_service.application.messages import EndKind, LeaseContext, ReportRequest, SelectRequest
from policy_service.application.messages.lease import FenceMessage, LeaseMessage, LeaseShown, LeaseUnavailable
from policy_service.application.messages.report import ReportExtras
from policy_service.application.report_result import fold_report
from policy_service.application.view import View
from policy_service.domain.catalogue import Caller, Catalogue, Connection
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import AuthClass, ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.lease import EndReason, Fence, LeaseState
from policy_service.domain.lease_context import LEASE_SCOPE, LeaseCode, LeaseRefusal
from policy_service.domain.policy import Policy
from policy_service.storage.memory.lease_store import MemoryLeaseStore
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore

SCOPES = frozenset({LEASE_SCOPE})
CALLERS = (
    Caller("k", "1" * 64, True, SCOPES, ("c1", "c2")),
    Caller("other", "2" * 64, True, SCOPES, ("c1", "c2", "c3")),
    Caller("plain", "3" * 64),
    Caller("empty", "4" * 64, True, SCOPES),
    Caller("off", "5" * 64, False, SCOPES, ("c9",)),
)
CONNECTIONS = (
    Connection("c1", "p", label="Team account"),
    Connection("c2", "p", AuthClass.OAUTH, label="Ann", account_names=("ann",)),
    Connection("c3", "p"),
)
START = 1_700_000_000_000


def target(connection: str) -> Target:
    return Target(ProviderId("p"), ConnectionId(connection), ModelId("m"))


def owner(name: str) -> str:
    return sha256(name.encode()).hexdigest()


class World:
    """One replica with leases; the clock and what the ordinary filters say are the test's."""

    def __init__(self, *, delay_ms: int = 0, callers: Sequence[Caller] = CALLERS) -> None:
        self.now = START
        self.delay_ms = delay_ms
        self.excluded: dict[str, tuple[str, int | None]] = {}
        self.models: Any = {"m"}
        self.store = MemoryStore(MemoryDatabase(clock=lambda: self.now))
        self.rows = MemoryLeaseStore(self.store)
        self.view = View(self.policy(callers), fold_report)
        self.registry = Registry(self.view)
        self.book = LeaseBook(self.rows, SystemEntropy(1), "r1")
        self.giving_back = GivingBack(lambda: float(self.now))
        self.leases = Leases(self.registry, self.book, self.offers, self.giving_back)
        self.selection = ManagedSelection(self.registry, self.book)
        self.reports = LeaseReports(self.book)
        self.admin = LeaseAdmin(self.book)
        self.upkeep = LeaseUpkeep(self.registry, self.book)

    def policy(self, callers: Sequence[Caller], revision: int = 0) -> Policy:
        catalogue = Catalogue(
            connections={c.id: c for c in CONNECTIONS},
            callers={c.id: c for c in callers},
            stored_settings={"lease.lock_delay_ms": self.delay_ms},
        )
        return Policy(catalogue, revision=revision)

    def offers(self, caller: Caller, model: str, allowed: frozenset[str]) -> Sequence[Offer] | None:
        if self.models is None:
            raise RuntimeError("the catalogue cannot be read")
        return self.pool() if model in self.models else None

    def pool(self) -> list[Offer]:
        return [Offer(target(c.id), self.exclusion(c.id)) for c in CONNECTIONS]

    def exclusion(self, connection: str) -> Exclusion | None:
        found = self.excluded.get(connection)
        return Exclusion(target(connection), found[0], found[1]) if found else None

    async def acquire(self, name: str, key: str = "k", model: str = "m", **more: Any) -> LeaseShown | LeaseUnavailable:
        body = {"action": "acquire", "model": model, **more}
        return await self.leases.acquire(LeaseMessage(body, owner(name), key))

    async def held(self, name: str, key: str = "k", **more: Any) -> LeaseShown:
        answer = await self.acquire(name, key, **more)
        assert isinstance(answer, LeaseShown), answer
        return answer

    def request(self, name: str, generation: int | None = 1, key: str = "k", **more: Any) -> SelectRequest:
        context = LeaseContext(owner(name), generation)
        return SelectRequest("q", caller_id=key, lease=context, **more)

    async def begin(self, name: str, generation: int | None = 1, key: str = "k", **more: Any) -> ManagedRun:
        return await self.selection.begin(self.request(name, generation, key, **more), self.pool())

    def state_of(self, name: str) -> tuple[LeaseState, EndReason | None]:
        row = [row for row in self.rows.table.rows if row.owner_hash == owner(name)][-1]
        return row.state, row.end_reason


@pytest.fixture
def world() -> World:
    return World()


def message(action: str, name: str, generation: int = 1, key: str = "k", **more: Any) -> LeaseMessage:
    return LeaseMessage({"action": action, "generation": generation, **more}, owner(name), key)


# --- lifecycle -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (LeaseMessage({}, owner("o")), "LEASE_AUTHENTICATION_REQUIRED"),
        (LeaseMessage({}, owner("o"), "nobody"), "LEASE_API_KEY_INVALID"),
        (LeaseMessage({}, owner("o"), "off"), "LEASE_API_KEY_INVALID"),
        (LeaseMessage({}, owner("o"), "k", "9" * 64), "LEASE_API_KEY_INVALID"),
        (LeaseMessage({"action": "acquire", "model": " "}, owner("o"), "plain"), "LEASE_ACTION_INVALID"),
        (LeaseMessage({"action": "acquire", "model": "m", "ttlms": 1}, owner("o"), "k"), "LEASE_ACTION_INVALID"),
        (LeaseMessage({"action": "acquire", "model": "m"}, owner("o"), "plain"), "LEASE_SCOPE_REQUIRED"),
        (LeaseMessage({"action": "acquire", "model": "m"}, owner("o"), "empty"), "LEASE_KEY_CONFIGURATION_INVALID"),
        (
            LeaseMessage({"action": "acquire", "model": "m"}, LeaseRefusal(LeaseCode.CONTEXT_INVALID), "k"),
            "LEASE_CONTEXT_INVALID",
        ),
        (LeaseMessage({"action": "acquire", "model": "nowhere"}, owner("o"), "k"), "LEASE_MODEL_INVALID"),
    ],
)
async def test_an_acquire_is_refused_by_the_first_check_that_fails(
    world: World, given: LeaseMessage, code: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        await world.leases.acquire(given)
    assert caught.value.reason == code


async def test_a_broken_model_look_up_comes_before_the_scope_and_after_the_form(world: World) -> None:
    world.models = None
    for key, model, code in (("plain", "m", "LEASE_SERVICE_UNAVAILABLE"), ("plain", " ", "LEASE_ACTION_INVALID")):
        with pytest.raises(PolicyError) as caught:
            await world.acquire("o", key, model)
        assert caught.value.reason == code


async def test_a_caller_is_found_by_the_hash_of_its_key(world: World) -> None:
    body = {"action": "acquire", "model": "m"}
    answer = await world.leases.acquire(LeaseMessage(body, owner("o"), caller_key_sha256="1" * 64))
    assert isinstance(answer, LeaseShown)
    assert answer.row.api_key_id == "k"


async def test_owners_get_different_connections_until_none_is_left_and_then_a_bounded_wait(world: World) -> None:
    first, second = await world.held("a", ttlMs=50_000), await world.held("b", ttlMs=9_999_999)
    assert (first.row.connection_id, second.row.connection_id) == ("c1", "c2")
    world.now += 1_500
    answer = await world.acquire("c")
    assert isinstance(answer, LeaseUnavailable)
    assert (answer.code, answer.http_status) == ("LEASE_CAPACITY_UNAVAILABLE", 429)
    assert (answer.eligible_count, answer.free_count, answer.retry_after_ms) == (2, 0, 49_000)


async def test_a_repeated_acquire_finds_its_lease_and_does_not_extend_it(world: World) -> None:
    first = await world.held("o", ttlMs=10_000)
    world.now += 5_000
    again = await world.held("o", ttlMs=60_000)
    assert again.reused
    assert (again.row.expires_at, again.row.generation) == (first.row.expires_at, 1)


async def test_a_late_repetition_of_an_acquire_gets_its_own_lease_as_it_now_stands(world: World) -> None:
    body = {"action": "acquire", "model": "m"}
    asked = LeaseMessage(body, owner("o"), "k", request_id="q1", is_retry_safe=True)
    for _ in range(2):
        answer = await world.leases.acquire(asked)
        assert isinstance(answer, LeaseShown)
    await world.leases.release(message("release", "o"))
    late = await world.leases.acquire(asked)
    assert isinstance(late, LeaseShown)
    assert (late.row.state, late.row.generation, late.reused) == (LeaseState.RELEASED, 1, True)
    other = await world.leases.acquire(LeaseMessage(body, owner("o"), "k", request_id="q2", is_retry_safe=True))
    assert isinstance(other, LeaseShown)
    assert other.row.generation == 2
    world.now += 600_000
    much_later = await world.leases.acquire(asked)
    assert isinstance(much_later, LeaseShown)
    assert much_later.row.generation == 3


async def test_an_acquire_moves_the_lease_off_a_connection_that_no_longer_serves(world: World) -> None:
    await world.held("o")
    world.excluded["c1"] = ("connection_cooldown", START + 60_000)
    moved = await world.held("o")
    assert (moved.row.connection_id, moved.row.generation, moved.reused) == ("c2", 1, False)


async def test_an_owner_with_a_lease_under_another_key_is_refused(world: World) -> None:
    await world.held("o")
    with pytest.raises(PolicyError) as caught:
        await world.acquire("o", "other")
    assert caught.value.reason == "LEASE_FENCE_STALE"


@pytest.mark.parametrize(
    ("reasons", "code", "retry_ms"),
    [
        (("connection_cooldown", "connection_cooldown"), "LEASE_ELIGIBILITY_UNAVAILABLE", 30_000),
        (("connection_cooldown", "expired"), "LEASE_ELIGIBILITY_UNAVAILABLE", 30_000),
        (("connection_cooldown", "banned"), "LEASE_NO_ELIGIBLE_CONNECTION", None),
        (("model_lockout", "model_lockout"), "LEASE_NO_ELIGIBLE_CONNECTION", None),
    ],
)
async def test_without_an_eligible_connection_the_answer_says_whether_waiting_helps(
    world: World, reasons: tuple[str, str], code: str, retry_ms: int | None
) -> None:
    world.excluded = {"c1": (reasons[0], START + 30_000), "c2": (reasons[1], None)}
    answer = await world.acquire("o")
    assert isinstance(answer, LeaseUnavailable)
    assert (answer.code, answer.retry_after_ms, answer.eligible_count) == (code, retry_ms, 0)
    assert world.rows.table.rows == []


async def test_a_request_narrows_the_list_of_its_key_and_cannot_widen_it(world: World) -> None:
    body = {"action": "acquire", "model": "m"}
    answer = await world.leases.acquire(LeaseMessage(body, owner("o"), "k", allowed_connections=("c2", "c3")))
    assert isinstance(answer, LeaseShown)
    assert answer.row.connection_id == "c2"
    nothing = await world.leases.acquire(LeaseMessage(body, owner("q"), "k", allowed_connections=("c3",)))
    assert isinstance(nothing, LeaseUnavailable)
    assert nothing.code == "LEASE_NO_ELIGIBLE_CONNECTION"


async def test_renew_release_and_status_follow_the_generation(world: World) -> None:
    await world.held("o", ttlMs=10_000)
    world.now += 4_000
    renewed = await world.leases.renew(message("renew", "o", ttlMs=20_000))
    assert renewed.row.expires_at == world.now + 20_000
    shown = await world.leases.get(message("status", "o"))
    assert (shown.provider, shown.label) == ("p", "Team account")
    for _ in range(2):
        released = await world.leases.release(message("release", "o", reason="CLIENT_CANCELLED"))
        assert (released.row.state, released.row.end_reason) == (LeaseState.RELEASED, EndReason.CLIENT_CANCELLED)
    for action, use in (("renew", world.leases.renew), ("status", world.leases.get)):
        with pytest.raises(PolicyError) as caught:
            await use(message(action, "o"))
        assert caught.value.reason == "LEASE_FENCE_STALE"


async def test_a_label_that_names_the_account_is_hidden(world: World) -> None:
    world.excluded["c1"] = ("banned", None)
    await world.held("o")
    assert (await world.leases.get(message("status", "o"))).label == ""


async def test_a_fence_check_answers_each_mismatch_as_data(world: World) -> None:
    await world.held("o")

    async def check(generation: int = 1, connection: str = "c1", key: str = "k", name: str = "o") -> Fence:
        return (await world.leases.check_fence(FenceMessage(owner(name), generation, connection, key))).verdict

    assert await check() is Fence.VALID
    assert await check(name="nobody") is Fence.REQUIRED
    assert await check(generation=2) is Fence.STALE
    assert await check(key="other") is Fence.AUTHORIZATION_MISMATCH
    assert await check(connection="c2") is Fence.CONNECTION_MISMATCH
    assert await check(connection="") is Fence.CONNECTION_MISMATCH
    world.now += 120_000
    assert await check() is Fence.REQUIRED


async def test_without_the_store_every_call_is_refused_and_nothing_is_guessed(world: World) -> None:
    await world.held("o")
    world.store.is_away = True
    calls = (
        lambda: world.acquire("o"),
        lambda: world.leases.renew(message("renew", "o")),
        lambda: world.leases.get(message("status", "o")),
        lambda: world.leases.check_fence(FenceMessage(owner("o"), 1, "c1", "k")),
        lambda: world.begin("o"),
        lambda: world.admin.list(),
    )
    for call in calls:
        with pytest.raises(StoreLostError) as caught:
            await call()
        assert caught.value.reason == "LEASE_SERVICE_UNAVAILABLE"
        assert caught.value.retry_after_ms
    assert world.selection.hidden == {"c1", "c2", "c3"}


# --- selection -------------------------------------------------------------------------------------------


async def test_only_managed_callers_and_lease_contexts_concern_leases(world: World) -> None:
    assert world.selection.concerns(SelectRequest("q", caller_id="k"))
    assert world.selection.concerns(world.request("o", key="plain"))
    assert not world.selection.concerns(SelectRequest("q", caller_id="plain"))
    assert not world.selection.concerns(SelectRequest("q"))


@pytest.mark.parametrize(
    ("request_of", "code"),
    [
        (lambda: SelectRequest("q", lease=LeaseContext(owner("o"), 1)), "LEASE_AUTHENTICATION_REQUIRED"),
        (lambda: SelectRequest("q", caller_id="x", lease=LeaseContext(owner("o"), 1)), "LEASE_API_KEY_INVALID"),
        (lambda: SelectRequest("q", caller_id="plain", lease=LeaseContext(owner("o"), 1)), "LEASE_SCOPE_REQUIRED"),
        (
            lambda: SelectRequest("q", caller_id="empty", lease=LeaseContext(owner("o"), 1)),
            "LEASE_KEY_CONFIGURATION_INVALID",
        ),
        (lambda: SelectRequest("q", caller_id="k"), "LEASE_CONTEXT_REQUIRED"),
        (lambda: SelectRequest("q", caller_id="k", lease=LeaseContext(owner("o"), None)), "LEASE_CONTEXT_REQUIRED"),
        (
            lambda: SelectRequest("q", caller_id="k", lease=LeaseContext("", None, "LEASE_CONTEXT_INVALID")),
            "LEASE_CONTEXT_REQUIRED",
        ),
        (
            lambda: SelectRequest("q", caller_id="k", lease=LeaseContext("", 1, "LEASE_CONTEXT_INVALID")),
            "LEASE_CONTEXT_INVALID",
        ),
        (lambda: SelectRequest("q", caller_id="k", lease=LeaseContext(owner("p"), 1)), "LEASE_REQUIRED"),
        (lambda: SelectRequest("q", caller_id="k", lease=LeaseContext(owner("o"), 2)), "LEASE_FENCE_STALE"),
        (
            lambda: SelectRequest("q", caller_id="other", lease=LeaseContext(owner("o"), 1)),
            "LEASE_AUTHORIZATION_MISMATCH",
        ),
        (
            lambda: SelectRequest("q", caller_id="k", lease=LeaseContext(owner("o"), 1), forced_connection="c2"),
            "LEASE_CONNECTION_MISMATCH",
        ),
    ],
)
async def test_a_managed_selection_is_fenced_before_anything_else(world: World, request_of: Any, code: str) -> None:
    await world.held("o")
    with pytest.raises(PolicyError) as caught:
        await world.selection.begin(request_of(), world.pool())
    assert caught.value.reason == code


async def test_the_leased_connection_serves_outright(world: World) -> None:
    await world.held("a")
    await world.held("o")
    run = await world.begin("o")
    order = [0, 1, 2]
    assert run.rank(order, lambda position: CONNECTIONS[position].id) == [1]
    claimed = await world.selection.claim(run, target("c2"))
    assert claimed is not None
    assert (claimed.fence.connection, claimed.fence.generation, claimed.transitioned) == ("c2", 1, False)
    reasons = {(e.target.connection, e.reason) for e in run.exclusions(world.pool())}
    assert reasons == {("c1", "lease_held"), ("c3", "lease_not_allowed")}


async def test_a_lease_moves_when_its_connection_falls_out_and_keeps_its_generation(world: World) -> None:
    await world.held("o")
    world.excluded["c1"] = ("connection_cooldown", START + 60_000)
    run = await world.begin("o")
    assert run.rank([2, 1, 0], lambda position: CONNECTIONS[position].id) == [1]
    claimed = await world.selection.claim(run, target("c2"))
    assert claimed is not None
    assert claimed.transitioned
    assert world.state_of("o") == (LeaseState.ACTIVE, None)
    with pytest.raises(PolicyError) as caught:
        await world.selection.begin(world.request("o", forced_connection="c1"), world.pool())
    assert caught.value.reason == "LEASE_CONNECTION_MISMATCH"


async def test_a_connection_taken_in_between_is_picked_again_and_then_reported_as_capacity(world: World) -> None:
    await world.held("o")
    world.excluded["c1"] = ("connection_cooldown", START + 60_000)
    run = await world.begin("o")
    taken = await world.held("rival", ttlMs=7_000)
    assert taken.row.connection_id == "c2"
    assert await world.selection.claim(run, target("c2")) is None
    answer = await world.selection.refuse(run, 3)
    assert answer is not None
    assert (answer.code, answer.retry_after_s, answer.eligible_count) == ("LEASE_CAPACITY_UNAVAILABLE", 7, 1)
    assert world.state_of("o") == (LeaseState.INVALIDATED, EndReason.CONNECTION_INELIGIBLE)


async def test_a_claim_after_the_lease_ended_is_stale(world: World) -> None:
    await world.held("o")
    world.excluded["c1"] = ("connection_cooldown", START + 60_000)
    run = await world.begin("o")
    await world.leases.release(message("release", "o"))
    with pytest.raises(PolicyError) as caught:
        await world.selection.claim(run, target("c2"))
    assert caught.value.reason == "LEASE_FENCE_STALE"


@pytest.mark.parametrize(
    ("reason", "end"),
    [
        ("connection_cooldown", EndReason.HEALTH_OR_COOLDOWN),
        ("circuit_open", EndReason.HEALTH_OR_COOLDOWN),
        ("model_lockout", EndReason.MODEL_INELIGIBLE),
        ("banned", EndReason.AUTHORIZATION_CHANGED),
        ("quota_cutoff", EndReason.QUOTA_UNAVAILABLE),
        ("tags", EndReason.CONNECTION_INELIGIBLE),
    ],
)
async def test_a_dead_end_ends_the_lease_with_what_all_connections_have_in_common(
    world: World, reason: str, end: EndReason
) -> None:
    await world.held("o")
    world.excluded = dict.fromkeys(("c1", "c2"), (reason, None))
    run = await world.begin("o")
    assert not run.has_candidates
    assert await world.selection.refuse(run, 3) is None
    assert world.state_of("o") == (LeaseState.INVALIDATED, end)


async def test_after_an_invalidation_the_next_generation_is_one_higher(world: World) -> None:
    await world.held("o")
    await world.admin.invalidate("", 0, "c1", None, Actor("ann"))
    assert (await world.held("o")).row.generation == 2


# --- reports, operators, upkeep --------------------------------------------------------------------------


def report(name: str = "o", generation: int = 1, connection: str = "c1", end: str = "OWNER_EXIT") -> ReportRequest:
    extras = ReportExtras(end_lease=end, lease=LeaseContext(owner(name), generation))
    return ReportRequest(target(connection), EndKind.HTTP_STATUS, caller_id="k", status=200, extras=extras)


async def test_a_report_ends_its_lease_once_and_says_so_each_time(world: World) -> None:
    await world.held("o")
    assert await world.reports.end(report(connection="c2")) == ("REFUSED", "LEASE_CONNECTION_MISMATCH")
    assert await world.reports.end(report(generation=3)) == ("REFUSED", "LEASE_FENCE_STALE")
    assert await world.reports.end(report(end="")) == ("", "")
    assert world.state_of("o")[0] is LeaseState.ACTIVE
    for _ in range(2):
        assert await world.reports.end(report(end="CLIENT_CANCELLED")) == ("APPLIED", "")
    assert world.state_of("o") == (LeaseState.RELEASED, EndReason.CLIENT_CANCELLED)


async def test_a_report_without_the_store_keeps_its_evidence_and_refuses_the_end(world: World) -> None:
    await world.held("o")
    world.store.is_away = True
    assert await world.reports.end(report()) == ("REFUSED", "LEASE_SERVICE_UNAVAILABLE")


async def test_an_operator_ends_a_lease_by_owner_or_connection_and_leaves_a_name(world: World) -> None:
    await world.held("a")
    await world.held("b")
    assert [row.connection_id for row in await world.admin.list()] == ["c1", "c2"]
    assert await world.admin.list("other") == []
    await world.admin.invalidate(owner("a"), 1, "", EndReason.QUOTA_UNAVAILABLE, Actor("ann"))
    await world.admin.invalidate("", 0, "c2", None, Actor("ann"))
    assert world.state_of("a") == (LeaseState.INVALIDATED, EndReason.QUOTA_UNAVAILABLE)
    assert world.state_of("b") == (LeaseState.INVALIDATED, EndReason.AUTHORIZATION_CHANGED)
    ends = [f for f in await world.store.facts(limit=9) if f.to_state == "INVALIDATED"]
    assert {f.actor for f in ends} == {"ann"}
    with pytest.raises(PolicyError) as caught:
        await world.admin.invalidate("", 0, "c2", None, Actor("ann"))
    assert caught.value.reason == "LEASE_FENCE_STALE"
    with pytest.raises(InvalidRequestError):
        await world.admin.invalidate("", 0, "", None, Actor("ann"))


async def test_a_key_that_changes_loses_what_it_may_no_longer_hold(world: World) -> None:
    await world.held("a")
    await world.held("b")
    narrowed = Caller("k", "1" * 64, True, SCOPES, ("c2",))
    world.view.set_policy(world.policy([narrowed]))
    assert (await world.upkeep.sweep()).withdrawn == 1
    assert world.state_of("a") == (LeaseState.INVALIDATED, EndReason.AUTHORIZATION_CHANGED)
    world.view.set_policy(world.policy([Caller("k", "1" * 64, False, SCOPES, ("c2",))]))
    assert (await world.upkeep.sweep()).withdrawn == 1
    assert world.state_of("b") == (LeaseState.INVALIDATED, EndReason.MANAGED_KEY_REVOKED)


async def test_a_fresh_listing_waits_and_one_kept_over_revisions_does_not(world: World) -> None:
    for number in (1, 2):
        await world.store.import_catalogue(f"{number}", str(number) * 64, force=False, actor="test")
        world.view.set_policy(world.policy(CALLERS, revision=number))
        assert world.registry.listed_in("c1") == 1
    fresh = await world.acquire("o")
    assert isinstance(fresh, LeaseUnavailable)
    assert (fresh.code, fresh.retry_after_ms) == ("LEASE_CAPACITY_UNAVAILABLE", 5_000)
    world.now += 5_000
    assert isinstance(await world.acquire("o"), LeaseShown)


def test_a_connection_left_out_for_one_revision_or_a_skipped_one_counts_as_listed_anew(world: World) -> None:
    assert world.registry.listed_in("c1") == 0
    for revision, callers, listed in ((1, CALLERS, 1), (2, (), 0), (3, CALLERS, 3), (4, CALLERS, 3), (6, CALLERS, 6)):
        world.view.set_policy(world.policy(callers, revision=revision))
        assert world.registry.listed_in("c1") == listed


async def test_the_lock_delay_in_force_keeps_a_lapsed_connection_back() -> None:
    world = World(delay_ms=10_000)
    await world.held("a", ttlMs=1_000)
    await world.held("b", ttlMs=500_000)
    world.now += 5_000
    waits = await world.acquire("c")
    assert isinstance(waits, LeaseUnavailable)
    assert waits.retry_after_ms == 6_000
    world.now += 6_000
    assert (await world.held("c")).row.connection_id == "c1"


async def test_after_an_asynchronous_failover_no_lease_is_granted_for_the_largest_ttl() -> None:
    world = World()
    world.book = LeaseBook(world.rows, SystemEntropy(1), awaits_failover=True)
    world.leases = Leases(world.registry, world.book, world.offers, world.giving_back)
    await world.held("o")
    world.store.database.epoch, world.rows.table.raised_at = 2, world.now
    waits = await world.acquire("q")
    assert isinstance(waits, LeaseUnavailable)
    assert waits.retry_after_ms == 1_800_000
    world.now += 1_800_000
    assert (await world.held("q")).row.generation == 2 * 2**32 + 1
