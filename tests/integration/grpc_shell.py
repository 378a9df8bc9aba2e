"""A gRPC shell around fake use cases (named so), for tests of the transport alone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from policy_service.application.errors import PolicyError
from policy_service.application.messages import (
    Action,
    ActionKind,
    DecisionToken,
    Dispatch,
    Exclusion,
    HeardSuccess,
    Reject,
    ReportAnswer,
    ReportRequest,
    SelectAnswer,
    SelectRequest,
    TokenTarget,
    Verdict,
)
from policy_service.domain.ids import ConnectionId, ModelId, ProviderId, Target
from policy_service.transport.grpc.admin_servicer import AdminServicer
from policy_service.transport.grpc.auth import KeyRing
from policy_service.transport.grpc.gate import Gate, Stream, Unary
from policy_service.transport.grpc.limits import Limits
from policy_service.transport.grpc.listeners import TcpAddress
from policy_service.transport.grpc.mapping import Reading
from policy_service.transport.grpc.policy_servicer import PolicyServicer
from policy_service.transport.grpc.server import PolicyServer, ServerOptions
from policy_service.transport.grpc.token import TokenSeal

NOW = 1_800_000_000_000
SECRET = b"s" * 32
LOOPBACK = (TcpAddress("127.0.0.1", 0),)


class FakeClock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> int:
        return self.at


class FakeEntropy:
    """Ids by counting."""

    def __init__(self) -> None:
        self._count = itertools.count(1)

    def draw(self) -> float:
        return 0.5

    def new_id(self) -> str:
        return f"drawn-{next(self._count)}"


def target(provider: str, connection: str = "", model: str = "") -> Target:
    return Target(ProviderId(provider), ConnectionId(connection), ModelId(model))


@dataclass
class FakeSelects:
    """Dispatches to the first candidate. Routes choose other behaviour: `hold` waits for `release`, `empty` rejects,
    `broken` fails with a secret in its text, `refused` raises `error`."""

    seen: list[SelectRequest] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    finished: int = 0
    error: PolicyError | None = None

    def select_now(self, request: SelectRequest) -> SelectAnswer | None:
        self.seen.append(request)
        if request.route == "broken":
            raise RuntimeError("select password from secrets")
        if request.route == "refused":
            assert self.error is not None
            raise self.error
        if request.route == "hold":
            return None
        return _rejected(request) if request.route else _dispatched(request)

    async def select(self, request: SelectRequest) -> SelectAnswer:
        self.holding.set()
        await self.release.wait()
        self.finished += 1
        return _rejected(request)


def _dispatched(request: SelectRequest) -> SelectAnswer:
    entries = tuple(TokenTarget(target(c.provider, c.connection, c.model), key=c.key) for c in request.candidates)
    kept = entries[: 1 + request.max_fallbacks]
    token = DecisionToken("decision-1", NOW, kept, request_id=request.request_id, is_pool=True)
    return SelectAnswer(
        "decision-1",
        Dispatch(kept[0], kept[1:]),
        token,
        decided_at=NOW,
        policy_revision=7,
        request_id=request.request_id,
    )


def _rejected(request: SelectRequest) -> SelectAnswer:
    verdict = Reject(
        503, "all_targets_cooling_down", "service_unavailable", "all_targets_cooling_down", "wait", retry_after_s=3
    )
    out = Exclusion(target("openai", "a", "m"), "breaker", "circuit_open", NOW + 3_000, 3_000, "fact-1.0")
    return SelectAnswer("decision-2", verdict, exclusions=(out,), decided_at=NOW, request_id=request.request_id)


@dataclass
class FakeReports:
    """Answers every report with a server error that falls back."""

    seen: list[ReportRequest] = field(default_factory=list)

    def report_now(self, request: ReportRequest) -> ReportAnswer | None:
        self.seen.append(request)
        return None if request.attempt == 1 else _reported()

    def heard_now(self, success: HeardSuccess) -> bool:
        return self.report_now(success.request()) is not None

    async def report(self, request: ReportRequest) -> ReportAnswer:
        return _reported()


def _reported() -> ReportAnswer:
    verdict = Verdict("server_error", "provider_failure", restated_status=502, failure_kind="upstream")
    return ReportAnswer(verdict, Action(ActionKind.FALL_BACK), ignored=("suppressed",))


@dataclass
class Shell:
    """A running server with its fakes and a channel to it."""

    server: PolicyServer
    selects: FakeSelects
    reports: FakeReports
    reading: Reading
    channel: grpc.aio.Channel

    @property
    def address(self) -> str:
        return self.server.addresses[0]


@asynccontextmanager
async def shell(
    options: ServerOptions | None = None,
    *,
    keys: KeyRing | None = None,
    limits: Limits | None = None,
    deadlines: dict[str, int] | None = None,
    operations: dict[str, Unary] | None = None,
    streams: dict[str, Stream] | None = None,
    is_traced: bool = False,
) -> AsyncIterator[Shell]:
    limits = limits or Limits()
    gate = Gate(keys or KeyRing(), limits, deadlines, is_traced=is_traced)
    reading = Reading(TokenSeal({1: SECRET}), FakeClock(), FakeEntropy(), limits)
    selects, reports = FakeSelects(), FakeReports()
    options = options or ServerOptions(tcp=LOOPBACK, notice_ms=0, drain_ms=2_000)
    server = PolicyServer(
        options, gate, [PolicyServicer(selects, reports, reading, streams=streams), AdminServicer(operations)]
    )
    await server.start()
    server.health.set_ready(True)
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        try:
            yield Shell(server, selects, reports, reading, channel)
        finally:
            selects.release.set()
            await server.drain()


def details(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """google.rpc.Status of a failed call."""
    for name, value in error.trailing_metadata():
        if name == "grpc-status-details-bin":
            return status_pb2.Status.FromString(value)
    raise AssertionError("the error has no details")


def detail(status: status_pb2.Status, kind: type[Any]) -> Any:
    """One detail of a status by its type; an empty one if there is none."""
    found = kind()
    for packed in status.details:
        if packed.Is(kind.DESCRIPTOR):
            packed.Unpack(found)
    return found


def reason(error: grpc.aio.AioRpcError) -> str:
    """ErrorInfo reason of a failed call."""
    info = detail(details(error), error_details_pb2.ErrorInfo)
    assert info.domain == "policy.v1"
    return str(info.reason)


def fields(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """Reasons of the wrong fields of a failed call, by path."""
    found = detail(details(error), error_details_pb2.BadRequest)
    return {violation.field: violation.reason for violation in found.field_violations}
