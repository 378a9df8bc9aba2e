"""A model that has left the free tier of its provider is out of use for good (spec/guards.md section 1). Pure.

It is a lock without an end that anybody would wait for: a success, an operator or an early probe brings the model back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.lockout import ModelLockState, Place, extend_lock
from policy_service.domain.lockout_keys import BARE

REMOVED: Final = "free_tier_drained"
"""Reason of the lock, and of the exclusion that it makes."""
FOR_GOOD_MS: Final[DurationMs] = 100 * 365 * 24 * 3_600_000


def removed(row: ModelLockState, place: Place, at: Instant) -> ModelLockState:
    """Row of the model's bare key, locked for good; one that is removed already stays as it is."""
    if row.reason == REMOVED and row.until is not None:
        return row
    named = replace(row, model=place.model, written_as=BARE, last_failure_at=max(at, row.last_failure_at or at))
    return extend_lock(named, at, at + FOR_GOOD_MS, REMOVED)
