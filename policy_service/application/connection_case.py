"""One failure of one connection with everything the failure algorithm looks at, and the plan it leads to
(spec/connection_cooldown.md section 4). Values; nothing here writes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from policy_service.domain import classification, cooldown, error_types, signals, terminal
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.decision_record import Classification, DecisionRecord, Mode, Reason
from policy_service.domain.ids import AuthClass, DurationMs, Generations, Instant
from policy_service.domain.lockout import LockEvidence, Place
from policy_service.domain.outcome import CallKind, Outcome
from policy_service.domain.policy import ConnectionPolicy
from policy_service.domain.reading import Reading


@dataclass(frozen=True, slots=True)
class Attempt:
    """Circumstances of one reported attempt (spec/fleet.md sections 1 and 2)."""

    at: Instant
    """Database time of arrival; deadlines count from here."""
    started_at: Instant
    generations: Generations | None = None
    """None: judged against the current generations."""
    permit_id: str = ""
    """Early-probe permit that the decision held; empty without one."""
    breaker_blocks: bool = False
    """The provider's breaker refuses calls: no model is locked for a failure of that provider."""


class Errors(Enum):
    """How much of the failure the row remembers."""

    NONE = 0
    SHORT = 1
    """Text, type and code only (health checks)."""
    FULL = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What one failure does; `step` is the row of the algorithm that decided."""

    step: int
    fallback: bool = True
    cooldown_ms: DurationMs = 0
    reason: str = ""
    errors: Errors = Errors.NONE
    takes_level: bool = False
    timer_ms: DurationMs | None = None
    clears_timer: bool = False
    terminal: str = ""
    lock: LockEvidence | None = None
    blames_connection: bool = False
    """An uncounted failure of the connection itself: nothing of it is stored but that it was heard of."""
    unlocked: LockEvidence | None = None
    """Lock that a running timer has left no room for; the model's row only hears of the failure."""
    blames_pool: bool = False
    """An uncounted failure of the model's family."""
    pool_ms: DurationMs | None = None
    cools_siblings: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One failure under judgement. `record` is what classification says, `settled` what holds once the account
    itself was judged (step 16)."""

    outcome: Outcome
    policy: ConnectionPolicy
    row: ConnectionState
    at: Instant
    late: bool
    text: str
    record: DecisionRecord
    settled: DecisionRecord
    error_type: str
    resolution: terminal.Resolution
    refusal: terminal.Refusal | None
    pool_until: Instant | None = None
    """End of the timer of the model's family pool."""

    @property
    def status(self) -> int:
        """Status after restatement; 0 without one."""
        return self.outcome.status or 0

    @property
    def model(self) -> str:
        """Model of the call; empty where it names none."""
        return self.outcome.model

    @property
    def place(self) -> Place:
        """Where locks of the model lie."""
        return Place(self.row.provider, self.row.connection, self.model, self.policy.provider)

    @property
    def is_local(self) -> bool:
        """A provider on this machine or network, by class or by the connection's base URL."""
        return self.policy.auth_class is AuthClass.LOCAL or self.policy.connection.base_url_is_local

    @property
    def may_cool(self) -> bool:
        """The connection takes timers."""
        return not self.policy.connection.disable_cooling

    @property
    def stated_by(self) -> str:
        """Source of the hint that sets the duration; empty where the service's own numbers do."""
        used = self.settled.used_upstream_retry_hint and self.settled.retry_hint_source is not None
        return str(self.settled.retry_hint_source) if used else ""

    @property
    def is_isolated_check(self) -> bool:
        """A diagnostic call that must not change how traffic is served."""
        return self.outcome.call_kind is not CallKind.CLIENT and not self.policy.health_check_can_disable

    @property
    def is_cooling(self) -> bool:
        """The timer covers the instant of this failure."""
        covers = cooldown.was_cooling_at if self.late else cooldown.is_cooling
        return covers(self.row, self.at)


def build_case(
    outcome: Outcome, c: Classification, policy: ConnectionPolicy, row: ConnectionState, attempt: Attempt
) -> Case:
    """Resolve the classification against the row and judge the account."""
    late = row.last_event_at is not None and attempt.at < row.last_event_at
    # A late failure takes the step that the newer one took, so that a reordered burst is as long as an ordered one.
    level = max(0, row.backoff_level - 1) if late else row.backoff_level
    row_seen = _with_reported_ends(row, outcome)
    reading = Reading(outcome, policy, attempt.at)
    record = _resolved(c, level, policy, row_seen, attempt.at)
    record = record._replace(ambiguous_auth=record.ambiguous_auth or _is_ambiguous(reading))
    error_type = error_types.error_type_of(reading)
    evidence = _evidence(outcome, record, error_type, policy, row_seen, reading)
    resolution = terminal.resolve_terminal(evidence, row, attempt.at)
    refusal = terminal.refuse(row, attempt.at) if error_type == "request_rejected" and not resolution.state else None
    settled = record
    if resolution.live_token:
        settled = _resolved(as_auth_ladder(c), level, policy, row_seen, attempt.at)
    if refusal is not None:
        settled = record._replace(cooldown_ms=refusal.cooldown_ms, new_backoff_level=None)
    return Case(
        outcome, policy, row_seen, attempt.at, late, reading.text, record, settled, error_type, resolution, refusal
    )


def as_auth_ladder(c: Classification) -> Classification:
    """A 401 of a token that is still alive cools by the ladder."""
    return c._replace(mode=Mode.LADDER, reason=Reason.AUTH_ERROR, ignore_hint=False, new_level=None)


def _with_reported_ends(row: ConnectionState, outcome: Outcome) -> ConnectionState:
    token = row.token_expires_at if outcome.token_expires_at is None else outcome.token_expires_at
    quota = row.quota_reset_at if outcome.quota_reset_at is None else outcome.quota_reset_at
    return replace(row, token_expires_at=token, quota_reset_at=quota)


def _resolved(
    c: Classification, level: int, policy: ConnectionPolicy, row: ConnectionState, now: Instant
) -> DecisionRecord:
    """Record at a ladder level; a quota end known from elsewhere beats rule, hint and ladder (section 3 row 2)."""
    record = classification.resolve(c, level, policy)
    known_end = row.quota_reset_at
    if known_end is None or known_end <= now or record.reason != Reason.QUOTA_EXHAUSTED:
        return record
    return record._replace(
        cooldown_ms=known_end - now,
        new_backoff_level=None,
        used_upstream_retry_hint=False,
        retry_hint_source=None,
        configured_cooldown_ms=None,
    )


def _evidence(
    outcome: Outcome,
    record: DecisionRecord,
    error_type: str,
    policy: ConnectionPolicy,
    row: ConnectionState,
    reading: Reading,
) -> terminal.Evidence:
    return terminal.Evidence(
        outcome.status,
        error_type,
        permanent=record.permanent,
        credits_exhausted=record.credits_exhausted or is_empty_shared_wallet(outcome, policy, reading.text),
        credits_text=error_types.has_credits_text(reading),
        returns_by_itself=record.returns_by_itself,
        per_model_quota=policy.counts_per_model,
        web_cookie=policy.provider.web_cookie,
        ambiguous_auth=policy.terminal.ambiguous_401_soft and record.ambiguous_auth,
        token_expires_at=row.token_expires_at,
    )


def _is_ambiguous(reading: Reading) -> bool:
    """A 401 of a provider with the soft path that does not say that the credential is dead (section 5)."""
    if reading.status != 401 or not reading.policy.terminal.ambiguous_401_soft:
        return False
    return not signals.AMBIGUOUS_401_EXCLUDED.found_in(reading.text)


def is_empty_shared_wallet(outcome: Outcome, policy: ConnectionPolicy, text: str) -> bool:
    """A 402 of a provider whose accounts share one wallet, saying nothing else (terminal_states.md section 3)."""
    silent = not text.strip() or "usage balance exhausted" in text
    return outcome.status == 402 and policy.provider.shared_wallet_402 and silent
