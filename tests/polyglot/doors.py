"""The example gateways in Go and Node as processes: built once a session, started with a configuration, then ended."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.fleet.fleet import free_port
from tests.polyglot.scenario import Door, Send, Stage, http_send

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
GO_SOURCE = EXAMPLES / "go"
NODE_SOURCE = EXAMPLES / "node"
_USUAL_PLACE_OF_GO = "/usr/local/go/bin"
_STARTS_WITHIN_S = 30.0
_CLIENT_S = 20.0
PATIENT_MS = 5_000
"""Deadline of calls to the service where a test is not about a service that is away: the machine may be busy."""


def go_command() -> str | None:
    """The go command, also where its usual place is not on PATH."""
    return shutil.which("go") or shutil.which("go", path=_USUAL_PLACE_OF_GO)


def missing_for(language: str) -> str:
    """What is missing to run the gateway of a language; empty: nothing."""
    if language == "go":
        return "" if go_command() else "Go 1.26 is not installed (neither on PATH nor in /usr/local/go/bin)"
    if shutil.which("node") is None:
        return "Node 20 is not installed"
    modules = NODE_SOURCE / "node_modules" / "@grpc" / "grpc-js"
    return "" if modules.exists() else "the modules of docs/examples/node are not installed (make gateways)"


def build(language: str, directory: Path) -> Sequence[str]:
    """Command that starts the gateway; the configuration file is to be appended."""
    if language == "node":
        return ["node", str(NODE_SOURCE / "src" / "main.js")]
    binary = directory / "gateway"
    go = go_command()
    assert go is not None
    subprocess.run([go, "build", "-o", str(binary), "."], cwd=GO_SOURCE, check=True, timeout=900)
    return [str(binary)]


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway."""

    base_url: str
    child: subprocess.Popen[bytes]
    log: Path

    def send(self, **headers: str) -> Send:
        """A client of it; `headers` with underscores for hyphens."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return http_send(self.base_url, timeout_s=_CLIENT_S, extra=named)


@asynccontextmanager
async def running(command: Sequence[str], directory: Path, configuration: Mapping[str, Any]) -> AsyncIterator[Gateway]:
    """Start a gateway with a configuration and wait until it listens; it is ended with SIGTERM."""
    listen = f"127.0.0.1:{free_port()}"
    file = directory / f"gateway-{os.urandom(3).hex()}.json"
    file.write_text(json.dumps({"listen": listen, **configuration}))
    log = file.with_suffix(".log")
    child = _start([*command, str(file)], log)
    gateway = Gateway(f"http://{listen}", child, log)
    try:
        await _listening(gateway)
        yield gateway
    finally:
        await asyncio.to_thread(_end, child)


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


async def _listening(gateway: Gateway) -> None:
    async with asyncio.timeout(_STARTS_WITHIN_S), aiohttp.ClientSession() as session:
        while True:
            assert gateway.child.poll() is None, gateway.log.read_text()
            try:
                async with session.get(f"{gateway.base_url}/healthz") as answer:
                    assert answer.status == 200
                    return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(15)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(5)


def upstreams_of(catalogue: Path, base_urls: Mapping[str, str], keys: Mapping[str, str]) -> dict[str, Any]:
    """The part `upstreams` of a configuration, for every connection of a catalogue."""
    connections = yaml.safe_load(catalogue.read_text(encoding="utf-8"))["connections"]
    return {
        f"{each['provider']}/{each['id']}": {
            "base_url": base_urls[each["id"]],
            "headers": {"authorization": f"Bearer {keys[each['id']]}"},
        }
        for each in connections
    }


def policy_at(address: str, **more: Any) -> dict[str, Any]:
    """The part `policy` of a configuration for a service that is there."""
    return {"address": address, "select_timeout_ms": PATIENT_MS, "report_timeout_ms": PATIENT_MS, **more}


def scenario_door(command: Sequence[str]) -> Door:
    """A gateway as a door of the scenario."""

    @asynccontextmanager
    async def door(stage: Stage) -> AsyncIterator[Send]:
        upstreams = upstreams_of(stage.catalogue, stage.upstreams, stage.keys)
        configuration = {"policy": policy_at(stage.policy), "upstreams": upstreams}
        async with running(command, stage.directory, configuration) as gateway:
            yield gateway.send()

    return door
