"""Session pins of one replica: which connection a session stays on (spec/affinity.md, fleet.md section 6).

A pin that this replica has read lately costs no round trip. A first pin is one insert; what a report changes is
written in the background. Without the store pins are read from memory, and new ones are held here until it is back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from policy_service.application.messages import Affinity, PinRef, SelectRequest
from policy_service.application.pin_cache import PinBacklog, PinCache, PinChange
from policy_service.application.pin_pool import LastUses, PinQuestion, PinSettings, ask, hash_of
from policy_service.application.ports import StoreUnavailableError
from policy_service.application.ports_pins import PinKey, PinSeen, PinStore, SavedPin
from policy_service.application.view import View
from policy_service.domain import affinity
from policy_service.domain.affinity import PinDecision, PinRow, PinWrite, Standing
from policy_service.domain.eligibility import check_target
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import ConnectionId, DurationMs, Instant, ModelId, ProviderId, Target

RESET_MS: DurationMs = 5_000
"""Longest wait of an operator's reset for the store."""
RACES = 3
"""Times that a pin is written anew when the one in the way vanishes."""


class PinAnswer(NamedTuple):
    """What affinity says. `position` None: the account strategy decides."""

    affinity: Affinity
    position: int | None = None
    """Place among the eligible targets that were given."""
    connection: str | None = None
    ref: PinRef | None = None
    """For the decision token."""
    pin_connection: str = ""
    """Connection that the session is pinned to, for `explain`."""
    consecutive: int | None = None


class Pins:
    """The use case. Not thread-safe: one event loop owns it.

    Args:
        budget_ms: longest time that a selection waits for the store.
        store_away: true while the store counts as away; then it is not asked.
    """

    def __init__(self, store: PinStore, view: View, *, budget_ms: DurationMs, store_away: Callable[[], bool]) -> None:
        self._store = store
        self._view = view
        self._budget_ms = budget_ms
        self._store_away = store_away
        self._policy = view.policy
        self._settings = PinSettings.of(view.policy)
        self._uses = LastUses()
        self.cache = PinCache()
        self.backlog = PinBacklog()

    @property
    def settings(self) -> PinSettings:
        """Settings of the revision in force."""
        if self._policy is not self._view.policy:
            self._policy = self._view.policy
            self._settings = PinSettings.of(self._policy)
        return self._settings

    def is_off(self, request: SelectRequest) -> bool:
        """True where nothing is pinned and nothing looked up (TTL 0, the default)."""
        return not (self.settings.ttl_ms or request.affinity_ttl_ms)

    def question(
        self,
        request: SelectRequest,
        eligible: Sequence[Target],
        listed: Iterable[Target],
        exclusions: Iterable[Exclusion] = (),
    ) -> PinQuestion | None:
        """The question of a selection, see `pin_pool.ask`; None where affinity is off."""
        return ask(request, self.settings, self._view.policy, self._uses, eligible, listed, exclusions)

    # -- selection -----------------------------------------------------------------------------------
    def hit(self, request: SelectRequest, eligible: Sequence[Target], now: Instant) -> PinAnswer | None:
        """The common case at little cost: the pin was read lately and its connection may serve.

        None: ask `question`.
        """
        if not eligible or request.forced_connection or request.lease is not None or self.is_off(request):
            return None
        provider, _, model = eligible[0]
        key = PinKey(request.caller_id, provider, hash_of(request, provider))
        row = self.cache.get(key, now) if self._may_hold(key) else None
        if row is None:
            return None
        wanted = (provider, row.connection_id, model)
        place = next((i for i, target in enumerate(eligible) if target == wanted), None)
        if place is None:
            return None
        ttl_ms = request.affinity_ttl_ms or self.settings.ttl_ms
        ref = PinRef(row.session_hash, provider, row.connection_id, row.version, ttl_ms)
        consecutive = self._uses.get(row.connection_id)[1] + 1
        return PinAnswer(Affinity.HIT, place, row.connection_id, ref, row.connection_id, consecutive)

    def _may_hold(self, key: PinKey) -> bool:
        """False for a key without a session or a required caller, and while a change other than a refresh waits."""
        if not key.session_hash or (self.settings.require_caller and not key.api_key_id):
            return False
        waiting = self.backlog.get(key)
        return waiting is None or bool(waiting.refresh_ttl_ms)

    def choose_cached(self, question: PinQuestion, now: Instant) -> PinAnswer | None:
        """Answer from memory; None where the store must be asked, or written."""
        if not self._needs_pin(question):
            return _answer(question, self._decide(question, None, now))
        if self.is_evicting(question.key):
            return None
        held = self.backlog.local(question.key, now)
        if held is not None:
            return self._unless_write(question, held, now, is_local=True)
        row = self.cache.get(question.key, now)
        return None if row is None else self._unless_write(question, row, now)

    async def choose(self, question: PinQuestion, now: Instant) -> PinAnswer:
        """Answer, reading and writing the pin where needed. Never waits for the store beyond the budget."""
        known = self.choose_cached(question, now)
        if known is not None:
            return known
        if self._store_away():
            return self._without_store(question, now)
        try:
            return await self._with_store(question, now)
        except StoreUnavailableError:
            return self._without_store(question, now)

    async def reset(self, provider: str, connection: str) -> int:
        """Delete the pins of a provider and connection, empty: any; how many were live.

        Other replicas trust what they have read for TRUSTED_MS at most. Raises StoreUnavailableError.
        """
        gone = await self._store.delete_all(provider, connection, timeout_ms=RESET_MS)
        self.cache.drop_all(provider, connection)
        return gone

    def is_evicting(self, key: PinKey) -> bool:
        """True while an eviction of the pin waits to be written."""
        waiting = self.backlog.get(key)
        return waiting is not None and waiting.is_eviction

    def dispatched(self, answer: PinAnswer, now: Instant) -> None:
        """The target was handed out: note the use of its connection."""
        if answer.connection is not None and answer.consecutive is not None:
            self._uses.note(answer.connection, answer.consecutive, now)

    def _needs_pin(self, q: PinQuestion) -> bool:
        """False where the rules decide without looking a pin up."""
        is_anonymous = q.query.require_caller and not q.query.api_key_id
        return bool(q.query.session_hash and q.pool) and not (q.managed or is_anonymous)

    def _decide(self, q: PinQuestion, row: PinRow | None, now: Instant) -> PinDecision:
        if q.managed and not q.forced:
            return PinDecision(affinity.Affinity.NONE)
        if q.forced:
            return affinity.choose_forced(q.query, row, q.forced, q.pool, now, managed=q.managed)
        pinned = Standing.ELIGIBLE if row is None else self._standing(q, row.connection_id, now)
        return affinity.choose(q.query, row, pinned, q.pool, now)

    def _unless_write(self, q: PinQuestion, row: PinRow, now: Instant, *, is_local: bool = False) -> PinAnswer | None:
        decision = self._decide(q, row, now)
        return None if decision.write is not None else _answer(q, decision, is_local=is_local)

    # -- standing ------------------------------------------------------------------------------------
    def _standing(self, q: PinQuestion, connection: str, now: Instant) -> Standing:
        if any(member.connection == connection for member in q.pool):
            return Standing.ELIGIBLE
        if connection in q.tried:
            return Standing.TEMPORARY
        refusal = q.refused.get(connection)
        if refusal is not None:
            return _standing_of(refusal)
        target = Target(ProviderId(q.query.provider), ConnectionId(connection), ModelId(q.model))
        if not self._is_known(q, target):
            return Standing.PERMANENT
        found = self.standing(target, now)
        return Standing.TEMPORARY if found is Standing.ELIGIBLE else found

    def _is_known(self, q: PinQuestion, target: Target) -> bool:
        """Named with the request, or declared for the provider."""
        policy = self._view.policy
        declared = policy.catalogue.connections.get(target.connection)
        if declared is None:
            return target.connection in q.listed
        return policy.canonical(declared.provider) == target.provider

    def standing(self, target: Target, now: Instant) -> Standing:
        """How a connection stands in the view."""
        view = self._view
        gate = check_target(
            view.provider_rows(target.provider) or {},
            target,
            view.policy.for_connection(target.provider, target.connection),
            now,
            is_disabled=target.connection in view.policy.disabled_connections,
        )
        return Standing.ELIGIBLE if gate.exclusion is None else _standing_of(gate.exclusion)

    # -- with the store ------------------------------------------------------------------------------
    async def _with_store(self, q: PinQuestion, now: Instant) -> PinAnswer:
        await self._finish_waiting(q.key)
        row = await self._store.find(q.key, timeout_ms=self._budget_ms)
        for _ in range(RACES):
            if row is not None:
                self.cache.put(q.key, row, now)
            decision = self._decide(q, row, now)
            if decision.write is None or decision.row is None:
                return _answer(q, decision)
            decision = await self._spread(q, row, decision, now)
            saved = await self._save(row, decision)
            if saved is not None:
                self.cache.put(q.key, saved.row, now)
                return _answer(q, _settled(q, decision, saved))
            row = None
        raise StoreUnavailableError("the pin kept vanishing")

    async def _finish_waiting(self, key: PinKey) -> None:
        """A waiting eviction would be undone by reading the pin it is about; a pin held here gives way to the store."""
        waiting = self.backlog.get(key)
        if waiting is None or waiting.refresh_ttl_ms:
            return
        if waiting.is_eviction and waiting.seen is not None:
            await self._store.delete(key, waiting.seen, timeout_ms=self._budget_ms)
        self.backlog.done(key, waiting)

    async def _spread(self, q: PinQuestion, row: PinRow | None, found: PinDecision, now: Instant) -> PinDecision:
        """Decide again with the live pins of the connections that declare `max_sessions` (section 6)."""
        declaring = [member.connection for member in q.pool if member.max_sessions is not None]
        if not declaring:
            return found
        counts = await self._store.count(declaring, timeout_ms=self._budget_ms)
        pool = [replace(member, live_pins=counts.get(member.connection, 0)) for member in q.pool]
        return self._decide(replace(q, pool=pool), row, now)

    async def _save(self, seen: PinRow | None, decision: PinDecision) -> SavedPin | None:
        assert decision.row is not None
        if decision.write is PinWrite.MOVE and seen is not None:
            before = PinSeen(seen.connection_id, seen.version)
            return await self._store.move(decision.row, before, timeout_ms=self._budget_ms)
        return await self._store.insert(decision.row, timeout_ms=self._budget_ms)

    # -- without the store ---------------------------------------------------------------------------
    def _without_store(self, q: PinQuestion, now: Instant) -> PinAnswer:
        """From memory, however old; a new pin is held here and written when the store is back."""
        held = self.backlog.local(q.key, now)
        gone = self.is_evicting(q.key)
        row = held or (None if gone else self.cache.get(q.key, now, trusted_ms=None))
        decision = self._decide(q, row, now)
        if decision.write is None or decision.row is None:
            return _answer(q, decision, is_local=held is not None)
        seen = None if row is None or held is not None else PinSeen(row.connection_id, row.version)
        self.backlog.add(q.key, PinChange(seen, save=replace(decision.row, version=0)))
        self.cache.drop(q.key)
        return _answer(q, decision, is_local=True)


def _settled(q: PinQuestion, decision: PinDecision, saved: SavedPin) -> PinDecision:
    """The decision once its write is known: as decided, or what the winner's pin makes of it."""
    if saved.is_own:
        return replace(decision, row=saved.row)
    joined = affinity.join(saved.row, q.pool)
    return replace(joined, connection=joined.connection or q.forced or None)


def _standing_of(exclusion: Exclusion) -> Standing:
    return affinity.standing(exclusion.spec.mechanism, exclusion.reason)


_SOFT = frozenset({affinity.Affinity.CREATED, affinity.Affinity.MOVED, affinity.Affinity.HIT})


def _answer(q: PinQuestion, decision: PinDecision, *, is_local: bool = False) -> PinAnswer:
    label = affinity.Affinity.LOCAL if is_local and decision.affinity in _SOFT else decision.affinity
    row = decision.row
    ref = None
    if row is not None:
        version = 0 if is_local else row.version
        ref = PinRef(row.session_hash, row.provider, row.connection_id, version, q.query.ttl_ms)
    places = (place for place, member in zip(q.places, q.pool, strict=True) if member.connection == decision.connection)
    return PinAnswer(
        Affinity(label.value),
        next(places, None) if decision.connection is not None else None,
        decision.connection,
        ref,
        row.connection_id if row is not None else "",
        decision.consecutive,
    )
