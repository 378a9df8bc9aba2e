"""The committed stubs of the example gateways are what the contract says; what a language checks itself holds."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.polyglot.doors import GO_SOURCE, NODE_SOURCE, go_command, missing_for

SOURCES = {"go": GO_SOURCE, "node": NODE_SOURCE}


def _tree(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("language", list(SOURCES))
def test_the_stubs_are_current(language: str, tmp_path: Path) -> None:
    for each in {language, "node"}:  # buf itself comes with the modules of the Node gateway
        if missing_for(each):
            pytest.skip(missing_for(each))
    buf = NODE_SOURCE / "node_modules" / ".bin"
    path = [str(buf), str(Path(go_command() or "go").parent), os.environ["PATH"]]
    subprocess.run(
        [buf / "buf", "generate", "--output", tmp_path],
        cwd=SOURCES[language],
        env={**os.environ, "PATH": ":".join(path)},
        check=True,
        timeout=500,
    )
    differing = {name for name, _ in _tree(SOURCES[language] / "gen").items() ^ _tree(tmp_path / "gen").items()}
    assert differing == set(), "run `make stubs`"


@pytest.mark.timeout(600)
def test_the_unit_tests_of_the_go_gateway_pass() -> None:
    if missing_for("go"):
        pytest.skip(missing_for("go"))
    subprocess.run([go_command() or "go", "test", "-count=1", "./..."], cwd=GO_SOURCE, check=True, timeout=500)


@pytest.mark.timeout(120)
def test_the_types_in_the_comments_of_the_node_gateway_fit() -> None:
    if missing_for("node"):
        pytest.skip(missing_for("node"))
    subprocess.run([NODE_SOURCE / "node_modules" / ".bin" / "tsc"], cwd=NODE_SOURCE, check=True, timeout=100)


def test_the_lock_file_names_no_download_address() -> None:
    lock = json.loads((NODE_SOURCE / "package-lock.json").read_text())
    assert [name for name, each in lock["packages"].items() if "resolved" in each] == []
