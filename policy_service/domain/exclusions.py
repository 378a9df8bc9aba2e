"""Exclusion records: why a target may not run now, and until when (spec/diagnostics.md sections 1 and 2)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from policy_service.domain.ids import Instant, Target


class Mechanism(StrEnum):
    """Who excludes, in the order of the gates."""

    BREAKER = "breaker"
    TERMINAL_STATE = "terminal_state"
    PROVIDER_COOLDOWN = "provider_cooldown"
    CONNECTION_COOLDOWN = "connection_cooldown"
    REQUEST_EXHAUSTION = "request_exhaustion"
    MODEL_LOCKOUT = "model_lockout"
    QUOTA_CUTOFF = "quota_cutoff"
    TOKEN_BUDGET = "token_budget"
    AVAILABILITY = "availability"
    CREDENTIAL_GATE = "credential_gate"
    LEASE = "lease"
    CONCURRENCY = "concurrency"
    ADMISSION = "admission"
    FILTER = "filter"


class Level(StrEnum):
    """What kind of object the exclusion concerns."""

    PROVIDER = "provider"
    CONNECTION = "connection"
    MODEL = "model"
    REQUEST = "request"
    CALLER = "caller"


@dataclass(frozen=True, slots=True)
class ReasonSpec:
    """Fixed properties of one exclusion reason."""

    mechanism: Mechanism
    level: Level
    is_recovery_timer: bool = False


REASONS: dict[str, ReasonSpec] = {
    "forced_open": ReasonSpec(Mechanism.BREAKER, Level.PROVIDER),
    "banned": ReasonSpec(Mechanism.TERMINAL_STATE, Level.CONNECTION),
    "expired": ReasonSpec(Mechanism.TERMINAL_STATE, Level.CONNECTION),
    "credits_exhausted": ReasonSpec(Mechanism.TERMINAL_STATE, Level.CONNECTION),
    "deactivated": ReasonSpec(Mechanism.TERMINAL_STATE, Level.CONNECTION),
    "circuit_open": ReasonSpec(Mechanism.BREAKER, Level.PROVIDER, is_recovery_timer=True),
    "provider_cooldown": ReasonSpec(Mechanism.PROVIDER_COOLDOWN, Level.PROVIDER, is_recovery_timer=True),
    "connection_cooldown": ReasonSpec(Mechanism.CONNECTION_COOLDOWN, Level.CONNECTION, is_recovery_timer=True),
    "request_exhaustion": ReasonSpec(Mechanism.REQUEST_EXHAUSTION, Level.REQUEST),
    "model_lockout": ReasonSpec(Mechanism.MODEL_LOCKOUT, Level.MODEL, is_recovery_timer=True),
    "quota_cutoff": ReasonSpec(Mechanism.QUOTA_CUTOFF, Level.CONNECTION),
    "token_budget": ReasonSpec(Mechanism.TOKEN_BUDGET, Level.CALLER),
    "unavailable": ReasonSpec(Mechanism.AVAILABILITY, Level.CONNECTION),
    "free_tier_drained": ReasonSpec(Mechanism.AVAILABILITY, Level.CONNECTION),
    "disabled": ReasonSpec(Mechanism.AVAILABILITY, Level.CONNECTION),
    "unknown_target": ReasonSpec(Mechanism.AVAILABILITY, Level.CONNECTION),
    "credential_gate": ReasonSpec(Mechanism.CREDENTIAL_GATE, Level.CONNECTION),
    "lease_hidden": ReasonSpec(Mechanism.LEASE, Level.CONNECTION),
    "lease_held": ReasonSpec(Mechanism.LEASE, Level.CONNECTION),
    "lease_not_allowed": ReasonSpec(Mechanism.LEASE, Level.CONNECTION),
    "concurrency_cap": ReasonSpec(Mechanism.CONCURRENCY, Level.CONNECTION),
    "admission_lane": ReasonSpec(Mechanism.ADMISSION, Level.CONNECTION),
    "probe_in_flight": ReasonSpec(Mechanism.BREAKER, Level.PROVIDER),
    "slow_start": ReasonSpec(Mechanism.BREAKER, Level.PROVIDER),
    "tags": ReasonSpec(Mechanism.FILTER, Level.REQUEST),
    "context_overflow": ReasonSpec(Mechanism.FILTER, Level.REQUEST),
    "capability": ReasonSpec(Mechanism.FILTER, Level.REQUEST),
    "context_requirements": ReasonSpec(Mechanism.FILTER, Level.REQUEST),
}


@dataclass(frozen=True, slots=True)
class Exclusion:
    """One excluded target. `until` None: no known end. `evidence_id` is the fact that caused it, if any."""

    target: Target
    reason: str
    until: Instant | None = None
    evidence_id: str = ""
    stage: str = "gate"
    target_key: str = ""
    since: Instant | None = None
    """Start of a soft exclusion, for the pool guard."""
    is_fixed: bool = False
    """The end was stated by the server, or the breaker was forced open: never overridden (guards.md section 6)."""
    cause: str = ""
    """Reason behind a lock or timer, such as `rate_limit_exceeded`; decides whether waiting is worth it."""

    @property
    def spec(self) -> ReasonSpec:
        """Mechanism and level of the reason."""
        return REASONS[self.reason]

    def remaining_ms(self, now: Instant) -> int | None:
        """Time to the end, at least 0; None without a known end."""
        return None if self.until is None else max(0, self.until - now)
