"""What ReportOutcome is told and what it answers, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from policy_service.application.messages.answer import Degradation
from policy_service.application.messages.request import LeaseContext, QuotaSnapshot
from policy_service.application.messages.token import DecisionToken
from policy_service.domain.ids import AuthClass, DurationMs, Instant, Target
from policy_service.domain.outcome import CallKind, Origin, UsageCounters


class EndKind(StrEnum):
    """How an attempt ended, the arms of the contract's `outcome`."""

    HTTP_STATUS = "http_status"
    NETWORK_ERROR = "network_error"
    CLIENT_CANCELLED = "client_cancelled"
    LOCAL_FAULT = "local_fault"


@dataclass(frozen=True, slots=True)
class LimitResetReport:
    """Result of a step that a CLAIM_LIMIT_RESET action asked for (spec/usage_wall.md section 8.2)."""

    claim_id: str
    step: str
    http_status: int | None = None
    body: bytes = b""
    transport_error: str = ""
    organization_uuid: str = ""


@dataclass(frozen=True, slots=True)
class ReportExtras:
    """Fields of a report that most calls leave unset."""

    error_code: str = ""
    error_type: str = ""
    error_name: str = ""
    error_message: str = ""
    inner_status: int | None = None
    next_target_same_provider: bool = False
    persist: bool = True
    usage: UsageCounters | None = None
    quota: QuotaSnapshot | None = None
    egress_address: str = ""
    token_expires_at: Instant | None = None
    quota_reset_at: Instant | None = None
    own_timeout: bool = False
    own_queue_timeout: bool = False
    target_timeout: bool = False
    """A route's per-target timeout ended the attempt."""
    circuit_open_answer: bool = False
    spare_key: bool = False
    hedge_cancelled: bool = False
    stream_error: bytes = b""
    """Error event met inside a 200 stream."""
    sent_slow: bool = False
    remaining_budget_ms: DurationMs | None = None
    limit_reset: LimitResetReport | None = None
    end_lease: str = ""
    """`OWNER_EXIT`, `CLIENT_CANCELLED` or empty."""
    lease: LeaseContext | None = None
    """Explicit fence; the token's counts where this is None."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd: float | None = None
    failure_kind: str = ""
    first_output_ms: DurationMs | None = None


NO_EXTRAS = ReportExtras()


NO_HEADERS: Mapping[str, str] = {}


class ReportRequest(NamedTuple):
    """One ReportOutcome. Either `token` or `report_id` is set (mapping refuses the rest)."""

    target: Target
    """Served target, as the caller wrote it."""
    end: EndKind
    token: DecisionToken | None = None
    report_id: str = ""
    attempt: int = 0
    attempt_offset_ms: DurationMs | None = None
    final: bool = False
    status: int | None = None
    """HTTP status; None unless `end` is HTTP_STATUS."""
    network_error: str = ""
    """Kind in snake case, such as `connect_refused`; set when `end` is NETWORK_ERROR."""
    fault: str = ""
    """Kind of local fault; set when `end` is LOCAL_FAULT."""
    headers: Mapping[str, str] = NO_HEADERS
    """Lower-case names, first value each; capped (see transport/grpc/mapping)."""
    dropped_headers: int = 0
    body: bytes = b""
    """At most 64 KiB."""
    body_truncated: bool = False
    latency_ms: DurationMs | None = None
    first_byte_ms: DurationMs | None = None
    streamed: bool = False
    bytes_streamed: int = 0
    elapsed_ms: DurationMs | None = None
    """Time since the start of the attempt; reports without a token only."""
    origin: Origin = Origin.UNSET
    auth_class: AuthClass | None = None
    call_kind: CallKind | None = None
    """None: the token's, else client."""
    pool_attempt: bool | None = None
    """None: as the token says."""
    caller_id: str = ""
    request_id: str = ""
    extras: ReportExtras = NO_EXTRAS


class HeardSuccess(NamedTuple):
    """A 2xx under a token, told within the process by a caller that wants no answer."""

    token: DecisionToken
    target: Target
    """As the token names it."""
    attempt_offset_ms: DurationMs
    first_byte_ms: DurationMs
    request: Callable[[], ReportRequest]
    """The report in full, made only where it is judged later."""


class ActionKind(StrEnum):
    """What the gateway does next."""

    RETURN_TO_CLIENT = "return_to_client"
    FALL_BACK = "fall_back"
    RETRY_SAME = "retry_same"
    WAIT_AND_SELECT = "wait_and_select"
    CLAIM_LIMIT_RESET = "claim_limit_reset"


@dataclass(frozen=True, slots=True)
class ClaimStep:
    """HTTP call that the gateway makes for a limit reset."""

    claim_id: str
    step: str
    method: str
    url: str
    body: bytes = b""
    timeout_ms: DurationMs = 5_000


@dataclass(frozen=True, slots=True)
class Action:
    """Next step with its delay and headers; `next_target` only for FALL_BACK, None: select anew."""

    kind: ActionKind
    delay_ms: DurationMs = 0
    set_headers: tuple[tuple[str, str], ...] = ()
    next_target: Target | None = None
    via: str = ""
    reason: str = ""
    claim: ClaimStep | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the outcome means."""

    reason: str
    scope: str
    """Who is blamed: `none`, `request`, `model`, `connection`, `provider`, `local`."""
    restated_status: int | None = None
    retry_after_ms: DurationMs | None = None
    """For the client; None: no header."""
    rule: str = ""
    rule_id: str = ""
    hint_source: str = ""
    failure_kind: str = ""
    is_success: bool = False
    terminal_state: str = ""


class Effect(NamedTuple):
    """One recorded transition (a fact, shortened)."""

    fact_id: str
    mechanism: str
    key: str
    from_state: str
    to_state: str
    until: Instant | None = None
    generation: int = 1


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """Answer to one report."""

    verdict: Verdict
    action: Action
    effects: tuple[Effect, ...] = ()
    durable: bool = True
    ignored: tuple[str, ...] = ()
    """Causes for which evidence was statistics only: `duplicate`, `stale_generation`, `future_generation`,
    `void_permit`, `stale_success`, `suppressed`."""
    pin: str = ""
    """`kept`, `refreshed`, `evicted` or empty."""
    lease_result: str = ""
    """`APPLIED`, `REFUSED` or empty."""
    lease_code: str = ""
    degradations: tuple[Degradation, ...] = ()
    policy_revision: int = 0
    view_age_ms: DurationMs = 0
    is_degraded: bool = False
