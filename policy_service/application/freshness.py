"""Freshness: how old the view is and whether answers are degraded (stamped on every answer)."""

from __future__ import annotations

from collections.abc import Callable

from policy_service.application.view import View
from policy_service.domain.ids import DurationMs, Instant

STORE_AWAY = "store_away"
VIEW_STALE = "view_stale"


class Freshness:
    """Age and degradation of the view.

    Args:
        store_away: true while the store counts as away.
        stale_after_ms: age beyond which answers are stamped degraded.
    """

    def __init__(self, view: View, store_away: Callable[[], bool], stale_after_ms: DurationMs = 2_000) -> None:
        self._view = view
        self._store_away = store_away
        self._stale_after_ms = stale_after_ms

    def stamp(self, now: Instant) -> tuple[DurationMs, tuple[str, ...]]:
        """(view age in ms, reasons of degradation; empty while all is well)."""
        age = max(0, now - self._view.as_of)
        if age <= self._stale_after_ms and not self._store_away():
            return age, ()
        reasons = [STORE_AWAY] if self._store_away() else []
        if age > self._stale_after_ms:
            reasons.append(VIEW_STALE)
        return age, tuple(reasons)
