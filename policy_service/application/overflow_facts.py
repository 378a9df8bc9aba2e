"""Facts of exclusions that the pool guard leaves without effect (spec/guards.md section 6, docs/adr/0008).

Which exclusions those are is a function of the view, so every replica finds the same ones and names the fact alike:
the first to write it records it for the fleet. Written beside the calls, once for each exclusion and pool.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from typing import Final

from policy_service.application.pools import Pool
from policy_service.application.ports import Clock, Scope, Store, StoreUnavailableError, Unit, UnitResult
from policy_service.application.selection_answers import pool_name
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.facts import Fact
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.pool_guard import MECHANISM, NOT_ENFORCED, OVERFLOW

log = logging.getLogger(__name__)

REMEMBERED: Final = 4_096
WRITE_MS: Final[DurationMs] = 2_000


class OverflowFacts:
    """Records exclusions that take no effect.

    Args:
        replica: name of this replica, as facts have it.
    """

    def __init__(self, store: Store, clock: Clock, replica: str) -> None:
        self._store = store
        self._clock = clock
        self._replica = replica
        self._known: dict[str, None] = {}
        """Ids of facts that were recorded or are about to be, oldest first."""
        self._waiting: list[Fact] = []
        self._task: asyncio.Task[None] | None = None

    def note(self, pool: Pool, waived: Sequence[Exclusion]) -> None:
        """Record in the background what is not recorded yet; costs a look-up for what is."""
        name, now = pool_name(pool), self._clock.now()
        fresh = [fact for each in waived if (fact := self._fact(name, each, now)).id not in self._known]
        if not fresh:
            return
        self._remember(fresh)
        self._waiting += fresh
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._write())

    async def settle(self) -> None:
        """Wait for what is being written."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _remember(self, facts: Sequence[Fact]) -> None:
        self._known.update(dict.fromkeys(fact.id for fact in facts))
        while len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]

    async def _write(self) -> None:
        while self._waiting:
            facts, self._waiting = self._waiting, []
            guards = frozenset(f"pool:{fact.key}" for fact in facts)
            unit: Unit[None] = Unit(Scope(guards), lambda *_, facts=facts: UnitResult(None, facts))
            try:
                await self._store.run(unit, timeout_ms=WRITE_MS)
            except StoreUnavailableError as error:
                log.info("%d facts of the pool guard wait for another look: %s", len(facts), error)
                for fact in facts:
                    self._known.pop(fact.id, None)

    def _fact(self, pool: str, waived: Exclusion, now: Instant) -> Fact:
        provider, connection, model = waived.target
        return Fact(
            id=_fact_id(pool, waived),
            at=now,
            mechanism=MECHANISM,
            key=pool,
            from_state=waived.reason,
            to_state=NOT_ENFORCED,
            provider=provider,
            connection=connection,
            model=model,
            deadline_at=waived.until,
            reason=OVERFLOW,
            replica=self._replica,
        )


def _fact_id(pool: str, waived: Exclusion) -> str:
    """The same on every replica, and another one for each exclusion: its evidence tells them apart, else its start."""
    evidence = waived.evidence_id or str(waived.since)
    text = "\x1f".join((pool, *waived.target, waived.reason, evidence))
    return f"overflow-{hashlib.blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"
