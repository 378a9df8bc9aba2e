"""The schema: shipped migrations, agreement with the rows, and refusal of other releases' databases."""

from __future__ import annotations

import asyncio

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from policy_service.application.ports import SchemaMismatchError, StoreUnavailableError
from policy_service.storage.postgres import schema
from policy_service.storage.postgres.store import PostgresStore
from policy_service.storage.postgres.tables import METADATA
from tests.contract.beside import driver


def differences(connection: Connection) -> list[object]:
    context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": False})
    return list(compare_metadata(context, METADATA))


async def test_the_migrated_schema_is_that_of_the_rows(embedded_url: str) -> None:
    engine = create_async_engine(embedded_url, poolclass=NullPool)
    async with engine.connect() as connection:
        assert await connection.run_sync(differences) == []
    await engine.dispose()


async def test_replicas_that_start_at_once_migrate_once(empty_url: str) -> None:
    revisions = await asyncio.gather(*(schema.upgrade(empty_url) for _ in range(4)))
    assert set(revisions) == {schema.expected()}
    assert await schema.current(empty_url) == schema.expected()
    await schema.check(empty_url)


async def test_an_empty_database_is_refused_with_a_remedy(empty_url: str) -> None:
    assert await schema.current(empty_url) is None
    with pytest.raises(SchemaMismatchError, match=r"empty.*policy-service migrate") as caught:
        await PostgresStore.connect(empty_url)
    assert (caught.value.found, caught.value.remedy) == (None, schema.REMEDY_OLDER)


async def test_a_newer_database_is_refused_by_check_and_left_alone_by_upgrade(embedded_url: str) -> None:
    async with driver(embedded_url) as newer:
        await newer.execute("UPDATE alembic_version SET version_num = '9999'")
    for refused in (schema.check, schema.upgrade):
        with pytest.raises(SchemaMismatchError) as caught:
            await refused(embedded_url)
        assert (caught.value.found, caught.value.remedy) == ("9999", schema.REMEDY_NEWER)
    assert await schema.current(embedded_url) == "9999"


async def test_an_older_database_is_refused_with_a_remedy(embedded_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = schema.expected()
    monkeypatch.setattr(schema, "expected", lambda: "9999")
    with pytest.raises(SchemaMismatchError) as caught:
        await schema.check(embedded_url)
    assert (caught.value.found, caught.value.remedy) == (found, schema.REMEDY_OLDER)


async def test_a_database_of_the_first_schema_is_brought_up_with_its_rows(empty_url: str) -> None:
    """Rows written before a column existed read as if nothing had been said in it."""
    await _run(empty_url, "upgrade", "0001")
    async with driver(empty_url) as old:
        await old.execute("INSERT INTO replica (incarnation, last_number, seen_at) VALUES ('before', 7, 1)")
    await schema.upgrade(empty_url)
    async with driver(empty_url) as new:
        row = await new.fetchrow("SELECT last_number, name, alive_until FROM replica WHERE incarnation = 'before'")
        assert tuple(row) == (7, "", 0)


async def test_a_migration_that_fails_leaves_the_database_as_it_was(empty_url: str) -> None:
    async with driver(empty_url) as rival:
        await rival.execute("CREATE TABLE replica (id int)")
        with pytest.raises(Exception, match="42P07"):
            await schema.upgrade(empty_url)
        assert await rival.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == 1


async def test_the_schema_can_be_taken_down_again(embedded_url: str) -> None:
    await _run(embedded_url, "downgrade", "base")
    async with driver(embedded_url) as empty:
        left = await empty.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        assert [row["tablename"] for row in left] == ["alembic_version"]


async def _run(url: str, direction: str, revision: str) -> None:
    """Alembic's own command on one connection."""

    def migrate(connection: Connection) -> None:
        made = schema.config()
        made.attributes["connection"] = connection
        getattr(command, direction)(made, revision)

    engine = create_async_engine(url, poolclass=NullPool)
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
    await engine.dispose()


async def test_an_absent_server_is_unavailable() -> None:
    with pytest.raises(StoreUnavailableError):
        await schema.check("postgresql://postgres@127.0.0.1:1/postgres")
