"""A replica process that knows leases only: operations of the lease book as JSON lines on a Unix socket.

python -m tests.fleet.lease_replica URL SOCKET NAME
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

from policy_service.application.entropy import SystemEntropy
from policy_service.application.lease_book import LeaseBook, LeaseTerms
from policy_service.application.ports import StoreUnavailableError
from policy_service.domain.lease import LeaseCall, LeaseStep
from policy_service.storage.postgres.lease_store import PostgresLeaseStore
from policy_service.storage.postgres.session import StoreOptions
from policy_service.storage.postgres.store import PostgresStore

BUDGET_MS = 1_500
TERMS = LeaseTerms()


class Replica:
    """Answers one line with one line; many at a time."""

    def __init__(self, store: PostgresStore, name: str) -> None:
        self.store = store
        self.book = LeaseBook(PostgresLeaseStore(store), SystemEntropy(), name, budget_ms=BUDGET_MS)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            task = asyncio.create_task(self._answer(json.loads(line), writer))
            running.add(task)
            task.add_done_callback(running.discard)

    async def _answer(self, asked: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._run(asked)
        except StoreUnavailableError as error:
            answer = {"error": str(error)}
        writer.write(json.dumps({"id": asked["id"], **answer}).encode() + b"\n")

    async def _run(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        if asked["op"] == "clock":
            return {"at": (await self.store.read_clock(timeout_ms=BUDGET_MS)).database_ms}
        if asked["op"] == "sweep":
            return {"expired": (await self.book.sweep({}, revision=-1)).expired}
        call = LeaseCall(**asked["call"])
        if asked["op"] == "fence":
            check = await self.book.fence(call)
            return {"verdict": check.verdict.value, "at": check.at}
        operation = getattr(self.book, asked["op"])
        needs_terms = asked["op"] in ("acquire", "transition")
        return _shown(await (operation(call, TERMS) if needs_terms else operation(call)))


def _shown(step: LeaseStep) -> dict[str, Any]:
    row = step.lease
    held = {"generation": row.generation, "connection": row.connection_id} if row else {}
    return {"result": step.result.value, **held}


async def main(url: str, socket: str, name: str) -> None:
    options = StoreOptions(application_name=name, pool_size=8, idle_in_transaction_ms=5_000)
    replica = Replica(await PostgresStore.connect(url, options), name)
    server = await asyncio.start_unix_server(replica.serve, socket)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
