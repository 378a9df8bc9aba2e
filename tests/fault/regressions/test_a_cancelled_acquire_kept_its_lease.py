"""A client hung up while its AcquireLease was in the database: nobody had the lease, and the connection was hidden from
everybody until the TTL was over.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from policy_service.application.ports_leases import LeaseScope
from policy_service.bootstrap import Service
from policy_service.generated.policy.v1 import lease_pb2
from policy_service.storage.postgres.lease_store import lock_keys
from tests.contract.beside import driver, eventually
from tests.fleet.fleet import catalogue_file
from tests.integration.serving import config, serving

CATALOGUE = f"""
connections:
  - {{id: own, provider: leased}}
callers:
  - {{id: agent, key_sha256: {"a1" * 32}, scopes: ["lease:exclusive"], allowed_connections: [own]}}
"""
(KEY,) = lock_keys(LeaseScope(connections=("own",)))
LONG_LISTED = "UPDATE catalogue_revision SET created_at = created_at - 60000"
"""A connection listed just now is not leased yet (fleet.md section 6)."""
WAITS = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


def acquire(policy: Any, owner: str, request_id: str = "") -> Any:
    return policy.AcquireLease(
        lease_pb2.AcquireLeaseRequest(
            caller_id="agent", owner="vlo_" + owner.rjust(43, "x"), model="m", ttl_ms=600_000, request_id=request_id
        )
    )


@pytest.mark.parametrize("request_id", ["", "q1"])
async def test_a_lease_granted_to_a_client_that_hung_up_is_released(
    embedded_url: str, tmp_path: Path, request_id: str
) -> None:
    plain_url = embedded_url.replace("+asyncpg", "")
    settings = config(tmp_path, plain_url, catalogue=str(catalogue_file(tmp_path, CATALOGUE)))
    async with serving(settings) as (service, policy), driver(embedded_url) as other:
        await other.execute(LONG_LISTED)
        async with other.transaction():
            await other.execute("SELECT pg_advisory_xact_lock($1)", KEY)
            call = acquire(policy, "gone", request_id)
            await eventually(lambda: is_waiting(other), 5)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            # A grant that is answered before the service hears of the cancellation is the client's, as far as it knows.
            await eventually(lambda: has_hung_up(service), 5)
        await eventually(lambda: is_over(other), 5)
        assert (await acquire(policy, "next")).lease.generation == 1


async def has_hung_up(service: Service) -> bool:
    await asyncio.sleep(0.001)  # the service runs on this loop
    return service.server.gate.in_flight == 0


async def is_waiting(connection: Any) -> bool:
    return bool(await connection.fetchval(WAITS))


async def is_over(connection: Any) -> bool:
    ends = await connection.fetch("SELECT state, end_reason FROM lease")
    return [tuple(end) for end in ends] == [("RELEASED", "CLIENT_CANCELLED")]
