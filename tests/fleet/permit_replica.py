"""One replica whose callers share an account under a cap, as a process of its own for the fleet tests.

python -m tests.fleet.permit_replica DATABASE_URL NAME CALLERS HOLD_MS SECONDS CAP TTL_MS
"""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import count

from policy_service.application.clock import DatabaseClock
from policy_service.application.entropy import SystemEntropy
from policy_service.application.permit_work import Passage, PermitAsk
from policy_service.application.permits import Permits
from policy_service.domain.gates import Gate
from policy_service.storage.postgres.permit_store import PostgresPermitStore
from policy_service.storage.postgres.session import StoreOptions
from policy_service.storage.postgres.store import PostgresStore

GATE = "qsconn:account"
WAIT_MS = 120_000
STORE_MS = 10_000


def monotonic_ms() -> float:
    return time.monotonic() * 1000


async def call(permits: Permits, request: PermitAsk, hold_ms: int) -> bool:
    """One request of a caller: wait for the account, use it, give it back."""
    outcome = await permits.acquire(request)
    if outcome.row is None:
        return False
    await asyncio.sleep(hold_ms / 1000)
    await permits.release([outcome.row.permit_id])
    return True


async def caller(permits: Permits, name: str, hold_ms: int, ttl_ms: int, cap: int, ends_at: float) -> int:
    passage = Passage((Gate(GATE, cap, depth=0),))
    served = 0
    for number in count():
        if time.monotonic() >= ends_at:
            return served
        request = PermitAsk(passage, f"{name}-{number}", WAIT_MS, ttl_ms, store_ms=STORE_MS)
        served += await call(permits, request, hold_ms)
    return served


async def main(url: str, name: str, callers: int, hold_ms: int, seconds: float, cap: int, ttl_ms: int) -> None:
    store = await PostgresStore.connect(url, StoreOptions(application_name=name))
    end = await store.subscribe(lambda: None, lambda: None)
    clock = DatabaseClock(monotonic_ms)
    clock.learn(await store.read_clock(timeout_ms=STORE_MS))
    permit_store = PostgresPermitStore(store, name)
    permits = Permits(permit_store, clock, SystemEntropy(), name, monotonic_ms=monotonic_ms, store_ms=STORE_MS)
    await permits.start()
    print("ready", flush=True)
    ends_at = time.monotonic() + seconds
    tasks = [
        asyncio.create_task(caller(permits, f"{name}-{number}", hold_ms, ttl_ms, cap, ends_at))
        for number in range(callers)
    ]
    await asyncio.wait(tasks, timeout=seconds)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await permits.stop()
    await end()
    await store.close()


if __name__ == "__main__":
    database, replica, *numbers = sys.argv[1:]
    asyncio.run(main(database, replica, *map(int, numbers)))
