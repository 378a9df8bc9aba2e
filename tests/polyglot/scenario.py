"""Plays `scenario.yaml` through one door: starts service and upstreams, sends the requests, writes down what happened.

A door is an async context manager over a `Stage` that yields a `Send`; whoever builds one writes only that:

    @asynccontextmanager
    async def my_door(stage: Stage) -> AsyncIterator[Send]:
        ...  # start it, with stage.policy, stage.upstreams, stage.keys, stage.directory
        yield http_send(base_url)  # or a function of its own

    async def test_it(tmp_path, embedded_url):
        assert await play(my_door, tmp_path, embedded_url) == expected()
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import grpc
import yaml

from policy_service.generated.policy.v1 import admin_pb2, admin_pb2_grpc
from tests.integration.serving import config, serving
from tests.polyglot.upstreams import Behaviour, Upstreams

FILE = Path(__file__).with_name("scenario.yaml")
MODEL = "m"
SETTLES_WITHIN_S = 5.0
"""How long a report may take that no client waits for."""


# --- the file -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Step:
    """One client request and what has to follow from it."""

    calls: list[str]
    status: int
    stream: bool = False
    out: list[str] = field(default_factory=list)
    retry_after_s: tuple[int, int] | None = None
    stream_ends: str = ""


@dataclass(frozen=True, slots=True)
class Scene:
    """A route with its accounts and requests."""

    name: str
    accounts: dict[str, list[str]]
    requests: list[Step]
    provider: str = ""

    @property
    def own_provider(self) -> str:
        """Provider of a scene that names none."""
        return f"{self.name}-llm"

    def connection(self, account: str) -> str:
        """Id of an account in the catalogue."""
        return f"{self.name}-{account}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """The whole file."""

    seed: int
    client_timeout_s: float
    settings: dict[str, Any]
    behaviours: dict[str, Behaviour]
    scenes: list[Scene]

    def catalogue(self, upstreams: Upstreams) -> dict[str, Any]:
        """Catalogue with an address for each account."""
        owned = [(scene, account) for scene in self.scenes for account in scene.accounts]
        own = [{"id": scene.own_provider, "auth_class": "api_key"} for scene in self.scenes if not scene.provider]
        return {
            "version": 1,
            "providers": own,
            "connections": [
                {
                    "id": scene.connection(account),
                    "provider": scene.provider or scene.own_provider,
                    "address": upstreams.address(scene.connection(account)),
                }
                for scene, account in owned
            ],
            "routes": [
                {
                    "name": scene.name,
                    "strategy": "priority",
                    "targets": [{"connection": scene.connection(each), "model": MODEL} for each in scene.accounts],
                }
                for scene in self.scenes
            ],
            "settings": self.settings,
        }


def load() -> Scenario:
    """Read the file."""
    raw = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    behaviours = {name: Behaviour(**each) for name, each in raw.pop("behaviours").items()}
    scenes = [Scene(**{**each, "requests": [Step(**step) for step in each["requests"]]}) for each in raw.pop("scenes")]
    return Scenario(**raw, behaviours=behaviours, scenes=scenes)


# --- doors ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Stage:
    """What a door is given.

    Args:
        policy: host:port of the service, plain text, no key.
        catalogue: file of the catalogue in force; every connection in it has its `address`.
        upstreams: base URL of each connection, without `/v1`.
        keys: credential of each connection, for doors that add it.
        seed: of the scenario.
        directory: for files of the door.
    """

    policy: str
    catalogue: Path
    upstreams: Mapping[str, str]
    keys: Mapping[str, str]
    seed: int
    directory: Path


@dataclass(frozen=True, slots=True)
class ClientAnswer:
    """What the client got. `retry_after` as the header says it."""

    status: int
    retry_after: str | None
    body: bytes


Send: TypeAlias = Callable[[str, bool], Coroutine[Any, Any, ClientAnswer]]
"""(route, stream) -> answer, read to its end. An OpenAI chat completion whose `model` is the route."""

Door: TypeAlias = Callable[[Stage], AbstractAsyncContextManager[Send]]


def http_send(
    base_url: str,
    route_header: str | None = None,
    timeout_s: float | None = None,
    extra: Mapping[str, str] | None = None,
) -> Send:
    """A client that POSTs to `/v1/chat/completions`; the route is the model, and the header where one is named."""

    async def send(route: str, stream: bool) -> ClientAnswer:
        body = {"model": route, "stream": stream, "messages": [{"role": "user", "content": "hi"}]}
        headers = {"x-policy-session": "not for upstreams", **({route_header: route} if route_header else {})}
        headers |= extra or {}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(timeout_s or load().client_timeout_s)) as session,
            session.post(f"{base_url}/v1/chat/completions", json=body, headers=headers) as answer,
        ):
            return ClientAnswer(answer.status, answer.headers.get("retry-after"), await _read(answer))

    return send


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """The body, or what came before it broke off: a gateway may end a broken stream by hanging up."""
    body = b""
    try:
        async for chunk in answer.content.iter_any():
            body += chunk
    except aiohttp.ClientPayloadError:
        pass
    return body


# --- playing --------------------------------------------------------------------------------------------------
async def play(door: Door, directory: Path, database_url: str, settles_within_s: float = SETTLES_WITHIN_S) -> list[str]:
    """Play the whole scenario through a door; one line for each request, to compare with `expected()`."""
    scenario = load()
    scripts = {
        scene.connection(account): [scenario.behaviours[name] for name in script]
        for scene in scenario.scenes
        for account, script in scene.accounts.items()
    }
    defaults = (scenario.behaviours["ok"], scenario.behaviours["ok_stream"])
    async with (
        Upstreams.started(scripts, defaults) as upstreams,
        _service(scenario, upstreams, directory, database_url) as (stage, admin),
        door(stage) as send,
    ):
        return [line async for line in _lines(scenario, upstreams, send, _Watch(admin, settles_within_s))]


@asynccontextmanager
async def _service(
    scenario: Scenario, upstreams: Upstreams, directory: Path, database_url: str
) -> AsyncIterator[tuple[Stage, Any]]:
    file = directory / "catalogue.yaml"
    file.write_text(yaml.safe_dump(scenario.catalogue(upstreams), allow_unicode=True), encoding="utf-8")
    async with serving(config(directory, database_url, catalogue=str(file))) as (service, _):
        address = service.server.addresses[-1]
        async with grpc.aio.insecure_channel(address) as channel:
            stage = Stage(address, file, upstreams.base_urls, upstreams.keys, scenario.seed, directory)
            yield stage, admin_pb2_grpc.AdminServiceStub(channel)


async def _lines(scenario: Scenario, upstreams: Upstreams, send: Send, watch: _Watch) -> AsyncIterator[str]:
    for scene in scenario.scenes:
        for number, step in enumerate(scene.requests):
            before = len(upstreams.calls)
            answer = await send(scene.name, step.stream)
            arrived = upstreams.calls[before:]
            assert [name for call in arrived for name in call.headers if name.lower().startswith("x-policy-")] == []
            calls = [call.connection.removeprefix(f"{scene.name}-") for call in arrived]
            out = await watch.out(scene, step.out)
            found = Step(calls, answer.status, step.stream, out, _wait(step, answer), _end(step, answer))
            yield _line(scene, number, found)


@dataclass(frozen=True, slots=True)
class _Watch:
    admin: Any
    settles_within_s: float

    async def out(self, scene: Scene, wanted: list[str]) -> list[str]:
        """Those of the wanted accounts that have a state row, as soon as all have one or the time is over."""
        until = time.monotonic() + self.settles_within_s
        while True:
            state = await self.admin.ListState(admin_pb2.ListStateRequest(), timeout=5)
            known = {row.connection for row in state.rows}
            out = [account for account in wanted if scene.connection(account) in known]
            if out == wanted or time.monotonic() > until:
                return out
            await asyncio.sleep(0.02)


def _wait(step: Step, answer: ClientAnswer) -> tuple[int, int] | None:
    """The expected span where the answer keeps to it, else what it says."""
    if step.retry_after_s is None:
        return None
    said = int(answer.retry_after or 0)
    least, most = step.retry_after_s
    return step.retry_after_s if least <= said <= most else (said, said)


def _end(step: Step, answer: ClientAnswer) -> str:
    if not step.stream_ends:
        return ""
    events = [line.removeprefix("data: ") for line in answer.body.decode().splitlines() if line.startswith("data: ")]
    if events and events[-1] == "[DONE]":
        return "done"
    return "error" if any("error" in json.loads(event) for event in events if event != "[DONE]") else "broken off"


def expected() -> list[str]:
    """The lines that `play` must return."""
    return list(_expected())


def _expected() -> Iterator[str]:
    for scene in load().scenes:
        for number, step in enumerate(scene.requests):
            yield _line(scene, number, step)


def _line(scene: Scene, number: int, step: Step) -> str:
    words = [f"{scene.name} {number}:", "calls", " ".join(step.calls) or "nobody", "status", str(step.status)]
    words += ["out", *step.out] if step.out else []
    words += [f"retry-after {step.retry_after_s[0]}..{step.retry_after_s[1]}"] if step.retry_after_s else []
    words += [f"stream {step.stream_ends}"] if step.stream_ends else []
    return " ".join(words)
