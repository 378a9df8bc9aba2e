"""Retries of single calls: what the server says about coming back is obeyed, and nothing is tried for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from policy_client import AsyncPolicyClient, Connection, PolicyClient, ServiceAwayError, messages, pool
from policy_client.connection import SELECT
from policy_service.application.errors import DrainingError
from policy_service.transport.grpc.errors import to_status, trailers
from tests.fleet.fleet import free_port

ASKED = pool("openai/main/gpt")
PUSHBACK_MS = 150


class Refusing(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Refuses the first calls, with or without a word of the service, then answers."""

    def __init__(self, refusals: int, *, speaks: bool) -> None:
        self._left = refusals
        self._speaks = speaks
        self.arrived: list[float] = []

    def service(self, details: Any) -> Any:
        # The look for a service that is away asks for its health beside: not counted here.
        return grpc.unary_unary_rpc_method_handler(self._answer) if details.method == SELECT.path else None

    def _answer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.arrived.append(time.monotonic())
        self._left -= 1
        if self._left >= 0:
            error = DrainingError("this replica is shutting down", retry_after_ms=PUSHBACK_MS)
            if self._speaks:
                context.set_trailing_metadata(trailers(error, to_status(error)))
            context.abort(grpc.StatusCode.UNAVAILABLE, "refused")
        return messages.SelectTargetResponse(decision_id="d").SerializeToString()


@contextmanager
def refusing(refusals: int, *, speaks: bool) -> Iterator[tuple[Refusing, Connection]]:
    handler, port = Refusing(refusals, speaks=speaks), free_port()
    server = grpc.server(ThreadPoolExecutor(2), handlers=(handler,))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield handler, Connection(f"127.0.0.1:{port}", select_ms=5_000)
    finally:
        server.stop(None).wait()


def select(where: Connection, *, is_async: bool) -> str:
    """Id of the decision."""
    if is_async:
        return asyncio.run(_later(where))
    with PolicyClient(where=where) as client:
        return client.select(ASKED).decision_id


async def _later(where: Connection) -> str:
    async with AsyncPolicyClient(where=where) as client:
        return (await client.select(ASKED)).decision_id


either_client = pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asyncio"])


@either_client
def test_a_draining_replica_is_asked_again_when_it_says(is_async: bool) -> None:
    with refusing(1, speaks=True) as (handler, where):
        assert select(where, is_async=is_async) == "d"
    first, second = handler.arrived
    assert (second - first) * 1000 >= PUSHBACK_MS * 0.9


@either_client
def test_a_connection_that_fails_is_tried_three_times_at_once(is_async: bool) -> None:
    with refusing(99, speaks=False) as (handler, where), pytest.raises(ServiceAwayError):
        select(where, is_async=is_async)
    assert len(handler.arrived) == 3
    assert (handler.arrived[-1] - handler.arrived[0]) * 1000 < 250
