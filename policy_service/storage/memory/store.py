"""Reference store: the semantics of the Postgres store in one process, without its failures.

Stores of one `MemoryDatabase` are replicas of one fleet. A unit runs in one step of the event loop, which is this
store's guard lock. Used by tests and as the oracle of the contract suite.
"""

from __future__ import annotations

import secrets as secret_source
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from policy_service.application.ports import (
    CatalogueRevision,
    ClockSample,
    Committed,
    FactPage,
    Feed,
    RevisionFact,
    RevisionMismatchError,
    StoreUnavailableError,
    Unit,
    Versioned,
)
from policy_service.application.ports_fleet import Sighting, Signer
from policy_service.domain.egress import EgressSighting
from policy_service.domain.facts import Fact
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.state import Key, Row, StateBook
from policy_service.storage.retention import Retention
from policy_service.storage.scope import covers, refuse_foreign_writes
from policy_service.storage.sightings import is_old, prune_sightings

T = TypeVar("T")


def host_clock() -> Instant:
    """The host's time, ms."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Announcement:
    """One entry of the feed; `version` is its place as well."""

    written_at: Instant
    change: Versioned


@dataclass(frozen=True, slots=True)
class Answer:
    """Idempotency record of one report."""

    written_at: Instant
    body: bytes


@dataclass(slots=True)
class MemoryDatabase:
    """What the replicas of a fleet share."""

    clock: Callable[[], Instant] = host_clock
    version: int = 0
    rows: dict[Key, Versioned] = field(default_factory=dict)
    written_at: dict[Key, Instant] = field(default_factory=dict)
    feed: list[Announcement] = field(default_factory=list)
    pruned: int = 0
    """Newest version dropped from the feed."""
    answers: dict[str, Answer] = field(default_factory=dict)
    progress: dict[str, tuple[int, Instant]] = field(default_factory=dict)
    roll: dict[str, Sighting] = field(default_factory=dict)
    """Newest signature of each replica incarnation."""
    facts: dict[str, Fact] = field(default_factory=dict)
    """By id, in the order of recording."""
    fact_numbers: dict[str, int] = field(default_factory=dict)
    recorded: int = 0
    revisions: list[CatalogueRevision] = field(default_factory=list)
    imported: set[str] = field(default_factory=set)
    secrets: dict[int, bytes] = field(default_factory=dict)
    subscribers: list[tuple[Callable[[], None], Callable[[], None]]] = field(default_factory=list)
    epoch: int = 1

    def announce(self) -> None:
        """Wake every subscriber."""
        for wake, _ in tuple(self.subscribers):
            wake()

    def put(self, row: Row, now: Instant) -> Versioned:
        """Store one changed row under the version at hand."""
        change = Versioned(self.version, row)
        if row.is_default and row.generation == 1:
            self.rows.pop(row.key, None)
        else:
            self.rows[row.key] = change
            self.written_at[row.key] = now
        self.feed.append(Announcement(now, change))
        return change

    def record(self, facts: Iterable[Fact]) -> None:
        """Append facts; one already recorded is left alone."""
        for fact in facts:
            if fact.id not in self.facts:
                self.recorded += 1
                self.facts[fact.id] = fact
                self.fact_numbers[fact.id] = self.recorded


class MemoryStore:
    """One replica's store on a shared `MemoryDatabase` (implements `application.ports.Store`)."""

    def __init__(self, database: MemoryDatabase | None = None, retention: Retention | None = None) -> None:
        self.database = database or MemoryDatabase()
        self._retention = retention or Retention()
        self.statements = 0
        self.is_away = False
        """Set by tests: every call fails as with an absent database."""

    def reached(self) -> MemoryDatabase:
        """The database, for another mechanism's store on it; counts as one call."""
        return self._call()

    def _call(self) -> MemoryDatabase:
        if self.is_away:
            raise StoreUnavailableError("the store is away")
        self.statements += 1
        return self.database

    async def run(self, unit: Unit[T], *, timeout_ms: DurationMs) -> Committed[T]:
        database = self._call()
        now = database.clock()
        book = StateBook({key: found.row for key, found in database.rows.items() if covers(unit.scope, found.row)})
        known = {key: database.answers[key].body for key in unit.event_ids if key in database.answers}
        result = unit.run(book, now, known)
        refuse_foreign_writes(unit.scope, book.changes.values())
        database.version += 1
        rows = tuple(database.put(row, now) for row in book.changes.values())
        database.record(result.facts)
        database.answers.update({key: Answer(now, body) for key, body in result.answers.items()})
        self._note_progress(unit.progress, now)
        if rows or result.facts:
            database.announce()
        return Committed(result.value, now, rows, tuple(result.facts))

    def _note_progress(self, progress: tuple[str, int] | None, now: Instant) -> None:
        if progress is not None:
            incarnation, number = progress
            known, _ = self.database.progress.get(incarnation, (number, now))
            self.database.progress[incarnation] = (max(known, number), now)

    async def load(self, *, timeout_ms: DurationMs) -> Feed:
        return self._feed(self._call().rows.values(), is_full=True)

    async def poll(self, watermark: str, *, timeout_ms: DurationMs) -> Feed:
        database = self._call()
        if not watermark.isdecimal() or int(watermark) < database.pruned:
            return self._feed(database.rows.values(), is_full=True)
        since = int(watermark)
        entries = [entry for entry in database.feed if entry.change.version > since]
        feed = self._feed((entry.change for entry in entries), is_full=False)
        return replace(feed, written={entry.change.version: entry.written_at for entry in entries})

    def _feed(self, rows: Iterable[Versioned], *, is_full: bool) -> Feed:
        database = self.database
        revision = database.revisions[-1].revision if database.revisions else 0
        progress = {incarnation: number for incarnation, (number, _) in database.progress.items()}
        watermark = str(database.version)
        return Feed(tuple(rows), database.clock(), watermark, is_full, revision, progress, database.epoch)

    async def sign(self, signer: Signer, stands_ms: DurationMs, *, timeout_ms: DurationMs) -> tuple[Sighting, ...]:
        database = self._call()
        now = database.clock()
        own = Sighting(signer, now, now + stands_ms)
        database.roll[signer.incarnation] = own
        others = (each for each in database.roll.values() if each.signer.incarnation != signer.incarnation)
        standing = sorted((each for each in others if each.alive_until > now), key=lambda each: each.signer[1::-1])
        return (*([own] if stands_ms else []), *standing)

    async def subscribe(self, wake: Callable[[], None], lost: Callable[[], None]) -> Callable[[], Awaitable[None]]:
        subscribers = self.database.subscribers
        subscribers.append((wake, lost))

        async def end() -> None:
            if (wake, lost) in subscribers:
                subscribers.remove((wake, lost))

        return end

    async def read_clock(self, *, timeout_ms: DurationMs) -> ClockSample:
        database = self._call()
        sent_ms = time.monotonic_ns() / 1e6
        return ClockSample(database.clock(), sent_ms, time.monotonic_ns() / 1e6)

    async def known_answer(self, event_id: str, *, timeout_ms: DurationMs) -> bytes | None:
        answer = self._call().answers.get(event_id)
        return None if answer is None else answer.body

    async def catalogue(self, *, timeout_ms: DurationMs, revision: int | None = None) -> CatalogueRevision | None:
        revisions = self._call().revisions
        found = [each for each in revisions if revision in (None, each.revision)]
        return found[-1] if found else None

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
        database = self._call()
        newest = len(database.revisions)
        if if_revision not in (None, newest):
            raise RevisionMismatchError(newest)
        if sha256 in database.imported and database.revisions and not force:
            return database.revisions[-1]
        revision = CatalogueRevision(newest + 1, document, sha256, database.clock())
        database.imported.add(sha256)
        database.revisions.append(revision)
        database.record([fact(newest, revision)] if fact else [])
        database.announce()
        return revision

    async def secrets(self) -> Mapping[int, bytes]:
        database = self._call()
        database.secrets.setdefault(1, secret_source.token_bytes(32))
        return dict(database.secrets)

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
        page = await self.fact_page(
            limit=limit,
            provider=provider,
            connection=connection,
            decision_id=decision_id,
            mechanism=mechanism,
            before_id=before_id,
        )
        return page.facts

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
        database = self._call()
        numbers = database.fact_numbers
        named = (provider, connection, decision_id, mechanism)
        wanted = dict(zip(("provider", "connection", "decision_id", "mechanism"), named, strict=True))
        found = [
            fact
            for fact in reversed(database.facts.values())
            if (before_id is None or numbers[fact.id] < before_id) and _matches(fact, wanted)
        ][:limit]
        return FactPage(tuple(found), numbers[found[-1].id] if found and len(found) == limit else None)

    async def sighted_before(self, oldest: Instant, limit: int, *, timeout_ms: DurationMs) -> list[tuple[str, str]]:
        """Connections with egress sightings older than that, some of them."""
        rows = (row for _, row in self._call().rows.values() if isinstance(row, EgressSighting))
        return sorted({(row.provider, row.connection) for row in rows if is_old(row, oldest)})[:limit]

    async def prune(self, now: Instant, *, timeout_ms: DurationMs) -> Mapping[str, int]:
        kept = self._retention
        sightings = await prune_sightings(self, now - kept.sighting_ms, timeout_ms)
        dropped = {
            "state_feed": self._prune_feed(now - kept.feed_ms),
            "report_answer": _drop(self.database.answers, lambda answer: answer.written_at < now - kept.answer_ms),
            "replica": _drop(self.database.progress, lambda seen: seen[1] < now - kept.replica_ms),
            "fact": _drop(self.database.facts, lambda fact: fact.at < now - kept.fact_ms),
        }
        return dropped | self._prune_tombstones(now - kept.tombstone_ms) | {"egress_sighting": sightings}

    def _prune_feed(self, oldest: Instant) -> int:
        database = self.database
        gone = [entry for entry in database.feed if entry.written_at < oldest]
        database.feed = [entry for entry in database.feed if entry.written_at >= oldest]
        database.pruned = max([database.pruned, *(entry.change.version for entry in gone)])
        return len(gone)

    def _prune_tombstones(self, oldest: Instant) -> dict[str, int]:
        database = self.database
        old = [key for key, (_, row) in database.rows.items() if row.is_default and database.written_at[key] < oldest]
        for key in old:
            del database.rows[key]
        return {kind: sum(key[0] == kind for key in old) for kind in {key[0] for key in old}}

    async def close(self) -> None:
        """Nothing is held."""


K = TypeVar("K")
V = TypeVar("V")


def _drop(table: dict[K, V], is_old: Callable[[V], bool]) -> int:
    old = [key for key, value in table.items() if is_old(value)]
    for key in old:
        del table[key]
    return len(old)


def _matches(fact: Fact, wanted: Mapping[str, str]) -> bool:
    return all(not value or getattr(fact, name) == value for name, value in wanted.items())
