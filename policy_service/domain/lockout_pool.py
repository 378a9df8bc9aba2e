"""Pool lockout: what one failed attempt of a pool hands to the lock writer (spec/model_lockout.md section 5). Pure."""

from __future__ import annotations

from typing import Final

from policy_service.domain.ids import DurationMs
from policy_service.domain.lockout import LockEvidence
from policy_service.domain.profiles import LockoutProfile

_POOL_REASONS: Final = {429: "rate_limit", 403: "quota_exhausted", 404: "not_found", 408: "server_error"}
MODEL_SCOPED_400_MS: Final = 3_600_000


def pool_evidence(
    status: int, hint_ms: DurationMs, hint_source: str, model_scoped_400: bool, profile: LockoutProfile
) -> LockEvidence | None:
    """What the pool lockout hands to the writer for one failed attempt (section 5); None: nothing.

    Args:
        hint_ms: parsed hint, 0 without one.
        model_scoped_400: a 400 about the model itself, on a provider that counts per model.
    """
    if not profile.pool_enabled:
        return None
    if status == 400 and model_scoped_400:
        return LockEvidence(400, "model_capacity", exact_ms=MODEL_SCOPED_400_MS, uncapped=True)
    if status not in profile.error_codes:
        return None
    base = profile.base_cooldown_ms
    flat = 0 if profile.use_exponential_backoff else base
    exact, source = (hint_ms, hint_source) if hint_ms > base else (flat, "")
    reason = _POOL_REASONS.get(status, "server_error" if status >= 500 else "unknown")
    return LockEvidence(status, reason, base, exact, source, until_midnight=False)
