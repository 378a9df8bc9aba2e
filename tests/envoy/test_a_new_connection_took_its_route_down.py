"""A connection was added to the catalogue of a running service, in front of a route: Envoy, whose file is older,
answered every request of the route with an empty 503, and nobody said why.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import pytest
import yaml

from policy_service.bootstrap.envoy_door import ClosedDoor
from tests.envoy.upstreams import ERROR, says
from tests.envoy.world import ROUTE, Gateway, gateway


async def in_front(world: Gateway, file: Path, name: str) -> None:
    """Put another connection in front of the route, and wait until the service goes by it."""
    catalogue = yaml.safe_load(file.read_text())
    catalogue["connections"].append({"id": name, "provider": "openai", "address": "127.0.0.1:1"})
    catalogue["routes"][0]["targets"].insert(0, {"connection": name, "model": "m"})
    file.write_text(yaml.safe_dump(catalogue))
    async with asyncio.timeout(20):
        while name not in world.service.replica.view.policy.catalogue.connections:
            await asyncio.sleep(0.05)


async def test_a_connection_without_a_cluster_is_passed_over_and_told_of(
    tmp_path: Path, embedded_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    scripts = {"openai-one": [says(503, ERROR % "down")], "mistral-two": [says(200)]}
    async with gateway(tmp_path, embedded_url, scripts) as world:
        await in_front(world, tmp_path / "catalogue.yaml", "openai-new")
        with caplog.at_level(logging.WARNING, "policy_envoy"):
            async with world.post(headers={"x-policy-explain": "1"}) as answer:
                assert answer.status == 200
            async with world.post() as again:
                assert again.status == 200
        assert (await world.heard(2))[:2] == [("openai-one", 503, 0), ("mistral-two", 200, 1)]
    told = [record.message for record in caplog.records if "openai-new" in record.message]
    assert len(told) == 1
    assert "envoy-config" in told[0]


async def test_a_request_that_only_knows_such_a_connection_gets_an_answer_that_says_so(
    tmp_path: Path, embedded_url: str
) -> None:
    async with gateway(tmp_path, embedded_url, {"openai-one": [says(200)]}) as world:
        file = tmp_path / "catalogue.yaml"
        await in_front(world, file, "openai-new")
        catalogue = yaml.safe_load(file.read_text())
        catalogue["routes"].append({"name": "new", "targets": [{"connection": "openai-new", "model": "m"}]})
        file.write_text(yaml.safe_dump(catalogue))
        async with asyncio.timeout(20):
            while "new" not in world.service.replica.view.policy.catalogue.routes:
                await asyncio.sleep(0.05)
        async with world.post(headers={"x-policy-route": "new"}) as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["code"]
        async with world.post(headers={"x-policy-route": ROUTE}) as good:
            assert good.status == 200


async def test_a_closed_door_says_once_that_it_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((ClosedDoor().handler(None),))  # type: ignore[arg-type]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        process = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")
        for _ in range(2):
            call = process()
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "--envoy" in await call.details()
    await server.stop(None)
    assert ["--envoy" in record.message for record in caplog.records] == [True]
