"""Figures of one process: selections without a wire, statements that reach the database, what traces cost.

The service is the real one, on a real database, with its background work slowed down so far that every statement
counted belongs to a call of the measurement.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NoOpTracerProvider

from policy_service.application.entropy import SystemEntropy
from policy_service.application.messages import SelectAnswer, SelectRequest
from policy_service.bootstrap import Service
from policy_service.cli.bench import cases
from policy_service.cli.bench.figures import ROUNDS, Figure, alone, compared
from policy_service.cli.bench.processes import CLIENT_OPTIONS, BenchError
from policy_service.cli.bench_classify import bench_classify
from policy_service.generated.policy.v1 import policy_pb2, types_pb2
from policy_service.settings.server import ListenConfig, ServerConfig, StoreConfig, TelemetryConfig
from policy_service.telemetry.tracing import TracedSelect, tracer
from policy_service.transport.grpc.limits import Limits
from policy_service.transport.grpc.mapping import Reading, select_request
from policy_service.transport.grpc.policy_servicer import PolicyServicer
from policy_service.transport.grpc.token import TokenSeal

NEW_POOLS: Final = 40
DECISIONS: Final = 1_000
POLLS: Final = 3
"""Polls looked at for what one costs: the least counts, since other work of the service may fall into one of them."""
EVENTS: Final = 64
_QUIET_S: Final = 0.5
_QUIET: Final = StoreConfig(poll_ms=60_000, max_view_age_ms=600_000)

Call = Callable[[], object]


def quiet_config(place: Path, catalogue: Path) -> ServerConfig:
    """Configuration of the service in this process."""
    return ServerConfig(
        data_dir=str(place),
        catalogue=str(catalogue),
        catalogue_poll_ms=3_600_000,
        replica="bench",
        drain_ms=0,
        listen=ListenConfig(tcp=(), unix=str(place / "bench.sock")),
        store=_QUIET,
        telemetry=TelemetryConfig(traces=False),
    )


async def figures(place: Path, catalogue: Path, seconds: float) -> list[Figure]:
    """Every figure that needs no second process."""
    service = Service(quiet_config(place, catalogue))
    await service.start()
    try:
        # Statements first: the other measurements hold the event loop up, and background work then catches up.
        counted = await statements(service, f"unix:{place / 'bench.sock'}")
        bench = InProcess(service, await _reading(service), seconds)
        return [*counted, *bench.selections(), *bench.traces()]
    finally:
        await service.stop()


async def _reading(service: Service) -> Reading:
    seal = TokenSeal(await service.store.secrets(), service.config.token_max_age_s * 1000)
    return Reading(seal, service.replica.clock, SystemEntropy(), Limits())


def classification(seconds: float) -> float:
    """Median time in us of the reading of a typical error, from bytes to verdict."""
    return bench_classify(max(200, int(500 * seconds)))


def once(call: Call) -> float:
    """Time of one call, us; the clock itself costs less than a tenth of one."""
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / 1000


def timed(call: Call, seconds: float) -> float:
    """Median time of one call in us, over that long."""
    found = [once(call)]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        found.append(once(call))
    return median(found)


def interleaved(ours: Call, reference: Call, seconds: float) -> tuple[float, float]:
    """Medians in us of two calls, made in turn, each first in every other turn."""
    found: tuple[list[float], list[float]] = [once(ours)], [once(reference)]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        found[0].append(once(ours))
        found[1].append(once(reference))
        found[1].append(once(reference))
        found[0].append(once(ours))
    return median(found[0]), median(found[1])


def finished(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise BenchError("a healthy decision waited")


class InProcess:
    """Calls into a running service without its server."""

    def __init__(self, service: Service, reading: Reading, seconds: float) -> None:
        self._service = service
        self._reading = reading
        self._slice_s = seconds / ROUNDS / 2

    # -- selections ----------------------------------------------------------------------------------
    def selections(self) -> list[Figure]:
        """`select` by size of pool: a pool that is known, one never seen before, a route; then the way of a call."""
        return [figure for size in cases.POOLS for figure in self._of_size(size)] + [self._whole_way()]

    def _of_size(self, size: int) -> list[Figure]:
        inline, route = self._read(cases.inline_request(size)), self._read(cases.route_request(size))
        return [
            self._select(f"select.inline.{size}", f"{size:,} inline", lambda: self._answer(inline)),
            self._new_pools(size),
            self._select(f"select.route.{size}", f"route of {size:,}", lambda: self._answer(route)),
        ]

    def _select(self, name: str, what: str, call: Call) -> Figure:
        values = [timed(call, self._slice_s / ROUNDS) for _ in range(ROUNDS)]
        return alone(name, f"select in-process, {what}", "us", values)

    def _new_pools(self, size: int) -> Figure:
        requests = [self._read(_renamed(cases.inline_request(size), number)) for number in range(NEW_POOLS)]
        values = [once(lambda: self._answer(request)) for request in requests]  # noqa: B023 (called at once)
        return alone(f"select.inline_new.{size}", f"select in-process, {size:,} inline, pool never seen", "us", values)

    def _read(self, message: policy_pb2.SelectTargetRequest) -> SelectRequest:
        return select_request(message, self._reading)

    def _answer(self, request: SelectRequest) -> SelectAnswer:
        answer = self._service.replica.select.select_now(request)
        if answer is None:
            raise BenchError("a healthy decision waited")
        return answer

    def _whole_way(self) -> Figure:
        figure = self._select("select.call.8", "8 inline", _call(self._service.server.servicers[0]))
        return replace(figure, title="bytes to bytes without the RPC, 8 inline")

    # -- traces --------------------------------------------------------------------------------------
    def traces(self) -> list[Figure]:
        """The service as started, exporter off, against use cases that never heard of traces; then with spans."""
        select = self._service.replica.select
        no_op, recording = tracer(NoOpTracerProvider()), tracer(TracerProvider())
        return [
            self._traced("off", "exporter off", self._service.server.servicers[0]),
            self._traced("no_op", "no-op spans", self._servicer(TracedSelect(select, no_op, EVENTS))),
            self._traced("recorded", "spans recorded", self._servicer(TracedSelect(select, recording, EVENTS))),
        ]

    def _traced(self, name: str, what: str, servicer: Any) -> Figure:
        ours, bare = _call(servicer), _call(self._servicer(self._service.replica.select))
        pairs = [interleaved(ours, bare, self._slice_s) for _ in range(ROUNDS)]
        return compared(f"tracing.{name}", f"the same, {what}, to no tracing", "us", pairs)

    def _servicer(self, selects: Any) -> PolicyServicer:
        return PolicyServicer(selects, self._service.replica.report, self._reading)


def _call(servicer: Any) -> Call:
    """One SelectTarget from request bytes to answer bytes."""
    data = cases.inline_request().SerializeToString()
    read, select = policy_pb2.SelectTargetRequest.FromString, servicer.select_target
    return lambda: finished(select(read(data))).SerializeToString()


def _renamed(message: policy_pb2.SelectTargetRequest, number: int) -> policy_pb2.SelectTargetRequest:
    for index, candidate in enumerate(message.candidates):
        candidate.connection = f"new-{number}-{index}"
    return message


# -- database ----------------------------------------------------------------------------------------
async def statements(service: Service, address: str) -> list[Figure]:
    """Statements sent while real calls come in: healthy ones, and failures to show that the counter counts."""
    async with grpc.aio.insecure_channel(address, CLIENT_OPTIONS) as channel:

        async def ask(method: str, request: bytes) -> bytes:
            answer: bytes = await channel.unary_unary(f"/{cases.SERVICE.full_name}/{method}")(request)
            return answer

        healthy = await _counted(service, lambda number: _decide(ask, number), DECISIONS)
        failing = await _counted(service, lambda number: _fail(ask, number), ROUNDS)
    return [
        alone("database.statements_per_decision", "database statements, decision and its success", "", [healthy]),
        alone("database.statements_per_failure", "database statements, failure", "", [failing]),
    ]


async def _counted(service: Service, act: Callable[[int], Coroutine[Any, Any, None]], times: int) -> float:
    """Statements per act, without polls of the change feed; the one that follows judges what the acts left to it."""
    poll = min([await _of_a_poll(service) for _ in range(POLLS)])
    before, polls = service.store.statements, service.replica.follower.polls
    for number in range(times):
        await act(number)
    await _polled(service)
    return (service.store.statements - before - poll * (service.replica.follower.polls - polls)) / times


async def _of_a_poll(service: Service) -> float:
    await _quiet(service)
    before, polls = service.store.statements, service.replica.follower.polls
    await _polled(service)
    return (service.store.statements - before) / (service.replica.follower.polls - polls)


async def _polled(service: Service) -> None:
    """Poll once, and wait until nothing is under way."""
    await _quiet(service)
    polls = service.replica.follower.polls
    service.replica.follower.wake()
    while service.replica.follower.polls == polls:
        await _quiet(service)


async def _quiet(service: Service) -> None:
    """Return once no statement was sent for half a second."""
    seen = -1
    while seen != service.store.statements:
        seen = service.store.statements
        await asyncio.sleep(_QUIET_S)


async def _decide(ask: cases.Ask, number: int) -> None:
    """A decision, by route and by candidates in turn, and the report of its success."""
    request = cases.route_request() if number % 2 else cases.inline_request()
    answer = policy_pb2.SelectTargetResponse.FromString(await ask("SelectTarget", request.SerializeToString()))
    await ask("ReportOutcome", cases.success_request(answer.decision_token).SerializeToString())


async def _fail(ask: cases.Ask, number: int) -> None:
    report = cases.failure_request()
    report.report_id = f"bench-statements-{number}"
    report.target.CopyFrom(types_pb2.Target(provider=cases.FAILING_PROVIDER, connection=f"failing-{number}"))
    await ask("ReportOutcome", report.SerializeToString())
