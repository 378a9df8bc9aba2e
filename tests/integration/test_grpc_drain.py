"""Bounded graceful drain over real sockets: who is told what, in which order, and who sees an error."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from policy_service.generated.policy.v1 import (
    policy_pb2,
    policy_pb2_grpc,
    types_pb2,
)
from policy_service.transport.grpc.listeners import TcpAddress
from policy_service.transport.grpc.server import ServerOptions
from tests.integration.grpc_shell import LOOPBACK, Shell, shell

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
HOLD = policy_pb2.SelectTargetRequest(route="hold")
DISPATCH = policy_pb2.SelectTargetRequest(candidates=[types_pb2.Candidate(provider="openai", connection="a")])


def unix_options(path: Path, **more: int) -> ServerOptions:
    return ServerOptions(tcp=(), unix=path, **{"notice_ms": 0, "drain_ms": 2_000, **more})  # type: ignore[arg-type]


def stub(running: Shell) -> policy_pb2_grpc.PolicyServiceStub:
    return policy_pb2_grpc.PolicyServiceStub(running.channel)


async def held_call(running: Shell) -> asyncio.Task[policy_pb2.SelectTargetResponse]:
    """A call that is in its use case."""

    async def call() -> policy_pb2.SelectTargetResponse:
        answer: policy_pb2.SelectTargetResponse = await stub(running).SelectTarget(HOLD)
        return answer

    task = asyncio.create_task(call())
    await running.selects.holding.wait()
    return task


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_drain_lets_the_calls_in_flight_finish_and_takes_no_new_ones() -> None:
    async with shell() as running:
        held = await held_call(running)
        draining = asyncio.create_task(running.server.drain())
        await refused(running)
        assert not draining.done()
        running.selects.release.set()
        assert (await held).HasField("reject")
        assert (await draining).clean


async def refused(running: Shell) -> None:
    """Wait until new calls fail as unavailable."""
    codes: list[grpc.StatusCode] = []
    while not codes:
        await asyncio.sleep(0.01)
        with suppress_into(codes):
            await stub(running).SelectTarget(DISPATCH, timeout=1)
    assert codes == [grpc.StatusCode.UNAVAILABLE]


@contextmanager
def suppress_into(codes: list[grpc.StatusCode]) -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        codes.append(error.code())


RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "policy.v1.PolicyService"}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
HEALTH_CHECKS = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}


async def load_through_a_drain(channel: grpc.aio.Channel, one: Shell, two: Shell) -> list[grpc.StatusCode]:
    """Codes of failed calls of 8 busy callers while one of two servers drains."""
    policy = policy_pb2_grpc.PolicyServiceStub(channel)
    codes: list[grpc.StatusCode] = []
    is_over = asyncio.Event()

    async def load() -> None:
        while not is_over.is_set():
            with suppress_into(codes):
                await policy.SelectTarget(DISPATCH, wait_for_ready=True)

    callers = [asyncio.create_task(load()) for _ in range(8)]
    await until(lambda: len(one.selects.seen) + len(two.selects.seen) > 200)
    first, second = (one, two) if one.selects.seen else (two, one)
    await first.server.drain()
    at_drain = len(second.selects.seen)
    await until(lambda: len(second.selects.seen) > at_drain + 200)
    is_over.set()
    await asyncio.gather(*callers)
    return codes


async def test_a_client_that_retries_sees_no_error_when_a_worker_drains() -> None:
    address = TcpAddress("127.0.0.1", free_port())
    options = ServerOptions(tcp=(address,), shares_port=True, notice_ms=0, drain_ms=5_000)
    settings = [("grpc.service_config", json.dumps(RETRIES))]
    async with (
        shell(options) as one,
        shell(options) as two,
        grpc.aio.insecure_channel(address.text, options=settings) as channel,
    ):
        assert await load_through_a_drain(channel, one, two) == []


async def test_a_client_that_watches_health_sees_no_error_when_a_replica_drains() -> None:
    options = ServerOptions(tcp=LOOPBACK, notice_ms=500, drain_ms=5_000)
    settings = [("grpc.service_config", json.dumps(HEALTH_CHECKS))]
    async with shell(options) as one, shell(options) as two:
        both = f"ipv4:{one.address},{two.address}"
        async with grpc.aio.insecure_channel(both, options=settings) as channel:
            assert await load_through_a_drain(channel, one, two) == []


async def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, "did not come true"
        await asyncio.sleep(0.005)


async def test_health_says_not_serving_while_calls_are_still_taken() -> None:
    options = ServerOptions(tcp=LOOPBACK, notice_ms=500, drain_ms=5_000)
    async with shell(options) as running:
        watch = health_pb2_grpc.HealthStub(running.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        draining = asyncio.create_task(running.server.drain())
        assert (await watch.read()).status == NOT_SERVING
        assert (await stub(running).SelectTarget(DISPATCH)).HasField("dispatch")
        assert await watch.read() is grpc.aio.EOF
        assert (await draining).clean


async def test_open_watches_do_not_hold_a_drain_up() -> None:
    options = ServerOptions(tcp=LOOPBACK, notice_ms=0, drain_ms=30_000)
    async with shell(options) as running:
        watch = health_pb2_grpc.HealthStub(running.channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        assert (await asyncio.wait_for(running.server.drain(), 10)).clean


async def test_a_drain_is_bounded_and_counts_what_it_cut_off() -> None:
    options = ServerOptions(tcp=LOOPBACK, notice_ms=0, drain_ms=100)
    async with shell(options) as running:
        held = await held_call(running)
        result = await asyncio.wait_for(running.server.drain(), 5)
        with pytest.raises(grpc.aio.AioRpcError):
            await held
    assert (result.clean, result.left) == (False, 1)
