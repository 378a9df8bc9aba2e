"""Fixtures: loopback upstreams, a scripted policy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from policy_client.testing import ScriptedPolicy
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
