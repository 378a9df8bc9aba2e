"""The Python door plays the scenario that every door plays: the same upstream calls in the same order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import policy_client.httpx
from policy_client import AsyncPolicyClient, Connection, messages
from policy_client.upstreams import Door, Sent, Upstream
from tests.polyglot.doors import PATIENT_MS
from tests.polyglot.scenario import ClientAnswer, Send, Stage, expected, play

ANYWHERE = "https://api.openai.invalid/v1/chat/completions"


def through(stage: Stage) -> Door:
    def asking(sent: Sent) -> messages.SelectTargetRequest:
        return messages.SelectTargetRequest(route=sent.model, traits=messages.RequestTraits(seed=stage.seed))

    table = {
        name: Upstream(f"{base}/v1", {"authorization": f"Bearer {stage.keys[name]}"})
        for name, base in stage.upstreams.items()
    }
    return Door(table, asking)


@asynccontextmanager
async def python_door(stage: Stage) -> AsyncIterator[Send]:
    where = Connection(stage.policy, select_ms=PATIENT_MS, report_ms=PATIENT_MS)
    async with (
        AsyncPolicyClient(where=where) as policy,
        policy_client.httpx.async_client(policy, through(stage)) as client,
    ):

        async def send(route: str, stream: bool) -> ClientAnswer:
            answer = await _sent(client, route, stream)
            await policy.settle()
            return answer

        yield send


async def _sent(client: httpx.AsyncClient, route: str, stream: bool) -> ClientAnswer:
    body: dict[str, Any] = {"model": route, "stream": stream, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"x-policy-session": "not for upstreams", "authorization": "Bearer of-the-sdk"}
    async with client.stream("POST", ANYWHERE, json=body, headers=headers) as answer:
        content = b"".join([chunk async for chunk in answer.aiter_bytes()])
    return ClientAnswer(answer.status_code, answer.headers.get("retry-after"), content)


@pytest.mark.timeout(180)
async def test_python_calls_the_upstreams_as_the_scenario_says(tmp_path: Path, embedded_url: str) -> None:
    assert await play(python_door, tmp_path, embedded_url) == expected()
