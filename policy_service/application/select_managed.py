"""SelectTarget for callers with leases: fence first, the owner's connection before all others, the claim as the last
act (spec/leases.md section 7). Gates and lines are the same as for everybody (concurrency.md section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from policy_service.application.acquiring import Acquiring
from policy_service.application.granted import Granted
from policy_service.application.grants import Grants
from policy_service.application.lease_offers import account_offers
from policy_service.application.lease_terms import Offer
from policy_service.application.managed_selection import ManagedRun, ManagedSelection
from policy_service.application.messages import SelectAnswer
from policy_service.application.ordering import Ordering
from policy_service.application.ports import Clock
from policy_service.application.selection import Opening, Selection
from policy_service.application.selection_answers import gate_refusal
from policy_service.application.selection_replies import Replies
from policy_service.domain.exclusions import Exclusion


class Opened(NamedTuple):
    """Order and exclusions as the opening left them, before leases had their say."""

    order: Sequence[int]
    excluded: Sequence[Exclusion]


class SelectManaged:
    """The managed half of the use case."""

    def __init__(
        self,
        managed: ManagedSelection,
        opening: Opening,
        ordering: Ordering,
        acquiring: Acquiring,
        grants: Grants,
        replies: Replies,
        clock: Clock,
    ) -> None:
        self._managed = managed
        self._opening = opening
        self._ordering = ordering
        self._acquiring = acquiring
        self._grants = grants
        self._replies = replies
        self._clock = clock

    async def select(self, s: Selection) -> SelectAnswer:
        """The answer to a managed caller.

        Raises:
            PolicyError: the fence does not hold, or the store is away.
        """
        opened = Opened(s.order, s.excluded)
        run = await self._begin(s, opened)
        if run.has_candidates:
            answer = await self._claim_in_order(s, run) or await self._claim_in_line(s, opened)
            if answer is not None:
                return answer
        return await self._refuse(s, run)

    async def _begin(self, s: Selection, opened: Opened) -> ManagedRun:
        """Fence and plan on the view as it is now; the order of what may be claimed goes into the selection."""
        offers = self._offers(s, opened)
        run = await self._managed.begin(s.request, offers)
        s.excluded = (*opened.excluded, *run.exclusions(offers))
        s.order = self._ranked(s, opened, run) if run.has_candidates else ()
        return run

    async def _refuse(self, s: Selection, run: ManagedRun) -> SelectAnswer:
        refusal = await self._managed.refuse(run, s.pool.size)
        return self._replies.refuse(s) if refusal is None else self._replies.reject(s, refusal)

    def _offers(self, s: Selection, opened: Opened) -> list[Offer]:
        """Every account of the pool with the judgement of the gates, and of this request's own exclusions."""
        ruled_out = {each.target: each for each in opened.excluded}
        offers = (each.offer for each in account_offers(s.pool, self._opening.gating, s.now))
        return [offer if offer.exclusion else offer._replace(exclusion=ruled_out.get(offer.target)) for offer in offers]

    def _ranked(self, s: Selection, opened: Opened, run: ManagedRun) -> list[int]:
        """Entries that a candidate connection can serve, the leased connection's first."""
        pairs = [(i, t) for i in opened.order for t in self._opening.eligible_accounts(s, i)]
        ranked = run.rank(pairs, lambda pair: pair[1].connection)
        order: list[int] = []
        for position, target in ranked:
            if position not in order:
                s.choose_account(position, target)
                order.append(position)
        return order

    # -- claiming --------------------------------------------------------------------------------------
    async def _claim_in_order(self, s: Selection, run: ManagedRun) -> SelectAnswer | None:
        for position in s.order:
            granted = await self._acquiring.take(s, position)
            if granted is not None and granted.refusal is not None:
                s.exclude(replace(granted.refusal, target_key=s.pool.key(position)))
                run.is_gated = True
                continue
            answer = await self._claim(s, run, position, granted)
            if answer is not None:
                return answer
        return None

    async def _claim_in_line(self, s: Selection, opened: Opened) -> SelectAnswer | None:
        """Everything that may be claimed is at its cap: stand in line for the first, its own connection as a rule."""
        position = self._acquiring.line_of(s)
        if position is None:
            return None
        granted = await self._acquiring.take_in_line(s, position)
        if granted is not None and granted.refusal is not None:
            return self._replies.reject(s, gate_refusal(granted.answer, s.pool)) if granted.answer else None
        return await self._after_line(s, opened, position, granted)

    async def _after_line(self, s: Selection, opened: Opened, position: int, granted: Granted | None) -> SelectAnswer:
        """Lease and view may have moved on while the call waited: both are asked again (fleet.md section 4)."""
        target = s.target(position)
        s.now = self._clock.now()
        try:
            run = await self._begin(s, opened)
        except BaseException:
            self._give_back(granted)
            raise
        if position in s.order and s.target(position) == target:
            answer = await self._claim(s, run, position, granted)
        else:
            self._give_back(granted)
            answer = await self._claim_in_order(s, run)
        return answer or await self._refuse(s, run)

    async def _claim(
        self, s: Selection, run: ManagedRun, position: int, granted: Granted | None
    ) -> SelectAnswer | None:
        """Take the connection; what was granted for it goes back where somebody else has it."""
        try:
            claimed = await self._managed.claim(run, s.target(position))
        except BaseException:
            self._give_back(granted)
            raise
        if claimed is None:
            self._give_back(granted)
            return None
        self._ordering.keep(s.pool, s.fresh_rotation)
        return self._replies.dispatch(s, position, granted, claimed)

    def _give_back(self, granted: Granted | None) -> None:
        if granted is not None:
            self._grants.give_back(granted)
