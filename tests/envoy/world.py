"""A gateway for tests: real Envoy with the generated configuration, the service with its door, scripted upstreams."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import yaml
from policy_envoy.configuration import Choices, bootstrap

from policy_service.bootstrap import Service, envoy_door
from policy_service.generated.policy.v1 import policy_pb2
from policy_service.settings.catalogue_file import load_catalogue
from tests.envoy.upstreams import Answer, Upstream, running
from tests.integration.serving import config, serving

ENVOY = Path(sys.executable).with_name("envoy")
ROUTE = "chat"
MODEL = "gpt-4o"


@dataclass
class Gateway:
    """What a test talks to."""

    url: str
    admin: str
    client: aiohttp.ClientSession
    service: Service
    upstreams: dict[str, Upstream]
    reports: list[policy_pb2.ReportOutcomeRequest] = field(default_factory=list)
    answers: list[policy_pb2.ReportOutcomeResponse] = field(default_factory=list)

    def post(self, path: str = "/v1/chat/completions", **fields: Any) -> Any:
        """A call of the client, to the route `chat` unless it says otherwise."""
        headers = {"x-policy-route": ROUTE, **fields.pop("headers", {})}
        body = fields.pop("json", {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]})
        return self.client.post(self.url + path, json=body, headers=headers, **fields)

    async def permits(self) -> int:
        """Slots held in the whole fleet."""
        return sum(status.load.held for status in await self.service.replica.permits.list_gates())

    async def free_of_permits(self, timeout_s: float = 3.0) -> None:
        """Return once every slot is back."""
        async with asyncio.timeout(timeout_s):
            while await self.permits():
                await asyncio.sleep(0.02)

    async def heard(self, count: int, timeout_s: float = 5.0) -> list[tuple[str, object, int]]:
        """(connection, status or kind, attempt) of the reports, once there are `count`."""
        async with asyncio.timeout(timeout_s):
            while len(self.answers) < count:
                await asyncio.sleep(0.01)
        return [(r.target.connection, outcome_of(r), r.attempt) for r in self.reports]


def outcome_of(report: policy_pb2.ReportOutcomeRequest) -> object:
    """Status of a report, or the name of its outcome."""
    kind = report.WhichOneof("outcome")
    return report.http_status if kind == "http_status" else kind


def catalogue_of(
    upstreams: Mapping[str, Upstream],
    connections: Mapping[str, Mapping[str, Any]] | None = None,
    settings: Mapping[str, Any] | None = None,
    callers: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """One provider a connection name's first part (`openai-main`: openai), one route over all of them in order."""
    more = connections or {}
    return {
        "version": 1,
        "connections": [
            {"id": name, "provider": name.split("-")[0], "address": upstream.address, **more.get(name, {})}
            for name, upstream in upstreams.items()
        ],
        "routes": [
            {
                "name": ROUTE,
                "strategy": "priority",
                "targets": [{"connection": name, "model": MODEL} for name in upstreams],
            }
        ],
        "callers": list(callers),
        "settings": dict(settings or {}),
    }


@asynccontextmanager
async def gateway(
    directory: Path,
    database_url: str,
    scripts: Mapping[str, list[Answer]],
    *,
    catalogue: Mapping[str, Any] | None = None,
    door: Mapping[str, Any] | None = None,
    dead: Sequence[str] = (),
    process: Mapping[str, Any] | None = None,
    **choices: Any,
) -> AsyncIterator[Gateway]:
    """Everything, started.

    Args:
        catalogue: arguments of `catalogue_of`.
        door: settings `envoy.*`.
        process: further process configuration of the service.
        dead: connections whose upstream accepts no connection.
        choices: choices of the generated configuration.
    """
    async with running(scripts) as upstreams:
        for name in dead:
            upstreams[name].address = f"127.0.0.1:{free_port()}"
        document = yaml.safe_dump(catalogue_of(upstreams, **(catalogue or {})))
        file = directory / "catalogue.yaml"
        file.write_text(document)
        settings = config(
            directory / "data",
            database_url,
            catalogue=str(file),
            envoy={"enabled": True, **(door or {})},
            **(process or {}),
        )
        async with serving(settings) as (service, _), spied(service) as (reports, answers):
            policy = service.server.addresses[-1]
            chosen = Choices(
                listen=f"127.0.0.1:{free_port()}", admin=f"127.0.0.1:{free_port()}", policy=policy, **choices
            )
            data = bootstrap(load_catalogue(document, source="test").catalogue, chosen)
            async with envoy(directory, data, chosen.admin), aiohttp.ClientSession() as client:
                url, admin = f"http://{chosen.listen}", f"http://{chosen.admin}"
                yield Gateway(url, admin, client, service, upstreams, reports, answers)


@asynccontextmanager
async def spied(service: Service) -> AsyncIterator[tuple[list[Any], list[Any]]]:
    """What the door reports, and what it is answered."""
    reports: list[Any] = []
    answers: list[Any] = []
    report = envoy_door.LocalCalls.report

    async def recorded(self: Any, request: policy_pb2.ReportOutcomeRequest) -> policy_pb2.ReportOutcomeResponse:
        reports.append(request)
        answer = await report(self, request)
        answers.append(answer)
        return answer

    told = envoy_door.LocalCalls.told
    envoy_door.LocalCalls.report = recorded  # type: ignore[method-assign]
    envoy_door.LocalCalls.told = lambda self, success: False  # type: ignore[method-assign]
    try:
        yield reports, answers
    finally:
        envoy_door.LocalCalls.report = report  # type: ignore[method-assign]
        envoy_door.LocalCalls.told = told  # type: ignore[method-assign]


@asynccontextmanager
async def envoy(directory: Path, data: Mapping[str, Any], admin: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Envoy with a configuration, ready."""
    file = directory / "envoy.yaml"
    file.write_text(yaml.safe_dump(dict(data), sort_keys=False))
    log = (directory / "envoy.log").open("wb")
    command = [str(ENVOY), "-c", str(file), "--concurrency", "1", "--disable-hot-restart"]
    child = subprocess.Popen(  # noqa: ASYNC220  (returns at once)
        [*command, "-l", os.environ.get("ENVOY_LOG", "warning")], stdout=log, stderr=log
    )
    try:
        await _ready(admin, child, directory / "envoy.log")
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(10)
        log.close()


@asynccontextmanager
async def door_process(
    directory: Path, policy: str, place: str, *settings: str
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """`policy-service envoy` as a process of its own, ready; it is ended with SIGTERM."""
    log = (directory / "door.log").open("wb")
    command = [sys.executable, "-m", "policy_service", "envoy", "--policy", policy, "--door", place]
    more = [word for setting in settings for word in ("--set", setting)]
    child = subprocess.Popen([*command, *more], stdout=log, stderr=log)  # noqa: ASYNC220  (returns at once)
    try:
        async with grpc.aio.insecure_channel(place) as channel:
            await asyncio.wait_for(channel.channel_ready(), 20)
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(15)
        log.close()


async def _ready(admin: str, child: subprocess.Popen[bytes], log: Path) -> None:
    async with asyncio.timeout(20), aiohttp.ClientSession() as session:
        while True:
            assert child.poll() is None, log.read_text()[-2_000:]
            try:
                async with session.get(f"http://{admin}/ready") as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            await asyncio.sleep(0.05)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
