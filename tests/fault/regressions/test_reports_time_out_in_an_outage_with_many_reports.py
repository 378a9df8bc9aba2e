"""Each report of an outage was flushed to disk alone and the whole spool measured after it: 2,000 reports at once took
longer than a report may, and each one longer than the one before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from policy_service.application.ports import SpoolFullError
from policy_service.storage.spool import SqliteSpool


@pytest.fixture
async def spool(tmp_path: Path) -> AsyncIterator[SqliteSpool]:
    opened = SqliteSpool(tmp_path, "r1", 1_000)
    yield opened
    await opened.close()


def statements(spool: SqliteSpool) -> list[str]:
    seen: list[str] = []
    spool._database.set_trace_callback(seen.append)
    return seen


async def test_reports_that_come_together_are_flushed_together(spool: SqliteSpool) -> None:
    seen = statements(spool)
    await asyncio.gather(*(spool.append([(f"e{n}", b"x")]) for n in range(200)))
    assert spool.entries == 200
    assert seen.count("COMMIT") <= 20
    assert [event_id for event_id, _ in await spool.load()] == [f"e{n}" for n in range(200)]


async def test_a_report_does_not_read_those_that_wait_already(spool: SqliteSpool) -> None:
    seen = statements(spool)
    await spool.append([("e1", b"x")])
    await spool.remove(["e1"])
    assert not [text for text in seen if text.startswith("SELECT")]


async def test_what_was_counted_is_what_is_there(spool: SqliteSpool) -> None:
    await spool.append([("e1", b"x" * 600), ("e1", b"x" * 10), ("e2", b"x" * 100)])
    await spool.append([("e2", b"x" * 100)])
    await spool.remove(["e1", "e1", "unknown"])
    assert (spool._bytes, spool.entries) == spool._measure() == (100, 1)


async def test_the_limit_refuses_only_those_that_do_not_fit(spool: SqliteSpool) -> None:
    sizes = (600, 600, 300, 200, 100)
    found = await asyncio.gather(
        *(spool.append([(f"e{n}", b"x" * size)]) for n, size in enumerate(sizes)), return_exceptions=True
    )
    assert [isinstance(each, SpoolFullError) for each in found] == [False, True, False, True, False]
    assert [event_id for event_id, _ in await spool.load()] == ["e0", "e2", "e4"]
