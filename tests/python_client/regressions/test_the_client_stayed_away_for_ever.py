"""A service that was lost again while it was told what had been kept was never looked for again: the look of the loss
before was still running, so none was started, and decisions were made without the service from then on.
"""

from __future__ import annotations

import asyncio
import threading

from policy_client import AwayPolicy, answered, pool
from policy_client.connection import Method
from policy_client.testing import ScriptedPolicy
from tests.python_client.test_clients import Upstream, _eventually

BOTH = pool("openai/main/gpt", "openai/spare/gpt")
VOUCHING = AwayPolicy(trusts_candidates=True)


class LostAgain(ScriptedPolicy):
    """Is lost once more by the first batch of kept reports."""

    def __init__(self) -> None:
        super().__init__()
        self.is_lost_again = threading.Event()

    def answer(self, method: Method, request: object) -> object:  # type: ignore[type-arg]
        if method.name == "ReportOutcomes" and not self.is_lost_again.is_set():
            self.is_away = True
            self.is_lost_again.set()
        return super().answer(method, request)


def test_the_blocking_client_finds_a_service_that_was_lost_twice() -> None:
    policy = LostAgain()
    policy.is_away = True
    with policy.client(VOUCHING) as client:
        client.run(BOTH, lambda _: answered("served", 200))
        policy.is_away = False
        assert policy.is_lost_again.wait(5)
        policy.is_away = False
        _eventually(lambda: not client.is_away and not client.kept_reports)
    assert [each.http_status for each in policy.reports] == [200]


async def test_the_asyncio_client_finds_a_service_that_was_lost_twice() -> None:
    policy = LostAgain()
    policy.is_away = True
    async with policy.async_client(VOUCHING) as client:
        await client.run(BOTH, Upstream(main=200).later)
        await client.settle()
        policy.is_away = False
        async with asyncio.timeout(5):
            while not policy.is_lost_again.is_set():
                await asyncio.sleep(0.005)
            policy.is_away = False
            while client.is_away or client.kept_reports:
                await asyncio.sleep(0.005)
    assert [each.http_status for each in policy.reports] == [200]
