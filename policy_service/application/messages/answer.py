"""What SelectTarget answers, as values: Dispatch, Wait or Reject with everything that explains it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from policy_service.application.messages.token import DecisionToken, TokenTarget
from policy_service.domain.ids import DurationMs, Instant, Target


class PermitKind(StrEnum):
    """What a permit is for."""

    PROBE = "probe"
    EARLY_PROBE = "early_probe"
    CONCURRENCY = "concurrency"
    QUEUE = "queue"
    PANIC = "panic"


@dataclass(frozen=True, slots=True)
class PermitGrant:
    """A permit handed out with a Dispatch."""

    permit_id: str
    kind: PermitKind
    gate: str
    expires_at: Instant
    execution_limit_ms: DurationMs | None = None
    is_local: bool = False


@dataclass(frozen=True, slots=True)
class Degradation:
    """A change that lets a request run (spec/degradations.md)."""

    name: str
    """`background_to_sync`, `tool_limit` or `emergency_fallback`."""
    reason: str = ""
    warning: str = ""
    tool_limit: int | None = None
    replaced: Target | None = None
    max_output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Handoff:
    """Conversation that moves to another target (strategy context-relay)."""

    from_target: Target
    to_target: Target


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a fusion or pipeline route (spec/strategies.md section 10)."""

    kind: str
    targets: tuple[TokenTarget, ...]
    """Panel or stages in order."""
    judge: TokenTarget | None = None
    min_panel: int = 2
    grace_ms: DurationMs = 8_000
    hard_ms: DurationMs = 90_000
    mode: str = ""
    max_tool_rounds: int = 8


class Affinity(StrEnum):
    """What session affinity did (spec/affinity.md sections 4, 5 and 9)."""

    NONE = "none"
    NO_CALLER = "no_caller"
    CREATED = "created"
    JOINED = "joined"
    """Another replica pinned first; its connection serves."""
    HIT = "hit"
    MOVED = "moved"
    DETOUR = "detour"
    LOCAL = "local"
    """Held in this replica only because the store is away."""


class PermitUse(StrEnum):
    """How the dispatched target stands to its concurrency gate."""

    NOT_NEEDED = "not_needed"
    HELD = "held"
    NONE = "none"
    """Proceeds without the permit it should have (quota-share, on_saturation proceed)."""


@dataclass(frozen=True, slots=True)
class AttemptPolicy:
    """How the gateway is to retry and hedge (spec/strategies.md section 3, dispatch defaults)."""

    max_retries: int = 1
    retry_delay_ms: DurationMs = 2_000
    fallback_delay_ms: DurationMs = 0
    max_set_retries: int = 0
    set_retry_delay_ms: DurationMs = 2_000
    max_dispatches: int = 30
    hedge_delay_ms: DurationMs | None = None
    """None: no hedging."""
    request_timeout_ms: DurationMs = 600_000
    target_timeout_ms: DurationMs | None = None


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Go to `target`; where that fails, to `fallbacks` in order (they need no grant)."""

    target: TokenTarget
    fallbacks: tuple[TokenTarget, ...] = ()
    permits: tuple[PermitGrant, ...] = ()
    no_fail_open: bool = False
    is_probe: bool = False
    is_panic: bool = False
    set_headers: tuple[tuple[str, str], ...] = ()
    strip_headers: tuple[str, ...] = ()
    """Beyond the fixed list of control headers, which the transport always adds."""
    affinity: Affinity = Affinity.NONE
    permit_use: PermitUse = PermitUse.NOT_NEEDED
    waited_ms: DurationMs = 0
    degradations: tuple[Degradation, ...] = ()
    handoff: Handoff | None = None
    plan: Plan | None = None
    attempt_policy: AttemptPolicy | None = None
    """None: the defaults."""
    lease_transitioned: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Come back after `wait_ms` with the token of this answer."""

    wait_ms: DurationMs
    reason: str
    """Normalised reason of spec/cooldown_wait.md section 3, `circuit_open`, or `in_line`."""
    attempts_done: int = 0
    budget_left_ms: DurationMs | None = None
    gate: str = ""
    ticket: int | None = None
    line_depth: int | None = None


@dataclass(frozen=True, slots=True)
class Reject:
    """No target; every field of spec/diagnostics.md section 4."""

    http_status: int
    code: str
    type: str
    terminal_reason: str
    recovery: str = ""
    """`wait`, `switch-combo`, `try-auto`, `retry` or empty."""
    message: str = ""
    retry_after_s: int | None = None
    pool_size: int = 0
    attempted: int = 0
    gate: str = ""
    line_depth: int | None = None
    eligible_count: int | None = None
    free_count: int | None = None


class Exclusion(NamedTuple):
    """Why one target is not offered (spec/diagnostics.md section 1)."""

    target: Target
    mechanism: str
    reason: str
    until: Instant | None = None
    remaining_ms: DurationMs | None = None
    evidence_id: str = ""
    stage: str = "gate"
    key: str = ""


@dataclass(frozen=True, slots=True)
class ExplainedInput:
    """One strategy input with its source: `request`, `learned` or `catalogue`."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class ExplainedTarget:
    """One target in the order of the strategy."""

    target: Target
    key: str = ""
    score: float | None = None
    gates_passed: tuple[str, ...] = ()
    inputs: tuple[ExplainedInput, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the answer is what it is (spec/diagnostics.md section 6)."""

    strategy: str
    chosen_by: str = ""
    """Rule that chose the first target."""
    order: tuple[ExplainedTarget, ...] = ()
    affinity: str = ""
    pin_connection: str = ""
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class SelectAnswer:
    """One decision. Not frozen: it is built once for every decision, and freezing doubles the cost of that."""

    decision_id: str
    verdict: Dispatch | Wait | Reject
    token: DecisionToken | None = None
    """None for a Reject that leaves nothing to report or to come back with."""
    exclusions: tuple[Exclusion, ...] = ()
    decided_at: Instant = 0
    policy_revision: int = 0
    view_age_ms: DurationMs = 0
    is_degraded: bool = False
    degraded_reasons: tuple[str, ...] = ()
    request_id: str = ""
    explanation: Explanation | None = None
    strategy: str = ""
    pool_size: int = 0
    excluded_count: int = 0
    """All exclusions of the decision; `exclusions` lists them for negative answers, on request, and for traces."""
