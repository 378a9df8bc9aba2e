"""Database time as this replica knows it (DESIGN section 3, "Time").

An offset to `clock_timestamp()` is learnt from samples with their round trip; in between the monotonic clock
runs. The estimate never falls: after a sample that says it ran ahead it holds still until time has caught up.
"""

from __future__ import annotations

from collections.abc import Callable

from policy_service.application.ports import ClockSample
from policy_service.domain.ids import Instant

_TRUST_MS = 60_000.0
"""A better (shorter) round trip is preferred to a fresh one for this long."""


class DatabaseClock:
    """Estimate of database time.

    Args:
        monotonic_ms: the host's monotonic clock, ms; the host's wall clock is never read.
        bootstrap_ms: instant to start from before the first sample (a store-less start).
    """

    def __init__(self, monotonic_ms: Callable[[], float], bootstrap_ms: Instant = 0) -> None:
        self._monotonic_ms = monotonic_ms
        self._offset = bootstrap_ms - monotonic_ms() if bootstrap_ms else 0.0
        self._round_trip = float("inf")
        self._learnt_at = float("-inf")
        self._last: Instant = 0

    @property
    def round_trip_ms(self) -> float:
        """Round trip of the sample in use; bounds the error of the estimate."""
        return self._round_trip

    def learn(self, sample: ClockSample) -> None:
        """Take a sample unless a recent one had a shorter round trip."""
        round_trip = max(0.0, sample.received_ms - sample.sent_ms)
        stale = sample.received_ms - self._learnt_at > _TRUST_MS
        if round_trip <= self._round_trip or stale:
            self._offset = sample.database_ms - (sample.sent_ms + round_trip / 2)
            self._round_trip = round_trip
            self._learnt_at = sample.received_ms

    def now(self) -> Instant:
        """Estimate of database time, ms; never smaller than an earlier answer."""
        estimate = int(self._monotonic_ms() + self._offset)
        if estimate > self._last:
            self._last = estimate
        return self._last
