"""Go and Node turn the scenario into the same upstream calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.polyglot.doors import scenario_door
from tests.polyglot.scenario import expected, play


async def test_the_scenario_becomes_the_expected_calls(
    command: Sequence[str], tmp_path: Path, embedded_url: str
) -> None:
    assert await play(scenario_door(command), tmp_path, embedded_url) == expected()
