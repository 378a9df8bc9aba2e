"""Fixtures of the polyglot suite: each gateway is built once a session; what uses `command` runs once a language."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.polyglot.doors import build, missing_for

LANGUAGES = ("go", "node")
FIRST_BUILD_S = 400
"""A first build of the Go gateway on two busy cores, and the test behind it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test comes first builds the gateway, so each has the time for it."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(FIRST_BUILD_S))


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Language to the command that starts its gateway, built when first asked for."""
    directory: Path = tmp_path_factory.mktemp("gateways")
    return cache(lambda language: build(language, directory))


@pytest.fixture(params=LANGUAGES)
def command(request: pytest.FixtureRequest, commands: object) -> Sequence[str]:
    """Command that starts the gateway under test."""
    missing = missing_for(request.param)
    if missing:
        pytest.skip(missing)
    assert callable(commands)
    built: Sequence[str] = commands(request.param)
    return built
