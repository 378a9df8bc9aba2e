"""The integrators' kit against Envoy and its door: every rule but those that Envoy leaves no way to keep."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

KNOWN = {
    "attempt-timeout",  # AttemptPolicy.target_timeout_ms: a timeout of Envoy belongs to a route
    "max-dispatches",  # AttemptPolicy.max_dispatches: likewise the number of retries
    "tool-limit",  # degradations change the request body
    "network-errors",  # the kind of an error is told of the last attempt only
    "stream-cut",  # Envoy does not tell who ended a stream
    "times",  # a success is reported at its head
}


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_kit_finds_nothing_that_is_not_known(tmp_path: Path) -> None:
    gateway = f"{sys.executable} -m tests.envoy.conformed {tmp_path}"
    command = [sys.executable, "-m", "policy_service", "conformance", "--command", gateway]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert "rules:" in done.stdout, done.stdout + done.stderr
    failed = set(re.findall(r"^FAIL +(\S+)", done.stdout, re.MULTILINE))
    assert failed <= KNOWN, done.stdout
