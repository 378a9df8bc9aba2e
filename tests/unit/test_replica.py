"""Select and report over the reference store: what a replica sees, commits, spools and answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from policy_service.application.errors import InvalidRequestError, OverloadedError, UnknownStrategyError
from policy_service.application.events import OutcomeEvent
from policy_service.application.messages import Dispatch, EarlierAttempt, Reject, SelectRequest, Wait
from policy_service.application.replica import Replica
from policy_service.application.report_result import ReportResult, fold_report
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.policy import Policy
from policy_service.domain.state import StateBook
from policy_service.settings.catalogue_file import builtin_catalogue
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import (
    FakeTime,
    ListSpool,
    ask,
    candidates,
    chosen,
    failure,
    make_replica,
    quick_settings,
    report,
    running,
    select,
)


def fleet_member(database: MemoryDatabase, name: str, moments: FakeTime, **limits: int) -> Replica:
    return make_replica(
        MemoryStore(database), name, time_source=moments, settings=quick_settings(name, **limits), seed=hash(name)
    )


async def settled(replica: Replica) -> None:
    """Wait until everything queued is committed."""
    await asyncio.gather(*(item.done for item in replica.commit._queue))


@pytest.fixture
def moments() -> FakeTime:
    return FakeTime()


@pytest.fixture
def database(moments: FakeTime) -> MemoryDatabase:
    return MemoryDatabase(clock=moments.database)


async def open_breaker(replica: Replica, count: int = 12) -> None:
    for n in range(count):
        await report(replica, failure(f"burst{n}"))


async def test_a_replica_sees_its_own_failure_in_its_very_next_decision(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    async with running(fleet_member(database, "r1", moments)) as replica:
        first = await select(replica, ask("a", "b"))
        pending = asyncio.create_task(report(replica, failure("a", 429, token=first.token)))
        await asyncio.sleep(0)
        assert chosen(await select(replica, ask("a", "b"))) == "b"
        assert (await pending).durable


async def test_another_replica_sees_a_committed_failure(database: MemoryDatabase, moments: FakeTime) -> None:
    async with (
        running(fleet_member(database, "r1", moments)) as one,
        running(fleet_member(database, "r2", moments)) as two,
    ):
        await report(one, failure("a", 429))
        await two.follower._step()
        answer = await select(two, ask("a", "b", explain=True))
        assert chosen(answer) == "b"
        assert [(e.mechanism, e.reason) for e in answer.exclusions] == [("connection_cooldown", "connection_cooldown")]
        assert answer.exclusions[0].evidence_id in database.facts


async def test_a_replica_knows_how_late_it_sees_the_changes_of_others_and_leaves_out_its_own(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    async with (
        running(fleet_member(database, "r1", moments)) as one,
        running(fleet_member(database, "r2", moments)) as two,
    ):
        await asyncio.gather(one.follower._step(), two.follower._step())  # full loads, which say nothing of lags
        await asyncio.gather(one.follower.stop(), two.follower.stop())  # from here on only this test polls
        await report(one, failure("a", 429))
        moments.ms += 25
        await asyncio.gather(one.follower._step(), two.follower._step())
        assert two.follower.convergence.summary() == (1, 25, 25, 25)
        assert one.follower.convergence.summary().changes == 0


async def test_failures_of_several_replicas_open_the_breaker_at_exactly_the_threshold(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    replicas = [fleet_member(database, f"r{n}", moments) for n in range(4)]
    for replica in replicas:
        await replica.start()
    states = []
    for n in range(12):
        await report(replicas[n % 4], failure(f"c{n}"))
        row = database.rows[("breaker", "openai", "")].row
        states.append(row.state)  # type: ignore[attr-defined]
    assert [str(s) for s in states] == ["CLOSED"] * 6 + ["DEGRADED"] * 5 + ["OPEN"]
    for replica in replicas:
        await replica.stop()


async def test_a_repeated_report_gets_the_same_answer_and_changes_nothing(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    async with (
        running(fleet_member(database, "r1", moments)) as one,
        running(fleet_member(database, "r2", moments)) as two,
    ):
        answer = await select(one, ask("a", "b"))
        first = await report(one, failure("a", token=answer.token))
        again = await report(one, failure("a", token=answer.token))
        elsewhere = await report(two, failure("a", token=answer.token))
        assert database.rows[("breaker", "openai", "")].row.failure_count == 1  # type: ignore[attr-defined]
        assert again.verdict == first.verdict == elsewhere.verdict
        assert again.effects == first.effects == elsewhere.effects
        assert "duplicate" in again.ignored
        assert "duplicate" in elsewhere.ignored


async def test_a_success_sent_after_the_failure_of_the_same_attempt_gets_the_failure_s_answer(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    async with running(fleet_member(database, "r1", moments)) as replica:
        chosen_now = await select(replica, ask("a"))
        first = await report(replica, failure("a", 503, token=chosen_now.token))
        again = await report(replica, failure("a", 200, token=chosen_now.token))
        assert again.verdict == first.verdict
        assert "duplicate" in again.ignored


async def test_three_attempts_of_one_decision_are_three_effects(database: MemoryDatabase, moments: FakeTime) -> None:
    async with running(fleet_member(database, "r1", moments)) as replica:
        answer = await select(replica, ask("a", "b", "c"))
        one = await report(replica, failure("a", 503, token=answer.token, final=False))
        two = await report(replica, failure("b", 429, token=answer.token, attempt=1, final=False))
        assert one.action.next_target is not None
        assert one.action.next_target.connection == "b"
        assert two.action.next_target is not None
        assert two.action.next_target.connection == "c"
        assert chosen(await select(replica, ask("a", "b", "c"))) == "c"


async def test_one_probe_is_granted_to_the_fleet_and_its_success_closes_the_breaker(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    async with (
        running(fleet_member(database, "r1", moments)) as one,
        running(fleet_member(database, "r2", moments)) as two,
    ):
        await open_breaker(one)
        assert isinstance((await select(one, ask("z"))).verdict, Reject)
        moments.ms += 30_000
        await two.follower._step()
        probe = await select(one, ask("z"))
        assert isinstance(probe.verdict, Dispatch)
        assert probe.verdict.is_probe
        refused = await select(two, ask("z"))
        assert isinstance(refused.verdict, Reject)
        assert [e.reason for e in refused.exclusions] == ["probe_in_flight"]
        moments.ms += 10
        await report(one, failure("z", 200, token=probe.token))
        await two.follower._step()
        healed = await select(two, ask("z"))
        assert isinstance(healed.verdict, Dispatch)
        assert not healed.verdict.is_probe


async def test_a_repeated_request_id_gets_its_own_permit_again(database: MemoryDatabase, moments: FakeTime) -> None:
    async with running(fleet_member(database, "r1", moments)) as replica:
        await open_breaker(replica)
        moments.ms += 30_000
        first = await select(replica, ask("z", request_id="same"))
        again = await select(replica, ask("z", request_id="same"))
        other = await select(replica, ask("z", request_id="other"))
        assert first.token is not None
        assert again.token is not None
        assert again.token.probes == first.token.probes
        assert again.token.decision_id == first.token.decision_id
        assert isinstance(other.verdict, Reject)


async def test_a_report_is_spooled_while_the_store_is_away_and_committed_once_afterwards(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    store, spool = MemoryStore(database), ListSpool()
    replica = make_replica(store, "r1", spool=spool, time_source=moments, settings=quick_settings("r1"))
    async with running(replica):
        store.is_away = True
        answer = await report(replica, failure("a", 429, report_id="once"))
        assert not answer.durable
        assert list(spool.kept) == ["report/once"]
        assert chosen(await select(replica, ask("a", "b"))) == "b"
        store.is_away = False
        await settled(replica)
        assert "report/once" in database.answers
        assert spool.kept == {}
        assert (await report(replica, failure("a", 429, report_id="once"))).durable


async def test_a_spooled_report_survives_the_loss_of_the_replica(database: MemoryDatabase, moments: FakeTime) -> None:
    store, spool = MemoryStore(database), ListSpool()
    replica = make_replica(store, "r1", spool=spool, time_source=moments, settings=quick_settings("r1"))
    await replica.start()
    store.is_away = True
    await report(replica, failure("a", 429, report_id="kept"))
    next_life = make_replica(MemoryStore(database), "r1", spool=spool, time_source=moments, seed=2)
    async with running(next_life):
        await settled(next_life)
        assert "report/kept" in database.answers
        assert chosen(await select(next_life, ask("a", "b"))) == "b"
    await replica.follower.stop()


async def test_at_its_bounds_a_report_is_refused_not_lost_later(database: MemoryDatabase, moments: FakeTime) -> None:
    store = MemoryStore(database)
    replica = make_replica(store, "r1", time_source=moments, settings=quick_settings("r1", max_pending=2))
    async with running(replica):
        store.is_away = True
        await report(replica, failure("a"))
        await report(replica, failure("b"))
        with pytest.raises(OverloadedError):
            await report(replica, failure("c"))
        assert replica.commit.counters.refused == 1
        store.is_away = False


async def test_answers_are_stamped_degraded_while_the_store_is_away(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    store = MemoryStore(database)
    replica = make_replica(store, "r1", time_source=moments, settings=quick_settings("r1"))
    async with running(replica):
        assert not (await select(replica, ask("a"))).is_degraded
        store.is_away = True
        moments.ms += 60_000
        answer = await select(replica, ask("a"))
        assert answer.is_degraded
        assert answer.view_age_ms >= 60_000
        assert isinstance(answer.verdict, Dispatch)


async def test_without_the_store_one_probe_goes_out_per_replica_and_reset_timeout(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    store = MemoryStore(database)
    replica = make_replica(store, "r1", time_source=moments, settings=quick_settings("r1"))
    async with running(replica):
        await open_breaker(replica)
        moments.ms += 30_000
        store.is_away = True
        for _ in range(2):  # slow is not away: the third acquire without an answer makes it so
            assert isinstance((await select(replica, ask("z"))).verdict, Reject)
        assert isinstance((await select(replica, ask("z"))).verdict, Dispatch)
        assert isinstance((await select(replica, ask("z"))).verdict, Reject)
        moments.ms += 30_000
        assert isinstance((await select(replica, ask("z"))).verdict, Dispatch)
        store.is_away = False


async def test_one_slow_answer_of_the_store_makes_no_second_probe(database: MemoryDatabase, moments: FakeTime) -> None:
    store = MemoryStore(database)
    slow = make_replica(store, "r1", time_source=moments, settings=quick_settings("r1"))
    async with running(slow), running(fleet_member(database, "r2", moments)) as other:
        await open_breaker(slow)
        moments.ms += 30_000
        await other.follower._step()
        assert isinstance((await select(other, ask("z"))).verdict, Dispatch)
        store.is_away = True
        refused = await select(slow, ask("z", explain=True))
        store.is_away = False
        assert isinstance(refused.verdict, Reject)
        assert [each.reason for each in refused.exclusions] == ["probe_in_flight"]
        assert slow.grants.probes.local.granted == 0


async def test_healthy_traffic_sends_no_statement(database: MemoryDatabase, moments: FakeTime) -> None:
    store = MemoryStore(database)
    settings = quick_settings("r1")
    replica = make_replica(
        store, "r1", time_source=moments, settings=replace(settings, follow=replace(settings.follow, poll_ms=60_000))
    )
    async with running(replica):
        before = store.statements
        for _ in range(200):
            answer = replica.select.select_now(ask("a", "b"))
            assert answer is not None
            assert replica.report.report_now(failure("a", 200, token=answer.token)) is not None
        assert store.statements == before


async def test_a_success_that_started_before_the_newest_failure_clears_nothing(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    async with running(fleet_member(database, "r1", moments)) as replica:
        early = await select(replica, ask("a", "b"))
        moments.ms += 100
        await report(replica, failure("a", 429, headers={"retry-after": "60"}))
        moments.ms += 100
        await report(replica, failure("a", 200, token=early.token))
        assert chosen(await select(replica, ask("a", "b"))) == "b"


async def test_a_success_waits_for_the_view_to_reach_its_evidence(database: MemoryDatabase, moments: FakeTime) -> None:
    """The failure is committed elsewhere and not announced here yet when the success comes in."""
    async with running(fleet_member(database, "r1", moments)) as one:
        settings = quick_settings("r2")
        two = make_replica(
            MemoryStore(database),
            "r2",
            time_source=moments,
            settings=replace(settings, follow=replace(settings.follow, poll_ms=60_000, notifications=False)),
            seed=9,
        )
        async with running(two):
            for n in range(3):
                await report(one, failure(f"c{n}"))
            moments.ms += 50
            answer = await select(two, ask("c0"))
            moments.ms += 50
            assert two.report.report_now(failure("c0", 200, token=answer.token)) is not None
            moments.ms += 50
            await two.follower._step()
            await settled(two)
            row = database.rows[("breaker", "openai", "")].row
            assert row.failure_count == 2  # type: ignore[attr-defined]


async def test_earlier_attempts_are_not_tried_again(database: MemoryDatabase, moments: FakeTime) -> None:

    async with running(fleet_member(database, "r1", moments)) as replica:
        request = ask("a", "b")._replace(earlier_attempts=(EarlierAttempt("openai", "a", "gpt", 401),))
        assert chosen(await select(replica, request)) == "b"


async def test_an_unknown_route_is_a_typed_refusal(database: MemoryDatabase, moments: FakeTime) -> None:
    async with running(fleet_member(database, "r1", moments)) as replica:
        answer = await select(replica, SelectRequest("q", route="nowhere"))
        assert isinstance(answer.verdict, Reject)
        assert (answer.verdict.http_status, answer.verdict.terminal_reason) == (404, "no_executable_targets")
        assert "nowhere" in answer.verdict.message


async def test_an_unknown_strategy_is_refused_with_the_names(database: MemoryDatabase, moments: FakeTime) -> None:
    async with running(fleet_member(database, "r1", moments)) as replica:
        with pytest.raises(UnknownStrategyError, match="nonsense"):
            await select(replica, SelectRequest("q", candidates=candidates("a"), strategy="nonsense"))


async def test_a_target_that_the_decision_did_not_name_is_refused(database: MemoryDatabase, moments: FakeTime) -> None:
    async with running(fleet_member(database, "r1", moments)) as replica:
        answer = await select(replica, ask("a"))
        with pytest.raises(InvalidRequestError, match="none of the decision's targets"):
            await report(replica, failure("elsewhere", token=answer.token))


async def test_waiting_is_offered_where_the_soonest_lock_is_short(database: MemoryDatabase, moments: FakeTime) -> None:
    async with running(fleet_member(database, "r1", moments)) as replica:
        await report(replica, failure("a", 429, headers={"retry-after": "2"}))
        waiting = ask("a")._replace(allow_wait=True)
        answer = await select(replica, waiting)
        assert isinstance(answer.verdict, Wait)
        assert (answer.verdict.wait_ms, answer.verdict.reason) == (2_050, "rate_limit")
        short = waiting._replace(wait_budget_ms=1_000)
        assert isinstance((await select(replica, short)).verdict, Reject)


async def test_a_report_that_cannot_be_folded_is_set_aside_and_the_rest_goes_on(
    database: MemoryDatabase, moments: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    from policy_service.application import replica as module

    def poisoned(book: StateBook, event: OutcomeEvent, policy: Policy, now: int, replicas: int | None) -> ReportResult:
        if event.event_id == "report/poison" and database.version:
            raise RuntimeError("cannot be folded")
        return fold_report(book, event, policy, now, replicas)

    monkeypatch.setattr(module, "FOLDING", replace(module.FOLDING, fold=poisoned))
    async with running(fleet_member(database, "r1", moments)) as replica:
        await report(replica, failure("first"))
        bad = asyncio.create_task(report(replica, failure("a", report_id="poison")))
        good = asyncio.create_task(report(replica, failure("b", report_id="fine")))
        with pytest.raises(RuntimeError):
            await bad
        assert (await good).durable
        assert replica.commit.counters.failed_folds == 1
        assert "report/fine" in database.answers


def with_settings(**values: object) -> Catalogue:
    return replace(builtin_catalogue(), stored_settings={k.replace("__", "."): v for k, v in values.items()})


def with_catalogue(database: MemoryDatabase, moments: FakeTime, catalogue: Catalogue) -> Replica:
    return make_replica(MemoryStore(database), time_source=moments, catalogue=catalogue, settings=quick_settings("r1"))


async def test_a_long_block_is_tested_early_and_ends_when_the_quota_is_back(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    catalogue = with_settings(early_probe__enabled=True, early_probe__include_server_stated=True)
    replica = make_replica(
        MemoryStore(database), time_source=moments, catalogue=catalogue, settings=quick_settings("r")
    )
    async with running(replica):
        await report(replica, failure("a", 429, headers={"retry-after": "561635"}))
        assert chosen(await select(replica, ask("a", "b"))) == "b"
        moments.ms += 300_000
        trial = await select(replica, ask("a", "b"))
        assert chosen(trial) == "a"
        assert isinstance(trial.verdict, Dispatch)
        assert trial.verdict.is_probe
        assert chosen(await select(replica, ask("a", "b"))) == "b"
        moments.ms += 10
        await report(replica, failure("a", 200, token=trial.token))
        assert chosen(await select(replica, ask("a", "b"))) == "a"


async def test_a_failed_early_probe_leaves_the_deadline_and_waits_another_interval(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    catalogue = with_settings(early_probe__enabled=True, early_probe__include_server_stated=True)
    replica = make_replica(
        MemoryStore(database), time_source=moments, catalogue=catalogue, settings=quick_settings("r")
    )
    async with running(replica):
        await report(replica, failure("a", 429, headers={"retry-after": "3600"}))
        until = database.rows[("connection", "openai", "a")].row.rate_limited_until  # type: ignore[attr-defined]
        moments.ms += 300_000
        trial = await select(replica, ask("a", "b"))
        await report(replica, failure("a", 429, token=trial.token))
        row = database.rows[("connection", "openai", "a")].row
        assert row.rate_limited_until == until  # type: ignore[attr-defined]
        moments.ms += 299_999
        assert chosen(await select(replica, ask("a", "b"))) == "b"
        moments.ms += 1
        assert chosen(await select(replica, ask("a", "b"))) == "a"


async def test_the_pool_guard_keeps_half_of_a_pool_selectable(database: MemoryDatabase, moments: FakeTime) -> None:
    catalogue = with_settings(pool_guard__enabled=True)
    replica = make_replica(
        MemoryStore(database), time_source=moments, catalogue=catalogue, settings=quick_settings("r")
    )
    async with running(replica):
        for name in ("a", "b", "c"):
            await report(replica, failure(name, 503))
            moments.ms += 1
        answer = await select(replica, ask("a", "b", "c", "d", explain=True))
        assert chosen(answer) == "c"
        assert {e.target.connection for e in answer.exclusions} == {"a", "b"}


async def test_panic_offers_one_excluded_target_at_a_time_over_the_fleet(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    catalogue = with_settings(pool_guard__enabled=True, pool_guard__max_excluded_share=1.0)
    one, two = (
        make_replica(MemoryStore(database), n, time_source=moments, catalogue=catalogue, settings=quick_settings(n))
        for n in ("r1", "r2")
    )
    async with running(one), running(two):
        await report(one, failure("a", 503))
        moments.ms += 500
        await report(one, failure("b", 503))
        await two.follower._step()
        first = await select(one, ask("b", "a"))
        assert isinstance(first.verdict, Dispatch)
        assert first.verdict.is_panic
        assert chosen(first) == "a"
        assert isinstance((await select(two, ask("b", "a"))).verdict, Reject)
        await report(one, failure("a", 503, token=first.token))
        await one.grants.settle()
        again = await select(two, ask("b", "a"))
        assert isinstance(again.verdict, Dispatch)
        assert again.verdict.is_panic


async def test_upkeep_drops_what_time_has_ended_and_changes_no_decision(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    async with running(fleet_member(database, "r1", moments)) as replica:
        await report(replica, failure("a", 503))
        await report(replica, failure("b", 429, headers={"retry-after": "7200"}))
        assert await replica.upkeep() == 0
        kinds = {key[0] for key in database.rows}
        assert "breaker_burst" in kinds
        moments.ms += 120_000
        before = await select(replica, ask("a", "b", explain=True))
        assert await replica.upkeep() > 0
        assert "breaker_burst" not in {key[0] for key in database.rows}
        after = await select(replica, ask("a", "b", explain=True))
        assert chosen(after) == chosen(before) == "a"
        assert [e.evidence_id for e in after.exclusions] == [e.evidence_id for e in before.exclusions]
        assert await replica.upkeep() == 0


async def test_waiters_behind_somebody_elses_probe_look_again_soon_and_not_all_at_once(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    async with running(fleet_member(database, "r1", moments)) as replica:
        await open_breaker(replica)
        moments.ms += 30_000
        assert isinstance((await select(replica, ask("z"))).verdict, Dispatch)
        waits = []
        for _ in range(20):
            verdict = (await select(replica, ask("z")._replace(allow_wait=True))).verdict
            assert isinstance(verdict, Wait)
            waits.append(verdict.wait_ms)
        assert max(waits) <= 1_050
        assert len(set(waits)) > 5


async def test_after_a_wait_earlier_attempts_are_tried_afresh(database: MemoryDatabase, moments: FakeTime) -> None:
    async with running(fleet_member(database, "r1", moments)) as replica:
        await report(replica, failure("a", 429, headers={"retry-after": "2"}))
        tried = (EarlierAttempt("openai", "a", "gpt", 429),)
        first = await select(replica, ask("a")._replace(allow_wait=True, earlier_attempts=tried))
        assert isinstance(first.verdict, Wait)
        moments.ms += first.verdict.wait_ms
        again = ask("a")._replace(allow_wait=True, earlier_attempts=tried, previous=first.token)
        assert chosen(await select(replica, again)) == "a"
