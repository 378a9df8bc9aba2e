"""Databases for tests: one embedded server a test session, one fresh database a test.

`embedded_url` is migrated, `empty_url` is not. POLICY_TEST_DATABASE_URL names a server to use instead.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from sqlalchemy import URL, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from policy_service.storage.postgres import schema
from policy_service.storage.postgres.embedded import EmbeddedServer
from policy_service.storage.postgres.session import database_url
from tests.contract.beside import place_for_clusters

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
"""Tests start processes while channels are open; gRPC's own handling of that fork can stall every later call."""

settings.register_profile("of any speed", settings(), deadline=None)
settings.load_profile("of any speed")
"""How long an example takes says how busy the machine is; what is measured is measured by tests of its own."""

_NUMBERS = count(1)


GIVEN_DATABASE = os.environ.get("POLICY_TEST_DATABASE_URL")
OF_THE_TESTS = ("POLICY_TEST_", "POLICY_FLEET_", "POLICY_HYPOTHESIS_", "POLICY_FUZZ_")


@pytest.fixture(scope="session", autouse=True)
def variables_of_the_tests_are_hidden_from_the_service() -> Iterator[None]:
    """The service refuses `POLICY_*` variables that it does not know; those of the tests were read on import."""
    hidden = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith(OF_THE_TESTS)}
    yield
    os.environ.update(hidden)


def _finish(work: Coroutine[Any, Any, object]) -> None:
    """Run to the end on a loop of its own; the fixture may be asked for from within a running one."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result()


async def _administer(server: URL, *commands: str) -> None:
    engine = create_async_engine(server, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        for command in commands:
            await connection.execute(text(command))
    await engine.dispose()


def _create(server: URL, template: str) -> URL:
    name = f"test_{os.getpid()}_{next(_NUMBERS)}"
    _finish(_administer(server, f"CREATE DATABASE {name} TEMPLATE {template}"))
    return server.set(database=name)


def _drop(database: URL, server: URL) -> None:
    _finish(_administer(server, f"DROP DATABASE {database.database} WITH (FORCE)"))


@pytest.fixture(scope="session")
def server_url() -> Iterator[URL]:
    """A Postgres server's maintenance database."""
    if GIVEN_DATABASE:
        yield database_url(GIVEN_DATABASE)
        return
    directory = tempfile.mkdtemp(prefix="policy-test-", dir=place_for_clusters())
    server = EmbeddedServer.open(directory, {"fsync": "off"})
    yield database_url(server.url)
    server.close()
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def template(server_url: URL) -> Iterator[str]:
    """Name of a migrated database to copy."""
    database = _create(server_url, "template1")
    _finish(schema.upgrade(database))
    yield str(database.database)
    _drop(database, server_url)


@pytest.fixture
def empty_url(server_url: URL) -> Iterator[str]:
    """A fresh database without a schema."""
    database = _create(server_url, "template1")
    yield database.render_as_string(hide_password=False)
    _drop(database, server_url)


@pytest.fixture
def embedded_url(server_url: URL, template: str) -> Iterator[str]:
    """A fresh database with the schema of this release."""
    database = _create(server_url, template)
    yield database.render_as_string(hide_password=False)
    _drop(database, server_url)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The full run allows no skip: POLICY_TEST_NO_SKIP turns one into a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if reporter and skipped and os.environ.get("POLICY_TEST_NO_SKIP") and session.exitstatus == pytest.ExitCode.OK:
        reporter.write_line(f"{len(skipped)} test(s) were skipped, the full run allows none", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
