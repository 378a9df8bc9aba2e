"""grpc.health.v1 with a Watch that follows changes at once and ends when the server drains.

Names: "" and `readiness` (fit to decide), `liveness` (the process runs), and each service. Everything but liveness
is NOT_SERVING until the first view is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
LIVENESS = "liveness"

SERVICE = "grpc.health.v1.Health"


class Health:
    """Status by name, with watchers.

    Args:
        services: full names of the services that follow readiness.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._following = ("", "readiness", *services)
        self._status = dict.fromkeys(self._following, NOT_SERVING)
        self._status[LIVENESS] = SERVING
        self._changed = asyncio.Event()
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        """True while the server is fit to decide."""
        return bool(self._status[""] == SERVING)

    def set_ready(self, is_ready: bool) -> None:
        """Tell every watcher of everything but liveness."""
        status = SERVING if is_ready else NOT_SERVING
        self._status.update(dict.fromkeys(self._following, status))
        self._wake()

    def close(self) -> None:
        """End every Watch, so that open watches do not hold the shutdown up."""
        self._is_closed = True
        self._wake()

    def handler(self) -> Any:
        """Generic handler for `add_generic_rpc_handlers`. Health asks for no key and passes no gate."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        asked, answered = health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse.SerializeToString
        listed = health_pb2.HealthListResponse.SerializeToString
        methods = {
            "Check": unary(self.check, asked.FromString, answered),
            "List": unary(self.list_all, health_pb2.HealthListRequest.FromString, listed),
            "Watch": stream(self.watch, asked.FromString, answered),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """Status of one name; NOT_FOUND for an unknown one."""
        status = self._status.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service[:100]!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def list_all(self, request: health_pb2.HealthListRequest, context: Any) -> health_pb2.HealthListResponse:
        """Status of every name."""
        each = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._status.items()}
        return health_pb2.HealthListResponse(statuses=each)

    async def watch(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Status of one name now and after each change; SERVICE_UNKNOWN for an unknown one."""
        last: int | None = None
        while not self._is_closed:
            changed = self._changed
            status = self._status.get(request.service, SERVICE_UNKNOWN)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            await changed.wait()

    def _wake(self) -> None:
        # A fresh event per change: a watcher that is busy sending still finds its own event set.
        self._changed.set()
        self._changed = asyncio.Event()
