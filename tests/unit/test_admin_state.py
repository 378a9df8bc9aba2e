"""What operators' acts do to a fleet over one store: at once here, soon everywhere, with facts that name the actor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from policy_service.application.admin import Actor, Acts
from policy_service.application.admin_health import FactsAdmin
from policy_service.application.admin_listings import Listings
from policy_service.application.admin_owned import OwnedState, is_of
from policy_service.application.admin_plan import SCOPES, Selection, reset_unit_scope
from policy_service.application.admin_state import StateAdmin
from policy_service.application.entropy import SystemEntropy
from policy_service.application.errors import InvalidRequestError, StoreLostError
from policy_service.application.messages import Dispatch, SelectAnswer
from policy_service.application.permit_work import Passage, PermitAsk
from policy_service.application.ports_pins import PinKey, key_of
from policy_service.application.replica import Replica
from policy_service.domain.affinity import PinRow
from policy_service.domain.breaker import BreakerState, State
from policy_service.domain.catalogue import Catalogue, Connection
from policy_service.domain.connection_state import BANNED, EXPIRED, ConnectionState
from policy_service.domain.cooldown import RecoveryView
from policy_service.domain.facts import Fact, FactLog
from policy_service.domain.gates import Gate
from policy_service.domain.policy import Policy
from policy_service.domain.state import Row, StateBook
from policy_service.domain.usage_wall_state import Lane
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, ask, chosen, failure, make_replica, report, running, select

ALICE = Actor("alice", "maintenance")
HOUR = 3_600_000


class Operated:
    """A replica with its operators' use cases."""

    def __init__(self, name: str = "r1", database: MemoryDatabase | None = None, time: FakeTime | None = None) -> None:
        self.time = time or FakeTime()
        self.store = MemoryStore(database or MemoryDatabase(self.time.database))
        self.replica: Replica = make_replica(self.store, name, time_source=self.time)
        acts = Acts(self.store, self.replica.view, SystemEntropy(7), name)
        owned = OwnedState(self.replica.view, self.replica.pins, self.replica.permits)
        self.acts = acts
        self.state = StateAdmin(acts, self.replica.view, owned)
        self.listings = Listings(self.replica.view, self.replica.clock)
        self.facts = FactsAdmin(self.store, self.replica.view)

    def second(self, name: str = "r2") -> Operated:
        """Another replica of the same fleet."""
        return Operated(name, self.store.database, self.time)

    async def follow(self) -> None:
        """Hear of what the others committed."""
        self.replica.view.apply(await self.store.load(timeout_ms=1_000), self.replica.incarnation)

    def connection(self, connection: str) -> ConnectionState:
        return self.replica.view.book().get(ConnectionState, "openai", connection)

    async def acts_of(self, actor: str = "alice (maintenance)") -> list[Fact]:
        return [fact for fact in await self.store.facts(limit=100) if fact.actor == actor]


def reasons(answer: SelectAnswer) -> list[str]:
    return [each.reason for each in answer.exclusions]


async def open_breaker(fleet: Operated) -> None:
    for n in range(12):
        await report(fleet.replica, failure(f"c{n}", 503))


# -- breakers ------------------------------------------------------------------------------------------------
async def test_force_open_beats_a_live_permit_of_another_replica() -> None:
    here = Operated()
    there = here.second()
    async with running(here.replica), running(there.replica):
        await open_breaker(here)
        here.time.ms += 40_000
        await there.follow()
        probe = await select(there.replica, ask("z"))
        assert isinstance(probe.verdict, Dispatch)
        assert probe.token
        assert probe.token.probes
        await here.state.control_breaker("openai", "force_open", ALICE)
        late = await report(there.replica, failure("z", 200, token=probe.token))
        await there.follow()
        assert late.ignored == ("overridden",)
        assert reasons(await select(there.replica, ask("z", explain=True))) == ["forced_open"]
        assert here.listings.breakers()[0].control == "force_open"


async def test_a_control_set_twice_writes_one_fact() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        first = await fleet.state.control_breaker("openai", "force_open", ALICE)
        again = await fleet.state.control_breaker("OpenAI", "force_open", ALICE)
        assert first == again
        assert [fact.reason for fact in await fleet.acts_of()] == ["force_open"]


async def test_a_disabled_breaker_admits_and_counts_nothing() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await fleet.state.control_breaker("openai", "disable", ALICE)
        await open_breaker(fleet)
        assert fleet.listings.breakers()[0].failure_count == 0
        assert chosen(await select(fleet.replica, ask("z"))) == "z"


async def test_clearing_a_control_shows_the_state_below_it() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await open_breaker(fleet)
        await fleet.state.control_breaker("openai", "force_open", ALICE)
        cleared = await fleet.state.control_breaker("openai", "clear_override", ALICE)
        assert (cleared.control, cleared.state) == ("", "OPEN")
        assert cleared.retry_after_ms == 30_000


async def test_reset_closes_a_breaker_on_every_replica() -> None:
    here = Operated()
    there = here.second()
    async with running(here.replica), running(there.replica):
        await open_breaker(here)
        await there.follow()
        assert reasons(await select(there.replica, ask("z", explain=True))) == ["circuit_open"]
        shown = await here.state.control_breaker("openai", "reset", ALICE)
        await there.follow()
        assert (shown.state, shown.failure_count) == ("CLOSED", 0)
        assert chosen(await select(here.replica, ask("z"))) == "z"
        assert chosen(await select(there.replica, ask("z"))) == "z"


async def test_every_breaker_can_be_reset_at_once() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await open_breaker(fleet)
        await report(fleet.replica, failure("m", 503, provider="mistral"))
        assert [each.key for each in await fleet.state.reset_breakers(ALICE)] == ["mistral", "openai"]
        assert fleet.listings.breakers() == ()


async def test_a_connection_key_has_a_control_of_its_own() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        shown = await fleet.state.control_breaker("openai::conn::a", "force_open", ALICE)
        assert shown.key == "openai::conn::a"
        assert chosen(await select(fleet.replica, ask("b"))) == "b"


@pytest.mark.parametrize(("key", "control", "path"), [("", "reset", "key"), ("openai", "half_open", "control")])
async def test_a_control_that_cannot_be_is_refused(key: str, control: str, path: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await Operated().state.control_breaker(key, control, ALICE)
    assert caught.value.problems[0].path == path


# -- reset ---------------------------------------------------------------------------------------------------
async def test_a_reset_names_its_rows_and_leaves_terminal_states_unless_named() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await report(fleet.replica, failure("a", 429))
        await report(fleet.replica, failure("b", 401))
        assert await fleet.state.reset(["connection_cooldowns"], "", "", ALICE) == 1
        assert (fleet.connection("a").test_status, fleet.connection("b").test_status) == ("active", EXPIRED)
        assert await fleet.state.reset(["terminal_states"], "openai", "b", ALICE) == 1
        assert fleet.connection("b").test_status == "active"
        assert len(await fleet.acts_of()) == 2


def seen(row: ConnectionState) -> RecoveryView:
    return RecoveryView(row.test_status, row.last_error_at, row.rate_limited_until)


async def test_a_recovery_job_clears_a_connection_that_is_as_it_saw_it() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await report(fleet.replica, failure("a", 429))
        before = fleet.connection("a")
        assert before.rate_limited_until is not None
        assert await fleet.state.recover("OpenAI", "a", seen(before), ALICE)
        after = fleet.connection("a")
        assert (after.test_status, after.rate_limited_until, after.last_error, after.generation) == (
            "active",
            None,
            "",
            before.generation,
        )
        assert [(fact.from_state, fact.to_state, fact.reason) for fact in await fleet.acts_of()] == [
            ("unavailable", "active", "recovered")
        ]


@pytest.mark.parametrize(("status", "waits"), [(429, "900"), (401, "")], ids=["a longer wait", "a dead account"])
async def test_a_recovery_job_that_was_overtaken_changes_nothing(status: int, waits: str) -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await report(fleet.replica, failure("a", 429))
        known = seen(fleet.connection("a"))
        headers = {"retry-after": waits} if waits else {}
        await report(fleet.replica, failure("a", status, headers=headers))
        before = fleet.connection("a")
        assert not await fleet.state.recover("openai", "a", known, ALICE)
        assert fleet.connection("a") == before
        assert await fleet.acts_of() == []


async def test_a_recovery_job_ends_no_terminal_state() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await report(fleet.replica, failure("a", 401))
        assert not await fleet.state.recover("openai", "a", seen(fleet.connection("a")), ALICE)
        with pytest.raises(InvalidRequestError):
            await fleet.state.recover("openai", "", seen(fleet.connection("a")), ALICE)


@pytest.mark.parametrize("how", ["cooldowns", "locks", "one model", "credential"])
async def test_each_act_that_frees_a_family_leaves_a_fact(how: str) -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await report(fleet.replica, failure("a", 429, provider="codex"))
        assert fleet.replica.view.rows[("family_pool", "codex", "a", "codex")]
        acts: dict[str, Callable[[], Awaitable[object]]] = {
            "cooldowns": lambda: fleet.state.reset(["connection_cooldowns"], "codex", "", ALICE),
            "locks": lambda: fleet.state.clear_all_model_locks(ALICE),
            "one model": lambda: fleet.state.clear_model_lock("codex", "a", "gpt", ALICE),
            "credential": lambda: fleet.state.change_credential("codex", "a", None, ALICE),
        }
        await acts[how]()
        assert ("family_pool", "codex", "a", "codex") not in fleet.replica.view.rows
        freed = [fact for fact in await fleet.acts_of() if fact.mechanism == "family_pool"]
        assert [(fact.key, fact.from_state, fact.to_state) for fact in freed] == [("codex:a:codex", "limited", "free")]


async def test_pins_are_reset_of_one_connection_only_and_forgotten_here() -> None:
    fleet = Operated()
    async with running(fleet.replica) as replica:
        keys = [await pinned(fleet, session, connection) for session, connection in (("s", "a"), ("t", "b"))]
        assert await fleet.state.reset(["affinity_pins"], "OpenAI", "a", ALICE) == 1
        assert [replica.pins.cache.get(key, fleet.time.ms) is None for key in keys] == [True, False]
        assert [await replica.pins._store.find(key, timeout_ms=100) is None for key in keys] == [True, False]
        assert await fleet.state.reset(["affinity_pins"], "claude", "", ALICE) == 0
        assert await fleet.state.reset(["affinity_pins"], "", "", ALICE) == 1
        facts = [(fact.mechanism, fact.key, fact.reason) for fact in reversed(await fleet.acts_of())]
        assert facts == [("affinity", "openai:a", "reset"), ("affinity", "*", "reset")]


async def pinned(fleet: Operated, session: str, connection: str) -> PinKey:
    """A pin in the store and in the memory of the replica."""
    now = fleet.time.ms
    row = PinRow("u", "openai", session, connection, now, now, now + HOUR)
    saved = await fleet.replica.pins._store.insert(row, timeout_ms=100)
    assert saved is not None
    fleet.replica.pins.cache.put(key_of(row), saved.row, now)
    return key_of(row)


def put(row: Row, book: StateBook, _now: int, _facts: FactLog) -> None:
    book.put(row)


async def test_a_usage_wall_is_forgotten_for_one_connection_with_a_fact() -> None:
    fleet = Operated()
    async with running(fleet.replica) as replica:
        for connection in ("c1", "c2"):
            lane = Lane("claude", connection, resets_at_s=(fleet.time.ms + HOUR) // 1_000, budget_utilization=0.5)
            scope = reset_unit_scope(Selection("claude"))
            await fleet.acts.act(scope, ALICE, partial(put, lane))
        assert await fleet.state.reset(["usage_wall"], "claude", "c1", ALICE) == 1
        book = replica.view.book()
        assert [book.get(Lane, "claude", each).is_default for each in ("c1", "c2")] == [True, False]
        assert [(fact.mechanism, fact.key, fact.from_state) for fact in await fleet.acts_of()] == [
            ("usage_wall", "claude/c1", "active")
        ]


async def test_a_reset_of_permits_ends_who_waits_at_the_gates_named_and_leaves_who_holds() -> None:
    fleet = Operated()
    async with running(fleet.replica) as replica:
        waiting = {}
        for key in ("qsconn:a", "qsconn:b"):
            passage = Passage((Gate(key, 1),))
            await replica.permits.acquire(PermitAsk(passage, f"held {key}"))
            waiting[key] = asyncio.create_task(replica.permits.acquire(PermitAsk(passage, f"waits {key}")))
            while not replica.permits.loads.of(key).waiting:
                await asyncio.sleep(0.01)
        assert await fleet.state.reset(["permits"], "openai", "a", ALICE) == 1
        refusal = (await waiting["qsconn:a"]).refusal
        assert refusal is not None
        assert refusal.code == "SEMAPHORE_RESET"
        loads = [replica.permits.loads.of(key) for key in waiting]
        assert [(load.held, load.waiting) for load in loads] == [(1, 0), (1, 1)]
        assert await fleet.state.reset(["breakers", "permits"], "", "", ALICE) == 1
        await waiting["qsconn:b"]
        assert [fact.mechanism for fact in await fleet.acts_of()] == ["concurrency", "concurrency"]


@pytest.mark.parametrize(
    ("key", "selection", "is_meant"),
    [
        ("global", Selection(), True),
        ("global", Selection("openai"), False),
        ("openai", Selection("openai"), True),
        ("openai", Selection("openai", "a"), False),
        ("openai:a", Selection("openai", "a"), True),
        ("openai:a:model:gpt", Selection("openai", "a"), True),
        ("openai:ab", Selection("openai", "a"), False),
        ("openai:ab", Selection("openai"), True),
        ("openai-eu:a", Selection("openai"), False),
        ("qsconn:a", Selection("openai", "a"), True),
        ("qsconn:a", Selection("openai"), True),
        ("qsconn:z", Selection("openai"), False),
        ("combo:r:a", Selection("openai", "a"), False),
    ],
)
def test_a_reset_is_narrowed_by_the_key_of_a_gate(key: str, selection: Selection, is_meant: bool) -> None:
    policy = Policy(Catalogue(connections={"a": Connection("a", "openai"), "z": Connection("z", "claude")}))
    assert is_of(key, selection, policy) is is_meant


@pytest.mark.parametrize("scope", ["affinity_pins", "permits", "usage_wall"])
async def test_a_reset_without_the_store_is_refused(scope: str) -> None:
    fleet = Operated()
    async with running(fleet.replica):
        fleet.store.is_away = True
        with pytest.raises(StoreLostError):
            await fleet.state.reset([scope], "", "", ALICE)
        fleet.store.is_away = False


@pytest.mark.parametrize("scopes", [[], ["breakers", "everything"]])
async def test_an_unknown_or_empty_scope_list_is_refused_with_the_list(scopes: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await Operated().state.reset(scopes, "", "", ALICE)
    assert all(scope in caught.value.problems[0].remedy for scope in SCOPES)


async def test_a_connection_needs_its_provider() -> None:
    with pytest.raises(InvalidRequestError):
        await Operated().state.reset(["breakers"], "", "a", ALICE)


# -- model locks ---------------------------------------------------------------------------------------------
async def lock_model(fleet: Operated, connection: str, provider: str = "gemini") -> None:
    await report(fleet.replica, failure(connection, 429, provider=provider))


async def test_a_model_is_back_when_its_cooldown_is_cleared() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await lock_model(fleet, "a")
        await lock_model(fleet, "b")
        assert [item.connection for item in fleet.listings.model_cooldowns("gemini", "a")] == ["a"]
        assert reasons(await select(fleet.replica, ask("a", provider="gemini", explain=True))) == ["model_lockout"]
        assert await fleet.state.clear_model_lock("gemini", "a", "gpt", ALICE) == 1
        assert chosen(await select(fleet.replica, ask("a", provider="gemini"))) == "a"
        assert await fleet.state.clear_model_lock("gemini", "", "gpt", ALICE) == 1
        assert fleet.listings.model_cooldowns() == ()


async def test_clearing_nothing_removes_nothing_and_leaves_calls_under_way_heard() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await lock_model(fleet, "a")
        token = (await select(fleet.replica, ask("b", provider="gemini"))).token
        assert await fleet.state.clear_model_lock("gemini", "", "another", ALICE) == 0
        assert await fleet.state.clear_model_lock("gemini", "b", "gpt", ALICE) == 0
        heard = await report(fleet.replica, failure("b", 429, provider="gemini", token=token))
        assert heard.ignored == ()
        assert [item.connection for item in fleet.listings.model_cooldowns("gemini", "b")] == ["b"]


async def test_every_model_cooldown_can_be_cleared_at_once() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await lock_model(fleet, "a")
        await lock_model(fleet, "b", provider="github")
        assert await fleet.state.clear_all_model_locks(ALICE) == 2
        assert fleet.listings.counts().model_lockouts == 0


async def test_model_cooldowns_are_listed_by_remaining_time() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await lock_model(fleet, "short")
        await report(fleet.replica, failure("long", 429, provider="gemini", headers={"retry-after": "900"}))
        listed = fleet.listings.model_cooldowns()
        assert [item.connection for item in listed] == ["long", "short"]
        assert listed[0].remaining_ms == 900_000


@pytest.mark.parametrize(("provider", "model"), [("", "gpt"), ("gemini", ""), ("", "")])
async def test_a_lock_needs_provider_and_model(provider: str, model: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await Operated().state.clear_model_lock(provider, "a", model, ALICE)
    assert len(caught.value.problems) == (not provider) + (not model)


# -- connections ---------------------------------------------------------------------------------------------
async def test_a_credential_change_ends_expired_and_older_calls_become_statistics() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        older = await select(fleet.replica, ask("a", "b"))
        await report(fleet.replica, failure("a", 401))
        assert fleet.connection("a").test_status == EXPIRED
        done = await fleet.state.change_credential("openai", "a", None, ALICE)
        assert (done.value.test_status, done.value.generation) == ("active", 2)
        assert [(f.from_state, f.to_state, f.actor) for f in done.facts] == [(EXPIRED, "active", ALICE.text)]
        late = await report(fleet.replica, failure("a", 401, token=older.token))
        assert "stale_generation" in late.ignored
        assert chosen(await select(fleet.replica, ask("a"))) == "a"


async def test_a_banned_connection_is_revived_by_credential_or_operator_only() -> None:
    fleet = Operated()

    async def ban() -> None:
        answer = await select(fleet.replica, ask("a"))
        body = b'{"error": {"message": "account has been deactivated"}}'
        await report(fleet.replica, failure("a", 403, token=answer.token)._replace(body=body))
        assert fleet.connection("a").test_status == BANNED

    async with running(fleet.replica):
        await ban()
        fleet.time.ms += 30 * 24 * HOUR
        await report(fleet.replica, failure("a", 200))
        await fleet.state.reset(["breakers", "connection_cooldowns", "model_lockouts"], "", "", ALICE)
        assert reasons(await select(fleet.replica, ask("a", explain=True))) == ["banned"]
        await fleet.state.change_credential("openai", "a", None, ALICE)
        await ban()
        await fleet.state.reset(["terminal_states"], "openai", "a", ALICE)
        assert chosen(await select(fleet.replica, ask("a"))) == "a"


async def test_a_connection_switched_off_takes_no_calls_until_it_is_switched_on() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        row, changed = await fleet.state.set_enabled("openai", "a", False, ALICE)
        assert (changed, row.generation) == (True, 1)
        assert (await fleet.state.set_enabled("openai", "a", False, ALICE))[1] is False
        assert chosen(await select(fleet.replica, ask("a", "b"))) == "b"
        row, changed = await fleet.state.set_enabled("openai", "a", True, ALICE)
        assert (changed, row.generation) == (True, 2)
        assert chosen(await select(fleet.replica, ask("a", "b"))) == "a"
        told = [(f.from_state, f.to_state, f.reason) for f in await fleet.acts_of()]
        assert told == [("disabled", "active", "enabled"), ("active", "disabled", "disabled")]


@pytest.mark.parametrize(("provider", "connection"), [("", "a"), ("openai", ""), ("", "")])
async def test_an_act_on_a_connection_names_it(provider: str, connection: str) -> None:
    state = Operated().state
    with pytest.raises(InvalidRequestError):
        await state.change_credential(provider, connection, None, ALICE)
    with pytest.raises(InvalidRequestError):
        await state.set_enabled(provider, connection, True, ALICE)


# -- listings and outage -------------------------------------------------------------------------------------
async def test_state_is_listed_in_order_page_by_page_without_gaps() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await report(fleet.replica, failure("b", 429))
        await report(fleet.replica, failure("a", 401))
        await lock_model(fleet, "c")
        whole = fleet.listings.state(100)
        assert whole.after is None
        assert [row.place for row in whole.rows] == sorted(row.place for row in whole.rows)
        assert {(row.connection, row.state) for row in whole.rows} >= {("b", "cooling"), ("a", "expired")}
        paged, after = list(fleet.listings.state(1).rows), fleet.listings.state(1).after
        while after:
            page = fleet.listings.state(1, after=after)
            paged, after = [*paged, *page.rows], page.after
        assert paged == list(whole.rows)


async def test_an_open_breaker_is_listed_refreshed_by_time() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await open_breaker(fleet)
        assert fleet.listings.breakers("openai")[0].retry_after_ms == 30_000
        fleet.time.ms += 30_000
        shown = fleet.listings.breakers("openai")[0]
        assert (shown.state, shown.retry_after_ms) == ("HALF_OPEN", None)
        stored = fleet.replica.view.committed(("breaker", "openai", ""))
        assert stored
        assert isinstance(stored.row, BreakerState)
        assert stored.row.state is State.OPEN


async def test_no_act_happens_while_the_store_is_away() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        fleet.store.is_away = True
        for attempt in (
            fleet.state.control_breaker("openai", "force_open", ALICE),
            fleet.state.reset(["breakers"], "", "", ALICE),
            fleet.state.change_credential("openai", "a", None, ALICE),
            fleet.state.clear_all_model_locks(ALICE),
            fleet.facts.explain("d"),
        ):
            with pytest.raises(StoreLostError):
                await attempt
        fleet.store.is_away = False
        assert fleet.listings.breakers() == ()


async def test_each_blocked_second_has_a_fact_with_rule_evidence_replica_and_request() -> None:
    """A cooldown without a cause: three of four accounts blocked, and for each of them the facts say why."""
    fleet = Operated()
    async with running(fleet.replica):
        limited = await select(fleet.replica, ask("a", request_id="q1"))
        await report(fleet.replica, failure("a", 429, token=limited.token, headers={"retry-after": "60"}))
        await report(fleet.replica, failure("b", 503))
        await report(fleet.replica, failure("c", 401))
        answer = await select(fleet.replica, ask("a", "b", "c", "d", explain=True))
        assert chosen(answer) == "d"
        assert len(answer.exclusions) == 3
        for excluded in answer.exclusions:
            connection = excluded.target.connection
            page = await fleet.facts.list_facts(100, provider="openai", connection=connection)
            (fact,) = [each for each in page.facts if each.id == excluded.evidence_id]
            assert fact.deadline_at == excluded.until
            assert (fact.replica, bool(fact.status), bool(fact.reason)) == ("r1", True, True)
        (told,) = await fleet.facts.explain(limited.decision_id)
        assert (told.decision_id, told.request_id, told.status) == (limited.decision_id, "q1", 429)
        assert told.hint_source == "header"
        assert told.deadline_at is not None
        assert told.deadline_at - told.at == 60_000


async def test_clearing_every_model_cooldown_ends_the_timers_of_family_pools_too() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await report(fleet.replica, failure("a", 429, provider="codex"))
        assert reasons(await select(fleet.replica, ask("a", provider="codex", explain=True)))
        await fleet.state.clear_all_model_locks(ALICE)
        assert chosen(await select(fleet.replica, ask("a", provider="codex"))) == "a"
