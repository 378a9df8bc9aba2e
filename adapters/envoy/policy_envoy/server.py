"""The door as a server of its own: listen, answer health, drain."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from policy_envoy.names import SERVICE
from policy_envoy.options import LARGEST_MESSAGE_BYTES
from policy_envoy.servicer import Door

DRAIN_S = 10.0
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", LARGEST_MESSAGE_BYTES),  # request bodies come whole
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)


async def serve(door: Door, address: str, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        address: host:port or unix:/path; port 0 takes a free one.
        announce: told the address in use.
    """
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((door.handler(),))
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    port = server.add_insecure_port(address)
    await server.start()
    for name in ("", SERVICE):
        await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
    announce(address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}")
    await _told_to_end()
    await healthy.enter_graceful_shutdown()
    await server.stop(DRAIN_S)
    await door.close()


async def _told_to_end() -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, ended.set)
    await ended.wait()
