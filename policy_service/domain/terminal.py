"""Terminal states of a connection: resolution, bounded sequences, and the acts that end them
(spec/terminal_states.md). Pure.

Traffic can bring a connection into a terminal state and never out of it. Every act that ends one raises the
connection's generation, so that outcomes of calls that began before are statistics only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from policy_service.domain.connection_state import (
    ACTIVE,
    BANNED,
    CREDITS_EXHAUSTED,
    EXPIRED,
    TERMINAL_STATES,
    ConnectionState,
)
from policy_service.domain.ids import AuthClass, DurationMs, Instant
from policy_service.domain.profiles import TerminalProfile

__all__ = [
    "BANNED",
    "CREDITS_EXHAUSTED",
    "EXPIRED",
    "TERMINAL_STATES",
    "Evidence",
    "Refusal",
    "Resolution",
    "RetryPermit",
    "change_credential",
    "disables",
    "enter",
    "grant_retry",
    "next_retry_at",
    "refuse",
    "resolve_terminal",
    "retry_due",
    "retry_failed",
    "retry_succeeded",
    "revive",
    "soft_strikes",
    "with_refusal",
    "with_soft_strike",
    "without_streak",
]

LIVE_TOKEN_MS: Final = 60_000
"""A token that is valid for longer than this excuses a 401 (strictly longer)."""
STREAK_WINDOW_MS: Final = 24 * 3_600_000
STREAK_COOLDOWNS_MS: Final = (300_000, 900_000)
RETRY_BASE_MS: Final = 300_000
RETRY_LONGEST_MS: Final = 240 * 60_000
RETRY_LIMIT: Final = 3
TOKEN_TEST_MS: Final = 300_000
SOFT_WINDOW_MS: Final = 3_600_000
SOFT_LIMIT: Final = 3

_HARMLESS_TYPES: Final = frozenset(
    {
        "project_route_error",
        "geo_blocked",
        "oauth_invalid_token",
        "fingerprint_rejection",
        "request_rejected",
        "model_not_found",
    }
)


# -- resolution --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Evidence:
    """What one failure says about the account (section 1)."""

    status: int | None
    error_type: str = ""
    permanent: bool = False
    credits_exhausted: bool = False
    credits_text: bool = False
    returns_by_itself: bool = False
    """The answer names the instant at which the allowance is back: no empty wallet."""
    per_model_quota: bool = False
    web_cookie: bool = False
    ambiguous_auth: bool = False
    """A 401 with ambiguous text, where the soft path is on (section 5)."""
    token_expires_at: Instant | None = None


@dataclass(frozen=True, slots=True)
class Resolution:
    """Outcome of the resolution: a state, or the veto that prevented `expired`."""

    state: str | None = None
    live_token: bool = False
    soft_strike: bool = False


def resolve_terminal(evidence: Evidence, row: ConnectionState, now: Instant) -> Resolution:
    """First matching row of the resolution table; a state of None means the failure is transient."""
    if _is_spent(evidence):
        return Resolution(CREDITS_EXHAUSTED)
    if evidence.permanent:
        return Resolution(BANNED)
    if evidence.error_type in _HARMLESS_TYPES:
        return Resolution()
    if evidence.error_type == "forbidden":
        return Resolution(BANNED)
    if evidence.error_type in ("account_deactivated", "unauthorized") or evidence.status == 401:
        return _resolve_expired(evidence, row, now)
    return Resolution()


def _is_spent(evidence: Evidence) -> bool:
    wallet = evidence.status == 402 or evidence.credits_text
    excused = evidence.per_model_quota or evidence.returns_by_itself
    return evidence.credits_exhausted or (wallet and not excused)


def _resolve_expired(evidence: Evidence, row: ConnectionState, now: Instant) -> Resolution:
    if evidence.token_expires_at is not None and evidence.token_expires_at - now > LIVE_TOKEN_MS:
        return Resolution(live_token=True)
    if evidence.web_cookie and evidence.error_type != "account_deactivated":
        return Resolution()
    if evidence.ambiguous_auth and soft_strikes(row, now) <= SOFT_LIMIT:
        return Resolution(soft_strike=True)
    return Resolution(EXPIRED)


def enter(row: ConnectionState, state: str) -> ConnectionState:
    """Write a terminal state; it has no timer and no streak any more. A terminal row stays as it is."""
    if row.is_terminal:
        return row
    return replace(
        without_streak(row),
        test_status=state,
        rate_limited_until=None,
        limited_since=None,
        hint_source="",
        early_probe=None,
    )


def disables(profile: TerminalProfile, auth: AuthClass) -> bool:
    """True if a ban also switches the connection off; scope `subscription` means OAuth accounts."""
    in_scope = profile.auto_disable_scope == "all" or auth is AuthClass.OAUTH
    return profile.auto_disable_banned and in_scope


# -- streak of refusals ------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Refusal:
    """Effect of one refused request: the streak after it, the cooldown, and whether it bans."""

    streak: int
    cooldown_ms: DurationMs
    counted: bool
    bans: bool = False


def refuse(row: ConnectionState, now: Instant) -> Refusal:
    """Judge one `request_rejected` (section 4); refusals inside the streak's cooldown are one episode."""
    if row.streak_until is not None and now < row.streak_until:
        return Refusal(row.streak, row.streak_until - now, counted=False)
    continues = row.streak_at is not None and now - row.streak_at < STREAK_WINDOW_MS
    streak = row.streak + 1 if continues else 1
    if streak > len(STREAK_COOLDOWNS_MS):
        return Refusal(streak, 0, counted=True, bans=True)
    return Refusal(streak, STREAK_COOLDOWNS_MS[streak - 1], counted=True)


def with_refusal(row: ConnectionState, refusal: Refusal, now: Instant) -> ConnectionState:
    """Store a counted refusal; the one that bans deletes the streak and switches the connection off."""
    if refusal.bans:
        return replace(without_streak(row), active=False)
    if not refusal.counted:
        return row
    return replace(row, streak=refusal.streak, streak_at=now, streak_until=now + refusal.cooldown_ms)


def without_streak(row: ConnectionState) -> ConnectionState:
    """Row without refusals and soft strikes (fresh success, operator, credential change)."""
    return replace(row, streak=0, streak_at=None, streak_until=None, soft_strikes=0, soft_since=None)


# -- soft path ---------------------------------------------------------------------------------------
def soft_strikes(row: ConnectionState, now: Instant) -> int:
    """Strikes within the hour counted from the first, this one included."""
    return row.soft_strikes + 1 if _soft_window_runs(row, now) else 1


def with_soft_strike(row: ConnectionState, now: Instant) -> ConnectionState:
    """Store one ambiguous 401."""
    since = row.soft_since if _soft_window_runs(row, now) else now
    return replace(row, soft_strikes=soft_strikes(row, now), soft_since=since)


def _soft_window_runs(row: ConnectionState, now: Instant) -> bool:
    return row.soft_since is not None and now - row.soft_since < SOFT_WINDOW_MS


# -- bounded retries of an expired connection --------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RetryPermit:
    """Right to try to revive one expired connection."""

    id: str
    expires_at: Instant
    test_token_first: bool
    """The stored access token is still good: test it before a rotating refresh token is spent."""


def next_retry_at(row: ConnectionState) -> Instant | None:
    """Instant at which a revival is due; None where there will be none. Without a last attempt: at once (0)."""
    if row.test_status != EXPIRED or not row.active or row.retry_attempts >= RETRY_LIMIT:
        return None
    if row.retry_at is None:
        return 0
    return row.retry_at + min(RETRY_BASE_MS << row.retry_attempts, RETRY_LONGEST_MS)


def retry_due(row: ConnectionState, now: Instant) -> bool:
    """True if a revival of this connection may be handed out now."""
    due = next_retry_at(row)
    taken = row.retry_permit_until is not None and now < row.retry_permit_until
    return due is not None and now >= due and not taken


def grant_retry(
    row: ConnectionState, permit_id: str, now: Instant, ttl_ms: DurationMs = 60_000
) -> tuple[ConnectionState, RetryPermit | None]:
    """Hand out one revival. One that was handed out before and never reported counts as failed."""
    if row.retry_permit and row.retry_permit_until is not None and now >= row.retry_permit_until:
        row = retry_failed(row, row.retry_at or now)
    if not retry_due(row, now):
        return row, None
    test_first = row.token_expires_at is not None and row.token_expires_at - now > TOKEN_TEST_MS
    permit = RetryPermit(permit_id, now + ttl_ms, test_first)
    return replace(row, retry_permit=permit_id, retry_permit_until=permit.expires_at, retry_at=now), permit


def retry_failed(row: ConnectionState, now: Instant) -> ConnectionState:
    """Record a failed revival; the third one ends them and switches the connection off."""
    if row.test_status != EXPIRED or row.retry_attempts >= RETRY_LIMIT:
        return row
    attempts = row.retry_attempts + 1
    return replace(
        row,
        retry_attempts=attempts,
        retry_at=max(now, row.retry_at or 0),
        retry_permit="",
        retry_permit_until=None,
        active=row.active and attempts < RETRY_LIMIT,
    )


def retry_succeeded(row: ConnectionState, now: Instant) -> ConnectionState:
    """The connection is authenticated again: everything is cleared, attempts included."""
    return revive(row, now)


# -- acts that end a terminal state ------------------------------------------------------------------
def revive(row: ConnectionState, now: Instant) -> ConnectionState:
    """Clean row of the next generation: operator reset or re-test, re-authentication, re-enabling.

    What the gateway knows about token and quota stays.
    """
    return ConnectionState(
        row.provider,
        row.connection,
        test_status=ACTIVE,
        generation=row.generation + 1,
        token_expires_at=row.token_expires_at,
        quota_reset_at=row.quota_reset_at,
        last_event_at=now if row.last_event_at is None else max(now, row.last_event_at),
        fact_id=row.fact_id,
    )


def change_credential(row: ConnectionState, now: Instant, token_expires_at: Instant | None = None) -> ConnectionState:
    """Clean row of the next generation for a new credential; token and quota of the old one are forgotten."""
    return replace(revive(row, now), token_expires_at=token_expires_at, quota_reset_at=None)
