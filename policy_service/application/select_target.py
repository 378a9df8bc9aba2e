"""SelectTarget: where may this request go now, and why not elsewhere (spec/README.md, order for one selection).

Decided from memory. What must be exact over the fleet (a probe, a permit, a lease, a first pin) is acquired in the
store as the last act before the target is handed out; everything else costs no round trip.
"""

from __future__ import annotations

from dataclasses import replace

from policy_service.application.acquiring import Acquiring
from policy_service.application.freshness import Freshness
from policy_service.application.granted import Granted
from policy_service.application.grants import Grants
from policy_service.application.managed_selection import ManagedSelection
from policy_service.application.messages import SelectAnswer, SelectRequest
from policy_service.application.ordering import Ordering
from policy_service.application.overflow_facts import OverflowFacts
from policy_service.application.passages import Passages
from policy_service.application.pin_selection import Offered, PinnedSelection
from policy_service.application.pins import Pins
from policy_service.application.ports import Clock, Entropy
from policy_service.application.select_managed import SelectManaged
from policy_service.application.selection import Opening, Selection
from policy_service.application.selection_answers import gate_refusal, pool_name
from policy_service.application.selection_replies import Replies
from policy_service.application.stickiness import RouteStickiness
from policy_service.application.usage_wall import UsageWall
from policy_service.application.view import View


class SelectTarget:
    """The use case. Not thread-safe: one event loop owns it.

    Args:
        list_always: list exclusions on positive answers too (traces want them).
    """

    def __init__(
        self,
        view: View,
        clock: Clock,
        entropy: Entropy,
        grants: Grants,
        freshness: Freshness,
        managed: ManagedSelection,
        pins: Pins,
        wall: UsageWall,
        stickiness: RouteStickiness,
        overflows: OverflowFacts,
        *,
        list_always: bool = False,
    ) -> None:
        self._clock = clock
        self._grants = grants
        self._managed = managed
        self._pins = pins
        self._pinned = PinnedSelection(pins)
        self._ordering = Ordering(entropy)
        self._stickiness = stickiness
        self._opening = Opening(
            view, clock, entropy, managed.registry, self._ordering, stickiness, grants.replica, overflows
        )
        passages = Passages(view)
        self._acquiring = Acquiring(view, grants, passages)
        self._replies = Replies(
            view,
            self._opening.gating,
            entropy,
            freshness,
            passages,
            wall.set_headers,
            list_always=list_always,
        )
        self._managed_half = SelectManaged(
            managed, self._opening, self._ordering, self._acquiring, grants, self._replies, clock
        )

    @property
    def overflow(self) -> int:
        """Dispatches that went on without the permit they should have had (concurrency.md section 4.2)."""
        return self._acquiring.overflow

    def select_now(self, request: SelectRequest) -> SelectAnswer | None:
        """Answer from memory; None where something must be acquired and `select` is to be awaited.

        Raises:
            UnknownStrategyError: the strategy is none of the known names.
        """
        s = self._opening.begin(request)
        if s is None:
            return self._replies.unresolved(request, self._clock.now())
        if self._managed.concerns(request) or not self._is_pinned_now(s):
            return None
        if s.gated.early or (s.gated.panic and not s.order):
            return None
        if not s.order:
            return self._replies.refuse(s)
        if self._acquiring.needs_grant(s, s.order[0]):
            return None
        return self._dispatch(s, s.order[0])

    async def select(self, request: SelectRequest) -> SelectAnswer:
        """Answer, acquiring what must be exact. Never waits for the store beyond its budget.

        Raises:
            PolicyError: a bad call, or a fence that does not hold.
        """
        s = self._opening.begin(request)
        if s is None:
            return self._replies.unresolved(request, self._clock.now())
        if self._managed.concerns(request):
            return await self._managed_half.select(s)
        if not self._is_pinned_now(s):
            s.follow(await self._pinned.choose(request, self._offered(s), s.now))
        return (
            await self._try_early(s)
            or await self._try_shared(s)
            or await self._try_in_order(s)
            or await self._try_line(s)
            or await self._try_panic(s)
            or self._replies.refuse(s)
        )

    # -- session affinity ------------------------------------------------------------------------------
    def _is_pinned_now(self, s: Selection) -> bool:
        """Apply affinity from memory; False where the pin must be read or written first."""
        if self._pins.is_off(s.request):
            return True
        pinned = self._pinned.now(s.request, self._offered(s), s.now)
        if pinned is not None:
            s.follow(pinned)
        return pinned is not None

    def _offered(self, s: Selection) -> Offered:
        eligible = [i for i in s.gated.eligible if not s.gone.covers(s.target(i))]
        return Offered(s.order, eligible, lambda i: self._opening.eligible_accounts(s, i), s.gated.targets, s.excluded)

    # -- acquiring -------------------------------------------------------------------------------------
    async def _try_early(self, s: Selection) -> SelectAnswer | None:
        """A long block that is due is tested by this request; the others stay its fallbacks."""
        for position in s.gated.early:
            if self._is_ruled_out(s, position):
                continue
            granted = await self._grants.acquire_early(s.target(position), s.request)
            if granted is not None:
                return self._dispatch(s, position, granted)
        return None

    async def _try_shared(self, s: Selection) -> SelectAnswer | None:
        """Quota-share holds one permit of the first entry, or goes on without it (concurrency.md section 4.2)."""
        granted = await self._acquiring.take_shared(s)
        if granted is None:
            return None
        if granted.refusal is None:
            return self._after_line(s, s.order[0], granted)
        if granted.answer is not None:
            return self._replies.reject(s, gate_refusal(granted.answer, s.pool))
        return None

    async def _try_in_order(self, s: Selection) -> SelectAnswer | None:
        for position in s.order:
            granted = await self._acquiring.take(s, position)
            if granted is None or granted.refusal is None:
                return self._dispatch(s, position, granted)
            s.exclude(replace(granted.refusal, target_key=s.pool.key(position)))
        return None

    async def _try_line(self, s: Selection) -> SelectAnswer | None:
        """Everything is at its cap: stand in line where the request may (concurrency.md section 5, "who waits")."""
        position = self._acquiring.line_of(s)
        if position is None:
            return None
        granted = await self._acquiring.take_in_line(s, position)
        if granted is None or granted.refusal is None:
            return self._after_line(s, position, granted)
        return self._replies.reject(s, gate_refusal(granted.answer, s.pool)) if granted.answer else None

    def _after_line(self, s: Selection, position: int, granted: Granted | None) -> SelectAnswer | None:
        """The view may have moved on while this request waited: its gates are asked again (fleet.md section 4)."""
        s.now = self._clock.now()
        gate = self._opening.gating.check(s.target(position), s.pool, position, s.now)
        if gate.exclusion is None:
            target = s.target(position)
            s.excluded = tuple(each for each in s.excluded if each.target != target)  # the cap that it waited for
            return self._dispatch(s, position, granted)
        if granted is not None:
            self._grants.give_back(granted)
        s.exclude(gate.exclusion)
        return None

    async def _try_panic(self, s: Selection) -> SelectAnswer | None:
        """Nobody is selectable: offer those whose exclusion ends first, few at a time (guards.md section 6)."""
        offered = [position for position in s.gated.panic if not self._is_ruled_out(s, position)]
        if not offered or s.order:
            return None
        granted = await self._grants.acquire_panic(pool_name(s.pool), s.request)
        return None if granted is None else self._dispatch(s, offered[0], granted)

    @staticmethod
    def _is_ruled_out(s: Selection, position: int) -> bool:
        target = s.target(position)
        forced = s.request.forced_connection
        return s.gone.covers(target) or bool(forced and target.connection != forced)

    def _dispatch(self, s: Selection, position: int, granted: Granted | None = None) -> SelectAnswer:
        self._ordering.keep(s.pool, s.fresh_rotation)
        if s.pin is not None and position == s.order[0]:
            self._pins.dispatched(s.pin, s.now)
        answer = self._replies.dispatch(s, position, granted)
        if s.sticky is not None:
            self._stickiness.dispatched(s.decision_id, s.sticky)
        return answer
