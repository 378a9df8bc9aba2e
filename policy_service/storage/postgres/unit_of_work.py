"""One guarded transaction: lock, read, run the pure function, write, announce, commit (spec/fleet.md section 2).

Five round trips: BEGIN, guard locks, one read, one write, COMMIT. The read is a statement after the lock at READ
COMMITTED, so that it sees what the holder before it committed. Nothing is cached across runs but the names of
guard rows, which are never deleted.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from policy_service.application.ports import Committed, Scope, Unit, UnitResult, Versioned
from policy_service.domain.facts import Fact
from policy_service.domain.ids import Instant
from policy_service.domain.state import Key, Row, StateBook
from policy_service.storage.codec import clean_text, row_codec
from policy_service.storage.postgres import statements
from policy_service.storage.postgres.errors import AnswerRaceError
from policy_service.storage.postgres.session import Session
from policy_service.storage.rows import decode_row, encode_row
from policy_service.storage.scope import refuse_foreign_writes

T = TypeVar("T")

GUARD_NAMES_KEPT = 10_000


class Guards:
    """Names of guard rows known to exist."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    async def lock(self, session: Session, connection: AsyncConnection, scope: Scope) -> None:
        """Lock the guard rows of a scope in ascending order, making missing ones first."""
        if scope.all_providers:
            await session.execute(connection, statements.LOCK_ALL_GUARDS)
            return
        wanted = sorted({clean_text(provider) for provider in scope.providers | scope.whole_providers})
        if wanted:
            await self._lock(session, connection, wanted)

    async def _lock(self, session: Session, connection: AsyncConnection, wanted: list[str]) -> None:
        if not self._known.issuperset(wanted):
            await session.execute(connection, statements.ENSURE_GUARDS, wanted)
        locked = await session.execute(connection, statements.LOCK_GUARDS, wanted)
        if len(locked) < len(wanted):  # another database than the one these names were learnt from
            await session.execute(connection, statements.ENSURE_GUARDS, wanted)
            await session.execute(connection, statements.LOCK_GUARDS, wanted)
        self._remember(wanted)

    def _remember(self, names: list[str]) -> None:
        if len(self._known) > GUARD_NAMES_KEPT:
            self._known.clear()
        self._known.update(names)


@dataclass(slots=True)
class ReadSet:
    """What a unit reads under its locks."""

    now: Instant = 0
    version: int = 0
    known: dict[str, bytes] = field(default_factory=dict)
    rows: dict[Key, Row] = field(default_factory=dict)

    def take(self, tag: str, body: Mapping[str, Any]) -> None:
        """Take one tagged record of the read."""
        if tag == "head":
            self.now, self.version = body["now"], body["version"]
        elif tag == "answer":
            self.known[body["id"]] = base64.b64decode(body["answer"])
        else:
            self._take_row(decode_row(tag, body))

    def _take_row(self, row: Row | None) -> None:
        if row is not None:
            self.rows[row.key] = row


async def read_scope(session: Session, connection: AsyncConnection, unit: Unit[Any]) -> ReadSet:
    """Read the rows of a unit's scope, its known answers and the instant, in one statement."""
    scope = unit.scope
    pairs = {(provider, "") for provider in scope.providers | scope.whole_providers} | scope.connections
    providers, connections = _columns(pairs)
    ids = {clean_text(event_id): event_id for event_id in unit.event_ids}
    whole = [clean_text(provider) for provider in scope.whole_providers]
    statement = statements.read_scope(has_whole=bool(whole), is_everything=scope.all_providers)
    read = ReadSet()
    for tag, body in await session.execute(connection, statement, providers, connections, list(ids), whole):
        read.take(tag, json.loads(body))
    read.known = {ids[event_id]: answer for event_id, answer in read.known.items()}
    return read


def _columns(pairs: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    cleaned = sorted({(clean_text(provider), clean_text(connection)) for provider, connection in pairs})
    return [provider for provider, _ in cleaned], [connection for _, connection in cleaned]


@dataclass(frozen=True, slots=True)
class WriteSet:
    """What a unit leaves behind, as records of the write statement."""

    now: Instant
    version: int
    rows: tuple[Row, ...]
    facts: tuple[Fact, ...]
    answers: Mapping[str, bytes]
    progress: tuple[str, int] | None

    @property
    def is_empty(self) -> bool:
        return not (self.rows or self.facts or self.answers or self.progress)

    def statement(self) -> str:
        """The statement for the kinds concerned; announced only where a reader has something to learn."""
        upserted = frozenset(row.KIND for row in self.rows if is_kept(row))
        deleted = frozenset(row.KIND for row in self.rows if not is_kept(row))
        return statements.write_changes(upserted, deleted, announce=bool(self.rows or self.facts))

    def document(self) -> str:
        """The one parameter of the statement."""
        document: dict[str, list[Any]] = {
            "feed": [],
            "facts": [row_codec(Fact).encode(fact) for fact in self.facts],
            "answers": [self._answer(event_id, answer) for event_id, answer in self.answers.items()],
            "progress": [self._progress(*self.progress)] if self.progress else [],
        }
        for row in self.rows:
            encoded = encode_row(row)
            document.setdefault(("=" if is_kept(row) else "-") + row.KIND, []).append(self._stored(row, encoded))
            document["feed"].append(self._announced(row, encoded))
        return json.dumps(document)

    def _stored(self, row: Row, encoded: Mapping[str, Any]) -> dict[str, Any]:
        own = {"version": self.version, "is_default": row.is_default, "written_at": self.now}
        return {**encoded, **own}

    def _announced(self, row: Row, encoded: Mapping[str, Any]) -> dict[str, Any]:
        key = [clean_text(part) for part in row.key]
        record = {"version": self.version, "kind": row.KIND, "written_at": self.now}
        return record | {"key": key, "row": encoded}

    def _answer(self, event_id: str, answer: bytes) -> dict[str, Any]:
        return {"id": clean_text(event_id), "answer": base64.b64encode(answer).decode(), "at": self.now}

    def _progress(self, incarnation: str, number: int) -> dict[str, Any]:
        return {"incarnation": clean_text(incarnation), "last_number": number, "seen_at": self.now}


def is_kept(row: Row) -> bool:
    """A default row stays as a tombstone only where its generation must be remembered."""
    return not row.is_default or row.generation > 1


def write_set(unit: Unit[T], read: ReadSet, book: StateBook, result: UnitResult[T]) -> WriteSet:
    """Collect what a run of the pure function left."""
    return WriteSet(
        read.now, read.version, tuple(book.changes.values()), tuple(result.facts), result.answers, unit.progress
    )


async def commit_unit(session: Session, guards: Guards, unit: Unit[T]) -> Committed[T]:
    """One attempt at a unit. Raises AnswerRaceError where another unit stored one of its answers meanwhile."""
    async with session.transaction() as connection:
        await guards.lock(session, connection, unit.scope)
        read = await read_scope(session, connection, unit)
        book = StateBook(read.rows)
        result = unit.run(book, read.now, read.known)
        refuse_foreign_writes(unit.scope, book.changes.values())
        written = write_set(unit, read, book, result)
        if not written.is_empty:
            await _write(session, connection, written)
    rows = tuple(Versioned(read.version, row) for row in written.rows)
    return Committed(result.value, read.now, rows, written.facts)


async def record_facts(session: Session, connection: AsyncConnection, facts: tuple[Fact, ...]) -> None:
    """Append facts of a transition that is kept elsewhere than in the rows of state."""
    await _write(session, connection, WriteSet(0, 0, (), facts, {}, None))


async def _write(session: Session, connection: AsyncConnection, written: WriteSet) -> None:
    (outcome,) = await session.execute(connection, written.statement(), written.document())
    if outcome[0] < len(written.answers):
        raise AnswerRaceError
