"""Permits over real gRPC: what a gateway sends and sees (concurrency.md section 6, queue_admission.md section 7)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from policy_service.application.entropy import SystemEntropy
from policy_service.application.messages import DecisionToken, PermitRef, TokenTarget
from policy_service.application.permits import Permits
from policy_service.domain.catalogue import Catalogue, Connection
from policy_service.domain.facts import Fact
from policy_service.domain.policy import Policy
from policy_service.generated.policy.v1 import admin_pb2, admin_pb2_grpc, permit_pb2, policy_pb2_grpc
from policy_service.storage.memory.permit_store import MemoryPermits, MemoryPermitStore
from policy_service.storage.memory.store import host_clock
from policy_service.transport.grpc.admin_servicer import UNKNOWN_ACTOR, AdminServicer
from policy_service.transport.grpc.auth import KeyRing
from policy_service.transport.grpc.gate import Gate
from policy_service.transport.grpc.limits import Limits
from policy_service.transport.grpc.mapping import Reading
from policy_service.transport.grpc.permit_methods import PermitMethods
from policy_service.transport.grpc.policy_servicer import PolicyServicer
from policy_service.transport.grpc.server import PolicyServer, ServerOptions
from policy_service.transport.grpc.token import TokenSeal
from tests.contract.beside import eventually
from tests.integration.grpc_shell import LOOPBACK, SECRET, FakeEntropy, FakeReports, FakeSelects, reason, target
from tests.integration.serving import config, outcome, selection
from tests.integration.serving import serving as whole_service

POLICY = Policy(
    Catalogue(
        connections={
            "capped": Connection("capped", "openai", max_concurrent=1),
            "free": Connection("free", "openai"),
            "paced": Connection("paced", "openai", settings={"queue.requests_per_minute": 1, "queue.max_wait_ms": 300}),
        }
    )
)


class HostClock:
    def now(self) -> int:
        return host_clock()


@dataclass
class Service:
    store: MemoryPermitStore
    permits: Permits
    seal: TokenSeal
    policy: Any
    admin: Any
    facts: list[Fact]


@asynccontextmanager
async def serving() -> AsyncIterator[Service]:
    facts: list[Fact] = []
    store = MemoryPermitStore(MemoryPermits(record=facts.extend), "r0")
    permits = Permits(store, HostClock(), SystemEntropy(), "r0", monotonic_ms=lambda: time.monotonic() * 1000)
    await permits.start()
    reading = Reading(TokenSeal({1: SECRET}), HostClock(), FakeEntropy(), Limits())
    methods = PermitMethods(permits, lambda: POLICY, reading)
    servicers = (
        PolicyServicer(FakeSelects(), FakeReports(), reading, further=methods.policy_methods()),
        AdminServicer(methods.admin_methods()),
    )
    server = PolicyServer(
        ServerOptions(tcp=LOOPBACK, notice_ms=0, drain_ms=2_000), Gate(KeyRing(), Limits()), servicers
    )
    await server.start()
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        try:
            yield Service(
                store,
                permits,
                reading.seal,
                policy_pb2_grpc.PolicyServiceStub(channel),
                admin_pb2_grpc.AdminServiceStub(channel),
                facts,
            )
        finally:
            await server.drain()
            await permits.stop()


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with serving() as running:
        yield running


def on_gate(key: str = "g", limit: float | None = 1, **fields: Any) -> permit_pb2.AcquirePermitRequest:
    return permit_pb2.AcquirePermitRequest(gates=[permit_pb2.Gate(key=key, limit=limit)], **fields)


async def test_a_permit_is_granted_renewed_and_released(service: Service) -> None:
    granted = (await service.policy.AcquirePermit(on_gate(request_id="q", ttl_ms=1_000))).granted
    (permit,) = granted.permits
    assert (permit.gate, permit.kind) == ("g", permit_pb2.PERMIT_KIND_CONCURRENCY)
    renewed = await service.policy.RenewPermit(
        permit_pb2.RenewPermitRequest(permit_ids=[permit.permit_id], ttl_ms=60_000)
    )
    assert renewed.results[0].expires_at_unix_ms > permit.expires_at_unix_ms + 50_000
    release = permit_pb2.ReleasePermitRequest(permit_ids=[permit.permit_id])
    results = [(await service.policy.ReleasePermit(release)).results[0] for _ in range(2)]
    assert [(r.state, r.already_ended) for r in results] == [
        (permit_pb2.PERMIT_STATE_RELEASED, False),
        (permit_pb2.PERMIT_STATE_RELEASED, True),
    ]
    again = await service.policy.AcquirePermit(on_gate(request_id="q"))
    assert again.already_ended == permit_pb2.PERMIT_STATE_RELEASED


async def test_a_refusal_is_an_answer(service: Service) -> None:
    await service.policy.AcquirePermit(on_gate(request_id="h"))
    refused = (await service.policy.AcquirePermit(on_gate(wait_budget_ms=0))).refused
    assert (refused.code, refused.http_status, refused.gate) == ("SEMAPHORE_TIMEOUT", 429, "g")
    assert 119_000 <= refused.retry_after_ms <= 120_000


async def test_a_call_waits_in_line_until_the_slot_is_free(service: Service) -> None:
    held = (await service.policy.AcquirePermit(on_gate(request_id="h"))).granted.permits[0]
    waiting = asyncio.create_task(_acquire(service, on_gate(request_id="w", wait_budget_ms=5_000)))
    await eventually(lambda: _is_in_line(service, "w"))
    await service.policy.ReleasePermit(permit_pb2.ReleasePermitRequest(permit_ids=[held.permit_id]))
    assert (await waiting).granted.permits[0].gate == "g"


async def _is_in_line(service: Service, request_id: str) -> bool:
    return any(row.is_live and row.request_id == request_id for row in service.store.shared.rows.values())


async def _is_gone(service: Service, request_id: str) -> bool:
    return not await _is_in_line(service, request_id)


async def _acquire(service: Service, message: permit_pb2.AcquirePermitRequest, **options: Any) -> Any:
    return await service.policy.AcquirePermit(message, **options)


async def test_a_client_that_hangs_up_leaves_the_line(service: Service) -> None:
    await service.policy.AcquirePermit(on_gate(request_id="h"))
    with pytest.raises(grpc.aio.AioRpcError):
        await _acquire(service, on_gate(request_id="w"), timeout=0.1)
    await eventually(lambda: _is_gone(service, "w"))
    assert service.permits.waiting == 0


async def test_a_caller_cannot_raise_the_cap_of_the_catalogue(service: Service) -> None:
    asked = [on_gate("qsconn:capped", 50.0, request_id=f"q{n}", wait_budget_ms=0) for n in range(2)]
    answers = [await service.policy.AcquirePermit(message) for message in asked]
    assert [answer.WhichOneof("result") for answer in answers] == ["granted", "refused"]


async def test_a_request_waits_for_its_start_in_the_queue_of_its_connection(service: Service) -> None:
    queue = permit_pb2.QueueGate(provider="openai", connection="paced", model="m")
    answers = [await service.policy.AcquirePermit(permit_pb2.AcquirePermitRequest(queue=queue)) for _ in range(2)]
    (permit,) = answers[0].granted.permits
    assert (permit.gate, permit.kind) == ("openai:paced", permit_pb2.PERMIT_KIND_QUEUE)
    assert permit.execution_limit_ms == 600_000
    refused = answers[1].refused
    assert (refused.code, refused.http_status) == ("RATE_LIMIT_QUEUE_TIMEOUT", 503)
    assert 50_000 <= refused.retry_after_ms <= 60_000


async def test_a_connection_that_is_not_paced_is_granted_nothing_and_may_go(service: Service) -> None:
    queue = permit_pb2.QueueGate(provider="openai", connection="free")
    answer = await service.policy.AcquirePermit(permit_pb2.AcquirePermitRequest(queue=queue))
    assert answer.HasField("granted")
    assert not answer.granted.permits
    assert service.store.calls == 0


async def test_a_fallback_of_a_decision_is_acquired_by_its_token(service: Service) -> None:
    targets = (TokenTarget(target("openai", "free"), key="a"), TokenTarget(target("openai", "capped"), key="b"))
    token = service.seal.seal(DecisionToken("d", host_clock(), targets, request_id="r"))
    ask = permit_pb2.AcquirePermitRequest(decision_token=token, target_key="b")
    first, again = await service.policy.AcquirePermit(ask), await service.policy.AcquirePermit(ask)
    assert first.granted.permits[0].gate == "qsconn:capped"
    assert first.granted.permits[0].permit_id == again.granted.permits[0].permit_id
    unknown = permit_pb2.AcquirePermitRequest(decision_token=token, target_key="c")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.policy.AcquirePermit(unknown)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_decision_releases_all_its_permits_at_once(service: Service) -> None:
    held = (await service.policy.AcquirePermit(on_gate(request_id="q"))).granted.permits[0]
    refs = (PermitRef(held.permit_id, "g"), PermitRef("other", "early:openai/a"))
    token = service.seal.seal(DecisionToken("d", host_clock(), permits=refs))
    released = await service.policy.ReleasePermit(permit_pb2.ReleasePermitRequest(decision_token=token))
    assert [result.permit_id for result in released.results] == [held.permit_id]


async def test_a_cancelled_request_gives_back_what_it_holds(service: Service) -> None:
    await service.policy.AcquirePermit(on_gate(request_id="q"))
    cancelled = await service.policy.CancelPermit(permit_pb2.CancelPermitRequest(request_id="q"))
    assert [result.state for result in cancelled.results] == [permit_pb2.PERMIT_STATE_RELEASED]
    unknown = await service.policy.CancelPermit(permit_pb2.CancelPermitRequest(request_id="nobody"))
    assert not unknown.results


async def test_an_operator_blocks_resets_and_lists_gates(service: Service) -> None:
    alice = admin_pb2.Actor(name="alice", note="too hot")
    blocked = await service.admin.BlockGate(admin_pb2.BlockGateRequest(gate="g", for_ms=60_000, actor=alice))
    assert blocked.blocked_until_at_unix_ms > host_clock() + 50_000
    waiting = asyncio.create_task(_acquire(service, on_gate(request_id="w")))
    await eventually(lambda: _is_in_line(service, "w"))
    (view,) = (await service.admin.ListGates(admin_pb2.ListGatesRequest())).gates
    assert (view.gate, view.limit, view.held, view.waiting) == ("g", 1, 0, 1)
    assert (await service.admin.ResetGate(admin_pb2.ResetGateRequest(gate="g"))).reset_count == 1
    assert (await waiting).refused.code == "SEMAPHORE_RESET"
    assert [(fact.to_state, fact.actor) for fact in service.facts] == [
        ("blocked", "alice (too hot)"),
        ("reset", UNKNOWN_ACTOR),
    ]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.admin.ResetGate(admin_pb2.ResetGateRequest(gate="g", actor=admin_pb2.Actor(name="a\n")))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_without_the_store_an_acquire_is_refused_and_a_renewal_unavailable(service: Service) -> None:
    service.store.is_away = True
    refused = (await service.policy.AcquirePermit(on_gate())).refused
    assert (refused.code, refused.http_status) == ("STORE_UNAVAILABLE", 503)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.policy.RenewPermit(permit_pb2.RenewPermitRequest(permit_ids=["x"]))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reason(caught.value) == "STORE_UNAVAILABLE"
    service.store.is_away = False


@pytest.mark.parametrize(
    "message",
    [
        permit_pb2.AcquirePermitRequest(),
        permit_pb2.AcquirePermitRequest(gates=[permit_pb2.Gate(key="")]),
        permit_pb2.AcquirePermitRequest(gates=[permit_pb2.Gate(key=f"g{n}") for n in range(17)]),
        on_gate(wait_budget_ms=600_001),
        on_gate(ttl_ms=999),
        on_gate(queue_depth=-1),
        on_gate(request_id="q" * 129),
        permit_pb2.AcquirePermitRequest(queue=permit_pb2.QueueGate(provider="openai")),
    ],
)
async def test_a_malformed_acquire_names_its_fields(service: Service, message: permit_pb2.AcquirePermitRequest) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.policy.AcquirePermit(message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_rate_headers_of_a_released_ticket_slow_its_limiter_down(service: Service) -> None:
    queue = permit_pb2.QueueGate(provider="openai", connection="paced")
    held = (await service.policy.AcquirePermit(permit_pb2.AcquirePermitRequest(queue=queue))).granted.permits[0]
    headers = [
        permit_pb2.PermitHeader(name="X-RateLimit-Limit-Requests", value="10"),
        permit_pb2.PermitHeader(name="X-RateLimit-Remaining-Requests", value="2"),
    ]
    await service.policy.ReleasePermit(permit_pb2.ReleasePermitRequest(permit_ids=[held.permit_id], headers=headers))
    pace = service.store.shared.gates["openai:paced"].gate.pace
    assert pace is not None
    assert pace.gap_ms == 5_990


async def test_cancel_gives_back_the_panic_call_of_a_selection_whose_answer_was_lost(
    tmp_path: Path, embedded_url: str
) -> None:
    file = tmp_path / "catalogue.yaml"
    file.write_text("version: 1\nsettings: {pool_guard: {enabled: true, max_excluded_share: 1.0}}\n")
    async with whole_service(config(tmp_path, embedded_url, catalogue=str(file))) as (_, stub):
        await stub.ReportOutcome(outcome("a", 503))
        for name in ("lost", "next"):
            answer = await stub.SelectTarget(selection("a", request_id=name))
            assert answer.HasField("dispatch"), name
            assert not (await stub.SelectTarget(selection("a", request_id="waiting"))).HasField("dispatch")
            cancelled = await stub.CancelPermit(permit_pb2.CancelPermitRequest(request_id=name))
            assert [each.state for each in cancelled.results] == [permit_pb2.PERMIT_STATE_RELEASED]
