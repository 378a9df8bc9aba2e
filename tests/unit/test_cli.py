"""The command line: what it prints, its exit codes, and that it starts fast."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from policy_service.cli import exit_codes
from policy_service.cli.healthcheck import own_address
from policy_service.cli.main import main
from policy_service.settings.load import load

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "docs" / "examples" / "catalogue.yaml")


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Cli:
    """Runs the command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *argv: str) -> Ran:
        self._capsys.readouterr()
        code = main(list(argv))
        return Ran(code, *self._capsys.readouterr())


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    for name in ("POLICY_DATABASE_URL", "POLICY_CATALOGUE", "POLICY_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return Cli(capsys)


# -- config ------------------------------------------------------------------------------------------------
def test_check_lists_the_problems_of_configuration_and_catalogue_together(cli: Cli, tmp_path: Path) -> None:
    catalogue = tmp_path / "c.yaml"
    catalogue.write_text("routes: [{name: r, strategy: x, targets: [{provider: openai}]}]\n", encoding="utf-8")

    ran = cli("config", "check", "--workers", "0", "--catalogue", str(catalogue))

    assert ran.code == exit_codes.CONFIGURATION
    assert "workers: out of range; given: '0'; allowed: 1 .. 64" in ran.err
    assert "routes[0].strategy: unknown strategy" in ran.err
    assert "2 problem(s)" in ran.err


def test_check_of_the_example_explains_what_overrides_what(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLICY_BREAKER_OAUTH_FAILURE_THRESHOLD", "3")

    ran = cli("config", "check", "--catalogue", EXAMPLE)

    assert ran.code == exit_codes.OK
    assert "providers.anthropic.profile" in ran.out
    assert "a stored value beats the environment" in ran.out
    assert "6 connections, 4 routes, 2 callers" in ran.out


def test_check_can_answer_in_json(cli: Cli) -> None:
    ran = cli("config", "check", "--json", "--set", "store.select_ms=x")

    body = json.loads(ran.out)
    assert (ran.code, body["usable"]) == (exit_codes.CONFIGURATION, False)
    assert [(p["path"], p["given"], p["allowed"]) for p in body["problems"]] == [
        ("store.select_ms", "'x'", "a whole number 1 .. 10000")
    ]


def test_a_strict_check_fails_on_warnings(cli: Cli) -> None:
    arguments = ("config", "check", "--listen", "0.0.0.0:50051")

    assert cli(*arguments).code == exit_codes.OK
    assert cli(*arguments, "--strict").code == exit_codes.CONFIGURATION


def test_show_prints_value_and_source_and_hides_secrets(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLICY_AUTH_KEYS", "a-key-that-nobody-may-see")

    ran = cli("config", "show", "--json", "--database-url", "postgresql://u:hunter2@h/d", "--listen", "[::1]:0")

    shown = json.loads(ran.out)
    assert shown["listen.tcp"] == {"value": ["[::1]:0"], "source": "flag --listen"}
    assert shown["database_url"]["value"] == "postgresql://u:********@h/d"
    assert shown["auth.keys"] == {"value": ["********"], "source": "environment POLICY_AUTH_KEYS"}
    assert "hunter2" not in ran.out + ran.err
    assert "nobody" not in ran.out + ran.err


def test_show_can_add_the_policy_settings_in_force(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATE_LIMIT_MAX_WAIT_MS", "9000")

    shown = json.loads(cli("config", "show", "--policy", "--json", "--catalogue", EXAMPLE).out)

    assert shown["queue.max_wait_ms"] == {"value": 9000, "source": "environment"}
    assert shown["breaker.oauth.failure_threshold"] == {"value": 6, "source": "stored"}


def test_show_as_text_has_a_line_for_each_field(cli: Cli) -> None:
    lines = cli("config", "show").out.splitlines()

    assert any(line.split() == ["store.select_ms", "20", "default"] for line in lines)


@pytest.mark.parametrize(("flags", "key"), [((), "database_url"), (("--catalogue",), "connections")])
def test_schemas_are_json(cli: Cli, flags: tuple[str, ...], key: str) -> None:
    schema = json.loads(cli("config", "schema", *flags).out)

    assert key in schema["properties"]
    assert schema["additionalProperties"] is False


def test_the_configuration_reference_is_up_to_date(cli: Cli) -> None:
    ran = cli("config", "docs", "--check", "--out", str(ROOT / "docs" / "reference" / "configuration.md"))

    assert ran.code == exit_codes.OK, ran.err


def test_a_reference_that_is_out_of_date_is_told(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "reference" / "configuration.md"

    assert cli("config", "docs", "--check", "--out", str(out)).code == exit_codes.FAILED
    assert cli("config", "docs", "--out", str(out)).code == exit_codes.OK
    assert cli("config", "docs", "--check", "--out", str(out)).code == exit_codes.OK
    out.write_text(out.read_text(encoding="utf-8") + "x", encoding="utf-8")
    assert cli("config", "docs", "--check", "--out", str(out)).code == exit_codes.FAILED


# -- flags -------------------------------------------------------------------------------------------------
def test_a_set_without_a_value_is_a_usage_error(cli: Cli) -> None:
    assert cli("config", "show", "--set", "workers").code == exit_codes.CONFIGURATION


def test_unknown_flags_and_commands_are_usage_errors(cli: Cli) -> None:
    assert cli("config", "show", "--wrkers", "1").code == exit_codes.CONFIGURATION
    assert cli("sevre").code == exit_codes.CONFIGURATION


def test_serve_refuses_unusable_configuration_before_anything_starts(cli: Cli) -> None:
    ran = cli("serve", "--workers", "0", "--log-level", "loud")

    assert ran.code == exit_codes.CONFIGURATION
    assert "2 problem(s); nothing was started or changed" in ran.err


# -- migrate -----------------------------------------------------------------------------------------------
def test_migrate_without_a_database_says_which_flag_to_set(cli: Cli) -> None:
    ran = cli("migrate")

    assert ran.code == exit_codes.CONFIGURATION
    assert "--database-url" in ran.err


def test_migrate_of_a_database_that_refuses_says_so_without_the_password(cli: Cli, tmp_path: Path) -> None:
    ran = cli("migrate", "--database-url", f"postgresql://u:hunter2@/d?host={tmp_path}")

    assert ran.code == exit_codes.STORE_AWAY
    assert "database" in ran.err
    assert "hunter2" not in ran.out + ran.err


# -- classify ----------------------------------------------------------------------------------------------
def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


MISSTATED = """
providers:
  - id: openai
    restatement: [{id: haze, from_statuses: [400], to_status: 429, text_markers: [purple haze]}]
"""


def test_classify_answers_each_line_in_order_with_the_knowledge_of_the_catalogue(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    catalogue = tmp_path / "c.yaml"
    catalogue.write_text(MISSTATED, encoding="utf-8")
    texts = {"a": "green haze", "b": "purple haze"}
    record = {"provider": "openai", "auth": "api_key", "model": "m", "status": 400}
    lines = [json.dumps({**record, "id": name, "body": text}) for name, text in texts.items()]
    feed(monkeypatch, "\n".join(lines).encode())

    ran = cli("classify", "--catalogue", str(catalogue))

    answers = [json.loads(line) for line in ran.out.splitlines()]
    assert ran.code == exit_codes.OK
    assert [answer["id"] for answer in answers] == ["a", "b"]
    assert set(answers[0]) == {"id", "scope", "reason", "fallback", "retry_after_ms", "terminal", "rule"}
    assert answers[1]["reason"] == "rate_limit" != answers[0]["reason"]


def test_the_dry_run_shows_what_another_catalogue_would_have_changed(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now, then = tmp_path / "now.yaml", tmp_path / "then.yaml"
    now.write_text("rules: []\n", encoding="utf-8")
    ruled = "rules: [{id: mine, provider: openai, status: 400, match: red, scope: connection, cooldown_ms: 9000}]"
    then.write_text(MISSTATED + ruled, encoding="utf-8")
    record = {"provider": "openai", "auth": "api_key", "model": "m", "status": 400}
    lines = [json.dumps({**record, "id": name, "body": name}) for name in ("green haze", "purple haze", "red haze")]
    feed(monkeypatch, ("\n\n".join(lines) + "\nnot json\n").encode())

    ran = cli("classify", "--catalogue", str(then), "--compare", str(now))

    change, same_verdict = map(json.loads, ran.out.splitlines())
    assert ran.code == exit_codes.OK
    assert (change["before"]["id"], change["after"]["reason"]) == ("purple haze", "rate_limit")
    assert same_verdict["before"]["configured_rule"] is None
    assert same_verdict["after"]["configured_rule"] == {"id": "mine", "scope": "connection", "cooldown_ms": 9000}
    assert "would have changed 2 of 4" in ran.err


def test_classify_refuses_an_unusable_catalogue_before_the_first_line(cli: Cli, tmp_path: Path) -> None:
    ran = cli("classify", "--catalogue", str(tmp_path / "none.yaml"))

    assert (ran.code, ran.out) == (exit_codes.CONFIGURATION, "")


def test_a_line_that_cannot_be_used_is_answered_and_the_rest_goes_on(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    good = json.dumps({"id": "b", "provider": "openai", "status": 500})
    feed(monkeypatch, b"\xff\xfe not json\n" + good.encode() + b"\n")

    ran = cli("classify")

    answers = [json.loads(line) for line in ran.out.splitlines()]
    assert ran.code == exit_codes.FAILED
    assert answers[0]["error"]["field"] == "line"
    assert answers[1]["id"] == "b"
    assert "1 line(s)" in ran.err


def test_a_lone_surrogate_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from policy_service.cli.classify import run

    record = b'{"id": "\\ud800", "provider": "openai", "status": 500}\n'
    buffer = io.BytesIO()

    code = run(None, io.TextIOWrapper(io.BytesIO(record)), out := io.TextIOWrapper(buffer))
    out.flush()

    assert code == exit_codes.OK
    assert json.loads(buffer.getvalue())["id"] == "\ud800"


# -- healthcheck -------------------------------------------------------------------------------------------
@pytest.fixture
def health_address(tmp_path: Path) -> Iterator[str]:
    servicer = health.HealthServicer()
    servicer.set("readiness", HealthCheckResponse.SERVING)
    servicer.set("liveness", HealthCheckResponse.NOT_SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"unix:{tmp_path}/health.sock"
    server.add_insecure_port(address)
    server.start()
    yield address
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("service", "code", "text"),
    [
        ("readiness", exit_codes.OK, ": SERVING"),
        ("liveness", exit_codes.FAILED, ": NOT_SERVING"),
        ("nonsense", exit_codes.FAILED, "unknown service"),
    ],
)
def test_healthcheck_is_good_only_where_the_answer_is_serving(
    cli: Cli, health_address: str, service: str, code: int, text: str
) -> None:
    ran = cli("healthcheck", "--address", health_address, "--service", service)

    assert ran.code == code
    assert text in ran.out + ran.err


def test_healthcheck_of_nobody_fails_within_its_time(cli: Cli, tmp_path: Path) -> None:
    ran = cli("healthcheck", "--unix-socket", str(tmp_path / "none.sock"), "--timeout-ms", "500")

    assert ran.code == exit_codes.FAILED
    assert "nobody answers" in ran.err


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        ({}, "127.0.0.1:50051"),
        ({"listen.tcp": "0.0.0.0:7"}, "127.0.0.1:7"),
        ({"listen.tcp": "[::]:7"}, "[::1]:7"),
        ({"listen.tcp": [], "listen.unix": "/run/p.sock"}, "unix:/run/p.sock"),
    ],
)
def test_healthcheck_asks_where_the_configuration_listens(flags: dict[str, object], address: str) -> None:
    assert own_address(load(flags=flags).config) == address


# -- start -------------------------------------------------------------------------------------------------
HEAVY = ("grpc", "sqlalchemy", "asyncpg", "alembic", "opentelemetry", "yaml", "policy_service.domain.rules")


@pytest.mark.parametrize("argv", [["version"], ["--help"]])
def test_small_commands_do_not_import_what_they_do_not_need(argv: list[str]) -> None:
    program = (
        "import sys; from policy_service.cli.main import main; code = main(sys.argv[1:]);"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    ran = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, check=False)

    assert ran.returncode == exit_codes.OK
    assert ran.stderr.strip() == "[]"


def test_the_package_can_be_run_as_a_module() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "policy_service", "version"], capture_output=True, text=True, check=False
    )

    assert ran.returncode == exit_codes.OK
    assert ran.stdout.strip()[0].isdigit()
