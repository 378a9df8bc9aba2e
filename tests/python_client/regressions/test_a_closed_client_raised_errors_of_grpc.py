"""Calls of a closed client raised gRPC's own ValueError and UsageError; the end of a stream that outlived its client
raised into the SDK, and the next `close` waited five seconds for a report that was never sent.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from policy_client import AsyncPolicyClient, ClientClosedError, Connection, PolicyClient, pool
from policy_client.outcomes import http
from tests.python_client.bare_server import Bare
from tests.python_client.regressions.test_a_grant_was_held_for_its_whole_life import streams, streams_later
from tests.python_client.test_clients import Upstream

BOTH = pool("openai/main/gpt", "openai/spare/gpt")


def at(server: Bare) -> Connection:
    return Connection(server.address, select_ms=30_000)


def test_a_closed_blocking_client_says_so_and_takes_the_end_of_its_last_stream(server: Bare) -> None:
    client = PolicyClient(where=at(server))
    result = client.run(BOTH, streams)
    client.close()
    client.complete(result, http(200))
    for attempt in (lambda: client.select(BOTH), lambda: client.run(BOTH, Upstream(main=200))):
        with pytest.raises(ClientClosedError):
            attempt()
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 1


async def test_a_closed_asyncio_client_says_so_and_takes_the_end_of_its_last_stream(server: Bare) -> None:
    client = AsyncPolicyClient(where=at(server))
    result = await client.run(BOTH, streams_later)
    await client.close()
    await client.complete(result, http(200))
    for attempt in (lambda: client.select(BOTH), lambda: client.run(BOTH, Upstream(main=200).later)):
        with pytest.raises(ClientClosedError):
            await attempt()
    await client.close()


async def test_a_call_under_way_hears_that_the_client_is_closed(server: Bare) -> None:
    client = AsyncPolicyClient(where=at(server))
    await client.run(BOTH, Upstream(main=200).later)
    server.lose("hung")
    selecting = asyncio.create_task(client.select(BOTH))
    await asyncio.sleep(0.02)
    await client.close()
    with pytest.raises(ClientClosedError):
        await selecting
