"""Profiles: the resolved numbers of each mechanism for one provider or connection, as frozen values.

A transition gets its profile as an argument and never asks the settings. `policy` compiles them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from policy_service.domain.ids import DurationMs


@dataclass(frozen=True, slots=True)
class KindThreshold:
    """Opening threshold of one failure kind (breaker.md section 6); no built-in provider sets any."""

    threshold: int | None = None
    immediate: bool = False


@dataclass(frozen=True, slots=True)
class BreakerProfile:
    """Numbers of breaker.md section 3 and the options of section 12. `degradation_threshold` is effective."""

    failure_threshold: int = 5
    degradation_threshold: int = 3
    reset_timeout_ms: DurationMs = 30_000
    max_backoff_multiplier: int = 16
    backoff_escalation_cycles: int = 3
    half_open_probes: int = 1
    successes_to_close: int = 1
    count_mode: str = "net"
    kind_hints: bool = False
    open_ms_by_kind: Mapping[str, DurationMs] = field(default_factory=dict)
    kind_thresholds: Mapping[str, KindThreshold] = field(default_factory=dict)
    per_connection: bool = False
    reopen_jitter: float = 0.0
    quorum_enabled: bool = False
    quorum_min_replicas: int = 2
    quorum_min_connections: int = 2
    slow_start_enabled: bool = False
    slow_start_duration_ms: DurationMs = 30_000
    slow_start_min_share: float = 0.10
    slow_start_aggression: float = 1.0
    slow_start_failure_budget: int = 2


@dataclass(frozen=True, slots=True)
class LadderProfile:
    """Connection ladder (connection_cooldown.md section 2)."""

    base_cooldown_ms: DurationMs = 5_000
    max_backoff_steps: int = 15
    honor_upstream_hints: bool = False
    cap_ms: DurationMs = 120_000


@dataclass(frozen=True, slots=True)
class ProviderCooldownProfile:
    """Window and ladder of provider_cooldown.md."""

    enabled: bool = False
    failure_threshold: int = 15
    failure_window_ms: DurationMs = 1_800_000
    cooldown_ms: DurationMs = 600_000
    min_ms: DurationMs = 5_000
    max_ms: DurationMs = 300_000


@dataclass(frozen=True, slots=True)
class SlowFirstOutput:
    """Lock models that start late (model_lockout.md section 5)."""

    enabled: bool = False
    threshold_ms: DurationMs = 120_000
    events: int = 3
    window_ms: DurationMs = 600_000
    locks_ms: tuple[DurationMs, ...] = (300_000, 600_000, 900_000)


@dataclass(frozen=True, slots=True)
class LockoutProfile:
    """Numbers of the lock writer and the pool lockout (model_lockout.md)."""

    pool_enabled: bool = False
    error_codes: frozenset[int] = frozenset({403, 404, 429, 502, 503, 504})
    base_cooldown_ms: DurationMs = 120_000
    max_cooldown_ms: DurationMs | None = 1_800_000
    """None: the writer works without a maximum."""
    max_backoff_steps: int = 10
    use_exponential_backoff: bool = True
    reset_after_ms: DurationMs = 1_800_000
    slow_first_output: SlowFirstOutput = SlowFirstOutput()


@dataclass(frozen=True, slots=True)
class TerminalProfile:
    """Switches of terminal_states.md."""

    custom_ban_signals: tuple[str, ...] = ()
    auto_disable_banned: bool = False
    auto_disable_scope: str = "all"
    ambiguous_401_soft: bool = False


@dataclass(frozen=True, slots=True)
class HintProfile:
    """Switches of retry_hints.md."""

    extended_texts: bool = True
    extended_reset_headers: bool = True


@dataclass(frozen=True, slots=True)
class RotationProfile:
    """Rotation gate (classification.md section 6)."""

    enabled: bool = False
    on_status: Mapping[int, bool] = field(default_factory=dict)
    threshold: Mapping[int, int] = field(default_factory=dict)
    window_ms: DurationMs = 120_000
    rate_limit_reset_ms: DurationMs = 0


@dataclass(frozen=True, slots=True)
class PoolGuardProfile:
    """guards.md section 6."""

    enabled: bool = False
    max_excluded_share: float = 0.5
    panic_max_in_flight: int = 1


@dataclass(frozen=True, slots=True)
class EarlyProbeProfile:
    """guards.md section 7."""

    enabled: bool = False
    min_block_ms: DurationMs = 600_000
    interval_ms: DurationMs = 300_000
    include_server_stated: bool = False


@dataclass(frozen=True, slots=True)
class WaitProfile:
    """Waiting out a short cooldown (cooldown_wait.md), for routes or direct calls."""

    enabled: bool = True
    max_wait_ms: DurationMs = 90_000
    max_attempts: int = 5
    budget_ms: DurationMs = 300_000

    @property
    def effective(self) -> bool:
        """Waiting needs a positive longest wait and at least one attempt."""
        return self.enabled and self.max_wait_ms > 0 and self.max_attempts > 0


@dataclass(frozen=True, slots=True)
class QueueProfile:
    """Effective limits of one queue limiter (queue_admission.md section 1)."""

    requests_per_minute: int = 60
    min_time_between_requests_ms: DurationMs = 350
    concurrent_requests: int = 6
    max_wait_ms: DurationMs = 30_000
    execution_max_wait_ms: DurationMs = 600_000
    max_queue_depth: int = 0
    """0: off."""
    unbounded_wait: bool = False
    wedge_after_ms: DurationMs = 60_000
    rpm_override: int | None = None
    """Limit declared for the connection; wins over a cap learned from a body."""
