"""Settings of the door, whoever starts it; the ranges are held where settings are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from policy_service.domain.watchdog import WatchdogSettings

LARGEST_MESSAGE_BYTES = 68_157_440
"""A request body as large as the buffers of the generated configuration, and what comes with it."""


def _off(connection: str) -> WatchdogSettings:
    return WatchdogSettings()


@dataclass(frozen=True, slots=True)
class DoorOptions:
    """How the door reads requests and what it says about its decisions."""

    reads_body: bool = False
    """Ask for the request body where neither path nor headers name a route; headers only otherwise."""
    writes_model: bool = False
    """Put the model of the served target into the request body, attempt by attempt."""
    default_route: str = ""
    """Route of requests that name none; empty: such a request is answered 404."""
    caller_header: str = ""
    """Header with the caller's id, set by an earlier filter; empty: the caller is known by the hash of its key."""
    max_wait_ms: int = 0
    """Longest wait in line or for a cooldown before an answer; 0: say `retry-after` at once."""
    explains_always: bool = False
    """Answer with `x-policy-decision` also unasked."""
    holds_streams: bool = True
    """Hold the head of a streamed answer back until its first output, so that an early error can still fail over."""
    connections: frozenset[str] = frozenset()
    """Connections that the Envoy of a stream has clusters of, as it says itself; empty: unknown."""
    watchdog: Callable[[str], WatchdogSettings] = _off
    """Settings of the throughput watchdog for a connection."""
