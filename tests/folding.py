"""Folding a batch without a store: the oracle that the commit's own batches are measured by."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from policy_service.application.events import OutcomeEvent, fold_order
from policy_service.application.report_plan import FoldResult, fold
from policy_service.domain.ids import Instant
from policy_service.domain.policy import Policy
from policy_service.domain.state import StateBook


def fold_batch(
    book: StateBook,
    events: Iterable[OutcomeEvent],
    policy: Policy,
    *,
    known: Collection[str] = (),
    now: Instant | None = None,
    replicas: int | None = None,
) -> dict[str, FoldResult]:
    """Fold events in (instant, id) order; an id that is known, or was folded in this batch, changes nothing.

    Returns results by event id; ids in `known` are left out, for their answers are stored.
    """
    results: dict[str, FoldResult] = {}
    for event in sorted(events, key=fold_order):
        if event.event_id not in known and event.event_id not in results:
            results[event.event_id] = fold(book, event, policy, now=now, replicas=replicas)
    return results
