"""After a failover of an asynchronous database nobody gets a permit until all that it may have lost have ended."""

from __future__ import annotations

import time

import pytest

from policy_service.application.entropy import SystemEntropy
from policy_service.application.permit_work import Passage, PermitAsk
from policy_service.application.permits import Permits
from policy_service.domain.gates import PERMIT_TTL_MAX_MS, Gate
from policy_service.storage.memory.store import host_clock
from policy_service.storage.postgres.permit_store import PostgresPermitStore
from policy_service.storage.postgres.store import PostgresStore
from tests.contract.beside import driver
from tests.contract.test_permits import HostClock

ASK = PermitAsk(Passage((Gate("qsconn:c", 1),)), "q", timeout_ms=0)


@pytest.mark.parametrize(
    ("awaits_failover", "epoch", "ago_ms", "is_granted"),
    [
        (True, 2, 0, False),
        (True, 2, PERMIT_TTL_MAX_MS + 1_000, True),
        (True, 1, 0, True),
        (False, 2, 0, True),
    ],
)
async def test_after_a_failover_permits_pause_for_the_largest_ttl(
    embedded_url: str, awaits_failover: bool, epoch: int, ago_ms: int, is_granted: bool
) -> None:
    store = await PostgresStore.connect(embedded_url)
    stored = PostgresPermitStore(store, "r0", awaits_failover=awaits_failover)
    permits = Permits(stored, HostClock(), SystemEntropy(), "r0", monotonic_ms=lambda: time.monotonic() * 1000)
    async with driver(embedded_url) as beside:
        await beside.execute("UPDATE fleet SET epoch = $1, raised_at = $2", epoch, host_clock() - ago_ms)
        outcome = await permits.acquire(ASK)
        if is_granted:
            await permits.release([outcome.grants[0].permit_id])
    await store.close()
    assert outcome.is_held is is_granted
    assert (outcome.refusal is None) is is_granted
