"""Ports: what the use cases need from the outside, as Protocols (storage and clocks implement them).

One guarded transaction (`Store.run`) serves outcome commits, probe permits, admin acts and sweeps alike: lock
guard rows in order, read rows and database time, run a pure function on them, write rows, facts and answers,
announce, commit (spec/fleet.md section 2).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from policy_service.application.ports_fleet import RollStore
from policy_service.domain.facts import Fact
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.state import Row, StateBook

T = TypeVar("T")


class StoreUnavailableError(Exception):
    """The store cannot be reached or did not answer within the budget; nothing is known to be written."""


class StoreSlowError(StoreUnavailableError):
    """No answer within the budget. The store may be there, and may yet do what it was asked."""


class UnitRefusedError(Exception):
    """The store understood a unit and refuses it: a fault of the unit, which another try would meet again."""


class SchemaMismatchError(Exception):
    """The database has an older or newer schema than this release; `remedy` says what to run."""

    def __init__(self, found: str | None, expected: str, remedy: str) -> None:
        super().__init__(f"database schema is {found or 'empty'}, this release needs {expected}: {remedy}")
        self.found, self.expected, self.remedy = found, expected, remedy


class RevisionMismatchError(Exception):
    """A conditional import met another catalogue revision than the one it was made for; nothing was stored."""

    def __init__(self, found: int) -> None:
        super().__init__(f"the catalogue is at revision {found}")
        self.found = found


class Versioned(NamedTuple):
    """A committed row with its fleet-wide version; a default row is a tombstone and still has its version."""

    version: int
    row: Row


@dataclass(frozen=True, slots=True)
class Scope:
    """What a unit of work locks and reads. All provider ids are canonical.

    `providers` are the guard rows, locked in ascending order; rows of a provider with connection "" are always
    read, rows of `connections` too, and every row of `whole_providers`.
    """

    providers: frozenset[str]
    connections: frozenset[tuple[str, str]] = frozenset()
    whole_providers: frozenset[str] = frozenset()
    all_providers: bool = False
    """Lock every guard row there is (reset all)."""


@dataclass(slots=True)
class UnitResult(Generic[T]):
    """What the pure function of a unit leaves besides the book's changes.

    `answers` are the idempotency records to insert, by event id (compact, opaque bytes).
    """

    value: T
    facts: Sequence[Fact] = ()
    answers: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unit(Generic[T]):
    """One guarded transaction.

    `run(book, now, known)` is pure and may run more than once (deadlock, serialization failure, unknown commit
    result): `now` is `clock_timestamp()` read after the locks, `known` the stored answers among `event_ids`.
    """

    scope: Scope
    run: Callable[[StateBook, Instant, Mapping[str, bytes]], UnitResult[T]]
    event_ids: tuple[str, ...] = ()
    progress: tuple[str, int] | None = None
    """(replica incarnation, last event number folded), written in the same transaction."""


@dataclass(frozen=True, slots=True)
class Committed(Generic[T]):
    """A committed unit: its value and the rows as they now stand."""

    value: T
    at: Instant
    rows: tuple[Versioned, ...] = ()
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True)
class Feed:
    """One poll of the change feed, or a full load: every visible change since `watermark`'s predecessor.

    Rows may repeat; versions decide. `as_of` is database time at the snapshot.
    """

    rows: tuple[Versioned, ...]
    as_of: Instant
    watermark: str
    """Opaque; handed back to the next poll."""
    is_full: bool
    """True: `rows` is the whole non-default state and replaces the view."""
    catalogue_revision: int
    progress: Mapping[str, int] = field(default_factory=dict)
    """Last folded event number by replica incarnation."""
    epoch: int = 1
    written: Mapping[int, Instant] = field(default_factory=dict)
    """Database time at which the rows of a version were written; polls only."""


@dataclass(frozen=True, slots=True)
class CatalogueRevision:
    """A stored catalogue document (the validated YAML as JSON text) with its revision number."""

    revision: int
    document: str
    sha256: str
    created_at: Instant


RevisionFact = Callable[[int, CatalogueRevision], Fact]
"""(revision before, revision added) to the fact that is recorded with it."""


@dataclass(frozen=True, slots=True)
class FactPage:
    """Facts, newest first; `before_id` continues with older ones, None where these were the last."""

    facts: tuple[Fact, ...]
    before_id: int | None


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One reading of database time with the monotonic instants (ms) around it."""

    database_ms: Instant
    sent_ms: float
    received_ms: float


class Store(RollStore, Protocol):
    """The one truth. Every method raises StoreUnavailableError when the store is away; none waits longer than
    the `timeout_ms` it was given."""

    async def run(self, unit: Unit[T], *, timeout_ms: DurationMs) -> Committed[T]:
        """Run one guarded transaction; retries deadlocks and serialization failures itself."""
        ...

    async def load(self, *, timeout_ms: DurationMs) -> Feed:
        """The whole non-default state (tombstones included), `is_full` True."""
        ...

    async def poll(self, watermark: str, *, timeout_ms: DurationMs) -> Feed:
        """Every change visible since `watermark`; a full load where the watermark is too old."""
        ...

    async def subscribe(self, wake: Callable[[], None], lost: Callable[[], None]) -> Callable[[], Awaitable[None]]:
        """Call `wake` at each announcement and `lost` when the subscription breaks; returns the way to end it."""
        ...

    async def read_clock(self, *, timeout_ms: DurationMs) -> ClockSample:
        """Database time (`clock_timestamp()`)."""
        ...

    async def known_answer(self, event_id: str, *, timeout_ms: DurationMs) -> bytes | None:
        """Stored answer of a report, or None."""
        ...

    async def catalogue(self, *, timeout_ms: DurationMs, revision: int | None = None) -> CatalogueRevision | None:
        """The newest catalogue revision, or the one named; None where there is none."""
        ...

    async def import_catalogue(
        self,
        document: str,
        sha256: str,
        *,
        force: bool,
        actor: str,
        if_revision: int | None = None,
        fact: RevisionFact | None = None,
    ) -> CatalogueRevision:
        """Store a new revision, and `fact` in the same transaction. Unless `force`, a document whose hash was imported
        before changes nothing and the current revision is returned (spec/fleet.md section 7).

        Raises:
            RevisionMismatchError: the newest revision is not `if_revision` (0: none was imported).
        """
        ...

    async def secrets(self) -> Mapping[int, bytes]:
        """Fleet secrets for decision tokens by key version, created on first use (32 random bytes each)."""
        ...

    async def facts(
        self,
        *,
        limit: int,
        provider: str = "",
        connection: str = "",
        decision_id: str = "",
        mechanism: str = "",
        before_id: int | None = None,
    ) -> Sequence[Fact]:
        """Recorded facts, newest first; `before_id` as given by `fact_page`."""
        ...

    async def fact_page(
        self,
        *,
        limit: int,
        provider: str = "",
        connection: str = "",
        decision_id: str = "",
        mechanism: str = "",
        before_id: int | None = None,
    ) -> FactPage:
        """Recorded facts, newest first, with the place where the next page begins."""
        ...

    async def prune(self, now: Instant, *, timeout_ms: DurationMs) -> Mapping[str, int]:
        """Drop feed rows, answers, tombstones, facts and sightings past their keeping time; rows dropped by table."""
        ...

    async def close(self) -> None:
        """Release every connection."""
        ...


class Clock(Protocol):
    """Database time as this replica knows it. Never falls, whatever the host clock does."""

    def now(self) -> Instant:
        """Estimate of database time, ms."""
        ...


class Entropy(Protocol):
    """Source of randomness; seeded in tests."""

    def draw(self) -> float:
        """Uniform in [0, 1)."""
        ...

    def new_id(self) -> str:
        """A fresh unique id, 26..36 characters, sortable by time where possible."""
        ...


class SpoolFullError(Exception):
    """The local spool is at its limit; the report is refused rather than lost later."""


class Spool(Protocol):
    """Local durable copy of acknowledged reports that are not committed yet (spec/fleet.md section 7).

    Survives `kill -9` and a restart on the same disk, not the loss of the disk.
    """

    async def append(self, entries: Sequence[tuple[str, bytes]]) -> None:
        """Write (event id, encoded event) pairs durably; SpoolFullError at the limit, then none is written."""
        ...

    async def remove(self, event_ids: Sequence[str]) -> None:
        """Forget committed events."""
        ...

    async def load(self) -> Sequence[tuple[str, bytes]]:
        """Everything spooled by earlier processes on this disk, in order; their directories are adopted."""
        ...

    @property
    def entries(self) -> int:
        """Events spooled and not removed."""
        ...

    async def close(self) -> None:
        """Release files and locks; entries stay."""
        ...
