"""How full the gates are, as last seen: for the eligibility gate of strategies that do not wait.

Exactness is the transaction's; a stale load costs one refused attempt or one target passed over for a moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from policy_service.application.ports import StoreUnavailableError
from policy_service.application.ports_permits import GateCount, PermitStore
from policy_service.domain.ids import DurationMs

log = logging.getLogger(__name__)

REFRESH_S = 0.25
IDLE_MS: DurationMs = 2_000
"""Without a question for so long and with nothing held nobody is asked."""
NOTHING = GateCount(0, 0)


class GateLoads:
    """Holders and waiters by gate; `version` rises when a load changes, so that kept gate results can be dropped."""

    def __init__(self, store: PermitStore, monotonic_ms: Callable[[], float]) -> None:
        self._store = store
        self._monotonic_ms = monotonic_ms
        self._loads: dict[str, GateCount] = {}
        self._asked_ms = float("-inf")
        self.version = 0

    def of(self, gate: str) -> GateCount:
        """Load of a gate."""
        self._asked_ms = self._monotonic_ms()
        return self._loads.get(gate, NOTHING)

    def is_full(self, gate: str, cap: int | None) -> bool:
        """True if the cap is reached or somebody waits (spec/concurrency.md section 5)."""
        load = self.of(gate)
        return cap is not None and (load.held >= cap or load.waiting > 0)

    def note(self, counts: Mapping[str, GateCount]) -> None:
        """Take the loads that a transaction left."""
        for key, count in counts.items():
            known = self._loads.get(key, NOTHING)
            if known != count:
                self.version += known[:2] != count[:2]
                self._set(key, count)

    def _set(self, key: str, count: GateCount) -> None:
        if count == NOTHING:
            self._loads.pop(key, None)
        else:
            self._loads[key] = count

    async def refresh(self) -> None:
        """Read all loads anew."""
        counts = await self._store.counts(timeout_ms=1_000)
        self.note({**dict.fromkeys(self._loads, NOTHING), **counts})

    @property
    def is_watched(self) -> bool:
        """Somebody relies on the loads, or some are not nothing."""
        return bool(self._loads) or self._monotonic_ms() - self._asked_ms < IDLE_MS

    async def follow(self) -> None:
        """Refresh for ever, while anybody relies on it."""
        while True:
            await asyncio.sleep(REFRESH_S)
            if self.is_watched:
                try:
                    await self.refresh()
                except StoreUnavailableError as error:
                    log.debug("loads of gates stay as they are: %s", error)
