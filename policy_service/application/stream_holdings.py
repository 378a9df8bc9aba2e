"""What a running stream keeps alive: permits and probes of its decision are renewed, its lease is looked at, pin and
probe hear of the first byte (spec/fleet.md section 3, spec/concurrency.md section 2.2, spec/affinity.md section 3).

Everything that needs the store runs in the background, a few streams at a time and each stream at its own rhythm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from policy_service.application.early_verdict import first_byte_unit, probes_of
from policy_service.application.lease_book import LeaseBook
from policy_service.application.messages import DecisionToken
from policy_service.application.permit_work import PermitChange, ids_of
from policy_service.application.permits import Permits
from policy_service.application.pin_reports import PinReports
from policy_service.application.ports import Clock, Store, StoreUnavailableError
from policy_service.application.probe_permits import ProbePermits
from policy_service.application.view import View
from policy_service.domain.breaker import split_name
from policy_service.domain.facts import Cause
from policy_service.domain.gates import PermitState
from policy_service.domain.ids import DurationMs, Instant, Target
from policy_service.domain.lease import Fence, LeaseCall
from policy_service.domain.lease import fence as fence_of
from policy_service.domain.lease_context import fence_refusal

log = logging.getLogger(__name__)

AT_A_TIME = 4
"""Streams whose upkeep may be in the store at once."""
OPERATION_MS: DurationMs = 2_000
RETRY_MS: DurationMs = 1_000
"""Pause after an upkeep that the store did not answer."""
LEASE_EVERY_MS: DurationMs = 10_000
"""How often the lease of a stream is looked at."""
RENEWALS_A_LIFE = 3
"""A third of the life of a permit is the rhythm of its renewal."""
SHORTEST_MS: DurationMs = 200


class StreamOpening(NamedTuple):
    """The attempt that a stream belongs to."""

    token: DecisionToken
    attempt: int = 0
    served: Target | None = None
    """Target that is called; None: the gateway did not say."""


class PermitNews(NamedTuple):
    """A permit was renewed until `expires_at`, or (None) has expired and its slot is gone."""

    permit_id: str
    expires_at: Instant | None = None


class LeaseLost(NamedTuple):
    """The lease of the stream no longer holds; `code` as CheckFence would refuse it."""

    code: str


News = PermitNews | LeaseLost
Tell = Callable[[News], None]


@dataclass(slots=True)
class Holding:
    """What one stream holds, and when it is looked after next."""

    opening: StreamOpening
    tell: Tell
    token: DecisionToken
    """As in the opening, less what is known to be gone."""
    due_at: Instant
    is_busy: bool = False
    is_over: bool = False
    first_byte_seen: bool = False


@dataclass(slots=True)
class Counters:
    """What the upkeep of streams did so far."""

    renewals: int = 0
    verdicts: int = 0
    store_failures: int = field(default=0)


class StreamHoldings:
    """The upkeep. One event loop owns it.

    Args:
        store_away: true while the store counts as away; then it is not asked.
        replica: name of this replica, recorded with facts.
    """

    def __init__(
        self,
        store: Store,
        view: View,
        clock: Clock,
        permits: Permits,
        pins: PinReports,
        leases: LeaseBook,
        replica: str,
        *,
        store_away: Callable[[], bool],
    ) -> None:
        self._store = store
        self._view = view
        self._clock = clock
        self._permits = permits
        self._probes = ProbePermits(store, view)
        self._pins = pins
        self._leases = leases
        self._replica = replica
        self._store_away = store_away
        self._turns = asyncio.Semaphore(AT_A_TIME)
        self._background: set[asyncio.Task[None]] = set()
        self.counters = Counters()
        self.lease_every_ms = LEASE_EVERY_MS

    def begin(self, opening: StreamOpening, tell: Tell) -> Holding:
        """Start to look after a stream; what it holds was granted with its decision."""
        token = opening.token
        holding = Holding(opening, tell, token, token.started_at)
        holding.due_at = token.started_at + self._rhythm_ms(token)
        return holding

    def first_byte(self, holding: Holding) -> None:
        """The answer has begun: refresh the pin, give the probe its verdict. Once a stream."""
        served, token = holding.opening.served, holding.token
        if holding.first_byte_seen or served is None:
            return
        holding.first_byte_seen = True
        if token.pin is not None:
            self._pins.first_byte(token.caller_id, token.pin, served, self._clock.now())
        if probes_of(token.probes, served) and not self._store_away():
            self._start(holding, self._give_verdict(holding, served))

    def progress(self, holding: Holding) -> None:
        """The stream lives: renew what is due. Costs nothing between two renewals."""
        now = self._clock.now()
        if now < holding.due_at or holding.is_busy:
            return
        token = holding.token
        if not (token.permits or token.probes or token.lease) or self._store_away():
            holding.due_at = now + RETRY_MS
            return
        self._start(holding, self._look_after(holding))

    async def settled(self) -> None:
        """Wait for upkeep under way."""
        while self._background:
            await asyncio.wait(set(self._background))

    # -- in the background -------------------------------------------------------------------------------
    def _start(self, holding: Holding, work: Coroutine[Any, Any, None]) -> None:
        holding.is_busy = True
        task = asyncio.create_task(self._in_turn(holding, work), name="stream-upkeep")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _in_turn(self, holding: Holding, work: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._turns:
                await work
            holding.due_at = self._clock.now() + self._rhythm_ms(holding.token)
        except StoreUnavailableError as error:
            self.counters.store_failures += 1
            holding.due_at = self._clock.now() + RETRY_MS
            log.info("the upkeep of a stream waits for the store: %s", error)
        except Exception:
            holding.due_at = self._clock.now() + RETRY_MS
            log.exception("the upkeep of a stream failed")
        finally:
            holding.is_busy = False

    async def _give_verdict(self, holding: Holding, served: Target) -> None:
        token = holding.token
        probes = probes_of(token.probes, served)
        cause = Cause(
            f"{token.decision_id}/{holding.opening.attempt}/first-byte",
            self._clock.now(),
            replica=self._replica,
            decision_id=token.decision_id,
            request_id=token.request_id,
        )
        unit = first_byte_unit(probes, served, cause, self._view.policy)
        committed = await self._store.run(unit, timeout_ms=OPERATION_MS)
        self._view.apply_committed(committed.rows)
        self.counters.verdicts += committed.value
        left = holding.token  # a renewal may have come in between: what it dropped stays dropped
        holding.token = left._replace(probes=tuple(ref for ref in left.probes if ref not in probes))

    async def _look_after(self, holding: Holding) -> None:
        if holding.is_over:
            return
        token = holding.token
        if token.permits or token.probes:
            changes = await self._permits.renew(ids_of(token.permits))
            changes += await self._probes.renew(token)
            self.counters.renewals += len(changes)
            self._take(holding, changes)
        if token.lease is not None:
            await self._look_at_lease(holding)

    def _take(self, holding: Holding, changes: list[PermitChange]) -> None:
        """Tell what became of the permits, and drop those that have ended: they never come back to life.

        A probe that got its verdict meanwhile is used up, not lost.
        """
        held = {ref.permit_id for ref in holding.token.permits} | {ref.permit_id for ref in holding.token.probes}
        changes = [change for change in changes if change.permit_id in held]
        gone = {change.permit_id for change in changes if change.state is not PermitState.HELD}
        for change in changes:
            if change.permit_id not in gone or change.state in (None, PermitState.EXPIRED):
                holding.tell(PermitNews(change.permit_id, change.expires_at))
        token = holding.token
        holding.token = token._replace(
            permits=tuple(ref for ref in token.permits if ref.permit_id not in gone),
            probes=tuple(ref for ref in token.probes if ref.permit_id not in gone),
        )

    async def _look_at_lease(self, holding: Holding) -> None:
        held = holding.token.lease
        assert held is not None
        call = LeaseCall(held.owner_hash, held.caller_id, held.generation, connection_id=held.connection)
        sight = await self._leases.look((held.owner_hash,), (), held.generation)
        verdict = fence_of(sight.rows, call, sight.now)
        if verdict is not Fence.VALID:
            refused = fence_refusal(verdict)
            holding.token = holding.token._replace(lease=None)
            holding.tell(LeaseLost(refused.code.value if refused else ""))

    def _rhythm_ms(self, token: DecisionToken) -> DurationMs:
        """Time between two looks: a third of the shortest life of what is held."""
        policy = self._view.policy
        lives = [policy.for_connection(*split_name(ref.breaker_key)).breaker.reset_timeout_ms for ref in token.probes]
        if ids_of(token.permits):
            lives.append(policy.setting("concurrency.permit_ttl_ms"))
        rhythms = [int(life) // RENEWALS_A_LIFE for life in lives]
        if token.lease is not None:
            rhythms.append(self.lease_every_ms)
        return max(SHORTEST_MS, min(rhythms, default=LEASE_EVERY_MS))
