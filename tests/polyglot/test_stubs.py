"""The committed stubs of the example gateways are what the contract says."""

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


def test_the_lock_file_names_no_download_address() -> None:
    lock = json.loads((NODE_SOURCE / "package-lock.json").read_text())
    assert [name for name, each in lock["packages"].items() if "resolved" in each] == []
