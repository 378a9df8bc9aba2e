"""The demo as a user starts it: real processes, real sockets, and the claims of its summary."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from policy_service.cli import exit_codes
from policy_service.cli.demo import JSON_VARIABLE

COMMAND = (sys.executable, "-m", "policy_service", "demo", "--fast")
LIMIT_S = 100

pytestmark = pytest.mark.xdist_group("demo")


def environment(tmp: Path) -> dict[str, str]:
    """Temporary files of the demo go below `tmp`, so that a test sees what is left of them."""
    return {**os.environ, JSON_VARIABLE: "1", "TMPDIR": str(tmp), "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One run, for all claims about it."""
    tmp = tmp_path_factory.mktemp("demo")
    return subprocess.run(COMMAND, env=environment(tmp), capture_output=True, text=True, timeout=LIMIT_S), tmp


@pytest.fixture(scope="module")
def summary(finished: tuple[subprocess.CompletedProcess[str], Path]) -> dict[str, Any]:
    """The last line of standard output."""
    done, _ = finished
    assert done.returncode == exit_codes.OK, done.stderr + done.stdout
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_both_gateways_get_the_same_requests(summary: dict[str, Any]) -> None:
    ours, theirs = summary["with_service"], summary["without_service"]
    assert ours["requests"] == theirs["requests"] > 300
    assert ours["failures_by_route"].keys() == theirs["failures_by_route"].keys()


def test_clients_see_fewer_failures_with_the_service(summary: dict[str, Any]) -> None:
    ours, theirs = summary["with_service"], summary["without_service"]
    assert ours["failures"] < theirs["failures"]
    assert ours["failures"] == sum(ours["failures_by_route"].values())
    assert summary["service_errors"] == 0


def test_a_route_with_a_healthy_target_loses_next_to_nothing(summary: dict[str, Any]) -> None:
    lost = summary["with_service"]["failures_by_route"]["chat"]
    assert lost <= 2 < summary["without_service"]["failures_by_route"]["chat"]


def test_blocked_targets_are_left_in_peace(summary: dict[str, Any]) -> None:
    assert summary["with_service"]["wasted_calls"] * 2 < summary["without_service"]["wasted_calls"]


def test_the_script_reaches_every_mechanism_it_is_meant_to_show(summary: dict[str, Any]) -> None:
    assert summary["facts"]["breaker"] >= 3, "opened, probed and closed"
    assert summary["facts"]["connection"] >= 3
    assert summary["restated"] >= 1
    assert {"dispatch", "wait"} <= summary["decisions"].keys()


def test_the_cost_of_the_service_is_measured(summary: dict[str, Any]) -> None:
    assert 0 < summary["select_p50_ms"] <= summary["added_p50_ms"] <= summary["added_p95_ms"]


def test_without_a_terminal_plain_lines_are_printed(
    summary: dict[str, Any], finished: tuple[subprocess.CompletedProcess[str], Path]
) -> None:
    output = finished[0].stdout
    assert "\x1b" not in output
    assert sum("client failures" in line for line in output.splitlines()) >= 10
    assert "breaker house-llm OPEN" in output
    assert "openai-spare key dead" in output
    assert "anthropic-batch wallet empty" in output


def test_nothing_is_left_after_a_run(
    summary: dict[str, Any], finished: tuple[subprocess.CompletedProcess[str], Path]
) -> None:
    assert_gone(finished[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_stops_everything_it_started(
    tmp_path_factory: pytest.TempPathFactory, number: signal.Signals
) -> None:
    tmp = tmp_path_factory.mktemp("demo")
    with subprocess.Popen(COMMAND, env=environment(tmp), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert "client failures" in running.stdout.readline(), "traffic flows"
        assert started_below(tmp)
        running.send_signal(number)
        assert running.wait(timeout=LIMIT_S) == exit_codes.INTERRUPTED
    assert_gone(tmp)


def assert_gone(tmp: Path) -> None:
    """Neither files nor processes are left."""
    assert list(tmp.iterdir()) == []
    assert started_below(tmp) == []


def started_below(tmp: Path) -> list[str]:
    """Command lines of live processes that name the directory."""
    lines = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return [line for line in lines if str(tmp) in line]
