"""SelectTarget: where may this request go now, and why not elsewhere (spec/README.md, order for one selection).

Decided from memory. What must be exact over the fleet (a probe, a permit, a lease, a first pin) is acquired in the
store as the last act before the target is handed out; everything else costs no round trip.
"""

from __future__ import annotations

from dataclasses import replace

from policy_service.application.freshness import Freshness
from policy_service.application.granted import Granted
from policy_service.application.grants import Grants
from policy_service.application.lease_offers import account_offers
from policy_service.application.lease_terms import Offer
from policy_service.application.managed_selection import ManagedRun, ManagedSelection
from policy_service.application.messages import SelectAnswer, SelectRequest
from policy_service.application.ordering import Ordering
from policy_service.application.overflow_facts import OverflowFacts
from policy_service.application.passages import Passages
from policy_service.application.pin_selection import Offered, PinnedSelection
from policy_service.application.pins import Pins
from policy_service.application.ports import Clock, Entropy
from policy_service.application.selection import Opening, Selection
from policy_service.application.selection_answers import gate_refusal, least, pool_name
from policy_service.application.selection_replies import Replies
from policy_service.application.stickiness import RouteStickiness
from policy_service.application.usage_wall import UsageWall
from policy_service.application.view import View

MAX_LINE_MS = 600_000


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
        self._passages = Passages(view)
        self._replies = Replies(
            view,
            self._opening.gating,
            entropy,
            freshness,
            self._passages,
            wall.set_headers,
            list_always=list_always,
        )

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
        if self._needs_grant(s, s.order[0]):
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
            return await self._select_managed(s)
        if not self._is_pinned_now(s):
            s.follow(await self._pinned.choose(request, self._offered(s), s.now))
        return (
            await self._try_early(s)
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
    def _needs_grant(self, s: Selection, position: int) -> bool:
        return position in s.gated.probing or self._passages.needed(s.pool, position, s.target(position))

    async def _try_early(self, s: Selection) -> SelectAnswer | None:
        """A long block that is due is tested by this request; the others stay its fallbacks."""
        for position in s.gated.early:
            if self._is_ruled_out(s, position):
                continue
            granted = await self._grants.acquire_early(s.target(position), s.request)
            if granted is not None:
                return self._dispatch(s, position, granted)
        return None

    async def _try_in_order(self, s: Selection) -> SelectAnswer | None:
        for position in s.order:
            granted = await self._acquire(s, position)
            if granted is None or granted.refusal is None:
                return self._dispatch(s, position, granted)
            s.exclude(replace(granted.refusal, target_key=s.pool.key(position)))
        return None

    async def _acquire(self, s: Selection, position: int, line_ms: int = 0) -> Granted | None:
        """What the entry demands; None where it demands nothing."""
        if not self._needs_grant(s, position):
            return None
        target = s.target(position)
        return await self._grants.acquire(
            target,
            s.request,
            s.decision_id,
            passage=self._passages.of(s.pool, position, target),
            probing=position in s.gated.probing,
            line_ms=line_ms,
        )

    async def _try_line(self, s: Selection) -> SelectAnswer | None:
        """Everything is at its cap: stand in line where the request may (concurrency.md section 5, "who waits")."""
        position = self._line_of(s)
        if position is None:
            return None
        target = s.target(position)
        passage = self._passages.of(s.pool, position, target)
        line_ms = min(least(s.request.wait_budget_ms, s.request.deadline_ms, passage.timeout_ms) or 0, MAX_LINE_MS)
        granted = await self._acquire(s, position, line_ms)
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

    @staticmethod
    def _line_of(s: Selection) -> int | None:
        """Entry in whose line the request waits; None: it does not wait."""
        may_wait = not s.request.route or s.pool.strategy == "round-robin"
        is_capped = any(e.reason == "concurrency_cap" for e in s.excluded)
        return s.order[0] if s.order and is_capped and may_wait and s.request.allow_wait else None

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

    # -- leases ----------------------------------------------------------------------------------------
    async def _select_managed(self, s: Selection) -> SelectAnswer:
        """A managed caller: fence first, its own connection before all others, the claim as the last act."""
        offers = self._offers(s)
        run = await self._managed.begin(s.request, offers)
        s.excluded = (*s.excluded, *run.exclusions(offers))
        if run.has_candidates:
            s.order = self._ranked(s, run)
            answer = await self._claim_in_order(s, run)
            if answer is not None:
                return answer
        refusal = await self._managed.refuse(run, s.pool.size)
        return self._replies.refuse(s) if refusal is None else self._replies.reject(s, refusal)

    def _offers(self, s: Selection) -> list[Offer]:
        """Every account of the pool with the judgement of the gates, and of this request's own exclusions."""
        ruled_out = {exclusion.target: exclusion for exclusion in s.excluded}
        offers = (each.offer for each in account_offers(s.pool, self._opening.gating, s.now))
        return [offer if offer.exclusion else offer._replace(exclusion=ruled_out.get(offer.target)) for offer in offers]

    def _ranked(self, s: Selection, run: ManagedRun) -> list[int]:
        """Entries that a candidate connection can serve, the leased connection's first."""
        pairs = [(i, t) for i in s.order for t in self._opening.eligible_accounts(s, i)]
        ranked = run.rank(pairs, lambda pair: pair[1].connection)
        order: list[int] = []
        for position, target in ranked:
            if position not in order:
                s.choose_account(position, target)
                order.append(position)
        return order

    async def _claim_in_order(self, s: Selection, run: ManagedRun) -> SelectAnswer | None:
        for position in s.order:
            granted = await self._acquire(s, position)
            if granted is not None and granted.refusal is not None:
                s.exclude(replace(granted.refusal, target_key=s.pool.key(position)))
                run.is_gated = True
                continue
            claimed = await self._managed.claim(run, s.target(position))
            if claimed is not None:
                self._ordering.keep(s.pool, s.fresh_rotation)
                return self._replies.dispatch(s, position, granted, claimed)
            if granted is not None:
                self._grants.give_back(granted)
        return None
