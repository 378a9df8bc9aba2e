"""Forgetting old egress sightings: by an ordinary guarded unit, so that every view hears of it."""

from __future__ import annotations

from typing import Protocol

from policy_service.application.ports import Committed, Feed, Scope, Unit, UnitResult
from policy_service.domain.egress import EgressSighting
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.state import StateBook


class Units(Protocol):
    async def load(self, *, timeout_ms: DurationMs) -> Feed: ...

    async def run(self, unit: Unit[int], *, timeout_ms: DurationMs) -> Committed[int]: ...


async def prune_sightings(store: Units, oldest: Instant, timeout_ms: DurationMs) -> int:
    """Forget connections seen on an egress address before `oldest`; rows dropped."""
    state = await store.load(timeout_ms=timeout_ms)
    providers = {row.provider for _, row in state.rows if isinstance(row, EgressSighting) and _is_old(row, oldest)}
    if not providers:
        return 0
    unit = Unit(Scope(frozenset(providers), whole_providers=frozenset(providers)), lambda book, *_: _drop(book, oldest))
    return (await store.run(unit, timeout_ms=timeout_ms)).value


def _is_old(sighting: EgressSighting, oldest: Instant) -> bool:
    return sighting.seen_at is not None and sighting.seen_at < oldest


def _drop(book: StateBook, oldest: Instant) -> UnitResult[int]:
    old = [row for row in book.rows(EgressSighting) if _is_old(row, oldest)]
    for row in old:
        book.put(EgressSighting.default(row.key))
    return UnitResult(len(old))
