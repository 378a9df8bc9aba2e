"""What a queue limiter learns from the upstream (spec/queue_admission.md section 5). Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from policy_service.domain.gates import Pace
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.profiles import QueueProfile
from policy_service.domain.queue_admission import WINDOW_MS, configured_pace

LEARNED_WRITE_MS: DurationMs = 60_000
"""Learned values are written at most this often per limiter."""
LEARNED_LIFE_MS: DurationMs = 86_400_000
LEARNED_ENTRIES = 2_048
HINT_REFILL = 60
OVER_LIMIT_GAP_MS: DurationMs = 200
_GAP_LEAD_MS = 10


@dataclass(frozen=True, slots=True)
class RateEvidence:
    """What one answer said about the rate. Absent values are None."""

    status: int | None = None
    limit: float | None = None
    """Requests per minute stated by a header."""
    remaining: float | None = None
    reset_ms: DurationMs | None = None
    """Time to the announced reset."""
    body_hint_ms: DurationMs | None = None
    over_limit: bool = False
    body_cap: tuple[float, DurationMs] | None = None
    """(count, window) of a text such as "10 requests per minute"."""


def learn(pace: Pace, profile: QueueProfile, evidence: RateEvidence, now: Instant, queue_budget_ms: DurationMs) -> Pace:
    """Pace after one answer. Headers first, then the 429, the flag and the body cap, which overrule them.

    Args:
        pace: as stored.
        profile: configuration of the limiter, restored by a 429 and by relaxed headers.
        queue_budget_ms: effective wait; a body cap with a longer gap would refuse everything and is ignored.
    """
    learned = _from_headers(pace, profile, evidence, now)
    if evidence.status == 429:
        learned = _from_rate_limit(pace, profile, evidence, now)
    if evidence.over_limit:
        learned = replace(learned, gap_ms=OVER_LIMIT_GAP_MS)
    gap = _body_gap(profile, evidence, queue_budget_ms)
    learned = learned if gap is None else replace(learned, gap_ms=gap)
    if learned is pace:
        return pace
    return replace(learned, learned_at=None if learned == _rebuilt(pace, profile) else now)


def without_stale(pace: Pace, profile: QueueProfile, now: Instant) -> Pace:
    """Pace by configuration where what was learned is too old to be used, else as it stands.

    The state is the fleet's: what a starting replica would ignore, every admission forgets.
    """
    if pace.learned_at is None or is_usable(pace.learned_at, now):
        return pace
    return _rebuilt(pace, profile)


def _from_headers(pace: Pace, profile: QueueProfile, evidence: RateEvidence, now: Instant) -> Pace:
    limit, remaining = evidence.limit, evidence.remaining
    if not limit or not math.isfinite(limit) or limit <= 0:
        return pace
    paced = replace(pace, gap_ms=max(0, math.floor(60_000 / limit) - _GAP_LEAD_MS))
    if remaining is None:
        return paced
    if remaining * 10 < limit:
        refill_in = WINDOW_MS if evidence.reset_ms is None else evidence.reset_ms
        return replace(paced, tokens=max(0, int(remaining)), refill_to=int(limit), refill_at=now + refill_in)
    if remaining * 2 > limit:
        return replace(paced, gap_ms=profile.min_time_between_requests_ms, tokens=None, refill_at=None)
    return paced


def _from_rate_limit(pace: Pace, profile: QueueProfile, evidence: RateEvidence, now: Instant) -> Pace:
    rebuilt = _rebuilt(pace, profile)
    if evidence.body_hint_ms is None:
        return rebuilt
    return replace(rebuilt, tokens=0, refill_to=HINT_REFILL, refill_at=now + evidence.body_hint_ms)


def _rebuilt(pace: Pace, profile: QueueProfile) -> Pace:
    """Learned values are dropped; the last start stays, it happened."""
    return replace(configured_pace(profile), last_start_at=pace.last_start_at)


def _body_gap(profile: QueueProfile, evidence: RateEvidence, queue_budget_ms: DurationMs) -> DurationMs | None:
    if evidence.body_cap is None or profile.rpm_override is not None:
        return None
    count, window_ms = evidence.body_cap
    if count <= 0 or window_ms <= 0:
        return None
    gap = math.ceil(window_ms / count)
    return None if gap > queue_budget_ms else max(gap, profile.min_time_between_requests_ms)


def may_write(last_written_at: Instant | None, now: Instant) -> bool:
    """True if learned values of a limiter may be written again."""
    return last_written_at is None or now - last_written_at >= LEARNED_WRITE_MS


def is_usable(learned_at: Instant, now: Instant) -> bool:
    """True if learned values are young enough to be used."""
    return now - learned_at <= LEARNED_LIFE_MS
