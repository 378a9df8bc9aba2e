"""Leases over real gRPC and a real Postgres: codes, details, idempotency, and that no owner token is kept anywhere."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from policy_service.application.callers import Registry
from policy_service.application.entropy import SystemEntropy
from policy_service.application.giving_back import GivingBack
from policy_service.application.lease_book import LeaseBook
from policy_service.application.lease_terms import Offer
from policy_service.application.lease_upkeep import LeaseAdmin
from policy_service.application.leases import Leases
from policy_service.application.messages import DecisionToken
from policy_service.application.messages.token import LeaseFence
from policy_service.application.report_result import fold_report
from policy_service.application.view import View
from policy_service.domain.catalogue import Caller, Catalogue, Connection, Provider
from policy_service.domain.lease_context import LEASE_SCOPE
from policy_service.domain.policy import Policy
from policy_service.generated.policy.v1 import admin_pb2, admin_pb2_grpc, lease_pb2, policy_pb2_grpc
from policy_service.storage.postgres.lease_store import PostgresLeaseStore
from policy_service.storage.postgres.store import PostgresStore
from policy_service.transport.grpc.admin_servicer import AdminServicer
from policy_service.transport.grpc.auth import KeyRing
from policy_service.transport.grpc.gate import Gate
from policy_service.transport.grpc.lease_methods import lease_admin_operations, lease_methods
from policy_service.transport.grpc.limits import Limits
from policy_service.transport.grpc.mapping import Reading
from policy_service.transport.grpc.policy_servicer import PolicyServicer
from policy_service.transport.grpc.server import PolicyServer, ServerOptions
from policy_service.transport.grpc.token import TokenSeal
from tests.contract.beside import driver
from tests.integration.grpc_shell import (
    LOOPBACK,
    NOW,
    SECRET,
    FakeClock,
    FakeReports,
    FakeSelects,
    detail,
    details,
    fields,
    reason,
    target,
)

TOKEN, RIVAL, THIRD = (f"vlo_{letter * 43}" for letter in "abc")
CALLER = Caller("k", "1" * 64, True, frozenset({LEASE_SCOPE}), ("c1", "c2"))
PLAIN = Caller("plain", "2" * 64)


@dataclass
class Served:
    """A served lease service."""

    policy: policy_pb2_grpc.PolicyServiceStub
    admin: admin_pb2_grpc.AdminServiceStub
    reading: Reading
    store: PostgresStore
    url: str

    async def acquire(self, owner: str = TOKEN, **more: Any) -> lease_pb2.AcquireLeaseResponse:
        request = lease_pb2.AcquireLeaseRequest(**{"caller_id": "k", "owner": owner, "model": "m", **more})
        answer: lease_pb2.AcquireLeaseResponse = await self.policy.AcquireLease(request)
        return answer


def offers(caller: Caller, model: str, allowed: frozenset[str]) -> Sequence[Offer] | None:
    return [Offer(target("p", name, model)) for name in ("c1", "c2", "c3")] if model == "m" else None


@pytest.fixture
async def served(embedded_url: str) -> AsyncIterator[Served]:
    store = await PostgresStore.connect(embedded_url)
    catalogue = Catalogue(
        providers={"p": Provider("p", display_name="Provider & Sons")},
        connections={"c1": Connection("c1", "p", label="Team account")},
        callers={"k": CALLER, "plain": PLAIN},
    )
    registry = Registry(View(Policy(catalogue), fold_report))
    book = LeaseBook(PostgresLeaseStore(store), SystemEntropy(), "r1")
    limits = Limits()
    reading = Reading(TokenSeal({1: SECRET}), FakeClock(), SystemEntropy(), limits)
    methods = lease_methods(Leases(registry, book, offers, GivingBack(lambda: 0.0)), reading)
    services: list[Any] = [
        PolicyServicer(FakeSelects(), FakeReports(), reading, further=methods),
        AdminServicer(lease_admin_operations(LeaseAdmin(book))),
    ]
    server = PolicyServer(ServerOptions(tcp=LOOPBACK, notice_ms=0, drain_ms=1_000), Gate(KeyRing(), limits), services)
    await server.start()
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        stubs = policy_pb2_grpc.PolicyServiceStub(channel), admin_pb2_grpc.AdminServiceStub(channel)
        yield Served(*stubs, reading, store, embedded_url)
        await server.drain()
    await store.close()


def context(owner: str = TOKEN, generation: int = 1) -> lease_pb2.LeaseContext:
    return lease_pb2.LeaseContext(owner=owner, generation=generation)


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error: grpc.aio.AioRpcError = caught.value
    return error


async def test_a_lease_lives_from_acquire_over_renew_and_status_to_release(served: Served) -> None:
    lease = (await served.acquire(ttl_ms=1)).lease
    assert (lease.state, lease.generation, lease.ttl_ms) == (lease_pb2.LEASE_STATE_ACTIVE, 1, 1_000)
    renewed = await served.policy.RenewLease(
        lease_pb2.RenewLeaseRequest(caller_key_sha256="1" * 64, lease=context(), ttl_ms=60_000)
    )
    assert renewed.lease.expires_at_unix_ms == renewed.lease.renewed_at_unix_ms + 60_000
    again = (await served.acquire(ttl_ms=1)).lease
    assert (again.reused, again.expires_at_unix_ms) == (True, renewed.lease.expires_at_unix_ms)
    shown = await served.policy.GetLease(lease_pb2.GetLeaseRequest(caller_id="k", lease=context()))
    assert (shown.lease.provider, shown.lease.connection_label) == ("Provider & Sons", "Team account")
    for _ in range(2):
        released = await served.policy.ReleaseLease(lease_pb2.ReleaseLeaseRequest(caller_id="k", lease=context()))
        assert released.lease.state == lease_pb2.LEASE_STATE_RELEASED
    assert (await served.acquire()).lease.generation == 2


async def test_a_repeated_request_id_gets_the_state_of_its_own_lease_and_no_new_one(served: Served) -> None:
    await served.acquire(request_id="q1")
    await served.policy.ReleaseLease(lease_pb2.ReleaseLeaseRequest(caller_id="k", lease=context()))
    late = (await served.acquire(request_id="q1")).lease
    assert (late.state, late.generation) == (lease_pb2.LEASE_STATE_RELEASED, 1)
    assert (await served.acquire(request_id="q2")).lease.generation == 2
    assert (await served.acquire(request_id="q1")).lease.generation == 1


async def test_missing_capacity_is_an_answer_with_counts_and_a_wait(served: Served) -> None:
    await served.acquire(TOKEN, ttl_ms=30_000)
    await served.acquire(RIVAL, ttl_ms=60_000)
    answer = await served.acquire(THIRD, request_id="q1")
    none = answer.unavailable
    assert (none.code, none.http_status) == ("LEASE_CAPACITY_UNAVAILABLE", 429)
    assert (none.eligible_count, none.free_count, answer.request_id) == (2, 0, "q1")
    assert 28_000 <= none.retry_after_ms <= 30_000


@pytest.mark.parametrize(
    ("given", "status", "code", "path"),
    [
        ({"caller_id": ""}, "UNAUTHENTICATED", "LEASE_AUTHENTICATION_REQUIRED", ""),
        ({"caller_id": "nobody"}, "UNAUTHENTICATED", "LEASE_API_KEY_INVALID", ""),
        ({"caller_id": "plain"}, "PERMISSION_DENIED", "LEASE_SCOPE_REQUIRED", ""),
        ({"owner": ""}, "INVALID_ARGUMENT", "LEASE_CONTEXT_REQUIRED", "owner"),
        ({"owner": "vlo_short"}, "INVALID_ARGUMENT", "LEASE_CONTEXT_INVALID", "owner"),
        ({"model": "  "}, "INVALID_ARGUMENT", "LEASE_ACTION_INVALID", "model"),
        ({"model": "nowhere"}, "INVALID_ARGUMENT", "LEASE_MODEL_INVALID", "model"),
        ({"ttl_ms": 0}, "INVALID_ARGUMENT", "LEASE_ACTION_INVALID", "ttl_ms"),
    ],
)
async def test_a_bad_acquire_names_its_code_and_the_field(
    served: Served, given: dict[str, Any], status: str, code: str, path: str
) -> None:
    error = await refused(served.acquire(**given))
    assert (error.code().name, reason(error)) == (status, code)
    assert fields(error) == ({path: code} if path else {})


async def test_a_stale_generation_is_a_failed_precondition(served: Served) -> None:
    await served.acquire()
    calls = (
        served.policy.RenewLease(lease_pb2.RenewLeaseRequest(caller_id="k", lease=context(generation=2))),
        served.policy.ReleaseLease(lease_pb2.ReleaseLeaseRequest(caller_id="k", lease=context(generation=2))),
        served.policy.GetLease(lease_pb2.GetLeaseRequest(caller_id="k", lease=context(RIVAL))),
    )
    for call in calls:
        error = await refused(call)
        assert (error.code().name, reason(error)) == ("FAILED_PRECONDITION", "LEASE_FENCE_STALE")


async def test_a_release_for_a_reason_that_is_not_the_owners_is_refused(served: Served) -> None:
    await served.acquire()
    request = lease_pb2.ReleaseLeaseRequest(
        caller_id="k", lease=context(), reason=lease_pb2.LEASE_END_REASON_TTL_EXPIRED
    )
    error = await refused(served.policy.ReleaseLease(request))
    assert (reason(error), fields(error)) == ("LEASE_ACTION_INVALID", {"reason": "LEASE_ACTION_INVALID"})


async def test_a_fence_check_is_always_ok_and_takes_the_fence_of_a_token(served: Served) -> None:
    lease = (await served.acquire()).lease
    fence = LeaseFence(sha256(TOKEN.encode()).hexdigest(), lease.generation, "k", "c1")
    token = served.reading.seal.seal(DecisionToken("d", NOW, lease=fence))
    valid = await served.policy.CheckFence(lease_pb2.CheckFenceRequest(decision_token=token))
    assert valid.status == lease_pb2.FENCE_STATUS_VALID
    assert valid.expires_at_unix_ms == lease.expires_at_unix_ms
    mismatches: tuple[tuple[dict[str, Any], int], ...] = (
        ({"connection": "c2"}, lease_pb2.FENCE_STATUS_CONNECTION_MISMATCH),
        ({}, lease_pb2.FENCE_STATUS_CONNECTION_MISMATCH),
        ({"connection": "c1", "lease": context(generation=7)}, lease_pb2.FENCE_STATUS_STALE),
        ({"connection": "c1", "lease": context(RIVAL)}, lease_pb2.FENCE_STATUS_REQUIRED),
    )
    for given, status in mismatches:
        request = lease_pb2.CheckFenceRequest(**{"caller_id": "k", "lease": context(), **given})
        answer = await served.policy.CheckFence(request)
        assert answer.status == status
        assert not answer.HasField("expires_at_unix_ms")


async def test_an_operator_lists_and_ends_leases(served: Served) -> None:
    await served.acquire()
    (view,) = (await served.admin.ListLeases(admin_pb2.ListLeasesRequest())).leases
    assert (view.caller_id, view.connection, view.owner_hash) == ("k", "c1", sha256(TOKEN.encode()).hexdigest())
    ended = await served.admin.InvalidateLease(admin_pb2.InvalidateLeaseRequest(connection="c1"))
    assert ended.lease.state == lease_pb2.LEASE_STATE_INVALIDATED
    error = await refused(served.admin.InvalidateLease(admin_pb2.InvalidateLeaseRequest(connection="c1")))
    assert reason(error) == "LEASE_FENCE_STALE"
    assert not (await served.admin.ListLeases(admin_pb2.ListLeasesRequest())).leases


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"reason": 99}, "reason"),
        ({"actor": admin_pb2.Actor(name="a\n")}, "actor.name"),
        ({"owner_hash": "\0"}, "owner_hash"),
    ],
)
async def test_an_end_that_cannot_be_read_ends_nothing(served: Served, given: dict[str, Any], path: str) -> None:
    await served.acquire()
    request = admin_pb2.InvalidateLeaseRequest(**{"connection": "c1", **given})
    error = await refused(served.admin.InvalidateLease(request))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert list(fields(error)) == [path]
    assert (await served.admin.ListLeases(admin_pb2.ListLeasesRequest())).leases


async def test_a_lost_store_is_unavailable_with_a_time_to_come_back(served: Served) -> None:
    async with driver(served.url) as beside:
        await beside.execute("ALTER TABLE lease RENAME TO hidden")
    error = await refused(served.acquire())
    assert (error.code().name, reason(error)) == ("UNAVAILABLE", "LEASE_SERVICE_UNAVAILABLE")
    assert detail(details(error), error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1_000


async def test_no_dump_of_the_database_and_no_log_has_an_owner_token(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        await served.acquire()
        await refused(served.acquire(RIVAL, model="nowhere"))
        await served.policy.ReleaseLease(lease_pb2.ReleaseLeaseRequest(caller_id="k", lease=context()))
    async with driver(served.url) as beside:
        tables = await beside.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        dump = [str(await beside.fetch(f'SELECT * FROM "{table[0]}"')) for table in tables]
    everything = "".join(dump) + caplog.text
    assert sha256(TOKEN.encode()).hexdigest() in everything
    assert TOKEN not in everything
    assert RIVAL not in everything


async def test_the_table_itself_refuses_a_second_active_row_and_a_plain_owner(served: Served) -> None:
    await served.acquire()
    copy = "INSERT INTO lease ({0}) SELECT {1} FROM lease"
    columns = (
        "owner_hash, api_key_id, provider, connection_id, generation, "
        "state, ttl_ms, acquired_at, renewed_at, expires_at"
    )
    async with driver(served.url) as beside:
        for changed in (
            columns.replace("connection_id", "'elsewhere'"),
            columns.replace("owner_hash", "repeat('a', 64)"),
            columns.replace("owner_hash", f"'{TOKEN}'").replace("connection_id", "'elsewhere'"),
        ):
            with pytest.raises(Exception, match=r"lease_(owner_hash|connection_id)"):
                await beside.execute(copy.format(columns, changed))
