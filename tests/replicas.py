"""Replicas for tests: real use cases over any store, with a clock that the test moves where it wants to."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from policy_service.application.commit import CommitLimits
from policy_service.application.entropy import SystemEntropy
from policy_service.application.follow import FollowSettings
from policy_service.application.messages import (
    Candidate,
    DecisionToken,
    Dispatch,
    EndKind,
    ReportAnswer,
    ReportRequest,
    SelectAnswer,
    SelectRequest,
)
from policy_service.application.ports import CatalogueRevision, SpoolFullError, Store
from policy_service.application.replica import OwnershipStores, Replica, ReplicaSettings
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.ids import ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.policy import Policy
from policy_service.settings.catalogue_file import builtin_catalogue, load_catalogue
from policy_service.storage import event_codec
from policy_service.storage.memory.lease_store import LeaseTable, MemoryLeaseStore
from policy_service.storage.memory.permit_store import MemoryPermits, MemoryPermitStore
from policy_service.storage.memory.pin_store import MemoryPinStore, PinTable
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from policy_service.storage.postgres.lease_store import PostgresLeaseStore
from policy_service.storage.postgres.permit_store import PostgresPermitStore
from policy_service.storage.postgres.pin_store import PostgresPinStore
from policy_service.storage.postgres.store import PostgresStore

OPENAI = "openai"


class ListSpool:
    """A spool in a list; `limit` entries at most. Named as a fake: the real one is a SQLite file."""

    def __init__(self, limit: int = 1_000_000) -> None:
        self.kept: dict[str, bytes] = {}
        self.limit = limit

    @property
    def entries(self) -> int:
        return len(self.kept)

    async def append(self, entries: Sequence[tuple[str, bytes]]) -> None:
        if len(self.kept) + len(entries) > self.limit:
            raise SpoolFullError("full")
        for event_id, payload in entries:
            self.kept.setdefault(event_id, payload)

    async def remove(self, event_ids: Sequence[str]) -> None:
        for event_id in event_ids:
            self.kept.pop(event_id, None)

    async def load(self) -> Sequence[tuple[str, bytes]]:
        return list(self.kept.items())

    async def close(self) -> None:
        return None


class FakeTime:
    """Host and database time in one, moved by the test; ms."""

    def __init__(self, start: int = 1_700_000_000_000) -> None:
        self.ms = start

    def database(self) -> int:
        return self.ms

    def monotonic(self) -> float:
        return float(self.ms)


def compile_revision(environment: Mapping[str, str]) -> object:
    def compiled(stored: CatalogueRevision) -> Policy:
        return Policy(load_catalogue(stored.document).catalogue, environment, stored.revision)

    return compiled


class _Shared(NamedTuple):
    """Tables of the ownership stores that the replicas of one memory database share."""

    leases: LeaseTable
    permits: MemoryPermits
    pins: PinTable


_SHARED: dict[int, tuple[MemoryDatabase, _Shared]] = {}
"""By identity of the database, which is kept so that its identity is not used again."""


def ownership_stores(store: Store, name: str) -> OwnershipStores:
    """Stores of leases, permits and pins beside a store, of the same kind."""
    if isinstance(store, PostgresStore):
        return OwnershipStores(PostgresLeaseStore(store), PostgresPermitStore(store, name), PostgresPinStore(store))
    assert isinstance(store, MemoryStore)
    database = store.database
    fresh = _Shared(LeaseTable(), MemoryPermits(clock=database.clock, record=database.record), PinTable())
    _, shared = _SHARED.setdefault(id(database), (database, fresh))
    return OwnershipStores(
        MemoryLeaseStore(store, shared.leases),
        MemoryPermitStore(shared.permits, name),
        MemoryPinStore(store, shared.pins),
    )


def make_replica(
    store: Store,
    name: str = "r1",
    *,
    spool: ListSpool | None = None,
    time_source: FakeTime | None = None,
    catalogue: Catalogue | None = None,
    settings: ReplicaSettings | None = None,
    seed: int = 1,
) -> Replica:
    """A replica that is not started yet."""
    chosen = settings or ReplicaSettings(name, follow=FollowSettings(poll_ms=50))
    return Replica(
        store,
        spool or ListSpool(),
        Policy(catalogue or builtin_catalogue()),
        SystemEntropy(seed),
        chosen,
        stores=ownership_stores(store, chosen.name),
        compile_revision=compile_revision({}),  # type: ignore[arg-type]
        monotonic_ms=time_source.monotonic if time_source else lambda: time.monotonic() * 1000,
        encode_event=event_codec.encode,
        decode_event=event_codec.decode,
    )


@asynccontextmanager
async def running(replica: Replica) -> AsyncIterator[Replica]:
    """Start and stop."""
    await replica.start()
    try:
        yield replica
    finally:
        await replica.stop()


def quick_settings(name: str, **limits: int) -> ReplicaSettings:
    """Short budgets, so that a test of an outage takes milliseconds."""
    return ReplicaSettings(
        name, select_ms=50, commit=CommitLimits(report_ms=50, **limits), follow=FollowSettings(poll_ms=20)
    )


def candidates(*connections: str, provider: str = OPENAI, model: str = "gpt") -> tuple[Candidate, ...]:
    return tuple(Candidate(provider, connection, model) for connection in connections)


def ask(*connections: str, request_id: str = "", provider: str = OPENAI, explain: bool = False) -> SelectRequest:
    """A selection over inline candidates that never answers Wait."""
    return SelectRequest(
        request_id or os.urandom(8).hex(),
        candidates=candidates(*connections, provider=provider),
        explain=explain,
        allow_wait=False,
    )


def chosen(answer: SelectAnswer) -> str:
    """Connection of a Dispatch."""
    assert isinstance(answer.verdict, Dispatch), answer.verdict
    return answer.verdict.target.target.connection


def target(connection: str, provider: str = OPENAI, model: str = "gpt") -> Target:
    return Target(ProviderId(provider), ConnectionId(connection), ModelId(model))


def failure(
    connection: str,
    status: int = 503,
    *,
    token: DecisionToken | None = None,
    report_id: str = "",
    headers: Mapping[str, str] | None = None,
    attempt: int = 0,
    provider: str = OPENAI,
    final: bool = True,
    elapsed_ms: int = 5,
) -> ReportRequest:
    """A report of an HTTP status; without a token under a report id."""
    return ReportRequest(
        target(connection, provider),
        EndKind.HTTP_STATUS,
        token,
        report_id=report_id or ("" if token else os.urandom(8).hex()),
        attempt=attempt,
        final=final,
        status=status,
        headers=headers or {},
        elapsed_ms=None if token else elapsed_ms,
    )


async def select(replica: Replica, request: SelectRequest) -> SelectAnswer:
    """As the transport does it: from memory, else awaited."""
    return replica.select.select_now(request) or await replica.select.select(request)


async def report(replica: Replica, request: ReportRequest) -> ReportAnswer:
    """As the transport does it."""
    return replica.report.report_now(request) or await replica.report.report(request)


EXAMPLE_CATALOGUE = Path(__file__).parent.parent / "docs" / "examples" / "catalogue.yaml"
