"""The Postgres store: the one truth of a fleet (implements `application.ports.Store`)."""

from __future__ import annotations

import asyncio
import json
import secrets as secret_source
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import URL

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
)
from policy_service.application.ports_fleet import Sighting, Signer
from policy_service.domain.facts import Fact
from policy_service.domain.ids import DurationMs, Instant
from policy_service.storage.codec import clean_text, row_codec
from policy_service.storage.postgres import feed, identity, pruning, roll, schema, statements
from policy_service.storage.postgres.errors import Remedy, remedy_of
from policy_service.storage.postgres.listener import Listener
from policy_service.storage.postgres.session import Session, Sessions, StoreOptions
from policy_service.storage.postgres.unit_of_work import Guards, commit_unit, record_facts
from policy_service.storage.retention import Retention
from policy_service.storage.sightings import prune_sightings

T = TypeVar("T")

SECRET_BYTES = 32
ADMIN_TIMEOUT_MS = 5_000
"""Budget of calls that nobody waits for within a decision."""
RERUNS = 50
"""Attempts of one unit; the deadline ends it earlier as a rule."""
RECONNECTS = 3


class PostgresStore:
    """Store on any Postgres 13 or newer. Safe for concurrent use on one event loop."""

    def __init__(self, url: str | URL, options: StoreOptions | None = None, retention: Retention | None = None) -> None:
        options = options or StoreOptions()
        self._sessions = Sessions(url, options)
        self._following = Sessions(url, replace(options, pool_size=2))
        """Of the feed and of the roll: selections that wait for a guard must not keep the view from following, nor must
        a signature that waits for the commit under way, which writes the same row."""
        self._retention = retention or Retention()
        self._guards = Guards()
        self._listeners: set[Listener] = set()
        self.listening: list[Callable[[str], bool]] = []
        """Who takes announcements with a payload; each answers whether it was one of its own."""
        self._adopted = 0
        """Connections opened when the server's identity was last looked at."""

    @classmethod
    async def connect(
        cls, url: str | URL, options: StoreOptions | None = None, retention: Retention | None = None
    ) -> PostgresStore:
        """Open a store and check its schema.

        Raises SchemaMismatchError where the database is of another release, StoreUnavailableError where it is away.
        """
        store = cls(url, options, retention)
        try:
            await schema.check(url)
            await store.read_clock(timeout_ms=ADMIN_TIMEOUT_MS)
        except BaseException:
            await store.close()
            raise
        return store

    @property
    def statements(self) -> int:
        """Statements sent so far, BEGIN and COMMIT included; healthy traffic adds none."""
        return self._sessions.statements + self._following.statements

    async def run(self, unit: Unit[T], *, timeout_ms: DurationMs) -> Committed[T]:
        """Run one guarded transaction; the same unit is run again after a deadlock, a serialization failure or an
        unknown commit result (its answers and progress make that safe)."""
        return await self._with_session(lambda session: commit_unit(session, self._guards, unit), timeout_ms)

    async def in_session(self, work: Callable[[Session], Awaitable[T]], *, timeout_ms: DurationMs) -> T:
        """Run the work of another mechanism's store on this one's connections; what `_with_session` says holds."""
        return await self._with_session(work, timeout_ms)

    async def _with_session(
        self, work: Callable[[Session], Awaitable[T]], timeout_ms: DurationMs, sessions: Sessions | None = None
    ) -> T:
        """Run `work` on a session; again where the error says that another try may do better."""

        async def known_server(session: Session) -> T:
            await self._adopt_identity(session)
            return await work(session)

        chosen = sessions or self._sessions
        return await chosen.run(lambda session: _attempts(session, known_server), timeout_ms)

    async def _adopt_identity(self, session: Session) -> None:
        """After a new connection: a failover shows as another server or timeline and raises the fleet epoch."""
        opened = self._sessions.connections + self._following.connections
        if opened and opened == self._adopted:
            return
        await identity.adopt(session)
        self._adopted = max(opened, 1)

    async def load(self, *, timeout_ms: DurationMs) -> Feed:
        return await self._with_session(feed.load, timeout_ms, self._following)

    async def poll(self, watermark: str, *, timeout_ms: DurationMs) -> Feed:
        return await self._with_session(lambda session: feed.poll(session, watermark), timeout_ms, self._following)

    async def sign(self, signer: Signer, stands_ms: DurationMs, *, timeout_ms: DurationMs) -> tuple[Sighting, ...]:
        return await self._with_session(lambda s: roll.sign(s, signer, stands_ms), timeout_ms, self._following)

    async def subscribe(self, wake: Callable[[], None], lost: Callable[[], None]) -> Callable[[], Awaitable[None]]:
        options = self._sessions.options
        if not options.notifications or options.has_transaction_pooler:
            return _nothing_to_end
        listener = Listener(self._sessions, wake, lost, self._tell)
        self._listeners.add(listener)

        async def end() -> None:
            self._listeners.discard(listener)
            await listener.end()

        return end

    def _tell(self, payload: str) -> bool:
        return bool(payload) and sum(told(payload) for told in tuple(self.listening)) > 0

    async def read_clock(self, *, timeout_ms: DurationMs) -> ClockSample:
        return await self._with_session(_sample_clock, timeout_ms)

    async def _query(
        self, statement: str, *parameters: Any, timeout_ms: DurationMs = ADMIN_TIMEOUT_MS
    ) -> Sequence[Any]:
        async def work(session: Session) -> Sequence[Any]:
            async with session.connect() as connection:
                return await session.execute(connection, statement, *parameters)

        return await self._with_session(work, timeout_ms)

    async def known_answer(self, event_id: str, *, timeout_ms: DurationMs) -> bytes | None:
        rows = await self._query(statements.KNOWN_ANSWER, clean_text(event_id), timeout_ms=timeout_ms)
        return bytes(rows[0][0]) if rows else None

    async def catalogue(self, *, timeout_ms: DurationMs, revision: int | None = None) -> CatalogueRevision | None:
        wanted = (statements.NEWEST_CATALOGUE,) if revision is None else (statements.CATALOGUE, revision)
        rows = await self._query(*wanted, timeout_ms=timeout_ms)
        return CatalogueRevision(*rows[0]) if rows else None

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
        wanted = _Import((document, sha256, clean_text(actor)), force, if_revision, fact)

        async def work(session: Session) -> CatalogueRevision:
            return await _import(session, wanted)

        return await self._with_session(work, ADMIN_TIMEOUT_MS)

    async def secrets(self) -> Mapping[int, bytes]:
        rows = await self._query(statements.SECRETS)
        if not rows:
            await self._query(statements.ADD_SECRET, 1, secret_source.token_bytes(SECRET_BYTES))
            rows = await self._query(statements.SECRETS)
        return {row[0]: bytes(row[1]) for row in rows}

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
        wanted = dict(zip(statements.FACT_FILTERS, (provider, connection, decision_id, mechanism), strict=True))
        filters = {column: clean_text(value) for column, value in wanted.items() if value}
        statement = statements.facts(tuple(filters), is_continued=before_id is not None)
        place = () if before_id is None else (before_id,)
        rows = await self._query(statement, limit, *filters.values(), *place)
        facts = tuple(row_codec(Fact).decode(json.loads(body)) for _, body in rows)
        return FactPage(facts, rows[-1][0] if rows and len(rows) == limit else None)

    async def sighted_before(self, oldest: Instant, limit: int, *, timeout_ms: DurationMs) -> list[tuple[str, str]]:
        """Connections with egress sightings older than that, some of them."""
        rows = await self._query(statements.SIGHTED_BEFORE, oldest, limit, timeout_ms=timeout_ms)
        return [(provider, connection) for provider, connection in rows]

    async def prune(self, now: Instant, *, timeout_ms: DurationMs) -> Mapping[str, int]:
        sightings = await prune_sightings(self, now - self._retention.sighting_ms, timeout_ms)
        dropped = await self._with_session(lambda s: pruning.prune(s, self._retention, now), timeout_ms)
        return dropped | {"egress_sighting": sightings}

    async def close(self) -> None:
        for listener in tuple(self._listeners):
            await listener.end()
        self._listeners.clear()
        await asyncio.gather(self._following.close(), self._sessions.close())


async def _attempts(session: Session, work: Callable[[Session], Awaitable[T]]) -> T:
    reconnects = 0
    for attempt in range(RERUNS):
        try:
            return await work(session)
        except Exception as error:
            remedy = remedy_of(error)
            reconnects += remedy is Remedy.RECONNECT
            if session.is_over or remedy is Remedy.GIVE_UP or reconnects > RECONNECTS:
                raise
            await asyncio.sleep(0.001 * min(attempt, 10))
    raise StoreUnavailableError("the unit kept colliding with others")


async def _nothing_to_end() -> None:
    """End of a subscription that was never begun: notifications are off."""


async def _sample_clock(session: Session) -> ClockSample:
    async with session.connect() as connection:
        sent = time.monotonic_ns()
        instant = (await session.execute(connection, statements.CLOCK))[0][0]
        return ClockSample(instant, sent / 1e6, time.monotonic_ns() / 1e6)


class _Import(NamedTuple):
    """One import: document, hash and actor, and under which conditions."""

    values: tuple[str, str, str]
    force: bool
    if_revision: int | None
    fact: RevisionFact | None


async def _import(session: Session, wanted: _Import) -> CatalogueRevision:
    """One revision; importers wait for each other on the fleet row, so that revisions have no twins."""
    async with session.transaction() as connection:
        await session.execute(connection, statements.LOCK_FLEET)
        was_imported = await session.execute(connection, statements.WAS_IMPORTED, wanted.values[1])
        newest = await session.execute(connection, statements.NEWEST_CATALOGUE)
        before: int = newest[0][0] if newest else 0
        if wanted.if_revision not in (None, before):
            raise RevisionMismatchError(before)
        if was_imported and newest and not wanted.force:
            return CatalogueRevision(*newest[0])
        (added,) = await session.execute(connection, statements.ADD_CATALOGUE, *wanted.values)
        revision = CatalogueRevision(*added[:4])
        if wanted.fact is not None:
            await record_facts(session, connection, (wanted.fact(before, revision),))
        return revision
