"""What a selection takes for an entry of its pool: at once, in line, or, where the route fails open, not at all
(spec/concurrency.md sections 4.2 and 5). Used by the selections of both kinds of callers.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from policy_service.application.granted import Granted
from policy_service.application.grants import Grants
from policy_service.application.messages import PermitUse
from policy_service.application.passages import Passages
from policy_service.application.permit_gates import FREE, proceeds
from policy_service.application.permit_work import STORE_LOST, Passage
from policy_service.application.selection import Selection
from policy_service.application.selection_answers import least
from policy_service.application.view import View
from policy_service.domain.ids import DurationMs
from policy_service.domain.permits import QUOTA_SHARE, OnSaturation

log = logging.getLogger(__name__)

MAX_LINE_MS: DurationMs = 600_000


class Acquiring:
    """Takes grants for entries. `overflow` counts dispatches without the permit that they should have had."""

    def __init__(self, view: View, grants: Grants, passages: Passages) -> None:
        self._view = view
        self._grants = grants
        self._passages = passages
        self.overflow = 0

    def needs_grant(self, s: Selection, position: int) -> bool:
        """False: the entry is dispatched from memory."""
        return position in s.gated.probing or self._passages.needed(s.pool, position, s.target(position))

    async def take(self, s: Selection, position: int, line_ms: DurationMs = 0) -> Granted | None:
        """What the entry demands; None where it demands nothing.

        Args:
            line_ms: longest time in line; 0: now or not at all.
        """
        if not self.needs_grant(s, position):
            return None
        return await self._acquire(s, position, self._passage(s, position), line_ms)

    async def take_in_line(self, s: Selection, position: int) -> Granted | None:
        """The same, standing in line as long as the request, and the route, are ready to wait."""
        return await self.take(s, position, self._line_ms(s, self._passage(s, position)))

    def line_of(self, s: Selection) -> int | None:
        """Entry in whose line the request waits, everything being at its cap; None: it does not wait."""
        may_wait = not s.request.route or s.pool.strategy == "round-robin"
        is_capped = any(e.reason == "concurrency_cap" for e in s.excluded)
        return s.order[0] if s.order and is_capped and may_wait and s.request.allow_wait else None

    async def take_shared(self, s: Selection) -> Granted | None:
        """The permit of a quota-share request's first entry (section 4.2); None: the route has no say here.

        A request that goes on without it is marked so. In mode `reject` the gate's refusal is in `answer`.
        """
        if s.pool.strategy != QUOTA_SHARE or not s.order or not self.needs_grant(s, s.order[0]):
            return None
        if s.request.earlier_attempts:
            return await self._take_as_fallback(s)
        passage = self._passage(s, s.order[0])
        granted = await self._acquire(s, s.order[0], passage, self._line_ms(s, passage))
        refused = granted.answer
        if refused is None or passage.limiter or not proceeds(self._view.policy, QUOTA_SHARE, refused):
            return granted
        if refused.reason == STORE_LOST:
            s.degraded = (*s.degraded, "store_away")
        return await self._without_permit(s, refused.gate)

    # -- steps -----------------------------------------------------------------------------------------
    def _passage(self, s: Selection, position: int) -> Passage:
        return self._passages.of(s.pool, position, s.target(position))

    async def _acquire(self, s: Selection, position: int, passage: Passage, line_ms: DurationMs) -> Granted:
        return await self._grants.acquire(
            s.target(position),
            s.request,
            s.decision_id,
            passage=passage,
            probing=position in s.gated.probing,
            line_ms=line_ms,
        )

    @staticmethod
    def _line_ms(s: Selection, passage: Passage) -> DurationMs:
        if not s.request.allow_wait:
            return 0
        return min(least(s.request.wait_budget_ms, s.request.deadline_ms, passage.timeout_ms) or 0, MAX_LINE_MS)

    async def _take_as_fallback(self, s: Selection) -> Granted | None:
        """A later attempt of the same request: no permit in mode `proceed`, else its own, without waiting."""
        passage = self._passage(s, s.order[0])
        if self.mode is OnSaturation.REJECT or passage.limiter:
            return None
        loads = self._grants.loads
        full = next((gate.key for gate in passage.gates if loads.is_full(gate.key, gate.limit)), "")
        return await self._without_permit(s, full) if full else await self._acquire(s, s.order[0], FREE, 0)

    async def _without_permit(self, s: Selection, gate: str) -> Granted:
        """Go on although the gate is full, or cannot be asked; a probe is taken all the same."""
        granted = await self._acquire(s, s.order[0], FREE, 0)
        if granted.refusal is None:
            self.overflow += 1
            log.info("request %s goes on without a permit of %s", s.request.request_id, gate)
        return replace(granted, permit_use=PermitUse.NONE)

    @property
    def mode(self) -> OnSaturation:
        """What quota-share does at a full gate."""
        return OnSaturation(self._view.policy.setting("concurrency.quota_share.on_saturation"))
