"""Switches of the gRPC library: set before it is loaded, known to it, left alone where the operator has set them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from policy_service.cli.grpc_core import IN_THE_POLLER, MEASURED, VARIABLE, choose_poller


@pytest.mark.parametrize(
    ("environment", "release", "expected"),
    [
        ({}, f"{MEASURED}9", IN_THE_POLLER),
        ({VARIABLE: ""}, f"{MEASURED}1", ""),
        ({VARIABLE: "mine"}, f"{MEASURED}1", "mine"),
        ({}, "1.99.0", None),
    ],
)
def test_only_a_measured_release_without_the_operators_own_is_switched(
    environment: dict[str, str], release: str, expected: str | None
) -> None:
    choose_poller(environment, release)
    assert environment.get(VARIABLE) == expected


def test_the_installed_release_is_the_measured_one() -> None:
    """A newer one has to be measured anew (docs/adr/0021)."""
    assert version("grpcio").startswith(MEASURED)


SERVES = "import asyncio, grpc\nasync def main():\n    await grpc.aio.server().start()\nasyncio.run(main())\n"


@pytest.mark.parametrize(("switches", "is_known"), [(IN_THE_POLLER, True), ("-no_such_switch", False)])
def test_the_library_knows_every_switch(switches: str, is_known: bool) -> None:
    environment = {**os.environ, VARIABLE: switches}
    ran = subprocess.run([sys.executable, "-c", SERVES], env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ("Unknown experiment" not in ran.stderr) is is_known


@pytest.mark.parametrize("command", ["serve", "envoy"])
def test_the_switches_are_set_before_the_library_is_loaded(command: str) -> None:
    """Too late, they would change nothing and nobody would notice."""
    told = (
        "import os, sys\n"
        "import policy_service.cli.main as cli\n"
        "def choose(environment):\n"
        "    sys.exit(3 if 'grpc' in sys.modules else 4)\n"
        "cli.choose_poller = choose\n"
        f"sys.exit(cli.main([{command!r}]))\n"
    )
    ran = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 4, ran.stderr
