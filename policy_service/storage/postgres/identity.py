"""Which server answers: its system identifier and timeline. A change is a failover and raises the fleet epoch
(spec/fleet.md section 7)."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError

from policy_service.storage.postgres import statements
from policy_service.storage.postgres.errors import sqlstate_of
from policy_service.storage.postgres.session import Session

UNKNOWN = ("", 0)
"""Identity of a server that does not tell: failovers are not noticed there."""

_NOT_TOLD = frozenset({"42501", "42883", "0A000"})


async def adopt(session: Session) -> None:
    """Note the identity of the server at hand; the first replica that finds another one raises the epoch."""
    found = await _identity(session)
    async with session.connect() as connection:
        await session.execute(connection, statements.ADOPT_IDENTITY, *found)


async def _identity(session: Session) -> tuple[str, int]:
    try:
        async with session.connect() as connection:
            (row,) = await session.execute(connection, statements.IDENTITY)
    except DBAPIError as error:
        if sqlstate_of(error) in _NOT_TOLD:
            return UNKNOWN
        raise
    return str(row[0]), int(row[1])
