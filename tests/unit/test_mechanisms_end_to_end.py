"""Mechanisms that are off by default, switched on in the catalogue and felt in a selection: each changes what a caller
sees, and what it did is still there for a new replica on the same database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import pytest

from policy_service.application.messages import ActionKind, Candidate, Dispatch, Reject, SelectAnswer
from policy_service.application.messages.report import ReportExtras
from policy_service.application.replica import Replica
from policy_service.domain.catalogue import Catalogue, Connection, OperatorRule
from policy_service.settings.catalogue_file import builtin_catalogue
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, ask, failure, make_replica, quick_settings, report, running, select

OPEN_MS = 30_000
"""First OPEN time of an API key's breaker."""
APART_MS = 6_000
"""Failures of one connection that come closer together count as one."""
LOADING = b'{"error": {"message": "The model is loading, please wait."}}'


def settings(**values: object) -> Catalogue:
    return replace(builtin_catalogue(), stored_settings={k.replace("__", "."): v for k, v in values.items()})


def declared(*connections: Connection, rules: tuple[OperatorRule, ...] = ()) -> Catalogue:
    return replace(builtin_catalogue(), connections={c.id: c for c in connections}, operator_rules=rules)


async def seen(replica: Replica, *connections: str, model: str = "gpt") -> str:
    """Connection that a caller is sent to, else the reason of the first exclusion."""
    wanted = tuple(Candidate("openai", connection, model) for connection in connections)
    answer = await select(replica, ask(*connections)._replace(candidates=wanted, explain=True))
    if isinstance(answer.verdict, Dispatch):
        return answer.verdict.target.target.connection
    assert isinstance(answer.verdict, Reject)
    return answer.exclusions[0].reason


# --- what happens -------------------------------------------------------------------------------------------------
async def open_breaker(replica: Replica, moments: FakeTime) -> None:
    for n in range(12):
        await report(replica, failure(f"burst{n}", report_id=f"burst{n}"))


async def sit_out_the_open_time(replica: Replica, moments: FakeTime) -> None:
    await open_breaker(replica, moments)
    moments.ms += OPEN_MS


async def recover(replica: Replica, moments: FakeTime) -> None:
    await sit_out_the_open_time(replica, moments)
    probe = await select(replica, ask("z"))
    assert isinstance(probe.verdict, Dispatch)
    assert probe.verdict.is_probe
    await report(replica, failure("z", 200, token=probe.token))


async def fail_over_and_over(replica: Replica, moments: FakeTime) -> None:
    """One connection fails until the breaker's threshold, its failures far enough apart to be counted each."""
    for _ in range(12):
        await report(replica, failure("a"))
        moments.ms += APART_MS


async def exhaust_an_address(replica: Replica, moments: FakeTime) -> None:
    """Two accounts are seen on one address, then one of them meets its limit."""
    shared = ReportExtras(egress_address="192.0.2.1")
    await report(replica, failure("z")._replace(extras=shared))
    moments.ms += 600_000
    limited = failure("a", 429, headers={"retry-after": "60"})
    await report(replica, limited._replace(extras=shared, body=b'{"error": {"message": "rate limit reached"}}'))


async def fail_three_connections_of_a_pool(replica: Replica, moments: FakeTime) -> None:
    for name in "abc":
        await report(replica, failure(name)._replace(pool_attempt=True))


async def meet_a_limit(replica: Replica, moments: FakeTime) -> None:
    await report(replica, failure("z", 429, headers={"retry-after": "60"}))


async def be_shut_out(replica: Replica, moments: FakeTime) -> None:
    await report(replica, failure("z", 403)._replace(body=b'{"error": {"message": "Seat withdrawn by the reseller."}}'))
    moments.ms += 86_400_000


async def load_a_model(replica: Replica, moments: FakeTime) -> None:
    await report(replica, failure("z", 400)._replace(body=LOADING))


# --- what a caller sees ---------------------------------------------------------------------------------------------
async def where_to(replica: Replica) -> str:
    return await seen(replica, "z")


async def admitted_of_twenty(replica: Replica) -> tuple[int, set[str]]:
    """How many of twenty requests go out, and what kept the others."""
    answers: list[SelectAnswer] = [await select(replica, ask("z")) for _ in range(20)]
    out = [answer for answer in answers if isinstance(answer.verdict, Reject)]
    return 20 - len(out), {e.reason for answer in out for e in answer.exclusions}


@dataclass(frozen=True)
class Mechanism:
    """What switches it on, what happens, and what a caller sees without and with it."""

    catalogue: Catalogue
    happens: Callable[[Replica, FakeTime], Awaitable[None]]
    look: Callable[[Replica], Awaitable[object]]
    ordinarily: object
    switched_on: object


MECHANISMS = {
    "slow start": Mechanism(
        settings(breaker__slow_start__enabled=True),
        recover,
        admitted_of_twenty,
        (20, set()),
        (2, {"slow_start"}),
    ),
    "reopen jitter": Mechanism(
        settings(breaker__reopen_jitter=1.0), sit_out_the_open_time, where_to, "z", "circuit_open"
    ),
    "breaker per connection": Mechanism(
        settings(breaker__per_connection=True), fail_over_and_over, where_to, "circuit_open", "z"
    ),
    "egress lock": Mechanism(
        settings(egress_lock__providers="openai"), exhaust_an_address, where_to, "z", "connection_cooldown"
    ),
    "provider cooldown": Mechanism(
        settings(provider_cooldown__enabled=True, provider_cooldown__api_key__failure_threshold=3),
        fail_three_connections_of_a_pool,
        where_to,
        "z",
        "provider_cooldown",
    ),
    "no cooling": Mechanism(
        declared(Connection("z", "openai", disable_cooling=True)),
        meet_a_limit,
        where_to,
        "connection_cooldown",
        "z",
    ),
    "ban signals": Mechanism(
        settings(terminal__custom_ban_signals=("seat withdrawn",)), be_shut_out, where_to, "z", "banned"
    ),
    "operator rule": Mechanism(
        declared(rules=(OperatorRule("openai", 400, "model is loading", "model", "quota_exhausted", 15_000),)),
        load_a_model,
        where_to,
        "z",
        "model_lockout",
    ),
}

LASTING = {name: each for name, each in MECHANISMS.items() if each.switched_on != "z"}
"""Those that keep a caller away: an empty database would not."""


@pytest.fixture
def moments() -> FakeTime:
    return FakeTime()


@pytest.fixture
def database(moments: FakeTime) -> MemoryDatabase:
    return MemoryDatabase(clock=moments.database)


def member(database: MemoryDatabase, moments: FakeTime, catalogue: Catalogue, name: str = "r1") -> Replica:
    return make_replica(
        MemoryStore(database), name, time_source=moments, catalogue=catalogue, settings=quick_settings(name)
    )


@pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS.keys())
async def test_a_mechanism_does_nothing_until_it_is_switched_on(
    mechanism: Mechanism, database: MemoryDatabase, moments: FakeTime
) -> None:
    async with running(member(database, moments, builtin_catalogue())) as replica:
        await mechanism.happens(replica, moments)
        assert await mechanism.look(replica) == mechanism.ordinarily


@pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS.keys())
async def test_a_mechanism_switched_on_changes_what_callers_see(
    mechanism: Mechanism, database: MemoryDatabase, moments: FakeTime
) -> None:
    async with running(member(database, moments, mechanism.catalogue)) as replica:
        await mechanism.happens(replica, moments)
        assert await mechanism.look(replica) == mechanism.switched_on


@pytest.mark.parametrize("mechanism", LASTING.values(), ids=LASTING.keys())
async def test_what_a_mechanism_did_is_there_for_a_new_replica(
    mechanism: Mechanism, database: MemoryDatabase, moments: FakeTime
) -> None:
    async with running(member(database, moments, mechanism.catalogue)) as replica:
        await mechanism.happens(replica, moments)
    async with running(member(database, moments, mechanism.catalogue, "r2")) as successor:
        assert await mechanism.look(successor) == mechanism.switched_on


async def test_the_quorum_keeps_one_connections_failures_with_the_replica_that_saw_them(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    catalogue = settings(breaker__quorum__enabled=True)
    async with (
        running(member(database, moments, catalogue)) as one,
        running(member(database, moments, catalogue, "r2")) as two,
    ):
        await one.liveness.sign()
        await fail_over_and_over(one, moments)
        await two.follower._step()
        assert (await where_to(one), await where_to(two)) == ("circuit_open", "z")
        await report(one, failure("b"))
        await two.follower._step()
        assert (await where_to(one), await where_to(two)) == ("circuit_open", "circuit_open")


async def test_without_a_quorum_one_connections_failures_open_the_breaker_for_the_fleet(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    async with (
        running(member(database, moments, builtin_catalogue())) as one,
        running(member(database, moments, builtin_catalogue(), "r2")) as two,
    ):
        await fail_over_and_over(one, moments)
        await two.follower._step()
        assert (await where_to(one), await where_to(two)) == ("circuit_open", "circuit_open")


async def test_a_jittered_breaker_lets_a_probe_out_within_its_share_and_is_the_same_on_every_replica(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    catalogue = settings(breaker__reopen_jitter=0.5)
    async with (
        running(member(database, moments, catalogue)) as one,
        running(member(database, moments, catalogue, "r2")) as two,
    ):
        await open_breaker(one, moments)
        await two.follower._step()
        ends = {(await select(replica, ask("z"))).exclusions[0].until for replica in (one, two)}
        assert len(ends) == 1
        wait = (ends.pop() or 0) - moments.ms
        assert OPEN_MS < wait <= OPEN_MS * 3 // 2
        moments.ms += wait - 1
        assert await where_to(two) == "circuit_open"
        moments.ms += 1
        assert await where_to(two) == "z"


async def test_a_slow_start_ends_after_its_time_and_opens_again_on_its_failure_budget(
    database: MemoryDatabase, moments: FakeTime
) -> None:
    catalogue = settings(breaker__slow_start__enabled=True)
    async with running(member(database, moments, catalogue)) as replica:
        await recover(replica, moments)
        for name in ("a", "b"):
            moments.ms += 10
            await report(replica, failure(name))
        assert await where_to(replica) == "circuit_open"
        moments.ms += OPEN_MS
        probe = await select(replica, ask("z"))
        await report(replica, failure("z", 200, token=probe.token))
        moments.ms += OPEN_MS
        assert await admitted_of_twenty(replica) == (20, set())


@pytest.mark.parametrize(
    ("rules", "verdict", "sees"),
    [
        ((), ("client_error", "request", "", ActionKind.RETURN_TO_CLIENT), "z"),
        (
            (OperatorRule("openai", 400, "model is loading", "connection", "quota_exhausted", 15_000, id="loading"),),
            ("quota_exhausted", "connection", "loading", ActionKind.FALL_BACK),
            "connection_cooldown",
        ),
    ],
    ids=["without", "with"],
)
async def test_an_operators_rule_decides_what_a_report_means(
    rules: tuple[OperatorRule, ...],
    verdict: tuple[object, ...],
    sees: str,
    database: MemoryDatabase,
    moments: FakeTime,
) -> None:
    async with running(member(database, moments, declared(rules=rules))) as replica:
        decision = await select(replica, ask("z", "y"))
        answer = await report(replica, failure("z", 400, token=decision.token)._replace(body=LOADING))
        told = answer.verdict
        assert (told.reason, told.scope, told.rule_id, answer.action.kind) == verdict
        assert await where_to(replica) == sees
        moments.ms += 15_000
        assert await where_to(replica) == "z"
