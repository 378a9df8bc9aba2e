"""The fleet's roll in Postgres: one statement signs and reads who stands (implements `application.ports_fleet`)."""

from __future__ import annotations

from policy_service.application.ports_fleet import Sighting, Signer
from policy_service.domain.ids import DurationMs
from policy_service.storage.codec import clean_text
from policy_service.storage.postgres.session import Session
from policy_service.storage.postgres.statements import NOW_MS

_SEEN = "incarnation, name, release, seen_at, alive_until"
SIGN = f"""
WITH signed AS (
  INSERT INTO replica (incarnation, name, release, last_number, seen_at, alive_until)
  VALUES ($1, $2, $3, 0, {NOW_MS}, {NOW_MS} + $4::bigint)
  ON CONFLICT (incarnation) DO UPDATE SET name = excluded.name, release = excluded.release,
    seen_at = excluded.seen_at, alive_until = excluded.alive_until
  RETURNING {_SEEN}),
others AS (SELECT {_SEEN} FROM replica WHERE incarnation <> $1 AND alive_until > {NOW_MS} ORDER BY name, incarnation)
SELECT {_SEEN} FROM signed WHERE $4::bigint > 0 UNION ALL SELECT {_SEEN} FROM others"""
"""$1 incarnation, $2 name, $3 release, $4 ms for which the signature stands. The number of the newest event committed,
which the row also holds, is the commit's."""


async def sign(session: Session, signer: Signer, stands_ms: DurationMs) -> tuple[Sighting, ...]:
    """Sign and read, in one round trip."""
    async with session.connect() as connection:
        rows = await session.execute(connection, SIGN, *map(clean_text, signer), stands_ms)
    return tuple(Sighting(Signer(*row[:3]), row[3], row[4]) for row in rows)
