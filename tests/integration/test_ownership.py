"""Caps, leases and session pins through SelectTarget and ReportOutcome, over real gRPC and real Postgres."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from policy_service.generated.policy.v1 import lease_pb2, permit_pb2, policy_pb2, types_pb2
from tests.integration.serving import config, serving

CATALOGUE = f"""
connections:
  - {{id: one, provider: openai, max_concurrent: 1}}
  - {{id: two, provider: openai}}
  - {{id: three, provider: openai}}
  - {{id: own, provider: openai}}
  - {{id: spare, provider: openai}}
routes:
  - name: capped
    strategy: priority
    targets:
      - {{provider: openai, connection: one, model: m}}
      - {{provider: openai, connection: two, model: m}}
  - name: only-capped
    strategy: priority
    targets: [{{provider: openai, connection: one, model: m}}]
  - name: open
    strategy: priority
    targets:
      - {{provider: openai, connection: own, model: m}}
      - {{provider: openai, connection: spare, model: m}}
      - {{provider: openai, connection: three, model: m}}
  - name: sessions
    strategy: round-robin
    options: {{sticky_round_robin_limit: 1}}
    targets:
      - {{provider: openai, connection: two, model: m}}
      - {{provider: openai, connection: three, model: m}}
callers:
  - id: agent
    key_sha256: {hashlib.sha256(b"agent-key").hexdigest()}
    scopes: ["lease:exclusive"]
    allowed_connections: [own, spare]
  - id: limited
    key_sha256: {hashlib.sha256(b"limited-key").hexdigest()}
    allowed_connections: [three]
"""


@asynccontextmanager
async def fleet(directory: Path, url: str, count: int = 1, more: str = "") -> AsyncIterator[list[Any]]:
    """Stubs of `count` replicas with the catalogue."""
    path = directory / "catalogue.yaml"
    path.write_text(CATALOGUE + more)
    patient = {"select_ms": 2_000}  # a busy machine does not make a pin local
    settings = [
        config(directory / str(n), url, replica=f"r{n}", catalogue=str(path), store=patient) for n in range(count)
    ]
    if count == 1:
        async with serving(settings[0]) as (_, stub):
            yield [stub]
    else:
        async with serving(settings[0]) as (_, one), serving(settings[1]) as (_, two):
            yield [one, two]


def route(name: str, **fields: Any) -> policy_pb2.SelectTargetRequest:
    fields.setdefault("allow_wait", False)
    return policy_pb2.SelectTargetRequest(route=name, **fields)


def final(answer: policy_pb2.SelectTargetResponse, status: int = 200, **fields: Any) -> policy_pb2.ReportOutcomeRequest:
    return policy_pb2.ReportOutcomeRequest(
        decision_token=answer.decision_token, target=answer.dispatch.target, http_status=status, final=True, **fields
    )


def reason_of(error: grpc.aio.AioRpcError) -> str:
    details = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    for entry in status_pb2.Status.FromString(details).details:
        info = error_details_pb2.ErrorInfo()
        if entry.Unpack(info):
            return str(info.reason)
    return ""


async def test_a_cap_of_one_is_one_over_two_replicas_and_a_final_report_frees_it(
    tmp_path: Path, embedded_url: str
) -> None:
    async with fleet(tmp_path, embedded_url, 2) as (one, two):
        first = await one.SelectTarget(route("capped"))
        assert first.dispatch.target.connection == "one"
        assert [p.kind for p in first.dispatch.permits] == [permit_pb2.PERMIT_KIND_CONCURRENCY]
        assert first.dispatch.no_fail_open
        second = await two.SelectTarget(route("capped", explain=True))
        assert second.dispatch.target.connection == "two"
        assert [e.reason_text for e in second.exclusions] == ["concurrency_cap"]
        full = await two.SelectTarget(route("only-capped"))
        assert full.reject.http_status == 429
        assert 1_000 <= full.reject.retry_after_ms <= 3_600_000
        known = await two.SelectTarget(route("only-capped"))
        assert (known.reject.http_status, known.reject.code) == (429, full.reject.code)
        assert 1_000 <= known.reject.retry_after_ms <= 3_600_000
        await two.ReportOutcome(final(first))
        async with asyncio.timeout(5):
            while (again := await one.SelectTarget(route("only-capped"))).WhichOneof("verdict") != "dispatch":
                await asyncio.sleep(0.02)
        assert again.dispatch.target.connection == "one"


async def test_a_repeated_request_id_gets_the_same_permit(tmp_path: Path, embedded_url: str) -> None:
    async with fleet(tmp_path, embedded_url) as (stub,):
        first = await stub.SelectTarget(route("only-capped", request_id="same"))
        again = await stub.SelectTarget(route("only-capped", request_id="same"))
        assert again.dispatch.permits[0].permit_id == first.dispatch.permits[0].permit_id
        assert again.decision_id == first.decision_id


async def test_a_request_without_a_route_waits_in_line_for_its_turn(tmp_path: Path, embedded_url: str) -> None:
    direct = policy_pb2.SelectTargetRequest(
        candidates=[types_pb2.Candidate(provider="openai", connection="one", model="m")],
        wait_budget_ms=8_000,
        explain=True,
    )
    async with fleet(tmp_path, embedded_url, 2) as (one, two):
        first = await one.SelectTarget(direct)
        waiting = asyncio.ensure_future(two.SelectTarget(direct))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await one.ReportOutcome(final(first))
        second = await asyncio.wait_for(waiting, 8)
        assert not second.exclusions
        assert second.dispatch.target.connection == "one"
        assert second.dispatch.waited_ms >= 200


async def test_a_place_in_line_ends_with_the_budget_in_a_typed_refusal(tmp_path: Path, embedded_url: str) -> None:
    direct = policy_pb2.SelectTargetRequest(
        candidates=[types_pb2.Candidate(provider="openai", connection="one", model="m")], wait_budget_ms=300
    )
    async with fleet(tmp_path, embedded_url) as (stub,):
        await stub.SelectTarget(direct)
        refused = await stub.SelectTarget(direct)
        assert refused.reject.code == "SEMAPHORE_TIMEOUT"
        assert refused.reject.http_status == 429


async def test_a_lease_owns_its_connection_and_hides_it_from_everybody_else(tmp_path: Path, embedded_url: str) -> None:
    owner = "vlo_" + secrets.token_urlsafe(32)
    key = hashlib.sha256(b"agent-key").hexdigest()
    async with fleet(tmp_path, embedded_url, 2) as (one, two):
        await asyncio.sleep(5.2)  # a connection is leased from its listing + 5 s on (spec/fleet.md section 6)
        granted = await one.AcquireLease(
            lease_pb2.AcquireLeaseRequest(owner=owner, caller_key_sha256=key, model="m", ttl_ms=30_000)
        )
        generation = granted.lease.generation
        managed = {"caller_key_sha256": key, "lease": lease_pb2.LeaseContext(owner=owner, generation=generation)}
        chosen = await two.SelectTarget(route("open", **managed))
        assert chosen.dispatch.target.connection == "own"
        assert not chosen.dispatch.fallbacks
        assert chosen.dispatch.no_fail_open
        others = await two.SelectTarget(route("open", explain=True))
        assert others.dispatch.target.connection == "three"
        assert {e.reason_text for e in others.exclusions} == {"lease_hidden"}
        fence = await one.CheckFence(lease_pb2.CheckFenceRequest(decision_token=chosen.decision_token))
        assert fence.status == lease_pb2.FENCE_STATUS_VALID
        stale = {**managed, "lease": lease_pb2.LeaseContext(owner=owner, generation=generation + 1)}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.SelectTarget(route("open", **stale))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(caught.value) == "LEASE_FENCE_STALE"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.SelectTarget(route("open", caller_key_sha256=key))
        assert reason_of(caught.value) == "LEASE_CONTEXT_REQUIRED"


async def test_a_caller_with_a_list_is_kept_to_it(tmp_path: Path, embedded_url: str) -> None:
    async with fleet(tmp_path, embedded_url) as (stub,):
        answer = await stub.SelectTarget(route("sessions", caller_id="limited", explain=True))
        assert answer.dispatch.target.connection == "three"
        assert [e.reason_text for e in answer.exclusions] == ["lease_not_allowed"]
        assert not answer.dispatch.fallbacks


async def test_a_session_stays_on_its_account_detours_and_goes_home(tmp_path: Path, embedded_url: str) -> None:
    more = "settings: {affinity.ttl_ms: 600000}\n"
    async with fleet(tmp_path, embedded_url, 2, more) as (one, two):
        first = await one.SelectTarget(route("sessions", session_key="s1"))
        home = first.dispatch.target.connection
        for stub in (two, one, two):
            answer = await stub.SelectTarget(route("sessions", session_key="s1"))
            assert answer.dispatch.target.connection == home
            assert answer.dispatch.affinity == policy_pb2.AFFINITY_HIT
        failed = await one.ReportOutcome(final(first, 429, headers=[types_pb2.Header(name="retry-after", value="2")]))
        assert failed.pin == policy_pb2.PIN_EFFECT_KEPT
        away = await one.SelectTarget(route("sessions", session_key="s1"))
        assert away.dispatch.target.connection != home
        assert away.dispatch.affinity == policy_pb2.AFFINITY_DETOUR
        await asyncio.sleep(2.3)
        back = await one.SelectTarget(route("sessions", session_key="s1"))
        assert back.dispatch.target.connection == home


async def test_a_leased_connection_at_its_cap_refuses_the_call_and_keeps_the_lease(
    tmp_path: Path, embedded_url: str
) -> None:
    owner = "vlo_" + secrets.token_urlsafe(32)
    key = hashlib.sha256(b"narrow-key").hexdigest()
    more = f"""
  - id: narrow
    key_sha256: {key}
    scopes: ["lease:exclusive"]
    allowed_connections: [one]
"""
    async with fleet(tmp_path, embedded_url, more=more) as (stub,):
        await asyncio.sleep(5.2)  # a connection is leased from its listing + 5 s on (spec/fleet.md section 6)
        granted = await stub.AcquireLease(
            lease_pb2.AcquireLeaseRequest(owner=owner, caller_key_sha256=key, model="m", ttl_ms=30_000)
        )
        generation = granted.lease.generation
        managed = {"caller_key_sha256": key, "lease": lease_pb2.LeaseContext(owner=owner, generation=generation)}
        first = await stub.SelectTarget(route("only-capped", **managed))
        assert first.dispatch.target.connection == "one"
        full = await stub.SelectTarget(route("only-capped", **managed))
        assert (full.reject.http_status, full.reject.code) == (429, "ALL_TARGETS_SKIPPED")
        fence = await stub.CheckFence(lease_pb2.CheckFenceRequest(decision_token=first.decision_token))
        assert fence.status == lease_pb2.FENCE_STATUS_VALID
        await stub.ReportOutcome(final(first))
        async with asyncio.timeout(5):
            while (await stub.SelectTarget(route("only-capped", **managed))).WhichOneof("verdict") != "dispatch":
                await asyncio.sleep(0.02)
