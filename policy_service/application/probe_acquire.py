"""Probe permits of half-open breakers: taken under the provider's guard row as the last act of a selection.

A selection waits for its budget and no longer; the transaction goes on without it. What it grants is kept for the
next selection of this replica, and given back where none comes, so that a slow store neither doubles a probe nor
swallows it (docs/adr/0016).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, NamedTuple

from policy_service.application.admission_plan import (
    Admission,
    acquire_probe,
    admission_scope,
    hand_over,
    is_held_for,
)
from policy_service.application.breaker_plan import give_back
from policy_service.application.events import ProbeRef
from policy_service.application.granted import Granted
from policy_service.application.local_probes import LocalProbes
from policy_service.application.messages import PermitGrant, PermitKind, SelectRequest
from policy_service.application.ports import (
    Clock,
    Scope,
    Store,
    StoreSlowError,
    StoreUnavailableError,
    Unit,
    UnitResult,
)
from policy_service.application.view import View
from policy_service.domain.breaker import BreakerState, split_name
from policy_service.domain.breaker_probe import ProbeRequest, find_permit
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.facts import Cause, FactLog
from policy_service.domain.ids import DurationMs, Instant, Target
from policy_service.domain.policy import ConnectionPolicy
from policy_service.domain.state import StateBook

log = logging.getLogger(__name__)

PROBE_MS: DurationMs = 2_000
"""Longest transaction of a probe permit. Cutting it at the budget of the selection would leave unknown whether the
permit was granted, and cost a new connection each time."""
GIVE_BACK_MS: DurationMs = 2_000
AWAY_AFTER = 3
"""Acquires in a row that the store refused before it counts as away here too (fleet.md section 4). One that merely
takes long does not count: whether the store answers at all is the follower's to say."""
LOOK_AGAIN_MS: DurationMs = 200
"""Until when a probe is refused whose acquire got no answer."""
KEPT_MS: DurationMs = 500
"""How long a permit that came too late waits here for a selection before other replicas may have it."""

Key = tuple[str, str]
"""Provider and connection whose permits a selection takes; the connection is empty where breakers are per provider."""


class Kept(NamedTuple):
    """A permit that came after its selection had gone."""

    granted: Granted
    expires_at: Instant


class Probes:
    """Acquires and gives back. One event loop owns it.

    Args:
        replica: name of this replica, recorded with each permit.
        budget_ms: longest time that a selection waits for the store.
        store_away: true while the store counts as away; then it is not asked.
        in_background: runs a coroutine beside the calls.
    """

    def __init__(
        self,
        store: Store,
        view: View,
        clock: Clock,
        replica: str,
        *,
        budget_ms: DurationMs,
        store_away: Callable[[], bool],
        in_background: Callable[[Coroutine[Any, Any, object]], None],
    ) -> None:
        self._store = store
        self._view = view
        self._clock = clock
        self._replica = replica
        self._budget_ms = budget_ms
        self._store_away = store_away
        self._in_background = in_background
        self._overdue: Counter[Key] = Counter()
        """Acquires whose callers have left; their answers are still to come."""
        self._kept: dict[Key, Kept] = {}
        self._denied = 0
        self.local = LocalProbes(view)
        self.late = 0
        """Permits that came after their selection had gone."""
        self.lost = 0

    async def acquire(self, target: Target, request: SelectRequest, decision_id: str) -> Granted:
        """Acquire what the breakers of `target` demand; a repeated request id gets the same permit again.

        A caller that is cancelled meanwhile leaves no permit behind.
        """
        policy = self._view.policy.for_connection(target.provider, target.connection)
        key = (target.provider, target.connection if policy.breaker.per_connection else "")
        probe = ProbeRequest(permit_id_of(request.request_id, target.provider), self._replica, decision_id)
        if self._store_away():
            return self._without_store(target, policy, probe)
        if key in self._overdue:
            return self._look_again(target)
        kept = self._take_kept(key)
        if kept is not None:
            return kept
        task = asyncio.ensure_future(self._acquire_stored(target, policy, probe, request.request_id))
        try:
            await asyncio.wait({task}, timeout=self._budget_ms / 1000)
        except asyncio.CancelledError:
            self._leave_behind(key, task, request.is_retry_safe)
            raise
        if not task.done():
            self._leave_behind(key, task, request.is_retry_safe)
            return self._look_again(target)
        granted = self._answer_of(task)
        if granted is None and self._denied >= AWAY_AFTER:
            return self._without_store(target, policy, probe)
        return granted or self._look_again(target)

    async def give_back(self, probes: tuple[ProbeRef, ...]) -> None:
        """Return permits that nobody will use, as far as they are still this replica's to return."""

        def run(book: StateBook, _now: Instant, _known: object) -> UnitResult[int]:
            return UnitResult(sum(give_back(book, ref) for ref in probes if is_held_for(book, ref, self._replica)))

        try:
            committed = await self._store.run(Unit(_scope_of(probes), run), timeout_ms=GIVE_BACK_MS)
        except StoreUnavailableError:
            self.lost += len(probes)
            log.warning("%d unused probe permits could not be given back and end by expiry", len(probes))
        else:
            self._view.apply_committed(committed.rows)

    # -- with the store ------------------------------------------------------------------------------
    async def _acquire_stored(
        self, target: Target, policy: ConnectionPolicy, probe: ProbeRequest, request_id: str
    ) -> Granted:
        def run(book: StateBook, now: Instant, _known: object) -> UnitResult[Admission]:
            cause = Cause(
                f"select/{probe.decision_id}",
                now,
                self._replica,
                decision_id=probe.decision_id,
                request_id=request_id,
            )
            admission = acquire_probe(book, target, now, policy, probe, FactLog(cause))
            return UnitResult(admission, admission.facts)

        committed = await self._store.run(Unit(admission_scope(target), run), timeout_ms=PROBE_MS)
        self._view.apply_committed(committed.rows)
        return _granted(committed.value, target, committed.at)

    def _answer_of(self, task: asyncio.Future[Granted]) -> Granted | None:
        """What the store said; None where it could not, which in a row makes it count as away for probes."""
        try:
            granted = task.result()
        except StoreSlowError:
            return None
        except StoreUnavailableError:
            self._denied += 1
            return None
        self._denied = 0
        return granted

    def _look_again(self, target: Target) -> Granted:
        """Slow is not away: a probe of this replica's own could be one too many for the fleet."""
        return Granted(refusal=Exclusion(target, "probe_in_flight", self._clock.now() + LOOK_AGAIN_MS))

    # -- after the caller has left -------------------------------------------------------------------
    def _leave_behind(self, key: Key, task: asyncio.Future[Granted], is_retry_safe: bool) -> None:
        """Until the answer is dealt with, others would only queue up behind it, and a repeated call would be given
        what is about to go."""
        self._overdue[key] += 1
        self._in_background(self._outlive(key, task, is_retry_safe))

    async def _outlive(self, key: Key, task: asyncio.Future[Granted], is_retry_safe: bool) -> None:
        try:
            await asyncio.wait({task})
            granted = self._answer_of(task)
            if granted is None or not granted.probes:
                return
            self.late += 1
            # Another caller may use it only once a repetition of its own, at any replica, cannot be given it again.
            kept = await self._renamed(granted) if is_retry_safe else granted
        finally:
            self._overdue -= Counter((key,))
        if kept is not None:
            await self._keep(key, kept)

    async def _renamed(self, granted: Granted) -> Granted | None:
        """The same slots under ids that no request has; None where they are not this replica's any more."""

        def run(book: StateBook, _now: Instant, _known: object) -> UnitResult[tuple[ProbeRef, ...]]:
            return UnitResult(hand_over(book, granted.probes, self._replica, _renamed))

        try:
            committed = await self._store.run(Unit(_scope_of(granted.probes), run), timeout_ms=GIVE_BACK_MS)
        except StoreUnavailableError:
            await self.give_back(granted.probes)
            return None
        self._view.apply_committed(committed.rows)
        probes = committed.value
        permits = tuple(replace(permit, permit_id=_renamed(permit.permit_id)) for permit in granted.permits)
        renamed = replace(granted, probes=probes, permits=permits, decision_id=_renamed(granted.decision_id))
        return renamed if probes else None

    async def _keep(self, key: Key, granted: Granted) -> None:
        """Hold permits for the next selection, for a while."""
        kept = Kept(granted, min(permit.expires_at for permit in granted.permits))
        before = self._kept.get(key)
        self._kept[key] = kept
        if before is not None:
            await self.give_back(before.granted.probes)
        await asyncio.sleep(KEPT_MS / 1000)
        if self._kept.get(key) is kept:
            del self._kept[key]
            await self.give_back(granted.probes)

    def _take_kept(self, key: Key) -> Granted | None:
        """Permits that came too late for somebody else; they must still hold their slots."""
        kept = self._kept.pop(key, None)
        now = self._clock.now()
        if kept is None or now >= kept.expires_at or not all(map(self._is_on_record, kept.granted.probes)):
            return None
        return replace(kept.granted, at=now)

    def _is_on_record(self, ref: ProbeRef) -> bool:
        permit = find_permit(self._committed(ref.breaker_key), ref.permit_id)
        return permit is not None and not permit.reclaimed

    def _committed(self, breaker_key: str) -> BreakerState:
        provider, part = split_name(breaker_key)
        known = self._view.committed((BreakerState.KIND, provider, part))
        return known.row if known and isinstance(known.row, BreakerState) else BreakerState(provider, part)

    # -- without the store ---------------------------------------------------------------------------
    def _without_store(self, target: Target, policy: ConnectionPolicy, probe: ProbeRequest) -> Granted:
        now = self._clock.now()
        local = self.local.acquire(target, policy, probe, now)
        return Granted(local.probes, local.permits, now, local.refusal)


def permit_id_of(request_id: str, provider: str) -> str:
    """Derived from the request, so that a repeated call finds its own permit."""
    return digest(request_id, provider)


def digest(*parts: str) -> str:
    """Id made of texts."""
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return made.hexdigest()


def _renamed(old: str) -> str:
    return digest("kept", old)


def _scope_of(probes: tuple[ProbeRef, ...]) -> Scope:
    names = [split_name(ref.breaker_key) for ref in probes]
    return Scope(frozenset(provider for provider, _ in names), frozenset(name for name in names if name[1]))


def _granted(admission: Admission, target: Target, now: Instant) -> Granted:
    if not admission.granted:
        until = None if admission.retry_after_ms is None else now + admission.retry_after_ms
        return Granted(refusal=Exclusion(target, str(admission.reason), until))
    permits = tuple(
        PermitGrant(ref.permit_id, PermitKind.PROBE, ref.breaker_key, admission.expires_at or now)
        for ref in admission.probes
    )
    return Granted(admission.probes, permits, now, decision_id=admission.decision_id)
