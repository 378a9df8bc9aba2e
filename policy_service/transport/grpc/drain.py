"""Bounded graceful shutdown: tell the balancers first, let the calls in flight finish, then close.

Order: health NOT_SERVING; a notice in which calls are still taken; GOAWAY, so that clients go elsewhere; the calls in
flight run to their end or to the bound. grpc's own grace is not enough: it does not wait for handlers that have
already aborted their call but still run, so the gate's count decides.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc

from policy_service.domain.ids import DurationMs
from policy_service.transport.grpc.gate import Gate
from policy_service.transport.grpc.health import Health


@dataclass(frozen=True, slots=True)
class Drained:
    """How a drain went."""

    clean: bool
    """True: every call in flight came to its end."""
    left: int
    """Calls that were cut off."""


async def drain(
    server: grpc.aio.Server, gate: Gate, health: Health, *, notice_ms: DurationMs, bound_ms: DurationMs
) -> Drained:
    """Shut down within `bound_ms`, of which `notice_ms` are notice at the most."""
    loop = asyncio.get_running_loop()
    end = loop.time() + bound_ms / 1000
    health.set_ready(False)
    await asyncio.sleep(min(notice_ms, bound_ms) / 1000)
    health.close()
    stopping = loop.create_task(server.stop(max(0.0, end - loop.time())))
    left = await _in_flight_at(gate, max(0.0, end - loop.time()))
    gate.is_draining = True
    await stopping
    gate.close()
    return Drained(clean=left == 0, left=left)


async def _in_flight_at(gate: Gate, seconds: float) -> int:
    try:
        async with asyncio.timeout(seconds):
            await gate.until_idle()
    except TimeoutError:
        return gate.in_flight
    return 0
