"""A gateway or an example that cannot start says in one line why and what to do, and its exit code says so, too."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.polyglot.doors import EXAMPLES

CANNOT_LISTEN = 1
CANNOT_BE_USED = 2
UPSTREAM = {"base_url": "http://127.0.0.1:1"}
UNUSABLE: Mapping[str, tuple[str, str]] = {
    "no file": ("", "no such file"),
    "no file, and now": ("", "-config FILE"),
    "no JSON": ("{", "JSON"),
    "unknown field": ('{"fail_mod": "open"}', "fail_mod"),
    "the known ones": ('{"lisen": "127.0.0.1:1"}', "known are listen"),
    "unknown field of an upstream": ('{"upstreams": {"a/b": {"baseurl": "http://x"}}}', 'unknown field "baseurl"'),
    "fail mode": ('{"fail_mode": "opn"}', "fail_mode"),
    "time": ('{"idle_timeout_ms": 0}', "idle_timeout_ms"),
    "URL": ('{"upstreams": {"a/b": {"base_url": "ftp://x"}}}', "base_url"),
    "variable": ('{"policy": {"key": "$NO_SUCH_VARIABLE"}}', "NO_SUCH_VARIABLE"),
    "authority": ('{"policy": {"ca_file": "/no/such.pem"}}', "/no/such.pem"),
    "key in plain text": ('{"policy": {"address": "127.example.com:50051", "key": "k"}}', "ca_file"),
}
"""Text of the file, and what the line has to name."""


def ended(command: Sequence[str], **environment: str) -> tuple[int, str]:
    """Exit code and the output of a command that cannot go on."""
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def started(command: Sequence[str], place: Path, **configuration: Any) -> tuple[int, str]:
    """The same for a gateway with a configuration."""
    file = place / "gateway.json"
    file.write_text(json.dumps(configuration))
    return ended([*command, str(file)])


@pytest.mark.parametrize("name", list(UNUSABLE))
def test_an_unusable_configuration_is_one_line_and_exit_code_2(
    command: Sequence[str], tmp_path: Path, name: str
) -> None:
    text, named = UNUSABLE[name]
    file = tmp_path / "gateway.json"
    if text:
        file.write_text(text)
    code, said = ended([*command, str(file)])
    assert code == CANNOT_BE_USED
    assert named.lower() in said.lower()
    assert len(said.splitlines()) == 1, said


@pytest.mark.parametrize("words", [("none.json",), ("-config", "none.json")])
def test_the_file_stands_by_itself_or_behind_its_flag(command: Sequence[str], words: Sequence[str]) -> None:
    code, said = ended([*command, *words])
    assert (code, said.count("\n")) == (CANNOT_BE_USED, 1), said
    assert "none.json: no such file" in said


@pytest.mark.parametrize("words", [("a.json", "b.json"), ("-config", "a.json", "b.json"), ("-confg", "a.json")])
def test_a_word_that_nobody_reads_is_refused(command: Sequence[str], words: Sequence[str]) -> None:
    code, said = ended([*command, *words])
    assert (code, said.count("\n")) == (CANNOT_BE_USED, 1), said
    assert "say FILE or -config FILE" in said


def test_a_used_port_is_one_line_and_exit_code_1(command: Sequence[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, said = started(command, tmp_path, listen=address, upstreams={"a/b": UPSTREAM})
    assert code == CANNOT_LISTEN
    assert address in said
    assert "in use" in said
    assert "listening" not in said
    assert len(said.splitlines()) == 1, said


# --- the examples in Python -------------------------------------------------------------------------------------
def example(name: str, *arguments: str, **environment: str) -> tuple[int, str]:
    """One of docs/examples."""
    return ended([sys.executable, str(EXAMPLES / name), *arguments], **environment)


def test_the_gateway_of_the_kit_names_the_port_that_is_used(tmp_path: Path) -> None:
    (tmp_path / "upstreams.json").write_text('{"upstreams": {}}')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        surroundings = {"POLICY_TARGET": "127.0.0.1:1", "UPSTREAMS_FILE": str(tmp_path / "upstreams.json")}
        code, said = example("gateway.py", **surroundings, GATEWAY_LISTEN=address)
    assert (code, said.count("\n")) == (1, 1), said
    assert address in said


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_the_gateway_of_the_kit_names_the_file_it_cannot_read(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "upstreams.json"
    if text is not None:
        file.write_text(text)
    surroundings = {"POLICY_TARGET": "127.0.0.1:1", "GATEWAY_LISTEN": "127.0.0.1:0", "UPSTREAMS_FILE": str(file)}
    code, said = example("gateway.py", **surroundings)
    assert (code, said.count("\n")) == (1, 1), said
    assert "UPSTREAMS_FILE" in said


def test_an_upstream_on_a_used_port_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, said = example("upstream.py", f"{address}=200")
    assert (code, said.count("\n")) == (1, 1), said
    assert address in said


@pytest.mark.parametrize("text", ["9103=429", "=200", "127.0.0.1:9103", "127.0.0.1:99999=200", "127.0.0.1:9103=999"])
def test_an_upstream_listens_on_no_address_that_was_not_written(text: str) -> None:
    code, said = example("upstream.py", text)
    assert code == CANNOT_BE_USED
    assert f"{text!r} is not an address; write host:port=status" in said


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        (("select", "main"), "PROVIDER/CONNECTION/MODEL"),
        (("select", "openai/main"), "PROVIDER/CONNECTION/MODEL"),
        (("report", "main", "429"), "PROVIDER/CONNECTION/MODEL"),
        (("report", "a/b/c", "999"), "100 to 599"),
        (("report", "a/b/c", "dsn"), "dns"),
        (("call", "a/b/c", "--answers", "200,99"), "100 to 599"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_form_that_is_wanted(line: Sequence[str], remedy: str) -> None:
    code, said = example("ask.py", *line)
    assert code == CANNOT_BE_USED
    assert remedy in said.splitlines()[-1]


@pytest.mark.parametrize("line", [("ask.py", "select", "a/b/c"), ("watch.py", "a/b/c", "--events", "1")])
def test_an_example_without_a_service_says_so_in_one_line(line: Sequence[str]) -> None:
    code, said = example(*line, POLICY_LISTEN_TCP="127.0.0.1:1")
    assert (code, said.count("\n")) == (1, 1), said
    assert "127.0.0.1:1" in said
