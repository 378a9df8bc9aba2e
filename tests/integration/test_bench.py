"""`policy-service bench`: a short run gives every figure; the clients notice calls that failed; goals are judged."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from policy_service.cli.bench import h2load
from policy_service.cli.bench.cases import Case, inline_request
from policy_service.cli.bench.echo import echo_path, write_script
from policy_service.cli.bench.figures import GOALS, Figure, compared
from policy_service.cli.bench.load import ONE_AT_A_TIME, Client, PythonClient, Shape, Work
from policy_service.cli.bench.processes import BenchError, free_address, plain_environment, running
from policy_service.generated.policy.v1 import policy_pb2

pytestmark = pytest.mark.xdist_group("bench")

CALLS = ("select_inline", "select_route", "select_batch", "report_success", "report_failure")
COMPARED = {f"{call}.{what}" for call in CALLS for what in ("throughput", "p50", "p99", "cpu")} | {
    f"tracing.{name}" for name in ("off", "no_op", "recorded")
}
COMPARED |= {f"stream.{name}" for name in ("chat_completions", "responses", "anthropic", "gemini", "unknown")}
ALONE = {f"select.{kind}.{size}" for kind in ("inline", "inline_new", "route") for size in (8, 100, 1_000)} | {
    "select.call.8",
    "classify.p50",
    "report_failure.durable",
    "database.statements_per_decision",
    "database.statements_per_failure",
}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """What a very short run prints with --json."""
    command = [sys.executable, "-m", "policy_service", "bench", "--seconds", "0.25", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=plain_environment(os.environ), check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture
def figures(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Its figures by name."""
    return {figure["name"]: figure for figure in result["figures"]}


@pytest.mark.timeout(300)
def test_a_short_run_yields_every_figure(figures: dict[str, dict[str, Any]]) -> None:
    assert set(figures) == COMPARED | ALONE


@pytest.mark.timeout(300)
def test_every_comparison_has_both_sides_and_their_ratio(figures: dict[str, dict[str, Any]]) -> None:
    for name in COMPARED:
        found = figures[name]
        assert found["service"] > 0, name
        assert found["reference"] > 0, name
        assert math.isfinite(found["ratio"]), name
        assert found["ratio"] > 0, name


@pytest.mark.timeout(300)
def test_healthy_traffic_sends_no_statement_and_a_failure_some(figures: dict[str, dict[str, Any]]) -> None:
    assert figures["database.statements_per_decision"]["service"] == 0
    assert figures["database.statements_per_decision"]["met"] is True
    assert figures["database.statements_per_failure"]["service"] >= 3  # BEGIN, something, COMMIT


@pytest.mark.timeout(300)
def test_every_goal_is_judged_and_the_conditions_are_stated(
    result: dict[str, Any], figures: dict[str, dict[str, Any]]
) -> None:
    assert {name for name, figure in figures.items() if figure["goal"]} == set(GOALS)
    assert all(isinstance(figures[name]["met"], bool) for name in GOALS)
    assert result["conditions"]["client"] in {"h2load", PythonClient.name}
    assert result["conditions"]["cpus"] >= 1


# -- clients -----------------------------------------------------------------------------------------
ANSWER = policy_pb2.SelectTargetResponse(decision_id="d" * 32, decision_token=b"t" * 300)
CASE = Case("select_inline", "", "SelectTarget", inline_request().SerializeToString())


def clients() -> list[Client]:
    """Every client that this machine has."""
    program = h2load.available()
    return [PythonClient(), *([h2load.H2Load(program)] if program else [])]


@pytest.fixture
async def echo(tmp_path: Path) -> AsyncIterator[str]:
    """Address of an echo that answers CASE with ANSWER."""
    script, address = tmp_path / "script.json", free_address()
    write_script(script, (CASE,), {CASE.name: ANSWER.SerializeToString()})
    module = "policy_service.cli.bench.echo"
    async with running(module, address, str(script), address=address, log=tmp_path / "log") as child:
        yield child.address


def work(address: str, path: str) -> Work:
    return Work(address, path, lambda _: CASE.request, len(ANSWER.SerializeToString()))


@pytest.mark.parametrize("client", clients(), ids=lambda client: client.name)
async def test_a_client_counts_calls_and_their_latencies(echo: str, client: Client) -> None:
    for shape in (Shape(2, 4), ONE_AT_A_TIME):
        sample = await client.load(work(echo, echo_path(CASE)), shape, 0.3)
        assert sample.calls > 0
        assert len(sample.latencies_us) == sample.calls
        assert all(latency > 0 for latency in sample.latencies_us)
        assert sample.seconds >= 0.3


@pytest.mark.parametrize("client", clients(), ids=lambda client: client.name)
async def test_a_client_notices_answers_that_are_errors(echo: str, client: Client) -> None:
    with pytest.raises(BenchError):
        await client.load(work(echo, "/policy.bench.v1.EchoServer/absent"), ONE_AT_A_TIME, 0.3)


async def test_the_echo_answers_with_the_bytes_of_the_recorded_answer(echo: str) -> None:
    sample = await PythonClient().load(work(echo, echo_path(CASE)), ONE_AT_A_TIME, 0.1)
    assert set(sample.answers) == {ANSWER.SerializeToString()}


async def test_a_server_that_does_not_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    address = free_address()
    with pytest.raises(BenchError, match="No such file"):
        async with running(
            "policy_service.cli.bench.echo", address, str(tmp_path / "absent"), address=address, log=tmp_path / "log"
        ):
            raise AssertionError("it runs")


def test_the_report_of_h2load_is_read() -> None:
    text = (
        "requests: 263 total, 263 started, 263 done, 262 succeeded, 1 failed, 0 errored, 0 timeout\n"
        "traffic: 205.88KB (210824) total, 1.71KB (1752) headers (space savings 94.37%), 278.18KB (284857) data\n"
    )
    assert h2load.parse_report(text) == h2load.Report(262, 1, 284857)
    with pytest.raises(BenchError, match="no result"):
        h2load.parse_report("could not connect")


# -- figures -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "ratio", "met"),
    [
        ("select_inline.throughput", 0.65, True),
        ("select_inline.throughput", 0.649, False),
        ("select_route.p50", 1.4, True),
        ("select_route.p50", 1.41, False),
        ("report_success.p50", 9.0, None),
    ],
)
def test_a_goal_on_the_ratio_is_judged_at_its_bound(name: str, ratio: float, met: bool | None) -> None:
    assert Figure(name, "", "us", ratio, 1.0, ratio).met is met


def test_goals_on_the_figure_itself_are_judged_without_rounding() -> None:
    assert Figure("database.statements_per_decision", "", "", 0.001).met is False
    assert Figure("classify.p50", "", "us", 60.0).met is False
    assert Figure("classify.p50", "", "us", 59.9).met is True


def test_one_busy_moment_does_not_move_a_ratio() -> None:
    figure = compared("x", "", "us", [(14, 10), (14, 10), (900, 10), (14, 10), (28, 20)])
    assert (figure.service, figure.reference, figure.ratio) == (14, 10, 1.4)


def test_calls_that_must_differ_carry_an_id_of_their_own() -> None:
    case = Case("report_failure", "", "ReportOutcome", b"", is_distinct=True)
    ids = {policy_pb2.ReportOutcomeRequest.FromString(case.body("run", number)).report_id for number in range(3)}
    assert ids == {"run-000000000000", "run-000000000001", "run-000000000002"}
