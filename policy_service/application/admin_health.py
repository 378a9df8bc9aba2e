"""Condition of the fleet as one replica sees it, and its recorded transitions
(spec/operator_surface.md section 2, spec/README.md, Facts)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from policy_service.application.admin import store_lost
from policy_service.application.admin_listings import BreakerView, Counts, Listings
from policy_service.application.convergence import ConvergenceSummary
from policy_service.application.errors import NotFoundError
from policy_service.application.freshness import Freshness
from policy_service.application.lease_book import LeaseBook
from policy_service.application.permits import Permits
from policy_service.application.ports import Clock, FactPage, Store, StoreUnavailableError
from policy_service.application.ports_fleet import Sighting
from policy_service.application.view import View
from policy_service.domain.connection_state import TERMINAL_STATES
from policy_service.domain.facts import Fact
from policy_service.domain.ids import DurationMs, Instant

PING_MS: DurationMs = 500
"""Longest wait for the database when it is asked for its condition."""
COUNT_MS: DurationMs = 1_000
"""Longest wait for the counts of leases and permits."""
EXPLAINED = 10_000
"""Most facts of one decision that are read."""


class Owned(NamedTuple):
    """What the fleet has given out exactly. Permits count once a gate."""

    active_leases: int = 0
    held_permits: int = 0
    waiting_permits: int = 0


@dataclass(frozen=True, slots=True)
class Health:
    """Condition; `status` is `ok`, `degraded` or `unavailable`."""

    status: str
    replica: str
    is_database_reachable: bool
    database_latency_ms: DurationMs | None
    policy_revision: int
    view_age_ms: DurationMs
    breakers: tuple[BreakerView, ...]
    counts: Counts
    owned: Owned
    spooled_events: int
    convergence: ConvergenceSummary
    replicas: tuple[Sighting, ...] = ()
    """Replicas alive, this one first."""
    now: Instant = 0
    """Database time of the answer."""
    ignored_reports: Mapping[str, int] = field(default_factory=dict)
    """Reports to this replica that were statistics only for some key, by cause."""


class HealthAdmin:
    """Tells the condition of the service.

    Args:
        spooled: number of reports that wait in the spool for the store.
        sightings: replicas alive.
        ignored: reports that were statistics only, by cause.
    """

    def __init__(
        self,
        store: Store,
        view: View,
        clock: Clock,
        listings: Listings,
        freshness: Freshness,
        replica: str,
        spooled: Callable[[], int],
        convergence: Callable[[], ConvergenceSummary],
        leases: LeaseBook,
        permits: Permits,
        sightings: Callable[[], tuple[Sighting, ...]] = tuple,
        ignored: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._ignored = ignored
        self._sightings = sightings
        self._leases = leases
        self._permits = permits
        self._owned = Owned()
        self._convergence = convergence
        self._store = store
        self._view = view
        self._clock = clock
        self._listings = listings
        self._freshness = freshness
        self._replica = replica
        self._spooled = spooled

    async def health(self) -> Health:
        """The condition now; asks the database for its time and what it has given out, and never fails."""
        latency = await self._ping()
        if latency is not None:
            await self._count_owned()
        age, reasons = self._freshness.stamp(self._clock.now())
        is_well = latency is not None and not reasons
        return Health(
            status="unavailable" if not self._view.is_loaded else "ok" if is_well else "degraded",
            replica=self._replica,
            is_database_reachable=latency is not None,
            database_latency_ms=latency,
            policy_revision=self._view.policy.revision,
            view_age_ms=age,
            breakers=tuple(each for each in self._listings.breakers() if each.state != "CLOSED" or each.control),
            counts=self._listings.counts(),
            owned=self._owned,
            spooled_events=self._spooled(),
            convergence=self._convergence(),
            replicas=self._sightings(),
            now=self._clock.now(),
            ignored_reports=dict(self._ignored()),
        )

    async def _ping(self) -> DurationMs | None:
        try:
            sample = await self._store.read_clock(timeout_ms=PING_MS)
        except StoreUnavailableError:
            return None
        return max(0, round(sample.received_ms - sample.sent_ms))

    async def _count_owned(self) -> None:
        """Without the stores the last counts stay."""
        try:
            async with asyncio.timeout(COUNT_MS / 1000):
                sight = await self._leases.active()
                gates = await self._permits.list_gates()
        except (StoreUnavailableError, TimeoutError):
            return
        self._owned = Owned(
            sum(row.is_active(sight.now) for row in sight.rows),
            sum(gate.load.held for gate in gates),
            sum(gate.load.waiting for gate in gates),
        )


class FactsAdmin:
    """Reads recorded transitions."""

    def __init__(self, store: Store, view: View) -> None:
        self._store = store
        self._view = view

    async def list_facts(
        self,
        limit: int,
        *,
        provider: str = "",
        connection: str = "",
        decision_id: str = "",
        mechanism: str = "",
        before_id: int | None = None,
    ) -> FactPage:
        """Facts, newest first.

        Args:
            mechanism: as facts have it, or its name in the contract.

        Raises:
            StoreLostError: the store is away.
        """
        try:
            return await self._store.fact_page(
                limit=limit,
                provider=self._view.policy.canonical(provider) if provider else "",
                connection=connection,
                decision_id=decision_id,
                mechanism=_RECORDED_AS.get(mechanism, mechanism),
                before_id=before_id,
            )
        except StoreUnavailableError as error:
            raise store_lost() from error

    async def explain(self, decision_id: str) -> tuple[Fact, ...]:
        """The facts that a decision and its reports made, in their order.

        Raises:
            NotFoundError: there are none, or none any more.
            StoreLostError: the store is away.
        """
        found = await self.list_facts(EXPLAINED, decision_id=decision_id)
        if not found.facts:
            raise NotFoundError("no fact names this decision: it changed nothing, or its facts are gone")
        return tuple(reversed(found.facts))


_RECORDED_AS = {"connection_cooldown": "connection", "terminal_state": "connection", "model_lockout": "model_lock"}
"""Text in facts of a mechanism of the contract, where they differ; the first two share one row."""
_MECHANISMS = {"connection": "connection_cooldown", "model_lock": "model_lockout"}


def mechanism_of(fact: Fact) -> str:
    """Name of the mechanism in the contract."""
    if fact.mechanism == "connection" and not TERMINAL_STATES.isdisjoint((fact.from_state, fact.to_state)):
        return "terminal_state"
    return _MECHANISMS.get(fact.mechanism, fact.mechanism)
