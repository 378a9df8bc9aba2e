"""`policy-service conformance` as a user runs it: exit codes, output, and a gateway of his own at an address."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest
from aiohttp import web

from policy_service.cli import conformance, exit_codes
from policy_service.cli.conformance import gateway_process
from policy_service.cli.conformance.judge import judge
from policy_service.cli.conformance.scripted_client import GatewayAccess
from policy_service.cli.conformance.stage import staged
from tests.docs_pages import ROOT

EXAMPLE = f"{sys.executable} {ROOT / 'docs' / 'examples' / 'gateway.py'}"


def kit(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "policy_service", "conformance", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_gateway_that_conforms_ends_with_0_and_a_line_for_each_rule() -> None:
    done = kit("--command", EXAMPLE, "--only", "reject", "--only", "reject-retry-after")
    assert done.returncode == exit_codes.OK, done.stderr
    assert done.stdout.splitlines() == [
        "PASS            reject              in 2 cases",
        "PASS            reject-retry-after  in 2 cases",
        "",
        "2 rules: 2 PASS, 0 FAIL, 0 NOT APPLICABLE; conforms",
    ]


def test_json_has_every_finding_with_what_was_expected_and_seen() -> None:
    done = kit("--command", EXAMPLE, "--case", "reject", "--only", "reject", "--only", "session", "--json")
    found = json.loads(done.stdout)
    assert found["conforms"] is True
    assert [(each["rule"], each["status"]) for each in found["rules"]] == [
        ("session", "NOT APPLICABLE"),
        ("reject", "PASS"),
    ]
    assert {each["case"] for each in found["rules"][1]["findings"]} == {"reject"}
    assert all(each["expected"] for each in found["rules"][1]["findings"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--command", "true", "--only", "no-such-rule"), "no rule of the name no-such-rule"),
        (("--command", "true", "--without", "wings"), "no feature of the name wings"),
        (("--command", "true", "--target", "127.0.0.1:1"), "either --target host:port or --command"),
        ((), "either --target host:port or --command"),
        (("--target", "gateway"), "--target is host:port, not gateway"),
    ],
)
def test_a_command_line_that_cannot_be_followed_ends_with_2(words: tuple[str, ...], told: str) -> None:
    done = kit(*words)
    assert done.returncode == exit_codes.CONFIGURATION
    assert told in done.stderr


def test_a_gateway_that_ends_at_once_is_told_with_the_end_of_its_log() -> None:
    done = kit("--command", "echo no configuration >&2; exit 3", "--only", "reject")
    assert done.returncode == exit_codes.FAILED
    assert "the gateway ended with 3" in done.stderr
    assert "no configuration" in done.stderr


def test_a_gateway_that_ends_in_a_case_is_told_with_the_case() -> None:
    program = (
        "import os, http.server; s = http.server.HTTPServer(('127.0.0.1', int(os.environ['GATEWAY_LISTEN'][10:])), "
    )
    program += (
        "http.server.BaseHTTPRequestHandler); [s.handle_request() for _ in range(2)]; raise SystemExit('full stop')"
    )
    done = kit("--command", f'{sys.executable} -c "{program}"', "--only", "reject")
    assert done.returncode == exit_codes.FAILED
    assert "in case reject, the gateway ended with 1" in done.stderr
    assert "full stop" in done.stderr


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_taken_port_is_told(unused_ports: int, place: int) -> None:
    with socket.create_server(("127.0.0.1", unused_ports + place)):
        done = kit("--command", "true", "--base-port", str(unused_ports), "--only", "reject")
    assert done.returncode == exit_codes.FAILED
    assert f"error: cannot listen on 127.0.0.1:{unused_ports + place}" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupted_kit_leaves_no_gateway_behind(tmp_path: Path) -> None:
    command = ["conformance", "--command", f"{EXAMPLE} & echo $! > {tmp_path}/pid; wait", "--log", f"{tmp_path}/log"]
    running = subprocess.Popen([sys.executable, "-m", "policy_service", *command], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    time.sleep(1)  # into the cases
    running.terminate()
    _, told = running.communicate(timeout=30)
    assert running.returncode == exit_codes.INTERRUPTED
    assert "everything that the kit started is stopped" in told
    with contextlib.suppress(psutil.NoSuchProcess):
        gateway = psutil.Process(int((tmp_path / "pid").read_text()))
        assert gateway.status() == psutil.STATUS_ZOMBIE  # ended; whoever inherited it has not looked yet


def test_the_rules_are_listed_with_their_level() -> None:
    done = kit("--list")
    assert done.returncode == exit_codes.OK
    assert "reject-retry-after    must: Retry-After is a thousandth of Reject.retry_after_ms" in done.stdout


def test_a_gateway_that_somebody_else_started_is_judged_and_a_breach_ends_with_1(unused_ports: int) -> None:
    """With ports that are known before, the gateway can be started first; this one calls nobody and rejects nothing."""
    careless = Thread(target=_careless, args=(server := HTTPServer(("127.0.0.1", 0), _Careless),))
    careless.start()
    where = f"127.0.0.1:{server.server_port}"
    done = kit("--target", where, "--base-port", str(unused_ports), "--only", "reject")
    server.shutdown()
    careless.join()
    assert done.returncode == exit_codes.FAILED
    assert f"POLICY_TARGET=127.0.0.1:{unused_ports}" in done.stderr
    assert "reject: expected status 429 for the client; seen 200" in done.stdout
    assert "1 must be mended" in done.stdout


class _Careless(BaseHTTPRequestHandler):
    """A fake gateway that says 200 to everything."""

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return None


def _careless(server: HTTPServer) -> None:
    server.serve_forever(0.05)


@pytest.fixture
def unused_ports() -> int:
    """First of five ports in a row that nobody uses now; below those that the system gives to clients."""
    for first in range(20_000 + os.getpid() % 1_000 * 10, 32_000, 5):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + 5):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise AssertionError("no five free ports in a row")


async def test_the_gateway_is_told_where_everything_is(tmp_path: Path) -> None:
    async with staged() as stage:
        told = gateway_process.environment(stage, tmp_path, "127.0.0.1:8080", "a-key")
    upstreams = json.loads(Path(told["UPSTREAMS_FILE"]).read_text())["upstreams"]
    assert set(upstreams) == {"openai/alpha", "openai/bravo", "openai/charlie", "openai/closed"}
    assert upstreams["openai/alpha"]["base_url"] == told["UPSTREAM_ALPHA_URL"] == f"http://{stage.upstreams['alpha']}"
    assert upstreams["openai/alpha"]["headers"]["authorization"] == f"Bearer {told['UPSTREAM_ALPHA_KEY']}"
    assert (told["POLICY_TARGET"], told["GATEWAY_LISTEN"]) == (stage.policy, "127.0.0.1:8080")


async def test_fixed_ports_are_taken_in_a_row(unused_ports: int) -> None:
    async with staged(unused_ports) as stage:
        found = [stage.policy, *stage.upstreams.values()]
    assert found == [f"127.0.0.1:{unused_ports + place}" for place in range(5)]


async def test_a_gateway_that_answers_nothing_at_all_breaks_rules_and_ends_nothing_else() -> None:
    """A run goes to its end whatever the gateway does; here it hangs up on everybody."""

    async def hang_up(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    application = web.Application()
    application.router.add_post("/v1/chat/completions", hang_up)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    options = conformance.Options(target="127.0.0.1:1", only=["return-to-client", "own-credential"], cases=["success"])
    rules, cases = conformance.chosen(options)
    async with staged() as stage:
        access = GatewayAccess(f"127.0.0.1:{runner.addresses[0][1]}")
        records = [await stage.play(case, access) for case in cases]
    await runner.cleanup()
    results = {result.rule.id: result.status.value for result in judge(rules, records)}
    assert results == {"return-to-client": "FAIL", "own-credential": "NOT APPLICABLE"}
