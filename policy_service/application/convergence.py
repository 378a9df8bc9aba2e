"""Convergence: how long after their commit other replicas' changes are in this replica's view (DESIGN section 3)."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from policy_service.domain.ids import DurationMs

KEPT = 1_024
"""Newest changes that the summary speaks of."""


class ConvergenceSummary(NamedTuple):
    """Lags of the newest changes; all 0 without any."""

    changes: int = 0
    """Changes of other replicas seen since the start."""
    p50_ms: DurationMs = 0
    p99_ms: DurationMs = 0
    max_ms: DurationMs = 0


class Convergence:
    """Collects lags."""

    def __init__(self) -> None:
        self._lags: deque[DurationMs] = deque(maxlen=KEPT)
        self._changes = 0

    def note(self, lag_ms: DurationMs) -> None:
        """One change of another replica became visible here `lag_ms` after it was written."""
        self._lags.append(max(0, lag_ms))
        self._changes += 1

    def summary(self) -> ConvergenceSummary:
        """Count and quantiles."""
        if not self._lags:
            return ConvergenceSummary()
        ordered = sorted(self._lags)
        last = len(ordered) - 1
        return ConvergenceSummary(self._changes, ordered[last // 2], ordered[round(last * 0.99)], ordered[-1])
