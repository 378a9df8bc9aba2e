"""Successes that the view could not judge yet (spec/fleet.md section 2).

A success is dropped as needless only when the view's as-of instant has reached the attempt's evidence: before
that, a failure committed elsewhere may still be on its way here. Until then it waits in a bounded ring, newest
per target kept, and is judged when the view arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from policy_service.application.view import View
from policy_service.domain.ids import DurationMs, Instant, Target

RING_ENTRIES = 4_096
RING_MS: DurationMs = 5_000

S = TypeVar("S")


class Waiting(NamedTuple, Generic[S]):
    """A success that waits: its target, when its first byte came, when it was reported, and the report itself."""

    target: Target
    response_at: Instant
    at: Instant
    report: S


class SuccessRing(Generic[S]):
    """Waiting successes by target.

    Args:
        apply: called with a report whose provider has state when the view has reached its evidence.
    """

    def __init__(self, view: View, apply: Callable[[S], None]) -> None:
        self._view = view
        self._apply = apply
        self._waiting: dict[Target, Waiting[S]] = {}
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(self, success: Waiting[S]) -> None:
        """Keep a success until the view has reached its evidence; the newest of a target replaces older ones."""
        if success.response_at <= self._view.as_of:
            return
        known = self._waiting.get(success.target)
        if known is not None and known.response_at > success.response_at:
            return
        self._waiting[success.target] = success
        if len(self._waiting) > RING_ENTRIES:
            self._waiting.pop(next(iter(self._waiting)))
            self.dropped += 1

    def judge(self, now: Instant) -> None:
        """Decide on every success whose evidence the view has reached; give up on those older than 5 s."""
        as_of = self._view.as_of
        due = [w for w in self._waiting.values() if w.response_at <= as_of or now - w.at > RING_MS]
        for success in due:
            del self._waiting[success.target]
            if success.response_at <= as_of and self._view.provider_rows(success.target.provider) is not None:
                self._apply(success.report)
