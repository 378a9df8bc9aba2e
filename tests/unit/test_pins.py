"""Session pins of a replica over the reference store: choosing, joining, detours, refresh, eviction, store away."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import pytest

from policy_service.application.messages import (
    DecisionToken,
    EarlierAttempt,
    EndKind,
    LeaseContext,
    PinRef,
    ReportExtras,
    ReportRequest,
    SelectRequest,
    SessionSource,
)
from policy_service.application.pin_cache import PinBacklog, PinCache, PinChange
from policy_service.application.pin_reports import PinReports
from policy_service.application.pins import PinAnswer, Pins
from policy_service.application.ports import Versioned
from policy_service.application.ports_pins import PinKey, PinSeen
from policy_service.application.report_result import ReportResult, fold_report
from policy_service.application.view import View
from policy_service.domain.affinity import PinRow
from policy_service.domain.catalogue import Catalogue, Connection
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import AuthClass, ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.policy import Policy
from policy_service.storage.memory.pin_store import MemoryPinStore, PinTable
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime

TTL = 3_600_000
ON = {"affinity.ttl_ms": TTL}
FAILED = ReportResult(reason="server_error", scope="connection", fallback=True)


def target(connection: str, provider: str = "openai") -> Target:
    return Target(ProviderId(provider), ConnectionId(connection), ModelId("gpt"))


def cooling(connection: str, until: int) -> ConnectionState:
    return ConnectionState("openai", connection, rate_limited_until=until)


def dead(connection: str) -> ConnectionState:
    return ConnectionState("openai", connection, test_status="banned")


class YieldingPinStore(MemoryPinStore):
    """Lets every other task run after a look-up, as a database far away does."""

    async def find(self, key: PinKey, *, timeout_ms: int) -> PinRow | None:
        found = await super().find(key, timeout_ms=timeout_ms)
        await asyncio.sleep(0)
        return found


@dataclass
class Member:
    """One replica's pins, with a view that the test writes."""

    fleet: Fleet
    store: MemoryStore
    pins: Pins
    reports: PinReports
    view: View
    calls: int = 0

    def choose_now(self, *eligible: str, **request: object) -> PinAnswer | None:
        return self.pins.choose_cached(self.question(*eligible, **request), self.fleet.time.ms)  # type: ignore[arg-type]

    def hit(self, *eligible: str, **request: object) -> PinAnswer | None:
        asked = SelectRequest("r", **{"session_key": "s1", "caller_id": "u", **request})  # type: ignore[arg-type]
        return self.pins.hit(asked, [target(name) for name in eligible], self.fleet.time.ms)

    def question(self, *eligible: str, refused: dict[str, str] | None = None, **request: object):  # type: ignore[no-untyped-def]
        asked = SelectRequest("r", **{"session_key": "s1", "caller_id": "u", **request})  # type: ignore[arg-type]
        refusals = [Exclusion(target(name), reason) for name, reason in (refused or {}).items()]
        listed = [*map(target, eligible), *(refusal.target for refusal in refusals)]
        found = self.pins.question(asked, [target(name) for name in eligible], listed, refusals)
        assert found is not None
        return found

    async def choose(self, *eligible: str, **request: object) -> PinAnswer:
        question = self.question(*eligible, **request)  # type: ignore[arg-type]
        answer = await self.pins.choose(question, self.fleet.time.ms)
        self.pins.dispatched(answer, self.fleet.time.ms)
        return answer

    def reported(
        self,
        answer: PinAnswer,
        connection: str,
        result: ReportResult | None = None,
        extras: ReportExtras | None = None,
        **report: object,
    ) -> str:
        token = DecisionToken("d", 0, caller_id="u", pin=answer.ref)
        fields = {"end": EndKind.HTTP_STATUS, "status": 200 if result is None else 503, **report}
        request = ReportRequest(target(connection), token=token, extras=extras or ReportExtras(), **fields)  # type: ignore[arg-type]
        return self.reports.reported(request, target(connection), result, self.fleet.time.ms)

    def show(self, row: ConnectionState) -> None:
        self.fleet.version += 1
        self.view.apply_committed([Versioned(self.fleet.version, row)])


@dataclass
class Fleet:
    """Replicas on one table."""

    settings: dict[str, object] = field(default_factory=lambda: dict(ON))
    connections: tuple[Connection, ...] = ()
    time: FakeTime = field(default_factory=FakeTime)
    table: PinTable = field(default_factory=PinTable)
    version: int = 0

    def member(self, *, yields: bool = False) -> Member:
        """A replica; `yields`: others run between its reading of a pin and its writing."""
        store = MemoryStore(MemoryDatabase(clock=self.time.database))
        catalogue = Catalogue(
            connections={each.id: each for each in self.connections}, stored_settings=dict(self.settings)
        )
        view = View(Policy(catalogue), fold_report)
        pin_store = (YieldingPinStore if yields else MemoryPinStore)(store, self.table)
        pins = Pins(pin_store, view, budget_ms=20, store_away=lambda: store.is_away)
        return Member(self, store, pins, PinReports(pin_store, pins), view)

    def pin(self) -> PinRow | None:
        return next((row for row in self.table.rows.values() if row.is_live(self.time.ms)), None)


def test_without_a_ttl_nothing_is_asked() -> None:
    pins = Fleet(settings={}).member().pins
    request = SelectRequest("r", session_key="s1")
    assert pins.is_off(request)
    assert pins.question(request, [target("a")], [target("a")]) is None
    assert not pins.is_off(request._replace(affinity_ttl_ms=5))


async def test_the_legacy_name_of_the_ttl_counts_only_where_the_new_one_is_absent() -> None:
    assert Fleet(settings={"affinity.legacy_ttl_ms": 7}).member().pins.settings.ttl_ms == 7
    assert Fleet(settings={"affinity.legacy_ttl_ms": 7, "affinity.ttl_ms": 0}).member().pins.settings.ttl_ms == 0


async def test_a_pinned_session_stays_and_costs_no_round_trip() -> None:
    fleet = Fleet()
    one = fleet.member()
    created = await one.choose("a", "b")
    calls = one.store.statements
    again = one.choose_now("b", "a")
    assert again is not None
    assert (created.affinity, created.connection) == ("created", "a")
    assert (again.affinity, again.connection, again.position) == ("hit", "a", 1)
    assert again.ref == PinRef(fleet.table.rows.popitem()[0].session_hash, "openai", "a", 1, TTL)
    assert one.store.statements == calls


async def test_another_replica_follows_the_pin_of_the_first() -> None:
    fleet = Fleet()
    await fleet.member().choose("a", "b")
    other = await fleet.member().choose("b", "a")
    assert (other.affinity, other.connection) == ("hit", "a")


async def test_a_row_read_long_ago_is_read_again_before_it_is_followed() -> None:
    fleet = Fleet()
    one, two = fleet.member(), fleet.member()
    await one.choose("a")
    two.show(dead("a"))
    assert (await two.choose("b", refused={"a": "banned"})).affinity == "moved"
    fleet.time.ms += 15_001
    assert one.choose_now("a", "b") is None
    assert (await one.choose("a", "b")).connection == "b"


@pytest.mark.parametrize(
    "reason", ["connection_cooldown", "circuit_open", "model_lockout", "concurrency_cap", "lease_held"]
)
async def test_a_passing_exclusion_is_a_detour_and_afterwards_the_session_goes_home(reason: str) -> None:
    fleet = Fleet()
    one = fleet.member()
    await one.choose("a", "b")
    away = await one.choose("b", refused={"a": reason})
    assert (away.affinity, away.position, away.pin_connection) == ("detour", None, "a")
    assert (await one.choose("a", "b")).affinity == "hit"


@pytest.mark.parametrize("reason", ["banned", "expired", "disabled", "lease_hidden", "lease_not_allowed"])
async def test_a_lasting_exclusion_moves_the_pin(reason: str) -> None:
    fleet = Fleet()
    one = fleet.member()
    await one.choose("a", "b")
    moved = await one.choose("b", refused={"a": reason})
    assert (moved.affinity, moved.connection) == ("moved", "b")
    assert fleet.table.written == {"insert": 1, "move": 1}


async def test_an_account_that_the_request_could_not_have_moves_the_pin_and_a_tried_one_does_not() -> None:
    fleet = Fleet()
    one = fleet.member()
    await one.choose("a")
    tried = await one.choose("b", earlier_attempts=(EarlierAttempt("openai", "a", status=503),))
    assert tried.affinity == "detour"
    assert (await one.choose("b")).affinity == "moved"


async def test_a_declared_account_outside_this_request_is_a_detour() -> None:
    fleet = Fleet(connections=(Connection("a", "openai"),))
    one = fleet.member()
    await one.choose("a")
    assert (await one.choose("b")).affinity == "detour"


async def test_repin_moves_on_any_exclusion() -> None:
    one = Fleet(settings={**ON, "affinity.on_ineligible": "repin"}).member()
    await one.choose("a", "b")
    assert (await one.choose("b", refused={"a": "connection_cooldown"})).affinity == "moved"


async def test_anonymous_callers_share_a_pin_unless_a_caller_is_required() -> None:
    one = Fleet().member()
    await one.choose("a", "b", caller_id="")
    assert (await one.choose("b", "a", caller_id="")).connection == "a"
    strict = Fleet(settings={**ON, "affinity.require_caller": True}).member()
    assert (await strict.choose("a", caller_id="")).affinity == "no_caller"
    assert strict.store.statements == 0


async def test_a_request_without_a_session_is_not_looked_up() -> None:
    one = Fleet().member()
    assert (await one.choose("a", session_key="")).affinity == "none"
    assert one.store.statements == 0


async def test_the_session_is_taken_from_the_fields_of_the_contract() -> None:
    one = Fleet().member()
    await one.choose("a", "b", session_key="", session=SessionSource({"x-session-id": "abc"}))
    same = await one.choose("b", "a", session_key="header:abc")
    text = await one.choose("b", "a", session_key="", session=SessionSource(first_user_text=" hello "))
    assert (same.affinity, text.affinity) == ("hit", "created")


async def test_new_pins_go_to_the_account_used_longest_ago() -> None:
    one = Fleet().member()
    picked = [(await one.choose("a", "b", "c", session_key=f"s{n}")).connection for n in range(3)]
    assert sorted(map(str, picked)) == ["a", "b", "c"]
    one.fleet.time.ms += 5
    assert (await one.choose("a", "b", "c", session_key="s9")).connection in picked


async def test_a_pin_beats_a_forced_connection_except_for_managed_requests() -> None:
    one = Fleet().member()
    await one.choose("a", "b")
    forced = await one.choose("a", "b", forced_connection="b")
    assert (forced.affinity, forced.connection) == ("hit", "a")
    away = await one.choose("b", refused={"a": "connection_cooldown"}, forced_connection="b")
    assert (away.affinity, away.connection) == ("detour", "b")
    managed = await one.choose("a", "b", forced_connection="b", lease=LeaseContext("h", 1))
    assert (managed.affinity, managed.connection) == ("none", "b")


async def test_new_sessions_spread_over_oauth_accounts_by_free_slots_over_the_fleet() -> None:
    accounts = tuple(
        Connection(n, "openai", AuthClass.OAUTH, priority=1, max_sessions=m) for n, m in (("a", 2), ("b", 3))
    )
    fleet = Fleet(connections=accounts)
    chosen = Counter([(await fleet.member().choose("a", "b", session_key=f"s{n}")).connection for n in range(5)])
    assert chosen == {"a": 2, "b": 3}


async def test_a_reset_at_one_replica_is_followed_by_the_others_within_five_seconds() -> None:
    fleet = Fleet()
    one, two = fleet.member(), fleet.member()
    await one.choose("a", "b")
    assert (await two.choose("a", "b")).affinity == "hit"
    assert await one.pins.reset("openai", "a") == 1
    assert one.hit("a", "b") is None
    fleet.time.ms += 5_000
    assert two.hit("a", "b") is not None
    fleet.time.ms += 1
    assert two.hit("a", "b") is None
    assert (await two.choose("b", "a")).affinity == "created"


# --- reports --------------------------------------------------------------------------------------------------
async def test_a_first_byte_over_the_pinned_account_slides_the_end_once_in_a_while() -> None:
    fleet = Fleet()
    one = fleet.member()
    answer = await one.choose("a")
    assert one.reported(answer, "a") == "kept"
    fleet.time.ms += 15_000
    calls = one.store.statements
    assert one.reported(answer, "a") == "refreshed"
    assert one.reported(answer, "a") == "kept"
    assert one.store.statements == calls, "a report never waits for the store"
    await one.reports.flush()
    row = fleet.pin()
    assert row is not None
    assert row.expires_at == fleet.time.ms + TTL


async def test_a_report_that_reaches_another_replica_refreshes_as_well() -> None:
    fleet = Fleet()
    answer = await fleet.member().choose("a")
    fleet.time.ms += 60_000
    two = fleet.member()
    assert two.reported(answer, "a") == "refreshed"
    await two.reports.flush()
    assert fleet.table.written["refresh"] == 1


async def test_a_success_elsewhere_leaves_the_pin_alone() -> None:
    one = Fleet().member()
    answer = await one.choose("a", "b")
    one.fleet.time.ms += 60_000
    assert one.reported(answer, "b") == "kept"
    assert len(one.pins.backlog) == 0


async def test_field_18_an_exhausted_account_is_left_for_a_while_and_a_stream_that_never_began_refreshes_nothing() -> (
    None
):
    fleet = Fleet()
    one = fleet.member()
    answer = await one.choose("a", "b")
    fleet.time.ms += 60_000
    one.show(cooling("a", fleet.time.ms + 30_000))
    refused = one.reported(answer, "a", FAILED, status=429, first_byte_ms=5)
    early_end = one.reported(answer, "a", FAILED, end=EndKind.NETWORK_ERROR, status=None, network_error="reset")
    error_first = one.reported(answer, "a", FAILED, ReportExtras(stream_error=b"{}"), status=200, first_byte_ms=5)
    assert [refused, early_end, error_first] == ["kept", "kept", "kept"]
    away = await one.choose("b", refused={"a": "connection_cooldown"})
    assert (away.affinity, one.reported(away, "b")) == ("detour", "kept")
    await one.reports.flush()
    row = fleet.pin()
    assert row is not None
    assert row.last_used_at == fleet.time.ms - 60_000
    fleet.time.ms += 30_001
    home = await one.choose("a", "b")
    assert (home.affinity, home.connection) == ("hit", "a")
    assert one.reported(home, "a") == "refreshed"


async def test_a_stream_that_broke_after_its_first_event_refreshes() -> None:
    one = Fleet().member()
    answer = await one.choose("a")
    one.fleet.time.ms += 60_000
    one.show(cooling("a", one.fleet.time.ms + 9_000))
    broken = {"end": EndKind.NETWORK_ERROR, "status": None, "network_error": "reset", "first_byte_ms": 40}
    assert one.reported(answer, "a", FAILED, ReportExtras(), **broken) == "refreshed"


@pytest.mark.parametrize(
    ("mode", "after", "expected"),
    [
        ("detour", "cooling", "kept"),
        ("repin", "cooling", "evicted"),
        ("detour", "dead", "evicted"),
        ("repin", "dead", "evicted"),
        ("detour", "nothing", "evicted"),
        ("repin", "nothing", "evicted"),
    ],
)
async def test_the_eviction_table(mode: str, after: str, expected: str) -> None:
    one = Fleet(settings={**ON, "affinity.on_ineligible": mode}).member()
    answer = await one.choose("a", "b")
    if after != "nothing":
        one.show(cooling("a", one.fleet.time.ms + 9_000) if after == "cooling" else dead("a"))
    assert one.reported(answer, "b", FAILED) == "kept"
    assert one.reported(answer, "a", FAILED) == expected
    await one.reports.flush()
    assert (one.fleet.pin() is None) == (expected == "evicted")


@pytest.mark.parametrize(
    ("expected", "report", "extras"),
    [
        (
            "evicted",
            {"end": EndKind.LOCAL_FAULT, "fault": "own_timeout", "status": None},
            ReportExtras(target_timeout=True),
        ),
        ("kept", {"end": EndKind.CLIENT_CANCELLED, "status": None}, ReportExtras()),
        ("kept", {"end": EndKind.CLIENT_CANCELLED, "status": None}, ReportExtras(hedge_cancelled=True)),
        ("kept", {"end": EndKind.LOCAL_FAULT, "fault": "own_queue", "status": None}, ReportExtras()),
    ],
)
async def test_a_route_timeout_evicts_and_what_the_account_is_not_to_blame_for_does_not(
    expected: str, report: dict[str, object], extras: ReportExtras
) -> None:
    one = Fleet().member()
    answer = await one.choose("a")
    assert one.reported(answer, "a", FAILED, extras, **report) == expected


async def test_a_fault_of_the_request_itself_is_not_held_against_the_account() -> None:
    one = Fleet().member()
    answer = await one.choose("a")
    assert one.reported(answer, "a", ReportResult(reason="bad_request", scope="request"), status=400) == "kept"


async def test_the_next_selection_does_not_read_a_pin_whose_eviction_is_still_queued() -> None:
    fleet = Fleet()
    one = fleet.member()
    answer = await one.choose("a", "b")
    one.reported(answer, "a", FAILED)
    fresh = await one.choose("b", "a")
    assert (fresh.affinity, fresh.connection) == ("created", "b")
    await one.reports.flush()
    row = fleet.pin()
    assert row is not None
    assert row.connection_id == "b", "the eviction names the old pin only"


@pytest.mark.parametrize("is_away", [False, True])
async def test_a_refresh_that_was_under_way_does_not_bring_an_evicted_pin_back(is_away: bool) -> None:
    one = Fleet().member()
    answer = await one.choose("a", "b")
    one.fleet.time.ms += 60_000
    one.reported(answer, "a", FAILED)
    one.pins.cache.put(*_stored(one), one.fleet.time.ms)
    one.store.is_away = is_away
    assert one.choose_now("a", "b") is None
    assert one.hit("a", "b") is None
    assert (await one.choose("b", "a")).affinity == ("local" if is_away else "created")


def _stored(member: Member) -> tuple[PinKey, PinRow]:
    (entry,) = member.fleet.table.rows.items()
    return entry


async def test_the_short_way_says_what_the_long_one_says_or_nothing() -> None:
    one = Fleet().member()
    assert one.hit("a", "b") is None
    await one.choose("a", "b")
    for pool in (("a", "b"), ("b", "a"), ("c", "b", "a")):
        assert one.hit(*pool) == one.choose_now(*pool)
    for request in (
        {"forced_connection": "b"},
        {"lease": LeaseContext("h", 1)},
        {"session_key": ""},
        {"caller_id": "v"},
    ):
        assert one.hit("a", "b", **request) is None
    assert one.hit("b", "c") is None
    one.fleet.time.ms += 15_001
    assert one.hit("a", "b") is None


async def test_positions_are_those_of_the_eligible_targets_also_where_others_stand_between() -> None:
    one = Fleet().member()
    mixed = [target("a"), target("x", "codex"), target("b")]
    request = SelectRequest("r", session_key="s1", caller_id="u")
    await one.choose("b")
    question = one.pins.question(request, mixed, mixed)
    assert question is not None
    long_way = one.pins.choose_cached(question, one.fleet.time.ms)
    assert long_way is not None
    assert long_way.position == 2
    assert one.pins.hit(request, mixed, one.fleet.time.ms) == long_way


async def test_a_late_eviction_spares_the_pin_that_was_made_since() -> None:
    fleet = Fleet()
    one, two = fleet.member(), fleet.member()
    answer = await one.choose("a")
    two.show(dead("a"))
    await two.choose("b", refused={"a": "banned"})
    assert one.reported(answer, "a", FAILED) == "evicted"
    await one.reports.flush()
    row = fleet.pin()
    assert row is not None
    assert row.connection_id == "b"


# --- store away -------------------------------------------------------------------------------------------------
async def test_without_the_store_known_pins_hold_and_new_ones_are_local_until_the_first_writer_is_known() -> None:
    fleet = Fleet()
    one, two = fleet.member(), fleet.member()
    await one.choose("a", "b", session_key="known")
    one.store.is_away = True
    fleet.time.ms += 60_000
    assert (await one.choose("b", "a", session_key="known")).affinity == "hit"
    local = await one.choose("b", "a", session_key="fresh")
    assert (local.affinity, local.connection) == ("local", "b")
    assert local.ref is not None
    assert local.ref.version == 0
    assert (await one.choose("a", "b", session_key="fresh")).connection == "b"
    await two.choose("a", session_key="fresh")
    one.store.is_away = False
    await one.reports.flush()
    joined = await one.choose("b", "a", session_key="fresh")
    assert (joined.affinity, joined.connection) == ("hit", "a")


async def test_a_local_pin_is_stored_when_nobody_else_made_one() -> None:
    fleet = Fleet()
    one = fleet.member()
    one.store.is_away = True
    local = await one.choose("a")
    fleet.time.ms += 60_000
    assert one.reported(local, "a") == "refreshed"
    one.store.is_away = False
    await one.reports.flush()
    row = fleet.pin()
    assert row is not None
    assert (row.connection_id, row.expires_at) == ("a", fleet.time.ms + TTL)


async def test_a_local_pin_that_ended_during_the_outage_is_never_stored() -> None:
    fleet = Fleet()
    one = fleet.member()
    one.store.is_away = True
    await one.choose("a")
    fleet.time.ms += TTL
    one.store.is_away = False
    await one.reports.flush()
    assert fleet.pin() is None


async def test_an_eviction_during_an_outage_holds_here_at_once_and_in_the_store_afterwards() -> None:
    fleet = Fleet()
    one = fleet.member()
    answer = await one.choose("a", "b")
    one.store.is_away = True
    assert one.reported(answer, "a", FAILED) == "evicted"
    local = await one.choose("b", "a")
    assert (local.affinity, local.connection) == ("local", "b")
    one.store.is_away = False
    await one.reports.flush()
    row = fleet.pin()
    assert row is not None
    assert row.connection_id == "b"


async def test_the_writer_waits_for_the_store_and_then_writes_by_itself() -> None:
    fleet = Fleet()
    one = fleet.member()
    one.reports.start()
    answer = await one.choose("a")
    fleet.time.ms += 60_000
    one.reported(answer, "a")
    for _ in range(5):
        await asyncio.sleep(0)
    assert fleet.table.written["refresh"] == 1
    await one.reports.stop()


# --- races and bounds ---------------------------------------------------------------------------------------------
async def test_two_replicas_that_race_for_the_first_pin_of_1000_sessions_agree_on_every_one() -> None:
    fleet = Fleet()
    one, two = fleet.member(yields=True), fleet.member(yields=True)
    sessions = [(f"s{n % 500}", f"u{n // 500}") for n in range(1_000)]
    answers = await asyncio.gather(
        *(
            member.choose(*pool, session_key=session, caller_id=caller)
            for session, caller in sessions
            for member, pool in ((one, ("a", "b", "c")), (two, ("c", "b", "a")))
        )
    )
    pairs = list(zip(answers[::2], answers[1::2], strict=True))
    assert len(fleet.table.rows) == 1_000
    assert fleet.table.written["insert"] == 1_000
    assert all(first.connection == second.connection for first, second in pairs)
    labels = Counter(tuple(sorted((first.affinity, second.affinity))) for first, second in pairs)
    assert labels == {("created", "joined"): 1_000}


def test_the_cache_forgets_the_least_recently_used() -> None:
    cache = PinCache(2)
    for name in ("a", "b"):
        cache.put(PinKey("", "p", name), PinRow("", "p", name, "c", 0, 0, 100), 0)
    cache.get(PinKey("", "p", "a"), 1)
    cache.put(PinKey("", "p", "c"), PinRow("", "p", "c", "c", 0, 0, 100), 0)
    assert [cache.get(PinKey("", "p", name), 1) is not None for name in "abc"] == [True, False, True]


def test_a_full_backlog_gives_refreshes_up_before_anything_else() -> None:
    backlog = PinBacklog(2)
    keys = [PinKey("", "p", name) for name in "abc"]
    backlog.add(keys[0], PinChange(PinSeen("c", 1)))
    backlog.add(keys[1], PinChange(PinSeen("c", 1), refresh_ttl_ms=5))
    backlog.add(keys[2], PinChange(PinSeen("c", 1)))
    assert [backlog.get(key) is not None for key in keys] == [True, False, True]
    assert backlog.dropped == 1
