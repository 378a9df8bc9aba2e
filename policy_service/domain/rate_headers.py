"""Rate headers of an answer as evidence for a queue limiter (spec/queue_admission.md section 5). Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.queue_learning import RateEvidence
from policy_service.domain.retry_headers import read_reset

_LIMIT = ("x-ratelimit-limit-requests", "anthropic-ratelimit-requests-limit", "x-ratelimit-limit", "ratelimit-limit")
_REMAINING = (
    "x-ratelimit-remaining-requests",
    "anthropic-ratelimit-requests-remaining",
    "x-ratelimit-remaining",
    "ratelimit-remaining",
)
_RESET = ("x-ratelimit-reset-requests", "anthropic-ratelimit-requests-reset", "x-ratelimit-reset", "ratelimit-reset")

_OVER_LIMIT = "x-ratelimit-over-limit"
"""Soft: the call was served, the next ones may not be."""
_YES = frozenset({"1", "true", "yes"})


def rate_evidence(
    headers: Mapping[str, str],
    now: Instant,
    *,
    status: int | None = None,
    body_hint_ms: DurationMs | None = None,
    body_cap: tuple[float, DurationMs] | None = None,
) -> RateEvidence:
    """Evidence of one answer; unreadable numbers are absent.

    Args:
        headers: lower-case names, first value each.
        body_hint_ms: waiting time that the body states.
        body_cap: (count, window) that the body states.
    """
    return RateEvidence(
        status=status,
        limit=_number(headers, _LIMIT),
        remaining=_number(headers, _REMAINING),
        reset_ms=_reset(headers, now),
        body_hint_ms=body_hint_ms,
        over_limit=headers.get(_OVER_LIMIT, "").strip().lower() in _YES,
        body_cap=body_cap,
    )


def _reset(headers: Mapping[str, str], now: Instant) -> DurationMs | None:
    return next((wait for name in _RESET if (wait := read_reset(headers.get(name), now)) is not None), None)


def _number(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    """First of the headers that holds a number; the part before a comma or semicolon counts."""
    for name in names:
        text = headers.get(name, "").partition(",")[0].partition(";")[0].strip()
        try:
            value = float(text)
        except ValueError:
            continue
        if math.isfinite(value) and value >= 0:
            return value
    return None
