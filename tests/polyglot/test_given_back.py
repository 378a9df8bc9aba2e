"""What a decision holds goes back, whichever way its call or its request ends.

A slot was held for two minutes although nobody used it: the service had granted it, and the answer came later than the
gateway's deadline, or than its client waited. On a busy machine that made a restart of the service cost slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from policy_service.generated.policy.v1 import admin_pb2, policy_pb2, reasons_pb2
from tests.fleet.fleet import free_port
from tests.integration.serving import config, serving
from tests.polyglot.doors import EXAMPLES, Gateway, policy_at, running
from tests.polyglot.scenario import http_send
from tests.polyglot.scripted import Scripted, beside, overloaded, started, urls
from tests.polyglot.upstreams import Behaviour
from tests.polyglot.world import behaving, behaviour, catalogue, routed, stubs, until, written

WITHIN_S = 10.0
"""A second look included; far below the TTL of two minutes."""
CHUNK = '{"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "more "}}]}'


# --- answers of SelectTarget that nobody gets -----------------------------------------------------------------
class Line:
    """A connection to the service whose answers can be held up."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._open = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open.set()
        self.address = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection(self._host, int(self._port))
        self._tasks |= {asyncio.create_task(self._copy(reader, forth)), asyncio.create_task(self._back(back, writer))}

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65_536):
                writer.write(piece)
        writer.close()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65_536):
                await self._open.wait()
                writer.write(piece)
        writer.close()

    @asynccontextmanager
    async def held_up(self, service_did: Callable[[], Awaitable[bool]]) -> AsyncIterator[None]:
        """Nothing comes back during the block, which ends once the service has done its part."""
        self._open.clear()
        try:
            yield
            await until(service_did, WITHIN_S)
        finally:
            self._open.set()


@asynccontextmanager
async def line_to(address: str) -> AsyncIterator[Line]:
    """The line on a free port."""
    line = Line(address)
    server = await asyncio.start_server(line.serve, "127.0.0.1", 0)
    line.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield line
    finally:
        server.close()


@asynccontextmanager
async def capped(
    command: Sequence[str], place: Path, database_url: str
) -> AsyncIterator[tuple[Gateway, Line, Callable[[], Awaitable[int]]]]:
    """A gateway before a route of one capped account; how many slots of it are held."""
    async with behaving("capped") as upstreams:
        file = written(place, catalogue(upstreams, {"narrow": ["capped"]}, capped={"max_concurrent": 2}))
        async with (
            serving(config(place, database_url, catalogue=str(file))) as (service, _),
            line_to(service.server.addresses[-1]) as line,
            stubs(service.server.addresses[-1]) as (_, admin),
        ):

            async def held() -> int:
                answer = await admin.ListGates(admin_pb2.ListGatesRequest(), timeout=5)
                return sum(gate.held for gate in answer.gates)

            policy = policy_at(line.address, select_timeout_ms=1_000, report_timeout_ms=1_000)
            settings = {"policy": policy, "upstreams": routed(file, upstreams), "fail_mode": "open"}
            async with running(command, place, settings) as gateway:
                await until(lambda: _is_served(gateway), 20)
                await until(lambda: _is(held, 0), WITHIN_S)
                yield gateway, line, held


async def _is_served(gateway: Gateway) -> bool:
    return (await gateway.send()("narrow", False)).status == 200


async def _is(held: Callable[[], Awaitable[int]], wanted: int) -> bool:
    return await held() == wanted


async def test_a_grant_whose_answer_comes_after_the_deadline_is_given_back(
    command: Sequence[str], tmp_path: Path, embedded_url: str
) -> None:
    async with capped(command, tmp_path, embedded_url) as (gateway, line, held):
        async with line.held_up(lambda: _is(held, 1)):
            answer = await gateway.send()("narrow", False)
        assert answer.status == 503
        await until(lambda: _is(held, 0), WITHIN_S)


async def test_a_grant_whose_client_has_left_meanwhile_is_given_back(
    command: Sequence[str], tmp_path: Path, embedded_url: str
) -> None:
    async with capped(command, tmp_path, embedded_url) as (gateway, line, held):
        async with line.held_up(lambda: _is(held, 1)):
            leaving = asyncio.create_task(gateway.send()("narrow", False))
            await until(lambda: _is(held, 1), WITHIN_S)
            leaving.cancel()
            await asyncio.wait({leaving})
        await until(lambda: _is(held, 0), WITHIN_S)


async def test_a_place_in_line_is_left_that_the_client_has_no_time_for(command: Sequence[str], tmp_path: Path) -> None:
    wait = policy_pb2.Wait(wait_ms=60_000, reason=reasons_pb2.WAIT_REASON_IN_LINE, reason_text="in_line", ticket=7)

    async def in_line(*_: Any) -> Any:
        return policy_pb2.SelectTargetResponse(decision_token=b"token", wait=wait)

    async with behaving("only") as upstreams, started(Scripted("only")) as service:
        service.scripts["SelectTarget"].append(in_line)
        async with beside(command, tmp_path, service, urls(upstreams), request_timeout_ms=5_000) as gateway:
            answer = await gateway.send()("one", False)
            (withdrawn, *_) = await service.told("CancelPermit")
    assert answer.status == 503
    assert withdrawn.request_id == service.of("SelectTarget")[0].request_id


async def test_the_gateway_of_the_kit_gives_back_what_a_silent_service_may_have_granted(tmp_path: Path) -> None:
    file, listen = tmp_path / "upstreams.json", f"127.0.0.1:{free_port()}"
    file.write_text('{"upstreams": {}}')
    async with started(Scripted("only")) as service:
        service.scripts["SelectTarget"].append(silent)
        environment = {"POLICY_TARGET": service.address, "GATEWAY_LISTEN": listen, "UPSTREAMS_FILE": str(file)}
        child = await asyncio.create_subprocess_exec(
            sys.executable, str(EXAMPLES / "gateway.py"), env={**os.environ, **environment}
        )
        try:
            await until(lambda: _takes_connections(listen), 20)
            assert (await http_send(f"http://{listen}", timeout_s=20)("one", False)).status == 503
            (withdrawn,) = await service.told("CancelPermit")
        finally:
            child.terminate()
            await child.wait()
    assert withdrawn.request_id == service.of("SelectTarget")[0].request_id


async def _takes_connections(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except ConnectionError:
        return False
    writer.close()
    return True


# --- reports and releases that are not taken at once ----------------------------------------------------------
async def test_a_report_that_an_overloaded_service_does_not_take_is_sent_again(
    command: Sequence[str], tmp_path: Path
) -> None:
    async with behaving("only") as upstreams, started(Scripted("only")) as service:
        service.scripts["ReportOutcome"].append(overloaded)
        async with beside(command, tmp_path, service, urls(upstreams)) as gateway:
            assert (await gateway.send()("one", False)).status == 200
            first, again = await service.told("ReportOutcome", 2)
    assert first == again


async def test_a_release_that_an_overloaded_service_does_not_take_is_sent_again(
    command: Sequence[str], tmp_path: Path
) -> None:
    async with behaving("only") as upstreams, started(Scripted("only", permit_ms=60_000)) as service:
        upstreams.script("only", behaviour("overloaded"))
        service.scripts["ReleasePermit"].append(overloaded)
        async with beside(command, tmp_path, service, urls(upstreams)) as gateway:
            assert (await gateway.send()("one", False)).status == 503
            await service.told("ReleasePermit", 2)


class Stuck(Scripted):
    """Never answers the reports of the first decision, and refuses the first report of every other."""

    async def ReportOutcome(self, request: Any, context: Any) -> Any:  # noqa: N802
        (first, *_), before = self.of("SelectTarget"), self.of("ReportOutcome")
        if request.decision_token == first.request_id.encode():
            self.scripts["ReportOutcome"].appendleft(silent)
        elif request not in before:
            self.scripts["ReportOutcome"].appendleft(overloaded)
        return await super().ReportOutcome(request, context)


async def silent(*_: Any) -> None:
    await asyncio.sleep(60)


async def test_a_report_that_never_gets_through_holds_up_no_other(command: Sequence[str], tmp_path: Path) -> None:
    async with (
        behaving("only") as upstreams,
        started(Stuck("only")) as service,
        beside(command, tmp_path, service, urls(upstreams), policy={"report_timeout_ms": 500}) as gateway,
    ):
        for sent in (1, 2):
            assert (await gateway.send()("one", False)).status == 200
            await service.told("ReportOutcome", sent)
        await until(lambda: _is_repeated(service, 1), WITHIN_S)


async def _is_repeated(service: Scripted, which: int) -> bool:
    token = service.of("SelectTarget")[which].request_id.encode()
    return [report.decision_token for report in service.of("ReportOutcome")].count(token) > 1


# --- the gateway ends -----------------------------------------------------------------------------------------
async def test_a_stream_that_outlasts_the_end_of_the_gateway_is_reported_and_frees_its_permit(
    command: Sequence[str], tmp_path: Path
) -> None:
    async with behaving("only") as upstreams, started(Scripted("only", permit_ms=60_000)) as service:
        upstreams.script("only", Behaviour(events=[CHUNK] * 400, event_gap_s=0.05))
        async with beside(command, tmp_path, service, urls(upstreams), drain_ms=300) as gateway:
            stream = asyncio.create_task(gateway.send()("one", True))
            await until(lambda: _is_called(service), WITHIN_S)
            await asyncio.sleep(0.3)
            gateway.child.send_signal(signal.SIGTERM)
            (report,) = await service.told("ReportOutcome")
            assert await asyncio.to_thread(gateway.child.wait, WITHIN_S) == 0
            await asyncio.wait({stream})
    assert report.final
    assert report.HasField("client_cancelled")


async def _is_called(service: Scripted) -> bool:
    return service.of("SelectTarget") != []


async def test_late_reports_are_tried_once_more_at_the_end_of_the_gateway(
    command: Sequence[str], tmp_path: Path
) -> None:
    async with behaving("only") as upstreams, started(Scripted("only")) as service:
        service.scripts["ReportOutcome"].append(overloaded)
        async with beside(command, tmp_path, service, urls(upstreams)) as gateway:
            assert (await gateway.send()("one", False)).status == 200
            await service.told("ReportOutcome")
            gateway.child.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(gateway.child.wait, WITHIN_S) == 0
    assert len(service.of("ReportOutcome")) == 2
