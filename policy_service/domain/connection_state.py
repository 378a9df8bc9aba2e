"""The row of one connection: what the timer, the ladder, terminal states and streaks remember about it.

Values only. `cooldown` and `terminal` are the mechanisms that change it and do not know each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from policy_service.domain.ids import Instant
from policy_service.domain.state import Key

ACTIVE = "active"
UNAVAILABLE = "unavailable"
BANNED = "banned"
EXPIRED = "expired"
CREDITS_EXHAUSTED = "credits_exhausted"
TERMINAL_STATES = frozenset({BANNED, EXPIRED, CREDITS_EXHAUSTED, "deactivated"})
"""States that end only by operator, credential change or re-enabling (spec/terminal_states.md)."""


@dataclass(frozen=True, slots=True)
class EarlyProbe:
    """Early-probe permit of a long block (spec/guards.md section 7)."""

    id: str
    granted_at: Instant
    expires_at: Instant
    used: bool = False
    """True once its test failed; the next permit then waits for the interval."""


@dataclass(frozen=True, slots=True)
class ConnectionState:
    """One row per connection that is not in its default state."""

    KIND: ClassVar[str] = "connection"
    provider: str
    connection: str
    test_status: str = ACTIVE
    active: bool = True
    """Switched on; a permanent error may switch the connection off."""
    generation: int = 1
    rate_limited_until: Instant | None = None
    limited_since: Instant | None = None
    """Start of the running timer; the length of a block is counted from here."""
    hint_source: str = ""
    """Source of the hint behind the timer; empty for the service's own durations."""
    backoff_level: int = 0
    last_error: str = ""
    last_error_type: str = ""
    last_error_source: str = ""
    error_code: str = ""
    last_error_at: Instant | None = None
    streak: int = 0
    streak_at: Instant | None = None
    streak_until: Instant | None = None
    retry_attempts: int = 0
    retry_at: Instant | None = None
    """Newest attempt to revive an expired connection."""
    retry_permit: str = ""
    """Id of the revival handed out and not reported yet; empty without one."""
    retry_permit_until: Instant | None = None
    soft_strikes: int = 0
    soft_since: Instant | None = None
    token_expires_at: Instant | None = None
    quota_reset_at: Instant | None = None
    rotation_failures: tuple[tuple[int, Instant], ...] = ()
    """(status, instant) of the failures within the rotation window; kept only while the gate is on."""
    early_probe: EarlyProbe | None = None
    last_event_at: Instant | None = None
    fact_id: str = ""
    failure_heard_at: Instant | None = None
    """Newest failure that arrived, counted or not: a success of a call that began before it clears nothing."""

    @property
    def key(self) -> Key:
        return (self.KIND, self.provider, self.connection)

    @property
    def is_default(self) -> bool:
        return self == ConnectionState(
            self.provider,
            self.connection,
            generation=self.generation,
            last_event_at=self.last_event_at,
            fact_id=self.fact_id,
        )

    @property
    def is_terminal(self) -> bool:
        """True in a state that traffic can neither set aside nor end."""
        return self.test_status in TERMINAL_STATES

    @classmethod
    def default(cls, key: Key) -> Self:
        return cls(key[1], key[2])
