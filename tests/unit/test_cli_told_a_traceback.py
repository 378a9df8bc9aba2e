"""Bad input to a command ended in a traceback, or was taken without a word. It ends with one line that names the option
or the field, and with the exit code of a wrong command line.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from policy_service.cli import exit_codes, serve
from policy_service.cli.output import counted
from policy_service.storage.postgres import embedded_host
from tests.unit.test_cli import Cli, cli

if TYPE_CHECKING:
    from policy_service.bootstrap import Service

__all__ = ["cli"]

NOT_UTF8 = b"\xff\xfe\x80\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a file that is no text and one that is a directory."""
    (tmp_path / "odd").write_bytes(NOT_UTF8)
    (tmp_path / "directory").mkdir()
    return tmp_path


@pytest.mark.parametrize("option", ["--key-file", "--policy-ca"])
@pytest.mark.parametrize("name", ["absent", "directory", "odd"])
def test_a_file_for_the_envoy_door_that_cannot_be_read_is_named(cli: Cli, place: Path, option: str, name: str) -> None:
    ran = cli("envoy", "--door", "127.0.0.1:1", option, str(place / name))
    assert ran.code == exit_codes.CONFIGURATION
    assert ran.err.startswith(f"error: {option}: ")


def test_an_address_of_the_service_that_is_none_is_refused_by_the_envoy_door(cli: Cli) -> None:
    ran = cli("envoy", "--door", "127.0.0.1:1", "--policy", "nonsense")
    assert ran.code == exit_codes.CONFIGURATION
    assert ran.err.startswith("error: --policy: not an address; write host:port")


def test_a_reference_that_cannot_be_written_is_named(cli: Cli, place: Path) -> None:
    ran = cli("config", "docs", "--out", str(place / "directory"))
    assert ran.code == exit_codes.CONFIGURATION
    assert ran.err.startswith("error: --out: cannot be written")


def test_a_reference_that_is_no_text_is_out_of_date(cli: Cli, place: Path) -> None:
    ran = cli("config", "docs", "--check", "--out", str(place / "odd"))
    assert ran.code == exit_codes.FAILED
    assert "is out of date" in ran.err


@pytest.mark.parametrize(
    "url",
    ["postgresql://127.0.0.1:99999/x", "postgresql://user:secret@one:5432,two:65536/x", "postgresql://[::1]:70000/x"],
)
def test_a_port_that_there_is_not_is_refused_before_the_database_is_asked(cli: Cli, url: str) -> None:
    ran = cli("migrate", "--database-url", url)
    assert ran.code == exit_codes.CONFIGURATION
    assert "database_url: no such port" in ran.err
    assert "secret" not in ran.err


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ("sslmod=require", "unknown parameter 'sslmod'"), ("sslmode=full", "unknown sslmode"),
        ("sslmode=verify-full&sslrootcert=/no/such.pem", "no file at sslrootcert=/no/such.pem"),
    ],
)  # fmt: skip
def test_a_parameter_of_the_database_that_means_nothing_is_refused(cli: Cli, parameters: str, told: str) -> None:
    ran = cli("migrate", "--database-url", f"postgresql://user:secret@127.0.0.1:1/x?{parameters}")
    assert ran.code == exit_codes.CONFIGURATION
    assert f"database_url: {told}" in ran.err
    assert "secret" not in ran.err


@pytest.mark.parametrize(
    "argv",
    [("healthcheck", "--service", "\udcff\udcfe"), ("serve", "--data-dir", "/tmp/\udcff"), ("version", "\udc80")],
)
def test_an_argument_that_is_no_text_is_refused(cli: Cli, argv: tuple[str, ...]) -> None:
    ran = cli(*argv)
    assert ran.code == exit_codes.CONFIGURATION
    assert f"error: argument {len(argv)}: not UTF-8" in ran.err


def test_a_data_directory_that_cannot_be_made_is_told(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise embedded_host.EmbeddedServerError("cannot create /proc/nope: No such file or directory")

    monkeypatch.setattr("policy_service.bootstrap.serve", refuses)
    ran = cli("serve", "--listen", "127.0.0.1:0")
    assert ran.code == exit_codes.FAILED
    assert ran.err.startswith("error: embedded database: cannot create /proc/nope")
    assert "--data-dir" in ran.err


@pytest.mark.parametrize("target", ["nonsense", "127.0.0.1:99999", "http://127.0.0.1:80", "127.0.0.1:-5", ":80"])
def test_a_target_that_is_no_address_is_refused_before_the_kit_starts(cli: Cli, target: str) -> None:
    ran = cli("conformance", "--target", target)
    assert ran.code == exit_codes.CONFIGURATION
    assert ran.err == f"error: --target is host:port, not {target}; such as 127.0.0.1:8080\n"


@pytest.mark.parametrize("name", ["directory", "absent/log"])
def test_a_log_that_cannot_be_written_is_refused_before_the_kit_starts(cli: Cli, place: Path, name: str) -> None:
    ran = cli("conformance", "--command", "true", "--log", str(place / name))
    assert ran.code == exit_codes.CONFIGURATION
    assert ran.err.startswith(f"error: --log {place / name} cannot be written")


@pytest.mark.parametrize(
    "argv", [("--base-port", "99999"), ("--base-port", "-1"), ("--wait-s", "nan"), ("--wait-s", "-1")]
)
def test_numbers_out_of_range_are_refused_before_the_kit_starts(cli: Cli, argv: tuple[str, str]) -> None:
    ran = cli("conformance", "--target", "127.0.0.1:1", *argv)
    assert ran.code == exit_codes.CONFIGURATION
    assert f"Invalid value for '{argv[0]}'" in ran.err


def test_an_option_that_takes_no_value_shows_none(cli: Cli) -> None:
    for command in (("serve",), ("bench",), ("conformance",), ("config", "check")):
        lines = cli(*command, "--help").out.splitlines()
        assert [line for line in lines if "<bool>" in line and "--help" not in line] == []


@pytest.mark.parametrize(("count", "text"), [(0, "0 routes"), (1, "1 route"), (2, "2 routes")])
def test_one_is_no_plural(count: int, text: str) -> None:
    assert counted(count, "route") == text


@pytest.mark.parametrize("is_enabled", [False, True])
def test_the_banner_tells_of_the_envoy_door(is_enabled: bool) -> None:
    policy = SimpleNamespace(revision=0, catalogue=SimpleNamespace(routes={"r": 1}, connections={}))
    service = SimpleNamespace(
        replica=SimpleNamespace(view=SimpleNamespace(policy=policy)),
        server=SimpleNamespace(addresses=["127.0.0.1:50051"]),
        config=SimpleNamespace(envoy=SimpleNamespace(enabled=is_enabled)),
        database="embedded",
        name="replica",
        taken_over=2,
    )
    facts = dict(serve._facts(cast("Service", service)))
    assert ("envoy" in facts) is is_enabled
    assert list(facts)[-4:] == ["catalogue", "spool", "replica", "try next"]
    assert "(1 route, 0 connections)" in facts["catalogue"]
