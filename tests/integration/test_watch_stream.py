"""WatchStream over real gRPC and real Postgres: verdicts, permits and probes kept alive, ends of every kind."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from policy_service.generated.policy.v1 import admin_pb2, lease_pb2, permit_pb2, policy_pb2, stream_pb2
from tests.integration.operating import Replica, details, first_probe, open_breaker, operated, refusal, until
from tests.integration.serving import outcome, selection

KEY = hashlib.sha256(b"stream-key").hexdigest()
CATALOGUE = f"""
connections:
  - {{id: one, provider: openai, max_concurrent: 1}}
  - {{id: two, provider: openai}}
  - {{id: patient, provider: openai, settings: {{stream_watchdog: {{enabled: false}}}}}}
  - {{id: own, provider: openai}}
routes:
  - name: capped
    strategy: priority
    targets: [{{provider: openai, connection: one, model: m}}]
  - name: owned
    strategy: priority
    targets: [{{provider: openai, connection: own, model: m}}]
callers:
  - id: agent
    key_sha256: {KEY}
    scopes: ["lease:exclusive"]
    allowed_connections: [own]
settings:
  concurrency: {{permit_ttl_ms: 1500}}
  breaker: {{api_key: {{reset_timeout_ms: 1200}}}}
"""
QUICK = {
    "POLICY_STREAM_WATCHDOG_ENABLED": "true",
    "POLICY_STREAM_WATCHDOG_WARMUP_MS": "0",
    "POLICY_STREAM_WATCHDOG_WINDOW_MS": "100",
    "POLICY_STREAM_WATCHDOG_MIN_USEFUL_BYTES_PER_SECOND": "10",
}


@asynccontextmanager
async def watched(directory: Path, url: str, **fields: Any) -> AsyncIterator[Replica]:
    directory.joinpath("catalogue.yaml").write_text(CATALOGUE)
    async with operated(
        directory, url, catalogue=str(directory / "catalogue.yaml"), environment=QUICK, **fields
    ) as one:
        yield one


def opening(number: int, token: bytes, **fields: Any) -> stream_pb2.WatchStreamRequest:
    return stream_pb2.WatchStreamRequest(stream_id=number, open=stream_pb2.StreamOpen(decision_token=token, **fields))


def progress(number: int, *events: tuple[int, bool], first_byte: bool = False) -> stream_pb2.WatchStreamRequest:
    told = [stream_pb2.StreamEvent(useful_bytes=size, protected=protected) for size, protected in events]
    return stream_pb2.WatchStreamRequest(
        stream_id=number, progress=stream_pb2.StreamProgress(events=told, first_byte=first_byte)
    )


def closing(number: int) -> stream_pb2.WatchStreamRequest:
    return stream_pb2.WatchStreamRequest(stream_id=number, close=stream_pb2.StreamClose())


async def token_of(one: Replica, connection: str = "two") -> bytes:
    answer = await one.policy.SelectTarget(selection(connection))
    assert answer.dispatch.target.connection == connection
    token: bytes = answer.decision_token
    return token


async def opened(one: Replica, number: int, token: bytes, **fields: Any) -> Any:
    """A call that watches one stream."""
    call = one.policy.WatchStream()
    await call.write(opening(number, token, **fields))
    answer = await call.read()
    assert (answer.stream_id, answer.WhichOneof("event")) == (number, "opened")
    return call


async def rest(call: Any) -> list[stream_pb2.WatchStreamResponse]:
    """What the service still says after the gateway has nothing more to say."""
    if not call.done():
        await call.done_writing()
    found = []
    while (answer := await call.read()) is not grpc.aio.EOF:
        found.append(answer)
    return found


async def failed(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    return caught.value


# -- the watchdog -----------------------------------------------------------------------------------------------
async def test_a_stream_without_output_is_aborted_once_and_its_neighbours_go_on(
    tmp_path: Path, embedded_url: str
) -> None:
    async with watched(tmp_path, embedded_url) as one:
        call = await opened(one, 7, await token_of(one))
        for number, connection in ((8, "two"), (9, "patient")):
            await call.write(opening(number, await token_of(one, connection)))
            assert (await call.read()).opened.watchdog_enabled == (number == 8)
        for number in (7, 8, 9):
            await call.write(progress(number, (40, False), (0, False)))
        await asyncio.sleep(0.25)
        await call.write(progress(8, (400, False), (0, False)))
        await call.write(progress(9, (0, False)))
        await call.write(progress(7, (0, False), (0, False)))
        order = await call.read()
        for _ in range(3):
            await call.write(progress(7, (0, False)))
        await call.write(closing(7))
        more = await rest(call)

        assert (order.stream_id, order.abort.code) == (7, "STREAM_THROUGHPUT_TOO_LOW")
        assert order.abort.reason == stream_pb2.ABORT_REASON_THROUGHPUT_TOO_LOW
        assert order.abort.reason_text == "throughput_too_low"
        assert more == []


async def test_a_tool_phase_is_not_judged_and_output_ends_it(tmp_path: Path, embedded_url: str) -> None:
    async with watched(tmp_path, embedded_url) as one:
        call = await opened(one, 1, await token_of(one))
        await call.write(progress(1, (0, True)))
        await asyncio.sleep(0.25)
        await call.write(progress(1, (0, False)))
        await call.write(progress(1, (5, False)))
        await asyncio.sleep(0.25)
        await call.write(progress(1, (0, False)))

        assert (await call.read()).HasField("abort")
        assert await rest(call) == []


async def test_an_aborted_attempt_is_reported_as_a_timeout(tmp_path: Path, embedded_url: str) -> None:
    async with watched(tmp_path, embedded_url) as one:
        report = policy_pb2.ReportOutcomeRequest(
            decision_token=await token_of(one),
            network_error=policy_pb2.NETWORK_ERROR_KIND_STREAM_TOO_SLOW,
            streamed=True,
            final=True,
        )
        answer = await one.policy.ReportOutcome(report)

        assert answer.verdict.failure_kind_text == "timeout"
        assert not answer.verdict.success


# -- permits ----------------------------------------------------------------------------------------------------
async def test_progress_keeps_a_permit_beyond_its_life_and_renews_it_at_a_third_of_it(
    tmp_path: Path, embedded_url: str
) -> None:
    async with watched(tmp_path, embedded_url) as one:
        held = await one.policy.SelectTarget(policy_pb2.SelectTargetRequest(route="capped", allow_wait=False))
        call = await opened(one, 1, held.decision_token)
        for _ in range(150):
            await call.write(progress(1, (50, False)))
            await asyncio.sleep(0.02)
        refused = await one.policy.SelectTarget(policy_pb2.SelectTargetRequest(route="capped", allow_wait=False))
        news = await rest(call)

        assert refused.reject.http_status == 429
        assert {answer.permit.permit_id for answer in news} == {held.dispatch.permits[0].permit_id}
        ends = [answer.permit.expires_at_unix_ms for answer in news]
        assert ends == sorted(ends)
        assert ends[-1] > held.dispatch.permits[0].expires_at_unix_ms + 1_000
        assert 3 <= len(ends) <= 8


async def test_a_stream_may_be_watched_by_another_replica_than_the_one_that_decided(
    tmp_path: Path, embedded_url: str
) -> None:
    async with (
        watched(tmp_path, embedded_url) as one,
        watched(tmp_path, embedded_url, name="two") as another,
    ):
        held = await one.policy.SelectTarget(policy_pb2.SelectTargetRequest(route="capped", allow_wait=False))
        call = await opened(another, 1, held.decision_token)
        await asyncio.sleep(0.6)
        await call.write(progress(1, (50, False)))
        renewed = await call.read()
        assert renewed.permit.permit_id == held.dispatch.permits[0].permit_id
        assert renewed.permit.expires_at_unix_ms > held.dispatch.permits[0].expires_at_unix_ms
        await open_breaker(one)
        probe = await first_probe(one)
        await call.write(opening(2, probe.decision_token))
        await call.write(progress(2, (9, False), first_byte=True))

        async def is_open_everywhere() -> bool:
            return await refusal(one, "y") == await refusal(another, "y") == []

        await until(is_open_everywhere)


async def test_a_permit_that_lapsed_is_told_once(tmp_path: Path, embedded_url: str) -> None:
    async with watched(tmp_path, embedded_url) as one:
        held = await one.policy.SelectTarget(policy_pb2.SelectTargetRequest(route="capped", allow_wait=False))
        call = await opened(one, 1, held.decision_token)
        await asyncio.sleep(1.8)
        await call.write(progress(1, (50, False)))
        lost = await call.read()
        await asyncio.sleep(0.6)
        await call.write(progress(1, (50, False)))
        await one.service.replica.watch.holdings.settled()

        assert (lost.stream_id, lost.permit.permit_id) == (1, held.dispatch.permits[0].permit_id)
        assert not lost.permit.HasField("expires_at_unix_ms")
        assert await rest(call) == []


async def test_thousands_of_streams_without_permits_cost_no_statement(tmp_path: Path, embedded_url: str) -> None:
    async with watched(tmp_path, embedded_url, store={"poll_ms": 60_000}) as one:
        token = await token_of(one, "patient")
        call = one.policy.WatchStream()
        for number in range(3_000):
            await call.write(opening(number, token))
            await call.read()
        assert one.service.replica.watch.watched == 3_000
        before = one.service.store.statements
        for number in range(3_000):
            await call.write(progress(number, (5, False), first_byte=True))
        answers = await rest(call)

        assert answers == []
        assert one.service.store.statements - before < 10  # the replica's signs of life go on
        assert one.service.replica.watch.watched == 0


# -- probes -----------------------------------------------------------------------------------------------------
async def test_a_first_byte_closes_the_breaker_at_once_and_the_report_changes_nothing(
    tmp_path: Path, embedded_url: str
) -> None:
    async with watched(tmp_path, embedded_url) as one:
        await open_breaker(one)
        probe = await first_probe(one)
        assert await refusal(one, "y") == ["probe_in_flight"]
        call = await opened(one, 1, probe.decision_token)
        await call.write(progress(1, (0, False), first_byte=True))

        async def is_closed() -> bool:
            found = (await one.admin.ListBreakers(admin_pb2.ListBreakersRequest(provider="openai"))).breakers
            return [each.state for each in found] == [admin_pb2.BREAKER_STATE_CLOSED]

        await until(is_closed)
        assert await refusal(one, "y") == []
        late = await one.policy.ReportOutcome(outcome("z", 503, decision_token=probe.decision_token, attempt=0))
        assert "void_permit" in late.ignored_texts
        assert await refusal(one, "y") == []
        assert await rest(call) == []
        facts = (await one.admin.ListFacts(admin_pb2.ListFactsRequest(provider="openai", mechanism="breaker"))).facts
        assert [fact.reason for fact in facts if fact.to_state == "CLOSED"] == ["probe_alive"]


@pytest.mark.parametrize("fields", [{"attempt": 1}, {"attempt": 0, "target_key": "other"}])
async def test_the_first_byte_of_another_target_gives_no_verdict(
    tmp_path: Path, embedded_url: str, fields: dict[str, Any]
) -> None:
    async with watched(tmp_path, embedded_url) as one:
        await open_breaker(one)
        request = selection("z")
        request.candidates[0].key = "first"
        request.candidates.add(provider="groq", connection="g", model="m", key="other")
        probe = await first_probe(one)
        answer = await one.policy.SelectTarget(request)
        token = answer.decision_token if "target_key" in fields else probe.decision_token
        call = await opened(one, 1, token, **fields)
        await call.write(progress(1, first_byte=True))
        await rest(call)
        await one.service.replica.watch.holdings.settled()

        assert await refusal(one, "y") == ["probe_in_flight"]


async def test_progress_keeps_a_probe_alive_beyond_the_reset_timeout(tmp_path: Path, embedded_url: str) -> None:
    async with watched(tmp_path, embedded_url) as one:
        await open_breaker(one)
        probe = await first_probe(one)
        call = await opened(one, 1, probe.decision_token)
        end = time.monotonic() + 3
        while time.monotonic() < end:
            await call.write(progress(1, (50, False)))
            assert not (await one.policy.SelectTarget(selection("y"))).HasField("dispatch")
            await asyncio.sleep(0.05)
        answer = await one.policy.ReportOutcome(outcome("z", 200, decision_token=probe.decision_token))
        news = await rest(call)

        assert [effect.to_state for effect in answer.effects] == ["CLOSED"]
        assert {each.permit.permit_id for each in news} == {probe.dispatch.permits[0].permit_id}
        assert 4 <= len(news) <= 10


# -- leases -----------------------------------------------------------------------------------------------------
async def test_a_stream_hears_that_its_lease_has_ended(tmp_path: Path, embedded_url: str) -> None:
    owner = f"vlo_{secrets.token_urlsafe(32)[:43]}"
    async with watched(tmp_path, embedded_url) as one:
        await asyncio.sleep(5.2)  # a connection is leased from its listing + 5 s on (spec/fleet.md section 6)
        granted = await one.policy.AcquireLease(
            lease_pb2.AcquireLeaseRequest(owner=owner, caller_key_sha256=KEY, model="m", ttl_ms=30_000)
        )
        context = lease_pb2.LeaseContext(owner=owner, generation=granted.lease.generation)
        chosen = await one.policy.SelectTarget(
            policy_pb2.SelectTargetRequest(route="owned", caller_key_sha256=KEY, lease=context, allow_wait=False)
        )
        one.service.replica.watch.holdings.lease_every_ms = 200
        call = await opened(one, 1, chosen.decision_token)
        await call.write(progress(1, (50, False)))
        await one.admin.InvalidateLease(admin_pb2.InvalidateLeaseRequest(connection="own"))

        async def is_ordered() -> bool:
            await call.write(progress(1, (50, False)))
            await one.service.replica.watch.holdings.settled()
            return one.service.replica.watch.aborted > 0

        await until(is_ordered)
        orders = await rest(call)

        assert [(order.abort.reason, order.abort.code) for order in orders] == [
            (stream_pb2.ABORT_REASON_LEASE_LOST, "LEASE_REQUIRED")
        ]


# -- ends -------------------------------------------------------------------------------------------------------
BAD: dict[str, tuple[Sequence[stream_pb2.WatchStreamRequest], str]] = {
    "no event": ([stream_pb2.WatchStreamRequest(stream_id=1)], "event"),
    "progress before open": ([progress(1)], "stream_id"),
    "close before open": ([closing(1)], "stream_id"),
    "open without token": ([opening(1, b"")], "open.decision_token"),
    "a forged token": ([opening(1, b"x" * 80)], "decision_token"),
    "a negative attempt": ([opening(1, b"TOKEN", attempt=-1)], "open.attempt"),
    "an unknown target": ([opening(1, b"TOKEN", target_key="nobody")], "open.target_key"),
    "open twice": ([opening(1, b"TOKEN"), opening(1, b"TOKEN")], "stream_id"),
    "progress after close": ([opening(1, b"TOKEN"), closing(1), progress(1)], "stream_id"),
    "bytes below zero": (
        [opening(1, b"TOKEN"), progress(1, (1, False), (-1, False))],
        "progress.events[1].useful_bytes",
    ),
    "too many events": ([opening(1, b"TOKEN"), progress(1, *[(1, False)] * 1_025)], "progress.events"),
}  # fmt: skip


@pytest.mark.timeout(240)
async def test_a_message_that_cannot_be_used_ends_the_call_with_the_field(tmp_path: Path, embedded_url: str) -> None:
    async with watched(tmp_path, embedded_url) as one:
        token = await token_of(one)
        for name, (messages, path) in BAD.items():
            call = one.policy.WatchStream()
            for message in messages:
                if message.open.decision_token == b"TOKEN":
                    message.open.decision_token = token
                await call.write(message)
            error = await failed(call)

            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            assert list(details(error)[1]) == [path], name
        await until(lambda: _is_idle(one))


async def _is_idle(one: Replica) -> bool:
    return one.service.server.gate.in_flight == 0 and one.service.replica.watch.watched == 0


async def test_the_token_of_a_refusal_can_not_be_watched(tmp_path: Path, embedded_url: str) -> None:
    async with watched(tmp_path, embedded_url) as one:
        await one.policy.ReportOutcome(outcome("two", 429, headers=[{"name": "Retry-After", "value": "60"}]))
        refused = await one.policy.SelectTarget(selection("two"))
        call = one.policy.WatchStream()
        await call.write(opening(1, refused.decision_token))
        error = await failed(call)

        assert refused.HasField("reject")
        assert list(details(error)[1]) == ["open.decision_token"]


async def test_as_many_events_as_allowed_are_taken(tmp_path: Path, embedded_url: str) -> None:
    async with watched(tmp_path, embedded_url) as one:
        call = await opened(one, 1, await token_of(one))
        await call.write(progress(1, *[(1, False)] * 1_024))

        assert await rest(call) == []


async def test_gateways_that_vanish_leave_nothing_behind(tmp_path: Path, embedded_url: str) -> None:
    async with watched(tmp_path, embedded_url) as one:
        token = await token_of(one)
        calls = [await opened(one, number, token) for number in range(40)]
        assert one.service.replica.watch.watched == 40
        for call in calls:
            await call.write(progress(0 if call is calls[0] else 1, (1, False)))
            call.cancel()
        await until(lambda: _is_idle(one))
        names = [task.get_name() for task in asyncio.all_tasks()]

        assert not {"watch-stream", "stream-upkeep"}.intersection(names)


async def test_a_drain_ends_open_streams_with_a_typed_error_and_is_not_held_up(
    tmp_path: Path, embedded_url: str
) -> None:
    async with watched(tmp_path, embedded_url, drain_ms=20_000) as one:
        calls = [await opened(one, 1, await token_of(one)) for _ in range(3)]
        began = time.monotonic()
        drained = await one.service.server.drain()
        took = time.monotonic() - began
        errors = [await failed(call) for call in calls]

    assert drained.clean
    assert took < 5
    assert {error.code() for error in errors} == {grpc.StatusCode.UNAVAILABLE}
    assert {details(error)[0].reason for error in errors} == {"DRAINING"}
    assert {dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"] for error in errors} == {"100"}


async def test_permits_of_a_stream_go_back_with_its_final_report(tmp_path: Path, embedded_url: str) -> None:
    async with watched(tmp_path, embedded_url) as one:
        ask = policy_pb2.SelectTargetRequest(route="capped", allow_wait=False)
        held = await one.policy.SelectTarget(ask)
        assert [permit.kind for permit in held.dispatch.permits] == [permit_pb2.PERMIT_KIND_CONCURRENCY]
        call = await opened(one, 1, held.decision_token)
        done = policy_pb2.ReportOutcomeRequest(
            decision_token=held.decision_token, http_status=200, final=True, streamed=True
        )
        await one.policy.ReportOutcome(done)
        await asyncio.sleep(0.6)
        await call.write(progress(1, (50, False)))
        await one.service.replica.watch.holdings.settled()

        assert await rest(call) == []
        assert (await one.policy.SelectTarget(ask)).HasField("dispatch")
