"""Cutting the books of the store by age. No view holds them, so that nobody has to hear of it."""

from __future__ import annotations

from policy_service.domain.ids import Instant
from policy_service.storage.postgres import statements
from policy_service.storage.postgres.session import Session
from policy_service.storage.postgres.tables import STATE_TABLES
from policy_service.storage.retention import Retention


async def prune(session: Session, retention: Retention, now: Instant) -> dict[str, int]:
    """Cut the books by age; rows dropped by table."""
    cuts = {
        "state_feed": (statements.PRUNE_FEED, retention.feed_ms),
        "report_answer": (statements.prune_by_age("report_answer", "written_at"), retention.answer_ms),
        "replica": (statements.prune_by_age("replica", "seen_at"), retention.replica_ms),
        "fact": (statements.prune_by_age("fact", "at"), retention.fact_ms),
    }
    cuts |= {kind: (statements.prune_tombstones(kind), retention.tombstone_ms) for kind in STATE_TABLES}
    async with session.connect() as connection:
        return {
            table: (await session.execute(connection, statement, now - kept_ms))[0][0]
            for table, (statement, kept_ms) in cuts.items()
        }
