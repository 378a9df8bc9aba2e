"""Mutation score of the pure core: `python tests/mutation/run.py [--module NAME] [--sample N --seed S] [--minutes M]`.

Works on a private copy of the tree; the shared one is only read. See the README beside this file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("policy_service", "tests", "proto", "docs", "examples", "pyproject.toml", "README.md", "Makefile")
EXAMPLES = "10"


def copy_tree(target: Path) -> None:
    """The parts of the tree that tests read."""
    ignored = shutil.ignore_patterns("__pycache__", ".hypothesis", "node_modules")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignored)
        elif source.exists():
            shutil.copy2(source, target / name)


def main(arguments: Sequence[str]) -> int:
    """Run the gate in a copy, with few examples for the property tests and low priority."""
    with tempfile.TemporaryDirectory(prefix="policy-mutation-") as folder:
        copy_tree(Path(folder))
        environment = os.environ | {
            "POLICY_HYPOTHESIS_EXAMPLES": EXAMPLES,
            "PYTHONPATH": folder,
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "",
            "MUTATION_REPORT_FOLDER": str(Path.cwd()),
        }
        command = ["nice", "-n", "10", sys.executable, "-m", "tests.mutation.gate", *arguments]
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
