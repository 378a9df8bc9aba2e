"""Session pins in Postgres (implements `application.ports_pins`): one statement a change, in autocommit.

A statement that touches no row is followed by a look at who won. All conditions are tested again on the row itself
after waiting for a concurrent writer, because each is part of the statement that writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from policy_service.application.ports_pins import PinKey, PinSeen, SavedPin, key_of
from policy_service.domain.affinity import PinRow, refresh_interval
from policy_service.domain.ids import DurationMs, Instant
from policy_service.storage.codec import clean_text
from policy_service.storage.postgres.session import Session
from policy_service.storage.postgres.statements import NOW_MS, PRUNED_AT_ONCE
from policy_service.storage.postgres.store import PostgresStore

_COLUMNS = (
    "api_key_id, provider, session_hash, connection_id, created_at, last_used_at, expires_at, version"  # as in PinRow
)
_KEY = "p.api_key_id = $1 AND p.provider = $2 AND p.session_hash = $3"
_SEEN = "p.connection_id = {0} AND ({1}::bigint = 0 OR p.version = {1}::bigint)"
_NEXT = "nextval('row_version')"

FIND = f"SELECT {_COLUMNS} FROM session_pin p WHERE {_KEY} AND p.expires_at > {NOW_MS}"
"""$1 caller, $2 provider, $3 session hash."""

INSERT = f"""
INSERT INTO session_pin AS p ({_COLUMNS})
SELECT $1::text, $2::text, $3::text, $4::text, $5::bigint, $6::bigint, $7::bigint, {_NEXT} WHERE $7::bigint > {NOW_MS}
ON CONFLICT (api_key_id, provider, session_hash) DO UPDATE SET connection_id = excluded.connection_id,
  created_at = excluded.created_at, last_used_at = excluded.last_used_at, expires_at = excluded.expires_at,
  version = excluded.version
WHERE p.expires_at <= {NOW_MS}
RETURNING {_COLUMNS}"""
"""$1 to $3 key, $4 connection, $5 created, $6 last used, $7 expires."""

MOVE = f"""
UPDATE session_pin p SET connection_id = $4, created_at = $5, last_used_at = $6, expires_at = $7, version = {_NEXT}
WHERE {_KEY} AND {_SEEN.format("$8", "$9")} RETURNING {_COLUMNS}"""
"""$1 to $7 as for INSERT, $8 connection seen, $9 version seen."""

DELETE = f"DELETE FROM session_pin p WHERE {_KEY} AND {_SEEN.format('$4', '$5')} RETURNING 1"
"""$1 to $3 key, $4 connection seen, $5 version seen."""

DELETE_ALL = f"""
WITH gone AS (
  DELETE FROM session_pin p WHERE ($1::text = '' OR p.provider = $1::text)
    AND ($2::text = '' OR p.connection_id = $2::text)
  RETURNING p.expires_at)
SELECT count(*) FROM gone WHERE expires_at > {NOW_MS}"""
"""$1 provider, $2 connection, empty: any."""

REFRESH = f"""
UPDATE session_pin p SET last_used_at = $6, expires_at = greatest(p.expires_at, $6 + $7)
WHERE {_KEY} AND {_SEEN.format("$4", "$5")} AND p.expires_at > {NOW_MS} AND $6 - p.last_used_at >= $8
RETURNING {_COLUMNS}"""
"""$1 to $5 as for DELETE, $6 instant, $7 TTL, $8 shortest time between two refreshes."""

COUNT = f"""
SELECT p.connection_id, count(*) FROM session_pin p
WHERE p.connection_id = ANY($1::text[]) AND p.expires_at > {NOW_MS} GROUP BY 1"""
"""$1 connections."""

SWEEP = f"""
WITH gone AS (
  DELETE FROM session_pin WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM session_pin WHERE expires_at <= {NOW_MS} LIMIT {PRUNED_AT_ONCE}))
  AND expires_at <= {NOW_MS} RETURNING 1)
SELECT count(*) FROM gone"""


class PostgresPinStore:
    """Pins on the connections of a replica's store."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def _query(self, statement: str, *parameters: Any, timeout_ms: DurationMs) -> Sequence[Any]:
        async def work(session: Session) -> Sequence[Any]:
            async with session.connect() as connection:
                return await session.execute(connection, statement, *parameters)

        return await self._store.in_session(work, timeout_ms=timeout_ms)

    async def _row(self, statement: str, *parameters: Any, timeout_ms: DurationMs) -> PinRow | None:
        rows = await self._query(statement, *parameters, timeout_ms=timeout_ms)
        return PinRow(*rows[0]) if rows else None

    async def find(self, key: PinKey, *, timeout_ms: DurationMs) -> PinRow | None:
        return await self._row(FIND, *_cleaned(key), timeout_ms=timeout_ms)

    async def insert(self, row: PinRow, *, timeout_ms: DurationMs) -> SavedPin | None:
        return await self._saved(INSERT, row, (), timeout_ms)

    async def move(self, row: PinRow, seen: PinSeen, *, timeout_ms: DurationMs) -> SavedPin | None:
        return await self._saved(MOVE, row, _cleaned(seen), timeout_ms)

    async def _saved(self, statement: str, row: PinRow, seen: Sequence[Any], timeout_ms: DurationMs) -> SavedPin | None:
        values = (*_cleaned(key_of(row)), clean_text(row.connection_id))
        times = (row.created_at, row.last_used_at, row.expires_at)
        written = await self._row(statement, *values, *times, *seen, timeout_ms=timeout_ms)
        if written is not None:
            return SavedPin(written, is_own=True)
        winner = await self.find(key_of(row), timeout_ms=timeout_ms)
        return None if winner is None else SavedPin(winner, is_own=False)

    async def delete(self, key: PinKey, seen: PinSeen, *, timeout_ms: DurationMs) -> bool:
        return bool(await self._query(DELETE, *_cleaned(key), *_cleaned(seen), timeout_ms=timeout_ms))

    async def delete_all(self, provider: str, connection: str, *, timeout_ms: DurationMs) -> int:
        names = (clean_text(provider), clean_text(connection))
        return int((await self._query(DELETE_ALL, *names, timeout_ms=timeout_ms))[0][0])

    async def refresh(
        self, key: PinKey, seen: PinSeen, at: Instant, ttl_ms: DurationMs, *, timeout_ms: DurationMs
    ) -> PinRow | None:
        times = (at, ttl_ms, refresh_interval(ttl_ms))
        row = await self._row(REFRESH, *_cleaned(key), *_cleaned(seen), *times, timeout_ms=timeout_ms)
        return await self.find(key, timeout_ms=timeout_ms) if row is None else row

    async def count(self, connections: Collection[str], *, timeout_ms: DurationMs) -> Mapping[str, int]:
        rows = await self._query(COUNT, [clean_text(name) for name in connections], timeout_ms=timeout_ms)
        return {row[0]: row[1] for row in rows}

    async def sweep(self, *, timeout_ms: DurationMs) -> int:
        return int((await self._query(SWEEP, timeout_ms=timeout_ms))[0][0])


def _cleaned(values: PinKey | PinSeen) -> tuple[Any, ...]:
    return tuple(clean_text(value) if isinstance(value, str) else value for value in values)
