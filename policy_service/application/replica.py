"""One running replica: view, clock, commit and follower tied together, without any transport.

Starting, stopping and crashing change no decision (spec/fleet.md section 7): a start only reads, takes over its own
spool, and commits what was acknowledged before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from policy_service.application.callers import Registry
from policy_service.application.clock import DatabaseClock
from policy_service.application.commit import CommitLimits, Folding, GroupedCommit
from policy_service.application.events import OutcomeEvent
from policy_service.application.follow import Follower, FollowSettings
from policy_service.application.freshness import Freshness
from policy_service.application.giving_back import GivingBack
from policy_service.application.grants import Grants
from policy_service.application.lease_book import LeaseBook
from policy_service.application.lease_upkeep import LeaseUpkeep
from policy_service.application.liveness import SIGN_EVERY_MS, Liveness
from policy_service.application.managed_selection import LeaseReports, ManagedSelection
from policy_service.application.overflow_facts import OverflowFacts
from policy_service.application.permits import Permits
from policy_service.application.pin_reports import PinReports
from policy_service.application.pins import Pins
from policy_service.application.ports import CatalogueRevision, Entropy, Spool, Store, StoreUnavailableError
from policy_service.application.ports_fleet import Signer
from policy_service.application.ports_leases import LeaseStore
from policy_service.application.ports_permits import PermitStore
from policy_service.application.ports_pins import PinStore
from policy_service.application.report_endings import Endings
from policy_service.application.report_outcome import ReportOutcome
from policy_service.application.report_plan import scope_of
from policy_service.application.report_result import ReportResult, decode, encode, fold_report
from policy_service.application.select_target import SelectTarget
from policy_service.application.stickiness import RouteStickiness
from policy_service.application.stream_holdings import StreamHoldings
from policy_service.application.upkeep_plan import upkeep_unit
from policy_service.application.usage_wall import UsageWall
from policy_service.application.view import View
from policy_service.application.watch_stream import WatchStream
from policy_service.domain.ids import DurationMs
from policy_service.domain.policy import Policy

log = logging.getLogger(__name__)

FOLDING: Folding[ReportResult] = Folding(scope_of, fold_report, encode, decode)
UPKEEP_EVERY_S = 15.0
PRUNE_EVERY_ROUNDS = 4
OPERATION_MS: DurationMs = 5_000


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Budgets of one replica (spec/fleet.md section 4)."""

    name: str
    select_ms: DurationMs = 20
    stale_after_ms: DurationMs = 5_000
    commit: CommitLimits = field(default_factory=CommitLimits)
    follow: FollowSettings = field(default_factory=FollowSettings)
    list_exclusions_always: bool = False
    operation_ms: DurationMs = 2_000
    """Longest transaction of a lease or permit."""
    awaits_failover: bool = False
    """Replication is asynchronous: leases and permits pause after a failover (fleet.md section 7)."""
    release: str = ""
    """Version of the service, as the other replicas' operators see it."""
    sign_every_ms: DurationMs = SIGN_EVERY_MS
    """Between two signs of life; never more often than the feed is polled."""


@dataclass(frozen=True, slots=True)
class OwnershipStores:
    """Stores of the mechanisms that own something exactly: leases, permits, first pins."""

    leases: LeaseStore
    permits: PermitStore
    pins: PinStore


class Replica:
    """Builds the use cases and runs the background work.

    Args:
        policy: catalogue in force until the store names another revision.
        compile_revision: makes a policy of a stored catalogue revision; raises ValueError where it cannot.
        monotonic_ms: the host's monotonic clock.
        encode_event, decode_event: form of an event in the spool.
    """

    def __init__(
        self,
        store: Store,
        spool: Spool,
        policy: Policy,
        entropy: Entropy,
        settings: ReplicaSettings,
        *,
        stores: OwnershipStores,
        compile_revision: Callable[[CatalogueRevision], Policy],
        monotonic_ms: Callable[[], float],
        encode_event: Callable[[OutcomeEvent], bytes],
        decode_event: Callable[[bytes], OutcomeEvent],
    ) -> None:
        self.store = store
        self.settings = settings
        self._compile_revision = compile_revision
        self.incarnation = entropy.new_id()
        self.clock = DatabaseClock(monotonic_ms)
        self.liveness = Liveness(
            store,
            Signer(self.incarnation, settings.name, settings.release),
            every_ms=max(settings.sign_every_ms, settings.follow.poll_ms),
        )
        self.view = View(policy, lambda book, event, p: fold_report(book, event, p, replicas=self.liveness.count()))
        self.commit: GroupedCommit[ReportResult] = GroupedCommit(
            store,
            self.view,
            spool,
            FOLDING,
            self.incarnation,
            encode_event=encode_event,
            decode_event=decode_event,
            limits=settings.commit,
            replicas=self.liveness.count,
        )
        self.freshness = Freshness(self.view, self.is_store_away, settings.stale_after_ms)
        self.permits = Permits(
            stores.permits,
            self.clock,
            entropy,
            settings.name,
            monotonic_ms=monotonic_ms,
            store_ms=settings.operation_ms,
        )
        self.grants = Grants(
            store,
            self.view,
            self.clock,
            self.permits,
            settings.name,
            budget_ms=settings.select_ms,
            store_away=self.is_store_away,
        )
        self.registry = Registry(self.view)
        self.leases = LeaseBook(
            stores.leases,
            entropy,
            settings.name,
            budget_ms=settings.operation_ms,
            awaits_failover=settings.awaits_failover,
        )
        self.lease_returns = GivingBack(monotonic_ms)
        self._lease_upkeep = LeaseUpkeep(self.registry, self.leases)
        self.pins = Pins(stores.pins, self.view, budget_ms=settings.select_ms, store_away=self.is_store_away)
        self.pin_reports = PinReports(stores.pins, self.pins)
        self.wall = UsageWall(
            self.view, store, self.clock, entropy, report_ms=settings.commit.report_ms, store_away=self.is_store_away
        )
        stickiness = RouteStickiness(self.view)
        self.overflows = OverflowFacts(store, self.clock, settings.name)
        self.select = SelectTarget(
            self.view,
            self.clock,
            entropy,
            self.grants,
            self.freshness,
            ManagedSelection(self.registry, self.leases),
            self.pins,
            self.wall,
            stickiness,
            self.overflows,
            list_always=settings.list_exclusions_always,
        )
        self.report = ReportOutcome(
            self.view,
            self.clock,
            self.commit,
            self.freshness,
            settings.name,
            Endings(
                self.view,
                self.clock,
                self.grants,
                self.permits,
                self.pin_reports,
                LeaseReports(self.leases),
                stickiness,
            ),
            self.wall,
        )
        holdings = StreamHoldings(
            store,
            self.view,
            self.clock,
            self.permits,
            self.pin_reports,
            self.leases,
            settings.name,
            store_away=self.is_store_away,
        )
        self.watch = WatchStream(self.view, holdings, monotonic_ms)
        self.follower = Follower(
            store,
            self.view,
            self.clock,
            self.incarnation,
            monotonic_ms=monotonic_ms,
            on_revision=self._adopt_revision,
            on_advance=self.report.judge_successes,
            settings=settings.follow,
        )
        self._sweeper: asyncio.Task[None] | None = None
        self._adopting = asyncio.Lock()

    def is_store_away(self) -> bool:
        """True while the store counts as away, whoever noticed."""
        return self.commit.is_store_away or self.follower.is_store_away

    async def start(self) -> int:
        """Load the view, then commit what earlier lives of this spool left. Returns how many reports that is.

        Raises:
            StoreUnavailableError: the first load failed.
        """
        await self.follower.start()
        await self.liveness.start()
        taken_over = await self.commit.start()
        self.pin_reports.start()
        await self.permits.start()
        await self._sweep_leases()
        self._sweeper = asyncio.create_task(self._sweep(), name="prune")
        return taken_over

    async def stop(self) -> None:
        """Commit or spool what is queued, return unused permits, end the background work."""
        await self.commit.stop()
        await self.watch.holdings.settled()
        await self.pin_reports.stop()
        await self.permits.stop()
        await self.lease_returns.stop()
        await self.grants.settle()
        await self.overflows.settle()
        await self.follower.stop()
        await self.liveness.stop()
        if self._sweeper:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)

    async def refresh(self) -> None:
        """Follow the newest catalogue revision now (after an import by this replica)."""
        async with self._adopting:
            stored = await self.store.catalogue(timeout_ms=OPERATION_MS)
            if stored is not None and stored.revision != self.view.policy.revision:
                await self._swap(stored)

    async def _adopt_revision(self, revision: int) -> None:
        if revision:
            await self.refresh()

    async def _swap(self, stored: CatalogueRevision) -> None:
        """Compiled beside the event loop: a large document takes seconds, and decisions go on meanwhile."""
        try:
            policy = await asyncio.to_thread(self._compile_revision, stored)
        except ValueError:
            log.exception("catalogue revision %d cannot be used, %d stays", stored.revision, self.view.policy.revision)
            return
        self.view.set_policy(policy)
        log.info("catalogue revision %d is in force", stored.revision)
        try:
            await self.permits.adopt(policy)
            await self._sweep_leases()
        except StoreUnavailableError as error:
            log.info("permits and leases follow the new revision when the store is back: %s", error)

    async def _sweep(self) -> None:
        rounds = 0
        while True:
            await asyncio.sleep(UPKEEP_EVERY_S)
            rounds += 1
            try:
                await self.upkeep()
                await self._sweep_leases()
                await self.permits.sweep()
                if rounds % PRUNE_EVERY_ROUNDS == 0:
                    await self.store.prune(self.clock.now(), timeout_ms=OPERATION_MS)
            except StoreUnavailableError as error:
                log.info("upkeep waits for the store: %s", error)
            except Exception:
                log.exception("upkeep failed")

    async def _sweep_leases(self) -> None:
        swept = await self._lease_upkeep.sweep()
        if swept.expired or swept.withdrawn:
            log.info("leases ended: %d expired, %d withdrawn", swept.expired, swept.withdrawn)

    async def upkeep(self) -> int:
        """Shrink what time has ended; the number of rows."""
        unit = upkeep_unit(self.view.rows, self.clock.now(), self.view.policy)
        if unit is None:
            return 0
        committed = await self.store.run(unit, timeout_ms=OPERATION_MS)
        self.view.apply_committed(committed.rows)
        return committed.value
