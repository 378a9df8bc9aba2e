"""Provider circuit breaker: CLOSED, DEGRADED, OPEN, HALF_OPEN, probe permits, verdicts (spec/breaker.md).

Pure. One breaker per canonical provider (optionally one per connection). `now` is always an argument.
What time alone does (OPEN to HALF_OPEN) is derived on read by `refresh` and stored by the next transaction
that holds the guard row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Self

from policy_service.domain.ids import Instant
from policy_service.domain.state import Key


class State(StrEnum):
    """States of a breaker."""

    CLOSED = "CLOSED"
    DEGRADED = "DEGRADED"
    OPEN = "OPEN"
    HALF_OPEN = "HALF_OPEN"


class Override(StrEnum):
    """Manual controls (breaker.md section 10)."""

    NONE = ""
    FORCE_OPEN = "force_open"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class ProbePermit:
    """Right to send one trial call in HALF_OPEN."""

    id: str
    generation: int
    round: int
    """Generation at entry to the HALF_OPEN round in which it was granted."""
    replica: str
    decision_id: str
    granted_at: Instant
    expires_at: Instant
    reclaimed: bool = False
    """The slot was given to somebody else; an alive verdict still counts in the same round."""


@dataclass(frozen=True, slots=True)
class BreakerState:
    """One breaker row. Key parts: provider, and the connection for a per-connection breaker ("" otherwise)."""

    KIND: ClassVar[str] = "breaker"
    provider: str
    connection: str = ""
    state: State = State.CLOSED
    override: Override = Override.NONE
    generation: int = 1
    failure_count: int = 0
    last_failure_at: Instant | None = None
    last_failure_kind: str = ""
    rate_limit_count: int = 0
    quota_exhausted_count: int = 0
    transient_count: int = 0
    open_cycle_count: int = 0
    reopen_at: Instant | None = None
    half_open_alive: int = 0
    half_open_round: int = 0
    permits: tuple[ProbePermit, ...] = ()
    last_event_at: Instant | None = None
    quorum_replicas: tuple[str, ...] = ()
    quorum_connections: tuple[str, ...] = ()
    closed_at: Instant | None = None
    """Start of a slow-start ramp; None outside one."""
    ramp_cycles: int = 0
    ramp_failures: int = 0
    ramp_asked: int = 0
    ramp_admitted: int = 0
    fact_id: str = ""
    """Fact of the last transition: the evidence of an exclusion."""

    @property
    def key(self) -> Key:
        return (self.KIND, self.provider, self.connection)

    @property
    def is_default(self) -> bool:
        return self == BreakerState(
            self.provider,
            self.connection,
            generation=self.generation,
            last_event_at=self.last_event_at,
            fact_id=self.fact_id,
        )

    @classmethod
    def default(cls, key: Key) -> Self:
        return cls(key[1], key[2])


@dataclass(frozen=True, slots=True)
class BurstState:
    """De-duplication times (breaker.md section 5). Connection "" is the network-event guard of the provider."""

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

    @classmethod
    def default(cls, key: Key) -> Self:
        return cls(key[1], key[2])
