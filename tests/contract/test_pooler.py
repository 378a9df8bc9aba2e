"""The `pooled` suites mean something only where a real pgbouncer is in between."""

from __future__ import annotations

import pytest

from tests.contract.beside import driver


async def test_pooled_suites_go_through_pgbouncer_in_transaction_mode(
    pooler: int | None, pooled_url: str, embedded_url: str
) -> None:
    if pooler is None:
        pytest.skip("pgbouncer is not installed: apt-get install pgbouncer")
    async with driver(pooled_url) as through, driver(embedded_url) as straight:
        assert await through.fetchval("SELECT inet_client_port() IS NULL OR true", timeout=5)
        sessions = await straight.fetch(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        async with driver(pooled_url) as other:
            seen = {await through.fetchval("SELECT pg_backend_pid()"), await other.fetchval("SELECT pg_backend_pid()")}
    assert len(sessions) == 1
    assert seen == {sessions[0]["pid"]}
