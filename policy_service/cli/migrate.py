"""`migrate`: the schema of an existing Postgres."""

from __future__ import annotations

import asyncio

from policy_service.cli import exit_codes
from policy_service.cli.output import progress, say
from policy_service.settings.fields import hidden_url
from policy_service.settings.load import LoadedConfig
from policy_service.settings.problems import ConfigError, Problem


def run(loaded: LoadedConfig, *, check_only: bool) -> int:
    """Migrate, or with `check_only` compare; prints the revisions.

    Raises:
        ConfigError: no database is named.
        StoreUnavailableError: it cannot be reached.
        SchemaMismatchError: it is newer than this release, or `check_only` and it is not this release's.
    """
    url = loaded.config.database_text
    if url is None:
        remedy = "set --database-url or POLICY_DATABASE_URL; the embedded database is migrated by `serve` itself"
        raise ConfigError([Problem("database_url", "no database is named", "", "postgresql://...", remedy)])
    return asyncio.run(_compare(url) if check_only else _upgrade(url))


async def _compare(url: str) -> int:
    from policy_service.storage.postgres import schema

    await schema.check(url)
    say(f"{hidden_url(url)} has the schema of this release")
    return exit_codes.OK


async def _upgrade(url: str) -> int:
    from policy_service.storage.postgres import schema

    before = await schema.current(url)
    with progress("migrating"):
        after = await schema.upgrade(url)
    done = f"is at {after} already" if before == after else f"migrated from {before or 'empty'} to {after}"
    say(f"{hidden_url(url)} {done}")
    return exit_codes.OK
