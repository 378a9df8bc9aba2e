"""Lease rows in Postgres (implements `application.ports_leases`).

One transaction an operation: advisory locks of the owners and connections in order, row locks of what exists, then in
a later statement rows and time, then the writes. The advisory locks keep others from adding rows, the row locks keep
an owner's renewal and a neighbour's expire step of the same row apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeVar

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from policy_service.application.ports import StoreUnavailableError
from policy_service.application.ports_leases import CONFLICTS, LeaseScope, LeaseSight, LeaseUnit, LeaseWrites
from policy_service.domain.facts import Fact
from policy_service.domain.ids import DurationMs
from policy_service.domain.lease import NEW_ROW, LeaseRow
from policy_service.storage.codec import clean_text, row_codec
from policy_service.storage.postgres import lease_statements as sql
from policy_service.storage.postgres.errors import sqlstate_of
from policy_service.storage.postgres.session import Session
from policy_service.storage.postgres.store import PostgresStore

T = TypeVar("T")

UNIQUE_VIOLATION = "23505"


class PostgresLeaseStore:
    """Leases on the connections of a replica's store."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def run(self, unit: LeaseUnit[T], *, timeout_ms: DurationMs) -> T:
        return await self._store.in_session(lambda session: _settle(session, unit), timeout_ms=timeout_ms)

    async def look(self, scope: LeaseScope, *, timeout_ms: DurationMs) -> LeaseSight:
        async def work(session: Session) -> LeaseSight:
            async with session.connect() as connection:
                return await _read(session, connection, scope)

        return await self._store.in_session(work, timeout_ms=timeout_ms)

    async def settled(self, scope: LeaseScope, *, timeout_ms: DurationMs) -> LeaseSight:
        async def work(session: Session) -> LeaseSight:
            async with session.transaction() as connection:
                await session.execute(connection, sql.SHARE_ROWS, _clean(scope.owners))
                return await _read(session, connection, scope)

        return await self._store.in_session(work, timeout_ms=timeout_ms)


async def _settle(session: Session, unit: LeaseUnit[T]) -> T:
    """Commit a unit; where another writer took its place in an index, look again at who won."""
    for _ in range(CONFLICTS):
        try:
            return await _commit(session, unit)
        except IntegrityError as error:
            if sqlstate_of(error) != UNIQUE_VIOLATION:
                raise
    raise StoreUnavailableError("the lease kept colliding with other writers")


async def _commit(session: Session, unit: LeaseUnit[T]) -> T:
    async with session.transaction() as connection:
        locked = await _lock(session, connection, unit.scope)
        sight = await _read(session, connection, unit.scope)
        written = unit.run(_of_locked(sight, locked) if unit.scope.everything else sight)
        await _write(session, connection, written)
    return written.value


async def _lock(session: Session, connection: AsyncConnection, scope: LeaseScope) -> frozenset[int]:
    """Lock names, then rows; ids of the rows."""
    keys = lock_keys(scope)
    if keys:
        await session.execute(connection, sql.LOCK_KEYS, keys)
    if scope.everything:
        rows = await session.execute(connection, sql.LOCK_LAPSED)
    else:
        rows = await session.execute(connection, sql.LOCK_ROWS, _clean(scope.owners), _clean(scope.connections))
    return frozenset(row[0] for row in rows)


def _of_locked(sight: LeaseSight, locked: frozenset[int]) -> LeaseSight:
    """Without the rows that came after the locks: without names to lock, nothing keeps others from adding some."""
    return replace(sight, rows=tuple(row for row in sight.rows if row.id in locked))


def lock_keys(scope: LeaseScope) -> list[int]:
    """Numbers of the advisory locks of a scope, ascending."""
    names = (*(f"lease/owner/{owner}" for owner in scope.owners), *(f"lease/on/{name}" for name in scope.connections))
    digests = (blake2b(clean_text(name).encode(), digest_size=8).digest() for name in names)
    return sorted({int.from_bytes(digest, signed=True) for digest in digests})


async def _read(session: Session, connection: AsyncConnection, scope: LeaseScope) -> LeaseSight:
    statement = sql.READ_EVERYTHING if scope.everything else sql.READ
    owners, connections = _clean(scope.owners), _clean(scope.connections)
    wanted = (scope.generation, scope.listed_in, clean_text(scope.event_id))
    found = await session.execute(connection, statement, owners, connections, *wanted)
    rows: list[LeaseRow] = []
    head: dict[str, Any] = {}
    for tag, body in found:
        if tag == "head":
            head = json.loads(body)
        else:
            rows.append(row_codec(LeaseRow).decode(json.loads(body)))
    return LeaseSight(tuple(rows), **head)


async def _write(session: Session, connection: AsyncConnection, written: LeaseWrites[Any]) -> None:
    """Ends first: an owner's new row must not meet the old one in the index of active rows."""
    known = [row for row in written.rows if row.id != NEW_ROW]
    added = [row for row in written.rows if row.id == NEW_ROW]
    if known:
        await session.execute(connection, sql.UPDATE, _document(known), _facts(() if added else written.facts))
    if added:
        await session.execute(connection, sql.INSERT, _document(added), _facts(written.facts))
    if written.grant:
        await session.execute(connection, sql.REMEMBER, clean_text(written.grant[0]), str(written.grant[1]))


def _document(rows: Iterable[LeaseRow]) -> str:
    return json.dumps([row_codec(LeaseRow).encode(row) for row in rows])


def _facts(facts: Iterable[Fact]) -> str:
    return json.dumps([row_codec(Fact).encode(fact) for fact in facts])


def _clean(names: Iterable[str]) -> list[str]:
    return sorted({clean_text(name) for name in names})
