"""Catalogue and settings as operators change them: whole or not at all, and no change of another is lost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from policy_service.application.admin import Actor, Acts
from policy_service.application.admin_catalogue import CatalogueAdmin
from policy_service.application.admin_health import FactsAdmin, HealthAdmin, Owned
from policy_service.application.admin_listings import Listings
from policy_service.application.entropy import SystemEntropy
from policy_service.application.errors import (
    InvalidRequestError,
    NotFoundError,
    StoreLostError,
    VersionMismatchError,
)
from policy_service.application.lease_book import LeaseTerms
from policy_service.application.permit_work import Passage, PermitAsk
from policy_service.application.ports import CatalogueRevision, Scope, StoreUnavailableError
from policy_service.application.replica import Replica
from policy_service.bootstrap.operations import documents, patch_by_rest_names
from policy_service.domain.facts import Fact
from policy_service.domain.gates import Gate
from policy_service.domain.lease import LeaseCall
from policy_service.domain.usage_wall_state import Lane
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, failure, make_replica, report, running

ALICE = Actor("alice")
DOCUMENT = """
connections:
  - {id: a, provider: openai}
callers:
  - {id: team, key_sha256: "%s"}
settings:
  breaker.half_open_probes: 2
""" % ("0" * 64)
SLOT = Passage((Gate("g", 1),))
KEY_TEXTS = ("key_sha256", "0" * 64)


class Operated:
    """A replica with what operators do to its documents."""

    def __init__(self, name: str = "r1", database: MemoryDatabase | None = None) -> None:
        self.time = FakeTime()
        self.store = MemoryStore(database or MemoryDatabase(self.time.database))
        self.replica: Replica = make_replica(self.store, name, time_source=self.time)
        replica = self.replica
        self.catalogue = CatalogueAdmin(self.store, replica.view, documents({}), replica.refresh, name)
        self.facts = FactsAdmin(self.store, replica.view)
        self.listings = Listings(replica.view, replica.clock)
        self.health = HealthAdmin(
            self.store,
            replica.view,
            replica.clock,
            self.listings,
            replica.freshness,
            name,
            lambda: 4,
            replica.follower.convergence.summary,
            replica.leases,
            replica.permits,
        )

    async def load(self, text: str = DOCUMENT, *, force: bool = False) -> tuple[int, bool]:
        done = await self.catalogue.import_document(text, ALICE, force=force, dry_run=False)
        return done.revision, done.changed

    def value(self, name: str) -> tuple[Any, str]:
        return next((each.value, each.source) for each in self.catalogue.settings().settings if each.name == name)

    async def accept_lane(self, provider: str, connection: str, *, ends_at: int) -> None:
        acts = Acts(self.store, self.replica.view, SystemEntropy(1), "r1")
        lane = Lane(provider, connection, resets_at_s=ends_at // 1_000, accepted_at=self.time.ms)
        owners = frozenset({provider})
        await acts.act(Scope(owners, whole_providers=owners), ALICE, lambda book, *_: book.put(lane))

    async def recorded(self) -> list[Fact]:
        page = await self.facts.list_facts(100, mechanism="catalogue")
        return list(page.facts)


# -- catalogue -----------------------------------------------------------------------------------------------
async def test_an_imported_document_is_in_force_at_once_with_a_fact_that_names_the_actor() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        assert await fleet.load() == (1, True)
        assert fleet.replica.view.policy.revision == 1
        assert "a" in fleet.replica.view.policy.catalogue.connections
        (fact,) = await fleet.recorded()
        assert (fact.from_state, fact.to_state, fact.actor, fact.replica) == ("0", "1", "alice", "r1")


async def test_a_known_document_changes_nothing_unless_forced() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await fleet.load()
        await fleet.load("connections: [{id: b, provider: openai}]")
        assert await fleet.load() == (2, False)
        assert await fleet.load(force=True) == (3, True)
        assert len(await fleet.recorded()) == 3


async def test_an_invalid_document_changes_nothing_and_every_problem_is_named() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await fleet.load()
        with pytest.raises(InvalidRequestError) as caught:
            await fleet.load("connections: [{id: a}]\nroutes: 3\nsettings: {breaker.half_open_probes: 0, nope: 1}")
        assert caught.value.reason == "CATALOGUE_INVALID"
        paths = {problem.path for problem in caught.value.problems}
        assert paths >= {"connections[0].provider", "routes", "settings.breaker.half_open_probes", "settings.nope"}
        assert (await fleet.catalogue.document()).revision == 1
        assert fleet.value("breaker.half_open_probes") == (2, "stored")


async def test_a_dry_run_only_checks() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        done = await fleet.catalogue.import_document(DOCUMENT, ALICE, force=False, dry_run=True)
        assert (done.revision, done.changed) == (0, False)
        with pytest.raises(NotFoundError):
            await fleet.catalogue.document()


async def test_a_stored_document_is_shown_without_hashes_of_keys() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await fleet.load()
        await fleet.load("{}")
        shown = await fleet.catalogue.document(1)
        assert json.loads(shown.document)["callers"] == [{"id": "team"}]
        assert not any(text in shown.document for text in KEY_TEXTS)
        with pytest.raises(NotFoundError):
            await fleet.catalogue.document(9)


async def test_rules_are_linted_in_force_and_in_a_document() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        rule = "{provider: openai, status: 418, match: teapot, scope: connection, id: tea}"
        found = await fleet.catalogue.lint_rules(f"rules: [{rule}]")
        assert ("tea", "no_path") in {(each.rule_id, each.problem) for each in found}
        assert "tea" not in {each.rule_id for each in await fleet.catalogue.lint_rules()}
        with pytest.raises(InvalidRequestError):
            await fleet.catalogue.lint_rules("rules: 3")


# -- settings ------------------------------------------------------------------------------------------------
async def test_a_patch_stores_only_what_it_names_nested_or_dotted() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await fleet.load()
        body = {"breaker": {"oauth": {"failure_threshold": 4}}, "model_lockout.error_codes": [429]}
        done = await fleet.catalogue.patch_settings(body, ALICE)
        assert done.version == 2
        assert fleet.value("breaker.oauth.failure_threshold") == (4, "stored")
        assert fleet.value("model_lockout.error_codes") == ([429], "stored")
        assert fleet.value("breaker.half_open_probes") == (2, "stored")
        assert fleet.value("breaker.api_key.failure_threshold") == (12, "default")
        assert "a" in fleet.replica.view.policy.catalogue.connections
        assert "breaker.oauth.failure_threshold" in (await fleet.recorded())[0].reason


async def test_null_takes_a_stored_value_back() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await fleet.load()
        await fleet.catalogue.patch_settings({"breaker": {"half_open_probes": None}}, ALICE)
        assert fleet.value("breaker.half_open_probes") == (1, "default")


async def test_settings_can_be_patched_before_any_catalogue_was_imported() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        assert (await fleet.catalogue.patch_settings({"breaker.half_open_probes": 3}, ALICE)).version == 1
        assert fleet.value("breaker.half_open_probes") == (3, "stored")


async def test_a_patch_that_changes_nothing_makes_no_revision() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await fleet.load()
        assert (await fleet.catalogue.patch_settings({"breaker": {"half_open_probes": 2}}, ALICE)).version == 1
        assert (await fleet.catalogue.patch_settings({}, ALICE)).version == 1


async def test_a_wrong_patch_stores_nothing_and_names_every_problem() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        body = {"breaker": {"half_open_probes": 0, "probes": 1}, "nope": 1, "breaker.oauth": 3, "tools.max_limit": 9}
        with pytest.raises(InvalidRequestError) as caught:
            await fleet.catalogue.patch_settings(body, ALICE)
        paths = {problem.path for problem in caught.value.problems}
        assert paths == {"breaker.half_open_probes", "breaker.probes", "nope", "breaker.oauth"}
        assert fleet.catalogue.settings().version == 0
        assert fleet.value("tools.max_limit") == (128, "default")


async def test_a_patch_for_another_version_is_refused() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await fleet.load()
        with pytest.raises(VersionMismatchError) as caught:
            await fleet.catalogue.patch_settings({"tools.max_limit": 9}, ALICE, if_version=0)
        assert caught.value.metadata == {"version": "1"}
        assert (await fleet.catalogue.patch_settings({"tools.max_limit": 9}, ALICE, if_version=1)).version == 2


class Crossing(MemoryStore):
    """A store in which every reader of the catalogue reads before any of them writes."""

    def __init__(self, database: MemoryDatabase, readers: int) -> None:
        super().__init__(database)
        self._left = readers
        self._all_read = asyncio.Event()

    async def catalogue(self, *, timeout_ms: int, revision: int | None = None) -> CatalogueRevision | None:
        found = await super().catalogue(timeout_ms=timeout_ms, revision=revision)
        self._left -= 1
        if self._left <= 0:
            self._all_read.set()
        await self._all_read.wait()
        return found


async def test_patches_of_different_fields_at_the_same_time_all_survive() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        store = Crossing(fleet.store.database, 2)
        admins = [
            CatalogueAdmin(store, fleet.replica.view, documents({}), fleet.replica.refresh, name) for name in "xy"
        ]
        bodies = ({"breaker.half_open_probes": 5}, {"tools.max_limit": 77})
        done = await asyncio.gather(*(a.patch_settings(b, ALICE) for a, b in zip(admins, bodies, strict=True)))
        assert {each.version for each in done} == {1, 2}
        assert fleet.value("breaker.half_open_probes") == (5, "stored")
        assert fleet.value("tools.max_limit") == (77, "stored")


async def test_of_two_conditional_patches_of_one_version_one_wins() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        store = Crossing(fleet.store.database, 2)
        admin = CatalogueAdmin(store, fleet.replica.view, documents({}), fleet.replica.refresh, "x")
        bodies = ({"breaker.half_open_probes": 5}, {"tools.max_limit": 77})
        done = await asyncio.gather(
            *(admin.patch_settings(body, ALICE, if_version=0) for body in bodies), return_exceptions=True
        )
        assert sorted(type(each).__name__ for each in done) == ["Settings", "VersionMismatchError"]


async def test_rest_names_patch_the_same_settings() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        body = {"providerBreaker": {"oauth": {"failureThreshold": 4}}}
        await fleet.catalogue.patch_settings(body, ALICE, patch=patch_by_rest_names)
        assert fleet.value("breaker.oauth.failure_threshold") == (4, "stored")


async def test_nothing_is_stored_while_the_store_is_away() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        fleet.store.is_away = True
        with pytest.raises(StoreLostError):
            await fleet.load()
        with pytest.raises(StoreLostError):
            await fleet.catalogue.patch_settings({"tools.max_limit": 9}, ALICE)
        fleet.store.is_away = False


# -- health and facts ----------------------------------------------------------------------------------------
async def test_health_counts_what_is_out_of_use() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        await report(fleet.replica, failure("a", 429))
        await report(fleet.replica, failure("g", 429, provider="gemini"))
        for n in range(12):
            await report(fleet.replica, failure(f"c{n}", 503))
        seen = await fleet.health.health()
        assert (seen.status, seen.is_database_reachable, seen.spooled_events) == ("ok", True, 4)
        assert [(each.key, each.state) for each in seen.breakers] == [("openai", "OPEN")]
        assert seen.counts.model_lockouts == 1
        assert seen.counts.cooling_connections >= 1


async def test_health_is_degraded_without_the_store_and_unavailable_without_a_view() -> None:
    fleet = Operated()
    assert (await fleet.health.health()).status == "unavailable"
    async with running(fleet.replica):
        fleet.store.is_away = True
        seen = await fleet.health.health()
        assert (seen.status, seen.is_database_reachable, seen.database_latency_ms) == ("degraded", False, None)
        with pytest.raises(StoreUnavailableError):
            await fleet.store.read_clock(timeout_ms=1)
        fleet.store.is_away = False


async def test_health_counts_leases_permits_and_lanes_and_keeps_the_counts_without_the_store() -> None:
    fleet = Operated()
    async with running(fleet.replica) as replica:
        call = LeaseCall("owner", "team", ttl_ms=60_000, connection_id="a")
        await replica.leases.acquire(call, LeaseTerms())
        await replica.permits.acquire(PermitAsk(SLOT, "held"))
        waiting = asyncio.create_task(replica.permits.acquire(PermitAsk(SLOT, "waiting")))
        while not replica.permits.loads.of("g").waiting:
            await asyncio.sleep(0.01)
        await fleet.accept_lane("claude", "c1", ends_at=fleet.time.ms + 60_000)
        await fleet.accept_lane("claude", "c2", ends_at=fleet.time.ms - 3_600_000)
        seen = await fleet.health.health()
        assert (seen.owned, seen.counts.active_lanes) == (Owned(1, 1, 1), 1)
        fleet.store.is_away = True
        assert (await fleet.health.health()).owned == Owned(1, 1, 1)
        fleet.store.is_away = False
        waiting.cancel()
        await asyncio.wait({waiting})
        fleet.time.ms += 600_000
        assert (await fleet.health.health()).owned.active_leases == 0


async def test_facts_are_listed_page_by_page_newest_first() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        for n in range(5):
            await report(fleet.replica, failure(f"c{n}", 429))
        whole = (await fleet.facts.list_facts(100, mechanism="connection_cooldown")).facts
        assert [fact.connection for fact in whole] == ["c4", "c3", "c2", "c1", "c0"]
        paged: list[Fact] = []
        before = None
        while page := await fleet.facts.list_facts(2, mechanism="connection", before_id=before):
            paged += page.facts
            before = page.before_id
            if before is None:
                break
        assert tuple(paged) == whole


async def test_a_decision_without_facts_is_not_found() -> None:
    with pytest.raises(NotFoundError):
        await Operated().facts.explain("none")


async def test_a_patch_back_to_an_earlier_document_takes_effect() -> None:
    fleet = Operated()
    async with running(fleet.replica):
        for value in (3, 4, 3):
            await fleet.catalogue.patch_settings({"breaker.half_open_probes": value}, ALICE)
            assert fleet.value("breaker.half_open_probes") == (value, "stored")
