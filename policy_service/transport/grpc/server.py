"""The gRPC server: listeners, services, health, reflection, drain. Knows how to run them, not what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
from grpc_reflection.v1alpha import reflection

from policy_service.domain.ids import DurationMs
from policy_service.transport.grpc import admin_servicer, policy_servicer
from policy_service.transport.grpc.drain import Drained, drain
from policy_service.transport.grpc.gate import Gate
from policy_service.transport.grpc.health import SERVICE as HEALTH_SERVICE
from policy_service.transport.grpc.health import Health
from policy_service.transport.grpc.listeners import TcpAddress, UnixSocket, private_umask, require_free_port
from policy_service.transport.grpc.tls import ListenError, TlsFiles, TlsReloader

SERVICES = (policy_servicer.SERVICE.full_name, admin_servicer.SERVICE.full_name)
_HARD_LIMIT_FACTOR = 4
"""Messages up to this many times the limit are still received, to be refused with a reason instead of a bare code."""
_MAX_PENDING = 100_000
"""Calls that grpc holds until the gate has looked at them, which takes microseconds a call."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where and how to listen.

    `shares_port` is for workers of one parent: the parent has called `require_free_port`, the workers bind with
    SO_REUSEPORT. The Unix socket belongs to one worker.
    """

    tcp: tuple[TcpAddress, ...] = (TcpAddress("127.0.0.1", 50051),)
    unix: Path | None = None
    tls: TlsFiles | None = None
    shares_port: bool = False
    notice_ms: DurationMs = 1_000
    drain_ms: DurationMs = 10_000
    keepalive_ms: DurationMs = 60_000
    """Idle time after which a client is asked whether it is still there."""
    largest_message_bytes: int = 0
    """Received at least, whatever the limit of the contract's own calls."""


class Servicer(Protocol):
    """A service of the contract."""

    def handler(self, gate: Gate) -> Any:
        """Generic handler behind the gate."""
        ...


@dataclass(slots=True)
class PolicyServer:
    """One listening server.

    Args:
        options: where to listen.
        gate: what every call passes.
        servicers: services of the contract.
    """

    options: ServerOptions
    gate: Gate
    servicers: Sequence[Servicer]
    health: Health = field(default_factory=lambda: Health(SERVICES))
    addresses: tuple[str, ...] = ()
    """Addresses in use, once started."""
    _server: Any = None
    _socket: UnixSocket | None = None

    async def start(self) -> None:
        """Bind everything, then serve; health says NOT_SERVING until `health.set_ready(True)`.

        Raises:
            ListenError: an address cannot be had; nothing is left bound.
        """
        self._server = grpc.aio.server(options=channel_options(self.options, self.gate.limits.message_bytes))
        try:
            self.addresses = (*self._bind_unix(), *self._bind_tcp())
            self._register()
            await self._server.start()
        except BaseException:
            await self._server.stop(None)
            self._release()
            raise

    async def drain(self) -> Drained:
        """Bounded graceful shutdown; see `drain`."""
        options = self.options
        result = await drain(
            self._server, self.gate, self.health, notice_ms=options.notice_ms, bound_ms=options.drain_ms
        )
        self._release()
        return result

    async def wait(self) -> None:
        """Return once the server has stopped."""
        await self._server.wait_for_termination()

    def _register(self) -> None:
        handlers = [servicer.handler(self.gate) for servicer in self.servicers]
        self._server.add_generic_rpc_handlers((*handlers, self.health.handler()))
        reflection.enable_server_reflection((*SERVICES, HEALTH_SERVICE, reflection.SERVICE_NAME), self._server)

    def _bind_tcp(self) -> list[str]:
        credentials = TlsReloader(self.options.tls).credentials() if self.options.tls else None
        return [self._bind_one(address, credentials) for address in self.options.tcp]

    def _bind_one(self, address: TcpAddress, credentials: Any) -> str:
        if not self.options.shares_port:
            require_free_port(address)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address.text)
            else:
                port = self._server.add_secure_port(address.text, credentials)
        except RuntimeError as error:
            raise ListenError(f"cannot listen on {address.text}", "check listen.tcp") from error
        return TcpAddress(address.host, port).text

    def _bind_unix(self) -> list[str]:
        if self.options.unix is None:
            return []
        self._socket = UnixSocket(self.options.unix)
        try:
            with private_umask():
                self._server.add_insecure_port(self._socket.text)
        except RuntimeError as error:
            raise ListenError(f"cannot listen on {self.options.unix}", "choose a shorter, writable path") from error
        self._socket.opened()
        return [self._socket.text]

    def _release(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()
            self._socket = None


def channel_options(options: ServerOptions, message_bytes: int) -> list[tuple[str, int]]:
    """Options of the grpc server, each with its reason."""
    return [
        ("grpc.max_receive_message_length", max(message_bytes * _HARD_LIMIT_FACTOR, options.largest_message_bytes)),
        ("grpc.max_send_message_length", message_bytes * _HARD_LIMIT_FACTOR),
        # Beyond these grpc cancels calls at random and gives no reason; the gate answers RESOURCE_EXHAUSTED.
        ("grpc.server.max_pending_requests", _MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _MAX_PENDING),
        # Without this a second server on the same port would silently take half of the calls.
        ("grpc.so_reuseport", int(options.shares_port)),
        # Go and Node clients ping every 10 s; Python servers answer the third such ping with GOAWAY by default.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", options.keepalive_ms),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]
