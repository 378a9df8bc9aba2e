"""Fixtures: loopback upstreams, a scripted policy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from policy_client.testing import ScriptedPolicy
from tests.fleet.fleet import free_port
from tests.python_client.bare_server import Bare
from tests.python_client.upstream_server import UpstreamServer, upstream_server


@pytest.fixture
def upstream() -> Iterator[UpstreamServer]:
    """Upstreams on loopback."""
    with upstream_server() as server:
        yield server


@pytest.fixture
def scripted() -> ScriptedPolicy:
    """A policy in memory."""
    return ScriptedPolicy()


@pytest.fixture
def server() -> Iterator[Bare]:
    """A bare gRPC server that can be lost."""
    server = Bare(free_port())
    yield server
    server.end()
