"""The gRPC shell over real sockets: listeners, health, reflection, load, deadlines, drain."""

from __future__ import annotations

import asyncio
import socket
import stat
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from policy_service.application.trace_context import TRACE_HEADERS
from policy_service.generated.policy.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    lease_pb2,
    policy_pb2,
    policy_pb2_grpc,
    stream_pb2,
    types_pb2,
)
from policy_service.transport.grpc.auth import KeyRing
from policy_service.transport.grpc.gate import Gate
from policy_service.transport.grpc.limits import Limits
from policy_service.transport.grpc.listeners import TcpAddress, UnixSocket, require_free_port
from policy_service.transport.grpc.server import PolicyServer, ServerOptions
from policy_service.transport.grpc.tls import ListenError
from tests.integration.grpc_shell import LOOPBACK, Shell, detail, details, reason, shell

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


# --- listeners --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_decision_travels_over_tcp_and_unix_sockets(kind: str, tmp_path: Path) -> None:
    options = unix_options(tmp_path / "s.sock") if kind == "unix" else None
    async with shell(options) as running:
        answer = await stub(running).SelectTarget(DISPATCH)
        assert answer.dispatch.target.provider == "openai"
        assert answer.decision_token


async def test_the_unix_socket_is_for_owner_and_group_only(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    async with shell(unix_options(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660


async def test_a_socket_left_by_a_dead_server_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with shell(unix_options(path)) as running:
        assert (await stub(running).SelectTarget(DISPATCH)).HasField("dispatch")


async def test_a_socket_that_somebody_listens_on_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ListenError, match="another server listens there"):
            UnixSocket(path)
    assert path.exists()


async def test_a_second_server_on_the_same_socket_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    async with shell(unix_options(path)) as first:
        second = PolicyServer(unix_options(path), Gate(KeyRing(), Limits()), [])
        with pytest.raises(ListenError, match="another server listens there"):
            await second.start()
        assert (await stub(first).SelectTarget(DISPATCH)).HasField("dispatch")


async def test_a_file_at_the_socket_path_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    path.write_text("precious")
    with pytest.raises(ListenError, match="it is a file, not a socket"):
        UnixSocket(path)
    assert path.read_text() == "precious"


async def test_the_socket_is_removed_when_the_server_has_drained(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    async with shell(unix_options(path)):
        assert path.exists()
    assert not path.exists()


async def test_a_port_in_use_is_refused_with_a_remedy() -> None:
    async with shell() as running:
        address = TcpAddress.parse(running.address)
        second = PolicyServer(ServerOptions(tcp=(address,)), Gate(KeyRing(), Limits()), [])
        with pytest.raises(ListenError, match="address in use; stop the other process"):
            await second.start()


def test_a_host_that_does_not_exist_is_a_listen_error() -> None:
    with pytest.raises(ListenError, match=r"check the host and port of listen\.tcp"):
        require_free_port(TcpAddress("no-such-host.invalid", 1))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_workers_of_one_parent_share_a_port() -> None:
    address = TcpAddress("127.0.0.1", free_port())
    options = ServerOptions(tcp=(address,), shares_port=True, notice_ms=0, drain_ms=1_000)
    async with shell(options) as one, shell(options) as two:
        assert one.address == two.address
        assert (await stub(one).SelectTarget(DISPATCH)).HasField("dispatch")


async def test_pinging_often_earns_no_goaway() -> None:
    async with shell() as running:
        address = TcpAddress.parse(running.address)
        frames = await frames_after_pings(address, 30)
    assert frames.count(PING) == 30
    assert GOAWAY not in frames


PING, GOAWAY = 6, 7


async def frames_after_pings(address: TcpAddress, pings: int) -> list[int]:
    """Types of the HTTP/2 frames that a bare client gets which sends nothing but settings and pings."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">I", 0)[1:] + bytes([4, 0]) + bytes(4))
    for number in range(pings):
        writer.write(struct.pack(">I", 8)[1:] + bytes([PING, 0]) + bytes(4) + struct.pack(">Q", number))
    await writer.drain()
    found: list[int] = []
    # Until the server has nothing more to say: a GOAWAY comes after the answers.
    with suppress(TimeoutError, asyncio.IncompleteReadError):
        while True:
            head = await asyncio.wait_for(reader.readexactly(9), 0.5)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            found.append(head[3])
    writer.close()
    return found


# --- health and reflection ------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["", "readiness", "policy.v1.PolicyService", "policy.v1.AdminService"])
async def test_watchers_hear_every_change_of_readiness(service: str) -> None:
    async with shell() as running:
        watch = health_pb2_grpc.HealthStub(running.channel).Watch(health_pb2.HealthCheckRequest(service=service))
        heard = [(await watch.read()).status]
        for ready in (False, True):
            running.server.health.set_ready(ready)
            heard.append((await watch.read()).status)
        watch.cancel()
    assert heard == [SERVING, NOT_SERVING, SERVING]


async def test_nothing_but_liveness_serves_before_the_server_is_told_ready() -> None:
    server = PolicyServer(ServerOptions(tcp=LOOPBACK, notice_ms=0), Gate(KeyRing(), Limits()), [])
    await server.start()
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        listed = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
    await server.drain()
    serving = {name for name, each in listed.statuses.items() if each.status == SERVING}
    assert serving == {"liveness"}
    assert len(listed.statuses) == 5


async def test_an_unknown_service_is_not_found_by_check_and_unknown_to_watch() -> None:
    request = health_pb2.HealthCheckRequest(service="no.such.Service")
    async with shell() as running:
        health = health_pb2_grpc.HealthStub(running.channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await health.Check(request)
        watch = health.Watch(request)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()
    assert failed.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services_and_their_files() -> None:
    async with shell() as running:
        reflection = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        call = reflection.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {each.name for each in (await call.read()).list_services_response.service}
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="policy.v1.PolicyService"))
        files = (await call.read()).file_descriptor_response.file_descriptor_proto
        await call.done_writing()
    assert {"policy.v1.PolicyService", "policy.v1.AdminService", "grpc.health.v1.Health"} <= listed
    assert files


# --- load, deadlines, faults --------------------------------------------------------------------------------


async def test_calls_beyond_the_limit_are_pushed_back() -> None:
    async with shell(limits=Limits(concurrent_calls=1)) as running:
        held = await held_call(running)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub(running).SelectTarget(DISPATCH)
        running.selects.release.set()
        await held
        assert (await stub(running).SelectTarget(DISPATCH)).HasField("dispatch")
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reason(failed.value) == "TOO_MANY_CALLS"
    assert detail(details(failed.value), error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 100
    assert ("grpc-retry-pushback-ms", "100") in [tuple(pair) for pair in failed.value.trailing_metadata()]


async def test_a_call_that_outlives_its_method_ends_with_its_own_reason() -> None:
    async with shell(deadlines={"SelectTarget": 50}) as running:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub(running).SelectTarget(HOLD)
        await asyncio.wait_for(running.server.gate.until_idle(), 5)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert reason(failed.value) == "METHOD_DEADLINE"


async def test_calls_that_keep_their_deadline_are_not_disturbed() -> None:
    async with shell(deadlines={"SelectTarget": 60_000}) as running:
        held = await held_call(running)
        running.selects.release.set()
        assert (await held).HasField("reject")


async def test_a_cancelled_call_leaves_nothing_in_flight() -> None:
    async with shell(deadlines={"SelectTarget": 60_000}) as running:
        held = await held_call(running)
        held.cancel()
        await asyncio.wait_for(running.server.gate.until_idle(), 5)
        assert running.server.gate.in_flight == 0
        assert running.selects.finished == 0


async def test_a_fault_of_the_service_shows_a_reference_and_nothing_else() -> None:
    async with shell() as running:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub(running).SelectTarget(policy_pb2.SelectTargetRequest(route="broken"))
        assert running.server.gate.in_flight == 0
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert reason(failed.value) == "INTERNAL"
    assert "password" not in str(failed.value)


async def test_methods_without_implementation_say_so() -> None:
    async with shell() as running:
        failures = [
            await failure(stub(running).CheckFence(lease_pb2.CheckFenceRequest())),
            await failure(admin_pb2_grpc.AdminServiceStub(running.channel).GetHealth(admin_pb2.GetHealthRequest())),
        ]
        watch = stub(running).WatchStream()
        failures.append(await failure(watch.read()))
    assert {each.code() for each in failures} == {grpc.StatusCode.UNIMPLEMENTED}
    assert {reason(each) for each in failures} == {"NOT_IMPLEMENTED"}
    assert "CheckFence is part of the contract" in (failures[0].details() or "")


async def failure(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value


async def test_the_trace_context_of_the_caller_reaches_the_operation_while_tracing_is_on() -> None:
    seen: list[dict[str, str] | None] = []

    async def health(request: admin_pb2.GetHealthRequest) -> admin_pb2.GetHealthResponse:
        seen.append(TRACE_HEADERS.get())
        return admin_pb2.GetHealthResponse()

    metadata = (("traceparent", "00-" + "a" * 32 + "-" + "b" * 16 + "-01"), ("other", "x"))
    for is_traced in (True, False):
        async with shell(operations={"GetHealth": health}, is_traced=is_traced) as running:
            admin = admin_pb2_grpc.AdminServiceStub(running.channel)
            await admin.GetHealth(admin_pb2.GetHealthRequest(), metadata=metadata)
    assert seen == [{"traceparent": metadata[0][1]}, None]


async def echoed(
    requests: AsyncIterator[stream_pb2.WatchStreamRequest],
) -> AsyncGenerator[stream_pb2.WatchStreamResponse, None]:
    """Fake WatchStream: opens whatever is asked."""
    async for request in requests:
        yield stream_pb2.WatchStreamResponse(stream_id=request.stream_id, opened=stream_pb2.StreamOpened())


async def test_a_stream_answers_while_the_gateway_goes_on_and_counts_as_one_call() -> None:
    async with shell(streams={"WatchStream": echoed}) as running:
        call = stub(running).WatchStream()
        for number in (1, 2):
            await call.write(stream_pb2.WatchStreamRequest(stream_id=number))
            assert (await call.read()).stream_id == number
            assert running.server.gate.in_flight == 1
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await asyncio.wait_for(running.server.gate.until_idle(), 5)


async def test_a_message_that_cannot_be_read_ends_its_stream_with_the_reason() -> None:
    async with shell(streams={"WatchStream": echoed}) as running:
        call = running.channel.stream_stream("/policy.v1.PolicyService/WatchStream")()
        await call.write(b"\x1a\x7f\x00")
        failed = await failure(call.read())
    assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason(failed) == "INVALID_FIELD"
