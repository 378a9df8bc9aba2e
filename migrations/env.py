"""Runs migrations on the connection given by `policy_service.storage.postgres.schema`, or on the configured URL."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from alembic import context
from alembic.autogenerate.api import AutogenContext
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine

from policy_service.storage.postgres.session import database_url
from policy_service.storage.postgres.tables import METADATA, Xid8


def _render_item(kind: str, item: Any, _: AutogenContext) -> str | Literal[False]:
    return "Xid8()" if kind == "type" and isinstance(item, Xid8) else False


def _migrate(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=METADATA, render_item=_render_item)
    with context.begin_transaction():
        context.run_migrations()


async def _migrate_configured() -> None:
    engine = create_async_engine(database_url(context.config.get_main_option("sqlalchemy.url") or ""))
    async with engine.begin() as connection:
        await connection.run_sync(_migrate)
    await engine.dispose()


def _migrate_offline() -> None:
    context.configure(dialect_name="postgresql", target_metadata=METADATA, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    _migrate(given)
elif context.is_offline_mode():
    _migrate_offline()
else:
    asyncio.run(_migrate_configured())
