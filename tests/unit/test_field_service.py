"""Failures that operators reported (cases of the field), felt at the door of the service: selections and reports of
whole replicas on one database, each test named for its symptom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from policy_service.application.messages import Dispatch, Reject
from policy_service.application.messages.report import ReportExtras
from policy_service.application.replica import Replica
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.policy import Policy
from policy_service.settings.catalogue_file import builtin_catalogue
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, ask, chosen, failure, make_replica, quick_settings, report, running, select

SECOND, MINUTE = 1_000, 60_000
EARLY = {"early_probe.enabled": True, "early_probe.include_server_stated": True}


@pytest.fixture
def moments() -> FakeTime:
    return FakeTime()


@pytest.fixture
def database(moments: FakeTime) -> MemoryDatabase:
    return MemoryDatabase(clock=moments.database)


@pytest.fixture
async def replica(database: MemoryDatabase, moments: FakeTime) -> AsyncIterator[Replica]:
    async with running(member(database, moments)) as started:
        yield started


def member(
    database: MemoryDatabase, moments: FakeTime, name: str = "r1", catalogue: Catalogue | None = None
) -> Replica:
    return make_replica(
        MemoryStore(database), name, time_source=moments, catalogue=catalogue, settings=quick_settings(name)
    )


def with_settings(**values: object) -> Catalogue:
    return replace(builtin_catalogue(), stored_settings=dict(values))


async def serves(replica: Replica, *connections: str) -> str:
    """Connection that a caller is sent to; empty where none may serve."""
    answer = await select(replica, ask(*connections))
    return chosen(answer) if isinstance(answer.verdict, Dispatch) else ""


async def remaining(replica: Replica, moments: FakeTime, connection: str = "a") -> int:
    """Time for which a caller who names one connection is kept out, ms."""
    answer = await select(replica, ask(connection, explain=True))
    assert isinstance(answer.verdict, Reject), answer.verdict
    until = answer.exclusions[0].until
    assert until is not None
    return until - moments.ms


async def heard(replica: Replica, connection: str) -> None:
    """Wait until another replica's failure of a connection has arrived here."""
    while await serves(replica, connection):
        await asyncio.sleep(0.01)


# -- 1: blocked for 6.5 days although the quota came back after a minute -------------------------------------------
async def test_a_key_blocked_for_days_serves_again_one_probe_period_after_its_quota_is_back(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    async with running(member(database, moments, catalogue=with_settings(**EARLY))) as replica:
        await report(replica, failure("a", 429, headers={"retry-after": "561635"}))
        moments.ms += MINUTE
        assert await serves(replica, "a") == ""
        moments.ms += 4 * MINUTE
        tested = await select(replica, ask("a"))
        assert chosen(tested) == "a"
        assert await serves(replica, "a") == "", "one test at a time"
        await report(replica, failure("a", 200, token=tested.token))
        assert await serves(replica, "a") == "a"


async def test_a_key_blocked_for_days_is_tested_twelve_times_an_hour_over_two_replicas(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    catalogue = with_settings(**EARLY)
    async with (
        running(member(database, moments, "r1", catalogue)) as one,
        running(member(database, moments, "r2", catalogue)) as two,
    ):
        await report(one, failure("a", 429, headers={"retry-after": "561635"}))
        await heard(two, "a")
        tested = 0
        for turn in range(360):
            moments.ms += 10 * SECOND
            replica = (one, two)[turn % 2]
            answer = await select(replica, ask("a"))
            if isinstance(answer.verdict, Dispatch):
                tested += 1
                await report(replica, failure("a", 429, token=answer.token))
        assert tested == 12


# -- 2: a slower refusal states a longer wait -----------------------------------------------------------------------
async def test_the_later_of_two_stated_waits_holds_and_a_burst_in_between_climbs_no_ladder(
    replica: Replica, moments: FakeTime
) -> None:
    began = moments.ms
    await report(replica, failure("a", 429, headers={"retry-after": "1"}))
    moments.ms = began + 200
    await report(replica, failure("a", 503))
    moments.ms = began + 500
    await report(replica, failure("a", 429, headers={"retry-after": "60"}))
    assert await remaining(replica, moments) == 60 * SECOND
    moments.ms = began + 60_499
    assert await serves(replica, "a") == ""
    moments.ms = began + 60_500
    assert await serves(replica, "a") == "a"
    await report(replica, failure("a", 503))
    assert await remaining(replica, moments) == 3 * SECOND, "the first step, not the third"


# -- 4: a 503 that heals by itself ----------------------------------------------------------------------------------
async def test_an_outage_of_seventeen_seconds_drains_no_pool_of_four(replica: Replica, moments: FakeTime) -> None:
    accounts = ("a", "b", "c", "d")
    began, failed = moments.ms, 0
    while moments.ms < began + 17 * SECOND:
        answer = await select(replica, ask(*accounts))
        if isinstance(answer.verdict, Dispatch):
            failed += 1
            await report(replica, failure(chosen(answer), 503, token=answer.token))
        moments.ms += 500
    assert failed >= len(accounts)
    moments.ms = began + 45 * SECOND
    assert {await serves(replica, name) for name in accounts} == set(accounts)


# -- 8: one model that always answers 500 ---------------------------------------------------------------------------
async def test_a_model_that_always_answers_500_costs_no_key_its_other_models(
    replica: Replica, moments: FakeTime
) -> None:
    keys = ("a", "b", "c")
    for _ in range(3):
        for position, key in enumerate(keys):
            extras = ReportExtras(next_target_same_provider=position < 2)
            broken = failure(key, 500, provider="gemini")._replace(pool_attempt=True, extras=extras)
            await report(replica, broken)
        moments.ms += 20 * SECOND
    for key in keys:
        answer = await select(replica, ask(key, provider="gemini"))
        assert isinstance(answer.verdict, Dispatch), key


# -- 9: a rate limit at the brink, and as the answer to the probe ----------------------------------------------------
async def open_breaker(replica: Replica, failures: int = 12) -> None:
    for n in range(failures):
        await report(replica, failure(f"burst{n}"))


async def test_a_rate_limit_at_the_brink_does_not_open_the_breaker(replica: Replica) -> None:
    await open_breaker(replica, 11)
    await report(replica, failure("a", 429))
    assert await serves(replica, "z") == "z"
    await report(replica, failure("one more"))
    assert await serves(replica, "z") == ""


async def test_a_rate_limit_as_the_answer_to_the_probe_closes_the_breaker(replica: Replica, moments: FakeTime) -> None:
    await open_breaker(replica)
    moments.ms += 30 * SECOND
    probe = await select(replica, ask("y"))
    assert isinstance(probe.verdict, Dispatch)
    assert probe.verdict.is_probe
    await report(replica, failure("y", 429, token=probe.token, headers={"retry-after": "60"}))
    assert (await serves(replica, "z"), await serves(replica, "y")) == ("z", "")


# -- 12: zero is a value --------------------------------------------------------------------------------------------
async def test_a_threshold_of_0_in_the_environment_opens_at_the_first_failure_and_not_at_the_default(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    zero = {"POLICY_BREAKER_API_KEY_FAILURE_THRESHOLD": "0", "POLICY_CONNECTION_API_KEY_BASE_COOLDOWN_MS": "0"}
    async with running(member(database, moments)) as replica:
        replica.view.policy = Policy(builtin_catalogue(), zero)
        await report(replica, failure("a"))
        assert await serves(replica, "z") == ""


# -- 13: one failure reported by two code paths ----------------------------------------------------------------------
async def test_a_failure_that_two_code_paths_report_is_one_strike(replica: Replica, moments: FakeTime) -> None:
    """The second one comes after the burst guard would have let it count again."""
    for n in range(11):
        answer = await select(replica, ask(f"k{n}"))
        await report(replica, failure(f"k{n}", 503, token=answer.token))
        moments.ms += 6 * SECOND
        again = await report(replica, failure(f"k{n}", 503, token=answer.token))
        assert again.ignored == ("duplicate",)
    assert await serves(replica, "z") == "z"


# -- 14, 15: the end of OPEN -----------------------------------------------------------------------------------------
async def test_nine_callers_on_three_replicas_at_the_end_of_open_make_one_probe_and_the_others_learn_how_long(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    async with (
        running(member(database, moments, "r1")) as one,
        running(member(database, moments, "r2")) as two,
        running(member(database, moments, "r3")) as three,
    ):
        await open_breaker(one)
        await heard(two, "z")
        await heard(three, "z")
        moments.ms += 30 * SECOND
        answers = [await select((one, two, three)[n % 3], ask("z", explain=True)) for n in range(9)]
        others = [answer for answer in answers if not isinstance(answer.verdict, Dispatch)]
        assert len(others) == 8
        waits = {(each.reason, each.until) for answer in others for each in answer.exclusions}
        assert waits == {("probe_in_flight", moments.ms + 30 * SECOND)}
        moments.ms += 30 * SECOND
        assert await serves(two, "z") == "z", "a probe that nobody answered for is replaced"


async def test_a_call_from_before_the_outage_neither_closes_nor_reopens_nor_frees_the_probe(
    replica: Replica, moments: FakeTime
) -> None:
    for late_status in (200, 503):
        early = await select(replica, ask("early"))
        await open_breaker(replica)
        moments.ms += 30 * SECOND
        probe = await select(replica, ask("z"))
        assert isinstance(probe.verdict, Dispatch)
        await report(replica, failure("early", late_status, token=early.token))
        assert await serves(replica, "y") == "", "the slot is the probe's"
        await report(replica, failure("z", 200, token=probe.token))
        assert await serves(replica, "y") == "y"
        moments.ms += MINUTE


# -- 16: a slow success --------------------------------------------------------------------------------------------
async def test_a_success_that_began_before_the_refusal_does_not_lift_its_cooldown(
    replica: Replica, moments: FakeTime
) -> None:
    slow = await select(replica, ask("a"))
    moments.ms += 5 * SECOND
    await report(replica, failure("a", 429, headers={"retry-after": "60"}))
    moments.ms += 4 * SECOND
    await report(replica, failure("a", 200, token=slow.token))
    assert await remaining(replica, moments) == 56 * SECOND


# -- 17: a restart in between ----------------------------------------------------------------------------------------
async def test_a_connection_blocked_until_twenty_past_is_so_after_a_restart_at_five_past(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    async with running(member(database, moments)) as replica:
        await report(replica, failure("a", 429, headers={"retry-after": "1200"}))
    moments.ms += 5 * MINUTE
    async with running(member(database, moments, "r2")) as successor:
        assert await remaining(successor, moments) == 15 * MINUTE
        assert await serves(successor, "a", "b") == "b"
        moments.ms += 15 * MINUTE
        assert await serves(successor, "a") == "a"
