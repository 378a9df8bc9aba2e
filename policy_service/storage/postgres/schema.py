"""Schema of the database: bring it up to date, tell its revision, refuse another release's.

Migrations are shipped inside the package. Several replicas may start at once: one migrates, the others wait for it
on an advisory lock and find nothing left to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files

import asyncpg
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from policy_service.application.ports import SchemaMismatchError, StoreUnavailableError
from policy_service.domain.ids import DurationMs
from policy_service.storage.postgres.errors import public_error
from policy_service.storage.postgres.session import StoreOptions, connect_arguments, database_url

MIGRATION_LOCK = 0x706F6C696379
"""Advisory lock of whoever migrates ("policy" in ASCII)."""
CONTACT_TIMEOUT_MS = 5_000
UPGRADE_TIMEOUT_MS = 600_000

REMEDY_OLDER = "run `policy-service migrate`"
REMEDY_NEWER = "run a release at least as new as the one that migrated this database"


def config() -> Config:
    """Alembic configuration with the shipped migrations."""
    made = Config()
    made.set_main_option("script_location", str(files("policy_service") / "migrations"))
    made.set_main_option("path_separator", "os")
    return made


def expected() -> str:
    """Revision that this release needs."""
    head = ScriptDirectory.from_config(config()).get_current_head()
    if head is None:
        raise RuntimeError("the package ships no migrations")
    return head


async def upgrade(url: str | URL, *, timeout_ms: DurationMs = UPGRADE_TIMEOUT_MS) -> str:
    """Migrate to the revision of this release and return it; does nothing where it is there already.

    Raises SchemaMismatchError for a database newer than this release, StoreUnavailableError where it is away.
    """
    async with _connected(url, timeout_ms) as connection:
        await connection.execute(text(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"))
        await connection.run_sync(_upgrade)
    return expected()


async def current(url: str | URL, *, timeout_ms: DurationMs = CONTACT_TIMEOUT_MS) -> str | None:
    """Revision of the database; None where it was never migrated."""
    async with _connected(url, timeout_ms) as connection:
        return await connection.run_sync(_revision)


async def check(url: str | URL, *, timeout_ms: DurationMs = CONTACT_TIMEOUT_MS) -> None:
    """Raise SchemaMismatchError unless the database has the revision of this release."""
    _compare(await current(url, timeout_ms=timeout_ms))


def _compare(found: str | None) -> None:
    needed = expected()
    if found != needed:
        raise SchemaMismatchError(found, needed, REMEDY_OLDER if _is_older(found) else REMEDY_NEWER)


def _is_older(found: str | None) -> bool:
    known = {script.revision for script in ScriptDirectory.from_config(config()).walk_revisions()}
    return found is None or found in known


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _upgrade(connection: Connection) -> None:
    found = _revision(connection)
    if not _is_older(found):
        raise SchemaMismatchError(found, expected(), REMEDY_NEWER)
    alembic = config()
    alembic.attributes["connection"] = connection
    command.upgrade(alembic, "head")


@asynccontextmanager
async def _connected(url: str | URL, timeout_ms: DurationMs) -> AsyncIterator[AsyncConnection]:
    """One transaction on a connection of its own, under a deadline; it asks for nothing that a pooler refuses."""
    limits = StoreOptions(statement_timeout_ms=timeout_ms, lock_timeout_ms=timeout_ms, has_transaction_pooler=True)
    engine = create_async_engine(database_url(url), poolclass=NullPool, connect_args=connect_arguments(limits))
    try:
        async with asyncio.timeout(timeout_ms / 1000), engine.begin() as connection:
            await connection.exec_driver_sql(limits.limit_transaction())
            yield connection
    except (OSError, TimeoutError, SQLAlchemyError, asyncpg.PostgresError) as error:
        raise (public_error(error) or StoreUnavailableError("the server does not answer")) from None
    finally:
        await engine.dispose()
