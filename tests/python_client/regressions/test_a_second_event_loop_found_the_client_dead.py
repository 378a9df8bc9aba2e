"""A client that outlived its event loop (one `asyncio.run` a job) raised "Event loop is closed" for ever after, looked
for a lost service no more, and had lost the reports that the loop had not sent.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from policy_client import AsyncPolicyClient, AwayPolicy, Connection, pool
from policy_client.testing import ScriptedPolicy, _Async
from tests.fleet.fleet import free_port
from tests.python_client.bare_server import Bare
from tests.python_client.test_clients import Upstream

BOTH = pool("openai/main/gpt", "openai/spare/gpt")


@pytest.fixture
def where() -> Iterator[Connection]:
    port = free_port()
    server = Bare(port)
    yield Connection(f"127.0.0.1:{port}", select_ms=5_000)
    server.end()


def test_one_client_serves_one_loop_after_the_other(where: Connection) -> None:
    client = AsyncPolicyClient(where=where)

    async def job() -> bool:
        result = await client.run(BOTH, Upstream(main=200).later)
        await client.settle()
        return result.attempt.is_local

    assert [asyncio.run(job()) for _ in range(3)] == [False] * 3
    asyncio.run(client.close())


class Unsending(_Async):
    """Reports take for ever at first."""

    is_slow = True

    async def call(self, method: Any, request: Any, timeout_ms: int, silence_ms: int = 0) -> Any:
        while self.is_slow and method.name == "ReportOutcome":
            await asyncio.sleep(60)
        return await super().call(method, request, timeout_ms, silence_ms)


def ended_at_once(client: AsyncPolicyClient) -> None:
    """A request in a loop that dies before it sends what the request left behind."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(client.run(BOTH, Upstream(main=200).later))
    loop.close()


@pytest.fixture
def buried() -> Iterator[None]:
    """Tasks of a dead loop complain when they are collected: here, and not in whatever test runs then."""
    yield
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::RuntimeWarning")
def test_what_a_loop_left_unsent_is_sent_by_the_next(scripted: ScriptedPolicy, buried: None) -> None:
    way = Unsending(scripted)
    client = AsyncPolicyClient(rpc=way)
    ended_at_once(client)
    way.is_slow = False
    assert scripted.reports == []
    asyncio.run(client.close())
    assert [each.http_status for each in scripted.reports] == [200]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::RuntimeWarning")
def test_a_service_lost_in_a_loop_that_is_over_is_found_in_the_next(scripted: ScriptedPolicy, buried: None) -> None:
    scripted.is_away = True
    client = scripted.async_client(AwayPolicy(trusts_candidates=True))
    ended_at_once(client)
    assert client.is_away
    scripted.is_away = False

    async def next_job() -> bool:
        return (await client.run(BOTH, Upstream(main=200).later)).attempt.is_local

    assert not asyncio.run(next_job())


async def test_a_task_cancelled_with_its_report_unsent_leaves_it_for_later(scripted: ScriptedPolicy) -> None:
    async with scripted.async_client() as client:
        await client.run(BOTH, Upstream(main=200).later)
        (sending,) = (task for task in asyncio.all_tasks() if task is not asyncio.current_task())
        sending.cancel()
        await asyncio.wait({sending})
        assert client.kept_reports == 1
    assert [each.http_status for each in scripted.reports] == [200]


async def test_a_client_in_use_by_one_loop_refuses_another(scripted: ScriptedPolicy) -> None:
    found: list[str] = []
    async with scripted.async_client() as client:
        await client.run(BOTH, Upstream(main=200).later)

        def elsewhere() -> None:
            with pytest.raises(RuntimeError, match="make one for each loop") as caught:
                asyncio.run(client.run(BOTH, Upstream(main=200).later))
            found.append(str(caught.value))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        await asyncio.to_thread(thread.join)
    assert len(found) == 1
