"""Forgetting old egress sightings: by an ordinary guarded unit, so that every view hears of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from policy_service.application.ports import Committed, Scope, Unit, UnitResult
from policy_service.domain.egress import EgressSighting
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.state import StateBook

AT_ONCE: Final = 250
"""Connections that one pruning takes: it holds the guards of their providers, and the next one goes on."""


class Units(Protocol):
    async def sighted_before(
        self, oldest: Instant, limit: int, *, timeout_ms: DurationMs
    ) -> Sequence[tuple[str, str]]: ...

    async def run(self, unit: Unit[int], *, timeout_ms: DurationMs) -> Committed[int]: ...


async def prune_sightings(store: Units, oldest: Instant, timeout_ms: DurationMs) -> int:
    """Forget connections seen on an egress address before `oldest`; rows dropped."""
    found = frozenset(await store.sighted_before(oldest, AT_ONCE, timeout_ms=timeout_ms))
    if not found:
        return 0
    scope = Scope(frozenset(provider for provider, _ in found), found)
    return (await store.run(Unit(scope, lambda book, *_: _drop(book, oldest)), timeout_ms=timeout_ms)).value


def is_old(sighting: EgressSighting, oldest: Instant) -> bool:
    """Seen last before `oldest`."""
    return sighting.seen_at is not None and sighting.seen_at < oldest


def _drop(book: StateBook, oldest: Instant) -> UnitResult[int]:
    old = [row for row in book.rows(EgressSighting) if is_old(row, oldest)]
    for row in old:
        book.put(EgressSighting.default(row.key))
    return UnitResult(len(old))
