"""Both gateways keep every rule of an integration, as `policy-service conformance` judges them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(400)
def test_every_rule_of_an_integration_is_kept(command: Sequence[str], tmp_path: Path) -> None:
    started = [sys.executable, "-m", "tests.polyglot.conformed", str(tmp_path / "gateway.json"), *command]
    kit = [sys.executable, "-m", "policy_service", "conformance", "--command", shlex.join(started)]
    done = subprocess.run(kit, cwd=ROOT, capture_output=True, text=True, timeout=360, check=False)
    judged = [line for line in done.stdout.splitlines() if line.startswith(("PASS", "FAIL", "NOT"))]
    assert [line for line in judged if not line.startswith("PASS")] == [], done.stdout
    assert done.returncode == 0, done.stderr
    assert len(judged) > 50
