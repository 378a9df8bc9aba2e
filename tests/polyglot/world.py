"""What one test of a gateway needs around it: a catalogue, the real service, upstreams that misbehave, the gateway."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import yaml

from policy_service.generated.policy.v1 import admin_pb2, admin_pb2_grpc, policy_pb2_grpc
from tests.integration.serving import config, serving
from tests.polyglot.doors import Gateway, policy_at, running, upstreams_of
from tests.polyglot.scenario import MODEL, load
from tests.polyglot.upstreams import Behaviour, Upstreams

AGENT_KEY = "agent-key-of-the-test"
"""Bearer key of a client whose catalogue entry may lease."""
AGENT_SHA256 = hashlib.sha256(AGENT_KEY.encode()).hexdigest()
PROVIDER = "house"


def catalogue(upstreams: Upstreams, routes: Mapping[str, Sequence[str]], **more: Any) -> dict[str, Any]:
    """Connections and routes of a test; `more` holds fields of connections by their name, and `settings`."""
    connections = [
        {"id": name, "provider": PROVIDER, "address": upstreams.address(name), **more.get(name, {})}
        for name in upstreams.base_urls
    ]
    return {
        "version": 1,
        "providers": [{"id": PROVIDER, "auth_class": "api_key"}],
        "connections": connections,
        "routes": [
            {"name": route, "strategy": "priority", "targets": [{"connection": c, "model": MODEL} for c in targets]}
            for route, targets in routes.items()
        ],
        "callers": more.get("callers", []),
        "settings": more.get("settings", {}),
    }


def behaviour(name: str) -> Behaviour:
    """One of the behaviours of the scenario."""
    return load().behaviours[name]


def behaving(*connections: str) -> Any:
    """Upstreams that behave until a test says otherwise."""
    return Upstreams.started({name: [] for name in connections}, (behaviour("ok"), behaviour("ok_stream")))


@dataclass(frozen=True, slots=True)
class World:
    """Everything is running."""

    gateway: Gateway
    upstreams: Upstreams
    policy: Any
    admin: Any

    def called(self) -> list[str]:
        """Connections of the upstream calls so far."""
        return [call.connection for call in self.upstreams.calls]

    async def held(self) -> int:
        """Permits held in the fleet."""
        answer = await self.admin.ListGates(admin_pb2.ListGatesRequest(), timeout=5)
        return sum(gate.held for gate in answer.gates)


@asynccontextmanager
async def world(
    command: Sequence[str],
    place: Path,
    database_url: str,
    upstreams: Upstreams,
    document: Mapping[str, Any],
    **gateway: Any,
) -> AsyncIterator[World]:
    """The service in this process and the gateway as a process; `gateway` are fields of its configuration."""
    file = written(place, document)
    async with serving(config(place, database_url, catalogue=str(file))) as (service, policy):
        address = service.server.addresses[-1]
        settings = {"policy": policy_at(address), "upstreams": routed(file, upstreams), **gateway}
        async with running(command, place, settings) as started, grpc.aio.insecure_channel(address) as channel:
            yield World(started, upstreams, policy, admin_pb2_grpc.AdminServiceStub(channel))


def written(place: Path, document: Mapping[str, Any]) -> Path:
    """The catalogue as a file."""
    file = place / "catalogue.yaml"
    file.write_text(yaml.safe_dump(dict(document), allow_unicode=True), encoding="utf-8")
    return file


def routed(file: Path, upstreams: Upstreams) -> dict[str, Any]:
    """The gateway's map of upstreams."""
    return upstreams_of(file, upstreams.base_urls, upstreams.keys)


@asynccontextmanager
async def stubs(address: str) -> AsyncIterator[tuple[Any, Any]]:
    """PolicyService and AdminService at an address."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield policy_pb2_grpc.PolicyServiceStub(channel), admin_pb2_grpc.AdminServiceStub(channel)


async def until(holds: Callable[[], Awaitable[bool]], within_s: float) -> float:
    """Wait until something holds; how long it took.

    Raises:
        AssertionError: it does not hold in time.
    """
    began = time.monotonic()
    while not await holds():
        assert time.monotonic() - began < within_s, f"not within {within_s} s"
        await asyncio.sleep(0.02)
    return time.monotonic() - began
