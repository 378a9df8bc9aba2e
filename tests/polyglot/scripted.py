"""A policy service of a few lines: it answers what the test says and writes down what it heard."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from policy_service.application.errors import OverloadedError
from policy_service.generated.policy.v1 import permit_pb2, policy_pb2, policy_pb2_grpc, types_pb2
from policy_service.transport.grpc.errors import abort
from tests.polyglot.doors import Gateway, running
from tests.polyglot.scenario import MODEL
from tests.polyglot.upstreams import Upstreams
from tests.polyglot.world import PROVIDER

Script: TypeAlias = Callable[[Any, Any], Awaitable[Any]]
"""(request, context) -> answer."""


def target(connection: str) -> types_pb2.Target:
    """A target of the provider of the tests."""
    return types_pb2.Target(provider=PROVIDER, connection=connection, model=MODEL)


def dispatch(request_id: str, *connections: str, permit_ms: int = 0) -> policy_pb2.SelectTargetResponse:
    """A dispatch to the first; the others are fallbacks. The token is the request id."""
    first, *rest = map(target, connections)
    now = round(time.time() * 1000)
    permits = [permit_pb2.Permit(permit_id="slot", expires_at_unix_ms=now + permit_ms)] if permit_ms else []
    told = policy_pb2.Dispatch(target=first, fallbacks=rest, permits=permits)
    return policy_pb2.SelectTargetResponse(decision_token=request_id.encode(), decided_at_unix_ms=now, dispatch=told)


async def overloaded(_: Any, context: Any) -> Any:
    """RESOURCE_EXHAUSTED, as a service says it that has too much to do."""
    await abort(context, OverloadedError("too many calls", retry_after_ms=100))


_Servicer: Any = policy_pb2_grpc.PolicyServiceServicer
"""Answers UNIMPLEMENTED to the methods that a gateway does not call; its stub calls them abstract."""


class Scripted(_Servicer):  # type: ignore[misc]
    """Dispatches to `connections` and takes everything, unless `scripts` has something for the next call."""

    def __init__(self, *connections: str, permit_ms: int = 0) -> None:
        self._connections = connections
        self._permit_ms = permit_ms
        self.scripts: dict[str, deque[Script]] = defaultdict(deque)
        self.heard: list[tuple[str, Any]] = []
        self.address = ""

    def of(self, method: str) -> list[Any]:
        """Requests of a method in order of arrival."""
        return [request for name, request in self.heard if name == method]

    async def told(self, method: str, count: int = 1, within_s: float = 8.0) -> list[Any]:
        """The requests of a method, once there are so many."""
        async with asyncio.timeout(within_s):
            while len(self.of(method)) < count:
                await asyncio.sleep(0.01)
        return self.of(method)

    async def _serve(self, method: str, request: Any, context: Any, usual: Any) -> Any:
        self.heard.append((method, request))
        script = self.scripts[method]
        return await script.popleft()(request, context) if script else usual

    async def SelectTarget(self, request: Any, context: Any) -> Any:  # noqa: N802
        usual = dispatch(request.request_id, *self._connections, permit_ms=self._permit_ms)
        return await self._serve("SelectTarget", request, context, usual)

    async def ReportOutcome(self, request: Any, context: Any) -> Any:  # noqa: N802
        action = policy_pb2.Action(kind=policy_pb2.ACTION_KIND_RETURN_TO_CLIENT)
        if request.attempt + 1 < len(self._connections):
            following = target(self._connections[request.attempt + 1])
            action = policy_pb2.Action(kind=policy_pb2.ACTION_KIND_FALL_BACK, next_target=following)
        return await self._serve("ReportOutcome", request, context, policy_pb2.ReportOutcomeResponse(action=action))

    async def RenewPermit(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._serve("RenewPermit", request, context, permit_pb2.RenewPermitResponse())

    async def ReleasePermit(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._serve("ReleasePermit", request, context, permit_pb2.ReleasePermitResponse())

    async def CancelPermit(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._serve("CancelPermit", request, context, permit_pb2.CancelPermitResponse())


@asynccontextmanager
async def started(service: Scripted) -> AsyncIterator[Scripted]:
    """The service on a free port."""
    server = grpc.aio.server()
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(service, server)
    service.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield service
    finally:
        await server.stop(0)


@asynccontextmanager
async def beside(
    command: Sequence[str], place: Path, service: Scripted, base_urls: dict[str, str], **fields: Any
) -> AsyncIterator[Gateway]:
    """A gateway of this service; `fields` of its configuration, those of `policy` as `policy`."""
    policy = {"address": service.address, "select_timeout_ms": 2_000, "report_timeout_ms": 2_000}
    settings = {
        "fail_mode": "closed",
        **fields,
        "policy": {**policy, **fields.get("policy", {})},
        "upstreams": {f"{PROVIDER}/{name}": {"base_url": url} for name, url in base_urls.items()},
    }
    async with running(command, place, settings) as gateway:
        yield gateway


def urls(upstreams: Upstreams, path: str = "") -> dict[str, str]:
    """Base URLs of upstreams below a path."""
    return {name: url + path for name, url in upstreams.base_urls.items()}
