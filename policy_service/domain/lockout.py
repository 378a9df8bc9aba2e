"""Model lockout: one model of one connection out of use (spec/model_lockout.md). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from policy_service.domain.cooldown import EarlyProbe
from policy_service.domain.ids import Instant
from policy_service.domain.state import Key


@dataclass(frozen=True, slots=True)
class ModelLockState:
    """Lock and counter of one key. `key_kind` is `family`, `bare` or `exact`; `model_key` the key's text."""

    KIND: ClassVar[str] = "model_lock"
    provider: str
    connection: str
    key_kind: str
    model_key: str
    model: str = ""
    """Bare model name for listings."""
    until: Instant | None = None
    locked_at: Instant | None = None
    reason: str = ""
    failure_count: int = 0
    last_failure_at: Instant | None = None
    reset_after_ms: int = 0
    last_cooldown_ms: int = 0
    hint_source: str = ""
    generation: int = 1
    slow_events: tuple[Instant, ...] = ()
    slow_step: int = 0
    early_probe: EarlyProbe | None = None
    last_event_at: Instant | None = None
    fact_id: str = ""

    @property
    def key(self) -> Key:
        return (self.KIND, self.provider, self.connection, self.key_kind, self.model_key)

    @property
    def is_default(self) -> bool:
        return self.until is None and self.failure_count == 0 and not self.slow_events and not self.slow_step

    @classmethod
    def default(cls, key: Key) -> Self:
        return cls(key[1], key[2], key[3], key[4])


@dataclass(frozen=True, slots=True)
class FamilyPoolState:
    """Timer of one family pool of a connection (connection_cooldown.md steps 4 and 19)."""

    KIND: ClassVar[str] = "family_pool"
    provider: str
    connection: str
    pool: str
    limited_until: Instant | None = None
    last_event_at: Instant | None = None
    fact_id: str = ""

    @property
    def key(self) -> Key:
        return (self.KIND, self.provider, self.connection, self.pool)

    @property
    def is_default(self) -> bool:
        return self.limited_until is None

    @property
    def generation(self) -> int:
        return 1

    @classmethod
    def default(cls, key: Key) -> Self:
        return cls(key[1], key[2], key[3])
