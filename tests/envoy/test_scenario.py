"""Envoy turns the scenario of all doors into the same upstream calls; the door is a process of its own here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from policy_envoy.configuration import Choices, Layout, bootstrap

from policy_service.settings.catalogue_file import load_catalogue
from tests.envoy.world import door_process, envoy, free_port
from tests.polyglot.scenario import Door, Send, Stage, expected, http_send, play


def envoy_door(layout: Layout) -> Door:
    """Envoy with the generated configuration, in front of a door of its own."""

    @asynccontextmanager
    async def door(stage: Stage) -> AsyncIterator[Send]:
        place = f"127.0.0.1:{free_port()}"
        chosen = Choices(f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", place, layout=layout)
        catalogue = load_catalogue(stage.catalogue.read_text(encoding="utf-8"), source="scenario").catalogue
        async with (
            door_process(stage.directory, stage.policy, place, "envoy.reads_body=true"),
            envoy(stage.directory, bootstrap(catalogue, chosen), chosen.admin),
        ):
            yield http_send(f"http://{chosen.listen}")

    return door


@pytest.mark.parametrize("layout", [*Layout])
async def test_the_scenario_becomes_the_expected_calls(tmp_path: Path, embedded_url: str, layout: Layout) -> None:
    assert await play(envoy_door(layout), tmp_path, embedded_url) == expected()
