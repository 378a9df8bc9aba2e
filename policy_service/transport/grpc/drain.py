"""Bounded graceful shutdown: tell the balancers first, let the calls in flight finish, then close.

Order: health NOT_SERVING; a notice in which calls are still taken; a moment in which new calls are refused, and open
streams ended, with a pushback, so that the wire goes quiet; GOAWAY; the calls in flight run to their end or to the
bound. Without that moment grpc would cut calls that cross the GOAWAY off as CANCELLED, which no client repeats. grpc's
own grace is not enough either: it does not wait for handlers that have already aborted their call but still run, so the
gate's count decides.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc

from policy_service.domain.ids import DurationMs
from policy_service.transport.grpc.gate import DRAIN_PUSHBACK_MS, Gate
from policy_service.transport.grpc.health import Health

QUIET_S = DRAIN_PUSHBACK_MS / 2_000
"""Half of the pushback: whoever was refused comes back after the GOAWAY, over a new connection."""


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
    gate.is_draining = True
    gate.end_streams()
    await asyncio.sleep(min(QUIET_S, max(0.0, end - loop.time())))
    stopping = loop.create_task(server.stop(max(0.0, end - loop.time())))
    left = await _in_flight_at(gate, max(0.0, end - loop.time()))
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
