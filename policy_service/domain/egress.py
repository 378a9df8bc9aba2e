"""Egress-bucketed lock: cool the siblings that share an exhausted address (spec/egress_lock.md). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from policy_service.domain.ids import Instant
from policy_service.domain.state import Key


@dataclass(frozen=True, slots=True)
class EgressSighting:
    """Connection seen on an egress address; kept for 24 h with its newest time."""

    KIND: ClassVar[str] = "egress_sighting"
    provider: str
    connection: str
    address: str
    seen_at: Instant | None = None

    @property
    def key(self) -> Key:
        return (self.KIND, self.provider, self.connection, self.address)

    @property
    def is_default(self) -> bool:
        return self.seen_at is None

    @property
    def generation(self) -> int:
        return 1

    @classmethod
    def default(cls, key: Key) -> Self:
        return cls(key[1], key[2], key[3])
