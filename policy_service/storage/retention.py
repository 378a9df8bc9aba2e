"""How long what the store keeps is kept (spec/fleet.md sections 1 and 2)."""

from __future__ import annotations

from dataclasses import dataclass

from policy_service.domain.ids import DurationMs

HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Retention:
    """Keeping times, ms. Answers and tombstones outlive the oldest token plus the oldest spooled event."""

    feed_ms: DurationMs = HOUR_MS
    answer_ms: DurationMs = 48 * HOUR_MS
    tombstone_ms: DurationMs = 48 * HOUR_MS
    replica_ms: DurationMs = 48 * HOUR_MS
    sighting_ms: DurationMs = 24 * HOUR_MS
    fact_ms: DurationMs = 30 * 24 * HOUR_MS
