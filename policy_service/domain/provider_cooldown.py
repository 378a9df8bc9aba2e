"""Opt-in memory of failing providers over requests (spec/provider_cooldown.md). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from policy_service.domain.ids import Instant
from policy_service.domain.state import Key


@dataclass(frozen=True, slots=True)
class ProviderCooldownState:
    """Window of a provider (connection "") or count of one connection."""

    KIND: ClassVar[str] = "provider_cooldown"
    provider: str
    connection: str = ""
    failures: tuple[Instant, ...] = ()
    """Failure times of the window; provider entries only."""
    count: int = 0
    """Failures in a row; connection entries only."""
    cooling_until: Instant | None = None
    last_failure_at: Instant | None = None
    last_event_at: Instant | None = None
    fact_id: str = ""

    @property
    def key(self) -> Key:
        return (self.KIND, self.provider, self.connection)

    @property
    def is_default(self) -> bool:
        return not self.failures and not self.count and self.cooling_until is None

    @property
    def generation(self) -> int:
        return 1

    @classmethod
    def default(cls, key: Key) -> Self:
        return cls(key[1], key[2])
