"""The scenario itself: a gateway that asks nobody fails it, and every line of the file is used."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from tests.polyglot.scenario import ClientAnswer, Send, Stage, expected, load, play


@asynccontextmanager
async def blind_door(stage: Stage) -> AsyncIterator[Send]:
    """A gateway that knows no policy: every request goes to the first account of its route."""

    async def send(route: str, stream: bool) -> ClientAnswer:
        body = {"model": route, "stream": stream}
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{stage.upstreams[f'{route}-a']}/v1/chat/completions", json=body) as answer,
            ):
                return ClientAnswer(answer.status, answer.headers.get("retry-after"), await answer.read())
        except aiohttp.ClientError:
            return ClientAnswer(502, None, b"")

    yield send


async def test_a_gateway_that_asks_nobody_fails_every_scene_with_a_failure(tmp_path: Path, embedded_url: str) -> None:
    played = await play(blind_door, tmp_path, embedded_url, settles_within_s=0.0)
    failed = {line.split()[0] for line, wanted in zip(played, expected(), strict=True) if line != wanted}
    easy = {"healthy", "client-mistake"}
    assert failed == {scene.name for scene in load().scenes} - easy


def test_every_behaviour_is_used_and_every_account_is_one_of_its_scene() -> None:
    scenario = load()
    used = {name for scene in scenario.scenes for script in scene.accounts.values() for name in script}
    assert used | {"ok", "ok_stream"} == {*scenario.behaviours}
    for scene in scenario.scenes:
        assert {account for step in scene.requests for account in (*step.calls, *step.out)} <= {*scene.accounts}
