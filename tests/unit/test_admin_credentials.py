"""Revivals of expired connections: due times, one permit in the fleet, three attempts, results taken once."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest

from policy_service.application.admin import Acts
from policy_service.application.admin_credentials import CredentialAdmin, CredentialResult
from policy_service.application.entropy import SystemEntropy
from policy_service.application.errors import NotFoundError, StoreLostError
from policy_service.application.replica import Replica
from policy_service.domain.connection_state import EXPIRED, ConnectionState
from policy_service.domain.facts import Fact
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, ask, chosen, failure, make_replica, report, running, select

MINUTE = 60_000


class Gateway:
    """A replica whose gateway asks for credential tasks."""

    def __init__(self, name: str = "r1", database: MemoryDatabase | None = None, time: FakeTime | None = None) -> None:
        self.time = time or FakeTime()
        self.store = MemoryStore(database or MemoryDatabase(self.time.database))
        self.replica: Replica = make_replica(self.store, name, time_source=self.time)
        acts = Acts(self.store, self.replica.view, SystemEntropy(3), name)
        self.credentials = CredentialAdmin(acts, self.replica.view, self.replica.clock)

    def second(self) -> Gateway:
        return Gateway("r2", self.store.database, self.time)

    async def follow(self) -> None:
        self.replica.view.apply(await self.store.load(timeout_ms=1_000), self.replica.incarnation)

    async def expire(self, *connections: str) -> None:
        for connection in connections:
            await report(self.replica, failure(connection, 401))

    def row(self, connection: str) -> ConnectionState:
        return self.replica.view.book().get(ConnectionState, "openai", connection)

    async def fail_next(self) -> CredentialResult:
        task = await self.credentials.next_retry()
        return await self.credentials.report(task.permit_id, succeeded=False, token_expires_at=None)

    async def facts(self) -> list[Fact]:
        return list(await self.store.facts(limit=100))


async def test_without_an_expired_connection_nothing_is_due() -> None:
    gateway = Gateway()
    async with running(gateway.replica):
        await report(gateway.replica, failure("a", 429))
        task = await gateway.credentials.next_retry()
        assert (task.permit_id, task.next_due_ms) == ("", MINUTE)


async def test_an_expired_connection_is_due_at_once_and_then_after_5_10_and_20_minutes() -> None:
    """Attempts 1 to 3 follow the last attempt after 10 and 20 minutes; the first is due without one."""
    gateway = Gateway()
    async with running(gateway.replica):
        await gateway.expire("a")
        for attempts, wait in ((0, 0), (1, 10), (2, 20)):
            if wait:
                gateway.time.ms += wait * MINUTE - 1
                assert (await gateway.credentials.next_retry()).permit_id == ""
                assert (await gateway.credentials.next_retry()).next_due_ms == 1
                gateway.time.ms += 1
            task = await gateway.credentials.next_retry()
            assert (task.connection, task.attempts) == ("a", attempts)
            result = await gateway.credentials.report(task.permit_id, succeeded=False, token_expires_at=None)
            assert (result.state, result.attempts_left) == (EXPIRED, 2 - attempts)
        gateway.time.ms += 1_000 * MINUTE
        assert (await gateway.credentials.next_retry()).permit_id == ""
        assert not gateway.row("a").active


async def test_one_permit_goes_out_in_the_fleet() -> None:
    here = Gateway()
    there = here.second()
    async with running(here.replica), running(there.replica):
        await here.expire("a")
        await there.follow()
        first = await here.credentials.next_retry()
        second = await there.credentials.next_retry()
        assert (first.connection, second.permit_id) == ("a", "")


async def test_any_replica_takes_the_result_even_before_it_heard_of_the_permit() -> None:
    here = Gateway()
    there = here.second()
    async with running(here.replica), running(there.replica):
        await here.expire("a")
        task = await here.credentials.next_retry()
        result = await there.credentials.report(task.permit_id, succeeded=True, token_expires_at=123_456)
        assert result == CredentialResult("active")
        assert there.row("a").token_expires_at == 123_456
        assert (await there.facts())[0].reason == "retry_succeeded"


async def test_success_clears_everything_and_the_connection_serves() -> None:
    gateway = Gateway()
    async with running(gateway.replica):
        await gateway.expire("a")
        older = await select(gateway.replica, ask("b"))
        await gateway.fail_next()
        gateway.time.ms += 10 * MINUTE
        task = await gateway.credentials.next_retry()
        await gateway.credentials.report(task.permit_id, succeeded=True, token_expires_at=None)
        assert (gateway.row("a").retry_attempts, gateway.row("a").generation) == (0, 2)
        assert chosen(await select(gateway.replica, ask("a"))) == "a"
        assert older.token


async def test_a_repeated_result_gets_the_same_answer_and_counts_once() -> None:
    gateway = Gateway()
    async with running(gateway.replica):
        await gateway.expire("a")
        task = await gateway.credentials.next_retry()
        results = [
            await gateway.credentials.report(task.permit_id, succeeded=succeeded, token_expires_at=None)
            for succeeded in (False, False, True)
        ]
        assert results == [CredentialResult(EXPIRED, 2)] * 3
        assert gateway.row("a").retry_attempts == 1


async def test_a_permit_that_is_never_reported_counts_as_a_failed_attempt() -> None:
    gateway = Gateway()
    async with running(gateway.replica):
        await gateway.expire("a")
        for wait in (0, 10, 20, 40):
            gateway.time.ms += wait * MINUTE
            task = await gateway.credentials.next_retry()
        assert task.permit_id == ""
        assert (gateway.row("a").retry_attempts, gateway.row("a").active) == (3, False)
        ended = (await gateway.facts())[0]
        assert (ended.reason, ended.connection) == ("retry_unreported", "a")


async def test_the_one_due_for_the_longest_time_goes_first_and_the_rest_follow() -> None:
    gateway = Gateway()
    async with running(gateway.replica):
        await gateway.expire("a", "b")
        assert {(await gateway.credentials.next_retry()).connection for _ in range(2)} == {"a", "b"}
        assert (await gateway.credentials.next_retry()).permit_id == ""


async def test_only_providers_of_the_gateway_are_handed_out() -> None:
    gateway = Gateway()
    async with running(gateway.replica):
        await gateway.expire("a")
        assert (await gateway.credentials.next_retry(["mistral"])).permit_id == ""
        assert (await gateway.credentials.next_retry(["OpenAI"])).connection == "a"


async def test_a_banned_connection_is_never_retried() -> None:
    gateway = Gateway()
    async with running(gateway.replica):
        body = b'{"error": {"message": "account has been deactivated"}}'
        await report(gateway.replica, failure("a", 403)._replace(body=body))
        assert gateway.row("a").test_status == "banned"
        assert (await gateway.credentials.next_retry()).permit_id == ""


async def test_attempts_survive_a_write_of_other_fields_and_a_restart() -> None:
    gateway = Gateway()
    async with running(gateway.replica):
        await gateway.expire("a")
        await gateway.fail_next()
        await report(gateway.replica, failure("a", 429))
    restarted = gateway.second()
    async with running(restarted.replica):
        assert restarted.row("a").retry_attempts == 1
        assert (await restarted.credentials.next_retry()).permit_id == ""


@pytest.mark.parametrize(
    "permit_id",
    ["", "x", "x.y", "x.!!!", "x." + base64.urlsafe_b64encode(b"openai\0a").decode(), "x." + "é"],
)
async def test_an_unknown_permit_is_not_found_and_changes_nothing(permit_id: str) -> None:
    gateway = Gateway()
    async with running(gateway.replica):
        await gateway.expire("a")
        before = gateway.row("a")
        with pytest.raises(NotFoundError):
            await gateway.credentials.report(permit_id, succeeded=True, token_expires_at=None)
        assert gateway.row("a") == before


async def test_nothing_is_handed_out_while_the_store_is_away() -> None:
    gateway = Gateway()
    async with running(gateway.replica):
        await gateway.expire("a")
        gateway.store.is_away = True
        with pytest.raises(StoreLostError):
            await gateway.credentials.next_retry()
        gateway.store.is_away = False


async def test_while_a_permit_is_out_the_store_is_left_alone() -> None:
    gateway = Gateway()
    async with running(gateway.replica):
        await gateway.expire("a")
        await gateway.credentials.next_retry()
        gateway.time.ms += 5 * MINUTE - 20_000
        before = gateway.store.statements
        assert (await gateway.credentials.next_retry()).next_due_ms == 20_000
        assert gateway.store.statements == before


@pytest.mark.parametrize(("ahead", "first"), [(5 * MINUTE, False), (5 * MINUTE + 1, True)])
async def test_a_token_that_is_still_good_is_tested_before_a_refresh_token_is_spent(ahead: int, first: bool) -> None:
    gateway = Gateway()
    async with running(gateway.replica):
        await gateway.expire("a")
        row = replace(gateway.row("a"), token_expires_at=gateway.time.ms + ahead)
        gateway.store.database.version += 1
        gateway.replica.view.apply_committed([gateway.store.database.put(row, gateway.time.ms)])
        task = await gateway.credentials.next_retry()
        assert (bool(task.permit_id), task.test_token_first) == (True, first)
