"""What SelectTarget is asked, as values. Ids are as the caller wrote them.

Values that occur once per candidate are NamedTuples: building a frozen dataclass costs several times as
much, and a request may carry ten thousand of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from policy_service.application.messages.token import DecisionToken
from policy_service.domain.ids import AuthClass, DurationMs, Instant
from policy_service.domain.outcome import CallKind


class QuotaWindow(NamedTuple):
    """One window of a quota snapshot; `used_percent` 0 .. 100, `reset_at` None where unknown."""

    name: str
    used_percent: float
    reset_at: Instant | None = None


@dataclass(frozen=True, slots=True)
class QuotaSnapshot:
    """What the gateway read about the quota of one connection (spec/strategies.md section 2)."""

    windows: tuple[QuotaWindow, ...] = ()
    used_percent: float | None = None
    limit_reached: bool = False
    reset_at: Instant | None = None
    taken_at: Instant | None = None
    """None: the arrival of the request."""


@dataclass(frozen=True, slots=True)
class CandidateInputs:
    """Strategy inputs stated with the request; they win over learned and catalogue values. None: not stated."""

    input_price: float | None = None
    output_price: float | None = None
    context_window: int | None = None
    capabilities: tuple[str, ...] = ()
    has_capabilities: bool = False
    """True: `capabilities` is the whole list, also when it is empty."""
    quota: QuotaSnapshot | None = None
    latency_avg_ms: float | None = None
    latency_p95_ms: float | None = None
    latency_stddev_ms: float | None = None
    success_rate: float | None = None
    error_rate: float | None = None
    request_count: int | None = None
    last_used_at: Instant | None = None
    consecutive_count: int | None = None
    tier: str = ""
    quality: float | None = None
    task_fitness: float | None = None
    connection_count: int | None = None
    tags: tuple[str, ...] = ()


class Candidate(NamedTuple):
    """One inline candidate. Without a connection any connection of the provider may serve."""

    provider: str
    connection: str = ""
    model: str = ""
    weight: float = 1.0
    priority: int = 0
    auth_class: AuthClass | None = None
    key: str = ""
    """Key of the target in its route; empty: the use case derives one."""
    fallback_only_on_quota: bool = False
    max_concurrent: int | None = None
    """Cap stated inline; the catalogue's wins. None or below 1: no cap."""
    inputs: CandidateInputs | None = None


class EarlierAttempt(NamedTuple):
    """An attempt already made for this client request; its target is not tried again."""

    provider: str
    connection: str = ""
    model: str = ""
    status: int | None = None
    reason: str = ""
    """Verdict reason as answered by ReportOutcome; empty where the gateway did not report."""
    scope: str = ""
    """Scope of blame as answered by ReportOutcome."""
    code: str = ""
    retry_hint_ms: DurationMs | None = None
    kind: str = ""
    """Failure kind of spec/diagnostics.md section 4, where known."""


@dataclass(frozen=True, slots=True)
class LeaseContext:
    """Lease context of a request; `owner_hash` because the token itself ends at the edge (spec/leases.md section 2)."""

    owner_hash: str
    generation: int | None
    """None where the caller sent none."""
    problem: str = ""
    """`LEASE_CONTEXT_REQUIRED` (owner absent) or `LEASE_CONTEXT_INVALID`; raised only after the caller's scope was
    checked. An absent generation is the use case's to refuse, because AcquireLease needs none."""


@dataclass(frozen=True, slots=True)
class SessionSource:
    """Where the session key is derived from (spec/affinity.md section 1) when no ready key is given."""

    headers: Mapping[str, str] = field(default_factory=dict)
    """Lower-case names, first value each."""
    metadata_session_id: str | None = None
    metadata_session_id_camel: str | None = None
    conversation_id: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    metadata_prompt_cache_key: str | None = None
    first_user_text: str | None = None


NO_SESSION = SessionSource()


@dataclass(frozen=True, slots=True)
class RequestTraits:
    """What the strategies, filters and degradations want to know of the client request. Empty or None: not stated."""

    tags: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    """Needed ones, such as `tools`, `vision`."""
    required_context: int | None = None
    tool_count: int = 0
    background: bool = False
    task: str = ""
    specificity: float | None = None
    tier: str = ""
    mode: str = ""
    router: str = ""
    budget_fallback: str = ""
    stable_prefix_hash: str = ""
    pinned_model: str = ""
    premium_only: bool = False
    max_p95_ms: float | None = None
    max_error_rate: float | None = None
    seed: int | None = None
    allow_cooling: bool = False


NO_TRAITS = RequestTraits()


class SelectRequest(NamedTuple):
    """One SelectTarget. Exactly one of `route` and `candidates` is set (mapping refuses the rest)."""

    request_id: str
    """Never empty: the transport draws one where the caller sent none, and says so in `is_retry_safe`."""
    route: str = ""
    candidates: tuple[Candidate, ...] = ()
    strategy: str = ""
    """Of inline candidates; empty: priority."""
    strategy_options: Mapping[str, object] | None = None
    is_retry_safe: bool = True
    caller_id: str = ""
    caller_key_sha256: str = ""
    session_key: str = ""
    session: SessionSource = NO_SESSION
    affinity_ttl_ms: DurationMs = 0
    """0: the setting."""
    estimated_tokens: int | None = None
    wait_budget_ms: DurationMs | None = None
    """None: the caller does not wait beyond the settings; 0: not at all."""
    deadline_ms: DurationMs | None = None
    """Time left of the whole client request, from arrival."""
    start_timeout_ms: DurationMs | None = None
    cost_budget_usd: float | None = None
    allow_wait: bool = True
    """False: never answer Wait and never stand in line."""
    earlier_attempts: tuple[EarlierAttempt, ...] = ()
    lease: LeaseContext | None = None
    call_kind: CallKind = CallKind.CLIENT
    forced_connection: str = ""
    allowed_connections: tuple[str, ...] = ()
    """Narrows the caller's list for this request; empty: no narrowing."""
    max_fallbacks: int = 8
    explain: bool = False
    previous: DecisionToken | None = None
    """Token of the Wait answer that this call follows, opened; carries attempts and time spent."""
    traits: RequestTraits = NO_TRAITS
