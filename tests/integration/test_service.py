"""The whole service over real gRPC and real Postgres: the main job, end to end."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from policy_service.application.ports import SchemaMismatchError, StoreUnavailableError
from policy_service.cli import exit_codes
from policy_service.generated.policy.v1 import policy_pb2, policy_pb2_grpc, types_pb2
from policy_service.storage.postgres import schema
from tests.contract.beside import driver
from tests.integration.serving import config, outcome, process, ready, selection, serving
from tests.replicas import EXAMPLE_CATALOGUE


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_select_report_and_select_again(tmp_path: Path, embedded_url: str) -> None:
    async with serving(config(tmp_path, embedded_url)) as (_, stub):
        first = await stub.SelectTarget(selection("a", "b"))
        assert first.dispatch.target.connection == "a"
        assert [t.connection for t in first.dispatch.fallbacks] == ["b"]
        answer = await stub.ReportOutcome(
            outcome("a", 429, decision_token=first.decision_token, headers=[{"name": "Retry-After", "value": "60"}])
        )
        assert answer.durable
        assert answer.verdict.reason_text == "rate_limit"
        assert answer.verdict.retry_after_ms == 60_000
        assert answer.action.next_target.connection == "b"
        second = await stub.SelectTarget(selection("a", "b", explain=True))
        assert second.dispatch.target.connection == "b"
        assert [(e.target.connection, e.reason_text) for e in second.exclusions] == [("a", "connection_cooldown")]
        assert 55_000 < second.exclusions[0].remaining_ms <= 60_000
        assert second.exclusions[0].evidence_id == answer.effects[0].fact_id


async def test_healthy_traffic_makes_no_database_round_trip(tmp_path: Path, embedded_url: str) -> None:
    settings = config(tmp_path, embedded_url, store={"poll_ms": 60_000})
    async with serving(settings) as (service, stub):
        await asyncio.sleep(0.2)
        before = service.store.statements
        for _ in range(100):
            answer = await stub.SelectTarget(selection("a", "b"))
            await stub.ReportOutcome(outcome("a", 200, decision_token=answer.decision_token, latency_ms=12))
        assert service.store.statements == before


async def test_a_storm_of_failures_costs_few_transactions(tmp_path: Path, embedded_url: str) -> None:
    async with serving(config(tmp_path, embedded_url, store={"report_ms": 10_000})) as (service, stub):
        started = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(stub.ReportOutcome(outcome(f"c{n}", 503)) for n in range(200)))
        elapsed_s = asyncio.get_running_loop().time() - started
        assert all(answer.durable for answer in answers)
        assert service.replica.commit.counters.committed == 200
        assert service.replica.commit.counters.batches <= elapsed_s * 50 + 1
        assert service.replica.commit.counters.batches < 100


async def test_failures_seen_by_two_replicas_add_up_and_both_refuse(tmp_path: Path, embedded_url: str) -> None:
    async with (
        serving(config(tmp_path / "one", embedded_url, replica="one")) as (_, one),
        serving(config(tmp_path / "two", embedded_url, replica="two")) as (_, two),
    ):
        for n in range(12):
            await (one, two)[n % 2].ReportOutcome(outcome(f"c{n}", 503))
        for stub in (one, two):
            async with asyncio.timeout(2):
                while (refused := await stub.SelectTarget(selection("z"))).WhichOneof("verdict") != "reject":
                    await asyncio.sleep(0.01)
            assert refused.reject.http_status == 503
            assert [e.reason_text for e in refused.exclusions] == ["circuit_open"]


async def test_a_token_of_one_replica_is_accepted_by_another(tmp_path: Path, embedded_url: str) -> None:
    async with (
        serving(config(tmp_path / "one", embedded_url, replica="one")) as (_, one),
        serving(config(tmp_path / "two", embedded_url, replica="two")) as (_, two),
    ):
        answer = await one.SelectTarget(selection("a", "b"))
        reported = await two.ReportOutcome(outcome("a", 503, decision_token=answer.decision_token))
        again = await one.ReportOutcome(outcome("a", 503, decision_token=answer.decision_token))
        assert again.effects == reported.effects
        assert "duplicate" in again.ignored_texts


async def test_an_open_breaker_survives_kill_9_with_its_remaining_time(tmp_path: Path) -> None:
    port = free_port()
    with process(tmp_path, port) as first:
        await ready(first.address)
        async with grpc.aio.insecure_channel(first.address) as channel:
            stub = policy_pb2_grpc.PolicyServiceStub(channel)
            for n in range(12):
                assert (await stub.ReportOutcome(outcome(f"c{n}", 503))).durable
            before = await stub.SelectTarget(selection("z"))
        first.kill()
    with process(tmp_path, port) as second:
        await ready(second.address)
        async with grpc.aio.insecure_channel(second.address) as channel:
            after = await policy_pb2_grpc.PolicyServiceStub(channel).SelectTarget(selection("z"))
        assert after.exclusions[0].reason_text == "circuit_open"
        assert after.exclusions[0].until_at_unix_ms == before.exclusions[0].until_at_unix_ms
        assert second.end() == 0


async def test_a_named_route_of_the_example_catalogue_answers(tmp_path: Path, embedded_url: str) -> None:
    settings = config(tmp_path, embedded_url, catalogue=str(EXAMPLE_CATALOGUE))
    async with serving(settings) as (service, stub):
        assert service.replica.view.policy.revision == 1
        for name in service.replica.view.policy.catalogue.routes:
            answer = await stub.SelectTarget(policy_pb2.SelectTargetRequest(route=name))
            assert answer.WhichOneof("verdict") == "dispatch", name
            assert answer.policy_revision == 1
        unknown = await stub.SelectTarget(policy_pb2.SelectTargetRequest(route="nowhere"))
        assert unknown.reject.http_status == 404
        assert unknown.reject.code == "model_not_found"


async def test_a_changed_catalogue_file_is_followed_and_a_broken_one_is_not(tmp_path: Path, embedded_url: str) -> None:
    path = tmp_path / "catalogue.yaml"
    route = "routes: [{name: r, strategy: priority, targets: [{provider: openai, model: %s}]}]\n"
    path.write_text(route % "m1")
    settings = config(tmp_path, embedded_url, catalogue=str(path), catalogue_poll_ms=100)

    async with serving(settings) as (service, stub):

        async def model() -> str:
            answer = await stub.SelectTarget(policy_pb2.SelectTargetRequest(route="r"))
            return str(answer.dispatch.target.model)

        async def model_is(wanted: str) -> None:
            async with asyncio.timeout(5):
                while await model() != wanted:
                    await asyncio.sleep(0.02)

        await model_is("m1")
        path.write_text(route % "m2")
        await model_is("m2")
        path.write_text("routes: [{name: r, strategy: nonsense, targets: []}]\n")
        await asyncio.sleep(0.5)
        await model_is("m2")
        assert service.replica.view.policy.revision == 2


async def test_a_file_imported_before_does_not_bring_an_old_catalogue_back(tmp_path: Path, embedded_url: str) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    route = "routes: [{name: r, strategy: priority, targets: [{provider: openai, model: %s}]}]\n"
    old.write_text(route % "old")
    new.write_text(route % "new")
    for path in (old, new):
        async with serving(config(tmp_path, embedded_url, catalogue=str(path))):
            pass
    async with serving(config(tmp_path, embedded_url, catalogue=str(old))) as (_, stub):
        answer = await stub.SelectTarget(policy_pb2.SelectTargetRequest(route="r"))
        assert answer.dispatch.target.model == "new"


async def test_a_database_that_refuses_is_a_typed_error(tmp_path: Path) -> None:
    settings = config(tmp_path, f"postgresql://nobody@127.0.0.1:{free_port()}/none", store={"connect_ms": 500})
    with pytest.raises(StoreUnavailableError):
        async with serving(settings):
            pass


async def test_a_database_that_hangs_is_a_typed_error_within_the_budget(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"postgresql://nobody@127.0.0.1:{silent.getsockname()[1]}/none"
        async with asyncio.timeout(10):
            with pytest.raises(StoreUnavailableError):
                async with serving(config(tmp_path, url, store={"connect_ms": 500})):
                    pass


async def test_a_database_of_a_newer_release_is_named_with_a_remedy(tmp_path: Path, embedded_url: str) -> None:
    import asyncpg
    from sqlalchemy.engine import make_url

    parts = make_url(embedded_url)
    connection = await asyncpg.connect(
        user=parts.username, database=parts.database, host=parts.query.get("host") or parts.host
    )
    await connection.execute("UPDATE alembic_version SET version_num = '9999'")
    await connection.close()
    with pytest.raises(SchemaMismatchError) as caught:
        async with serving(config(tmp_path, embedded_url)):
            pass
    assert "9999" in str(caught.value)
    assert caught.value.remedy


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A real OTLP receiver over gRPC."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_every_decision_is_a_span_that_joins_the_callers_trace(
    tmp_path: Path, embedded_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    metadata = (("traceparent", f"00-{trace}-{parent}-01"),)
    async with serving(config(tmp_path, embedded_url)) as (_, stub):
        first = await stub.SelectTarget(selection("a", "b"), metadata=metadata)
        await stub.ReportOutcome(outcome("a", 503, decision_token=first.decision_token), metadata=metadata)
        await stub.SelectTarget(selection("a", "b"), metadata=metadata)
    server.stop(None)
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"policy.SelectTarget", "policy.ReportOutcome"}
    for span in spans.values():
        assert span.trace_id.hex() == trace
        assert span.parent_span_id.hex() == parent
    last = {a.key: a.value for a in spans["policy.SelectTarget"].attributes}
    assert last["policy.verdict"].string_value == "Dispatch"
    assert last["policy.strategy"].string_value == "priority"
    assert last["policy.candidate_count"].int_value == 2
    assert last["policy.excluded_count"].int_value == 1
    assert last["policy.target.connection"].string_value == "b"
    assert [e.name for e in spans["policy.SelectTarget"].events] == ["policy.exclusion"]
    facts = spans["policy.ReportOutcome"].events
    assert {e.name for e in facts} == {"policy.fact"}


async def test_workers_share_one_port_and_one_brain(tmp_path: Path) -> None:
    port = free_port()
    with process(tmp_path, port, "--set", "workers=2") as service:
        await ready(service.address, 40)
        await asyncio.sleep(1.5)
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(service.address, options=options) as channel:
            stub = policy_pb2_grpc.PolicyServiceStub(channel)
            for n in range(12):
                await stub.ReportOutcome(outcome(f"c{n}", 503))
        await asyncio.sleep(0.7)
        for _ in range(6):
            async with grpc.aio.insecure_channel(service.address, options=options) as channel:
                answer = await policy_pb2_grpc.PolicyServiceStub(channel).SelectTarget(selection("z"))
                assert answer.WhichOneof("verdict") == "reject"
        assert service.end() == 0


async def test_an_unknown_provider_without_a_class_gets_the_api_key_profile(tmp_path: Path, embedded_url: str) -> None:
    """A plain 403 of a key cools it; it must not end an account that nobody described."""
    request = policy_pb2.SelectTargetRequest(
        candidates=[types_pb2.Candidate(provider="nobody-knows", connection=c, model="m") for c in "ab"]
    )
    async with serving(config(tmp_path, embedded_url)) as (_, stub):
        answer = await stub.SelectTarget(request)
        reported = await stub.ReportOutcome(
            policy_pb2.ReportOutcomeRequest(
                decision_token=answer.decision_token,
                target=answer.dispatch.target,
                http_status=403,
                body=b'{"error": {"message": "forbidden"}}',
            )
        )
        assert not reported.verdict.terminal_state
        again = await stub.SelectTarget(policy_pb2.SelectTargetRequest(candidates=request.candidates, explain=True))
        assert [e.reason_text for e in again.exclusions] == ["connection_cooldown"]


async def test_a_hangup_makes_a_running_service_read_its_catalogue_again(tmp_path: Path) -> None:
    """The file is not looked at by itself within the test: only the signal can have it read."""
    path, port = tmp_path / "catalogue.yaml", free_port()
    route = "routes: [{name: r, strategy: priority, targets: [{provider: openai, model: %s}]}]\n"
    path.write_text(route % "m1")
    request = policy_pb2.SelectTargetRequest(route="r")
    with process(tmp_path, port, "--catalogue", str(path), "--set", "catalogue_poll_ms=3600000") as service:
        await ready(service.address)
        async with grpc.aio.insecure_channel(service.address) as channel:
            stub = policy_pb2_grpc.PolicyServiceStub(channel)
            assert (await stub.SelectTarget(request)).dispatch.target.model == "m1"
            path.write_text(route % "m2")
            await asyncio.sleep(0.5)
            assert (await stub.SelectTarget(request)).dispatch.target.model == "m1"
            service.child.send_signal(signal.SIGHUP)
            async with asyncio.timeout(10):
                while (answer := await stub.SelectTarget(request)).dispatch.target.model != "m2":
                    await asyncio.sleep(0.02)
            assert answer.policy_revision == 2
            path.write_text("routes: [{name: r, strategy: nonsense, targets: []}]\n")
            service.child.send_signal(signal.SIGHUP)
            async with asyncio.timeout(10):
                while "is not usable, revision 2 stays" not in service.log.read_text():
                    await asyncio.sleep(0.02)
            assert (await stub.SelectTarget(request)).dispatch.target.model == "m2"
        assert service.end() == 0


@pytest.mark.parametrize(
    ("found", "needed", "remedy"),
    [
        (schema.expected(), "9998", schema.REMEDY_OLDER),
        ("9999", schema.expected(), schema.REMEDY_NEWER),
    ],
    ids=["older", "newer"],
)
async def test_serve_against_the_schema_of_another_release_ends_with_its_code_and_a_remedy(
    tmp_path: Path, embedded_url: str, found: str, needed: str, remedy: str
) -> None:
    """An older database is one of this release under a program that wants a later schema."""
    async with driver(embedded_url) as other:
        await other.execute("UPDATE alembic_version SET version_num = $1", found)
    program = (
        "from policy_service.storage.postgres import schema\n"
        f"schema.expected = lambda: {needed!r}\n"
        "from policy_service.__main__ import main\n"
        "import sys; sys.exit(main())\n"
    )
    arguments = ["serve", "--data-dir", str(tmp_path), "--database-url", embedded_url.replace("+asyncpg", "")]
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", program, *arguments, "--set", f"listen.tcp=127.0.0.1:{free_port()}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == exit_codes.SCHEMA == 4, ended.stderr
    told = " ".join(ended.stderr.split())
    assert f"database schema is {found}, this release needs {needed}: {remedy}" in told
    assert "Traceback" not in ended.stderr
    async with driver(embedded_url) as other:
        assert await other.fetchval("SELECT version_num FROM alembic_version") == found


async def test_workers_that_meet_a_newer_schema_end_the_service_with_its_code_and_are_not_started_again(
    tmp_path: Path, embedded_url: str
) -> None:
    async with driver(embedded_url) as other:
        await other.execute("UPDATE alembic_version SET version_num = '9999'")
    arguments = ["serve", "--data-dir", str(tmp_path), "--database-url", embedded_url.replace("+asyncpg", "")]
    more = ["--set", f"listen.tcp=127.0.0.1:{free_port()}", "--workers", "2"]
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "policy_service", *arguments, *more],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 4, ended.stderr
    assert schema.REMEDY_NEWER in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


async def test_a_start_on_a_port_in_use_changes_nothing_and_says_what_to_do(tmp_path: Path, embedded_url: str) -> None:
    catalogue = tmp_path / "catalogue.yaml"
    catalogue.write_text("connections: [{id: a, provider: openai}]\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        arguments = ["serve", "--data-dir", str(tmp_path), "--database-url", embedded_url.replace("+asyncpg", "")]
        more = ["--catalogue", str(catalogue), "--listen", f"127.0.0.1:{taken.getsockname()[1]}"]
        ended = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "policy_service", *arguments, *more],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1
    assert "address in use; stop the other process" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
    async with driver(embedded_url) as other:
        assert await other.fetchval("SELECT count(*) FROM catalogue_revision") == 0
