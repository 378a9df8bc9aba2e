"""The example gateway on the real service: what keeps the rules of the kit makes the right calls there, too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from aiohttp import web

from policy_service.generated.policy.v1 import policy_pb2_grpc
from tests.conformance.gateway_under_test import example
from tests.polyglot.scenario import Send, Stage, expected, http_send, play


@asynccontextmanager
async def example_door(stage: Stage) -> AsyncIterator[Send]:
    """The example gateway in this process."""
    upstreams = {name: {"base_url": url, "key": stage.keys[name]} for name, url in stage.upstreams.items()}
    async with (
        grpc.aio.insecure_channel(stage.policy, example.CHANNEL) as channel,
        await example.upstreams_session() as http,
    ):
        gateway = example.Gateway(policy_pb2_grpc.PolicyServiceStub(channel), upstreams, http)
        runner = web.AppRunner(example.application(gateway), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield http_send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await runner.cleanup()


async def test_the_example_gateway_makes_the_calls_of_the_scenario(tmp_path: Path, embedded_url: str) -> None:
    assert await play(example_door, tmp_path, embedded_url) == expected()
