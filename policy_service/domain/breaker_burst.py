"""De-duplication of counted failures: an outage seen many times counts once (spec/breaker.md section 5). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.state import Key

NETWORK_WINDOW_MS: DurationMs = 10_000
CONNECTION_WINDOW_MS: DurationMs = 5_000
MAX_CONNECTION_KEYS = 10_000
MAX_PROVIDER_KEYS = 1_000


@dataclass(frozen=True, slots=True)
class BurstState:
    """Time of the last accepted failure. Connection "" is the network-event guard of the provider."""

    KIND: ClassVar[str] = "breaker_burst"
    provider: str
    connection: str = ""
    last_at: Instant | None = None

    @property
    def key(self) -> Key:
        return (self.KIND, self.provider, self.connection)

    @property
    def is_default(self) -> bool:
        return self.last_at is None

    @property
    def generation(self) -> int:
        return 1

    @property
    def window_ms(self) -> DurationMs:
        """How long one accepted failure speaks for the others."""
        return CONNECTION_WINDOW_MS if self.connection else NETWORK_WINDOW_MS

    @classmethod
    def default(cls, key: Key) -> Self:
        return cls(key[1], key[2])


def suppresses(guard: BurstState, at: Instant) -> bool:
    """Is a failure at `at` part of a burst already counted? A late one is measured backwards, by the same window."""
    return guard.last_at is not None and abs(at - guard.last_at) < guard.window_ms


def accept(guard: BurstState, at: Instant) -> BurstState:
    """An accepted failure moves the time; a late one leaves it (fleet.md section 2)."""
    return guard if guard.last_at is not None and guard.last_at > at else replace(guard, last_at=at)


def clear(guard: BurstState, response_at: Instant) -> BurstState:
    """A fresh success on the connection ends the burst, unless the burst began after the answer did."""
    return guard if guard.last_at is None or response_at < guard.last_at else replace(guard, last_at=None)


def expired(guards: Iterable[BurstState], now: Instant) -> list[BurstState]:
    """Guards that a sweep may drop: past their window, and the oldest beyond the bounds."""
    ordered = sorted(guards, key=lambda guard: -(guard.last_at or 0))
    network = [guard for guard in ordered if not guard.connection]
    bound = [guard for guard in ordered if guard.connection]
    over = network[MAX_PROVIDER_KEYS:] + bound[MAX_CONNECTION_KEYS:]
    return over + [guard for guard in network[:MAX_PROVIDER_KEYS] + bound[:MAX_CONNECTION_KEYS] if _is_past(guard, now)]


def _is_past(guard: BurstState, now: Instant) -> bool:
    return guard.last_at is not None and now - guard.last_at >= guard.window_ms
