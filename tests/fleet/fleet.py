"""A fleet for tests: real processes on one real Postgres of their own, and what the suites measure it by.

POLICY_FLEET_LONG=1 asks for the long forms; every suite says itself what that means for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from policy_service.generated.policy.v1 import admin_pb2, admin_pb2_grpc, policy_pb2, policy_pb2_grpc, types_pb2
from policy_service.storage.postgres import schema
from policy_service.storage.postgres.embedded import EmbeddedServer
from tests.contract.beside import driver, place_for_clusters
from tests.integration.serving import Process, process, ready

LONG = os.environ.get("POLICY_FLEET_LONG") == "1"
LONG_TIMEOUT_S = 900


def form(short: int, long: int) -> int:
    """A number of the form that was asked for."""
    return long if LONG else short


def figure(name: str, value: object) -> None:
    """Print one measured figure (pytest -s shows it)."""
    print(f"\nFIGURE {name} {value}", flush=True)


def quantile(values: Sequence[float], share: float) -> float:
    """Smallest value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# --- database ---------------------------------------------------------------------------------------------
@dataclass
class Database:
    """A Postgres server of one suite."""

    server: EmbeddedServer
    settings: Mapping[str, str]

    @property
    def url(self) -> str:
        """For SQLAlchemy and for `driver`."""
        return self.server.url

    @property
    def plain_url(self) -> str:
        """As an operator writes it."""
        return self.server.url.replace("+asyncpg", "")

    def beside(self) -> Any:
        """A connection of the test's own."""
        return driver(self.url)


@asynccontextmanager
async def database(**settings: str) -> AsyncIterator[Database]:
    """A fresh server with the schema of this release."""
    directory = tempfile.mkdtemp(prefix="policy-fleet-", dir=place_for_clusters())
    chosen = {"fsync": "off", **settings}
    server = await EmbeddedServer.start(directory, chosen)
    try:
        await schema.upgrade(server.url)
        yield Database(server, chosen)
    finally:
        await asyncio.to_thread(server.close)
        shutil.rmtree(directory, ignore_errors=True)


async def database_now(connection: Any) -> int:
    """`clock_timestamp()`, ms."""
    return int(await connection.fetchval("SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint"))


# --- replicas ---------------------------------------------------------------------------------------------
@dataclass
class Replica:
    """One `policy-service serve` and the stubs to talk to it. The port and the disk survive a restart."""

    name: str
    directory: Path
    flags: tuple[str, ...]
    environment: Mapping[str, str] | None = None
    port: int = field(default_factory=free_port)
    _scope: ExitStack = field(default_factory=ExitStack)
    _process: Process | None = None
    _channel: grpc.aio.Channel | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def running(self) -> Process:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self.running.child.pid

    @property
    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=[("grpc.max_reconnect_backoff_ms", 200)])
        return self._channel

    @property
    def policy(self) -> Any:
        return policy_pb2_grpc.PolicyServiceStub(self.channel)

    @property
    def admin(self) -> Any:
        return admin_pb2_grpc.AdminServiceStub(self.channel)

    def launch(self) -> None:
        """Start the process; `ready` waits for it."""
        flags = (*self.flags, "--set", f"replica={self.name}")
        started = process(self.directory, self.port, *flags, environment=self.environment)
        self._process = self._scope.enter_context(started)

    async def ready(self) -> None:
        """Until it answers as ready; a process that ends instead fails the test with what it said."""
        serving = asyncio.create_task(ready(self.address, 60))
        while not serving.done():
            if self.running.child.poll() is not None:
                serving.cancel()
                raise AssertionError(self.running.log.read_text())
            await asyncio.wait({serving}, timeout=0.1)
        await serving

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
        await asyncio.to_thread(self._scope.close)

    async def spooled(self) -> int:
        """Reports in its spool, by its own word."""
        health = await self.admin.GetHealth(admin_pb2.GetHealthRequest(), timeout=5)
        return int(health.spooled_events)


@asynccontextmanager
async def fleet(
    place: Path, where: Database, count: int, *flags: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[list[Replica]]:
    """`count` replicas r0, r1, ... that are ready."""
    async with AsyncExitStack() as stack:
        replicas = [
            Replica(f"r{n}", place / f"r{n}", ("--database-url", where.plain_url, *flags), environment)
            for n in range(count)
        ]
        for replica in replicas:
            stack.push_async_callback(replica.close)
            replica.launch()
        await asyncio.gather(*(replica.ready() for replica in replicas))
        yield replicas


def catalogue_file(place: Path, text: str, name: str = "catalogue.yaml") -> Path:
    """A catalogue of the test's own."""
    path = place / name
    path.write_text(f"version: 1\n{text}")
    return path


def settings_of_every_class(
    breaker: Mapping[str, int],
    connection: Mapping[str, int] | None = None,
    more: Mapping[str, Mapping[str, object]] | None = None,
) -> str:
    """Catalogue text that gives providers without an entry these numbers, whichever class they are taken for.

    `more` are further blocks of settings.

    The provider cooldown is put out of reach: it would hide the breaker from the test.
    """
    both = {"breaker": breaker, "connection": connection or {}}
    classes: dict[str, object] = {
        block: {name: dict(numbers) for name in ("default", "api_key")} for block, numbers in both.items()
    }
    classes["provider_cooldown"] = {"api_key": {"failure_threshold": 100_000}}
    return f"settings: {json.dumps(classes | dict(more or {}))}\n"


# --- calls ------------------------------------------------------------------------------------------------
def ask(provider: str, *connections: str, **fields: Any) -> policy_pb2.SelectTargetRequest:
    """A selection over inline candidates that never answers Wait."""
    fields.setdefault("allow_wait", False)
    candidates = [types_pb2.Candidate(provider=provider, connection=c, model="m") for c in connections]
    return policy_pb2.SelectTargetRequest(candidates=candidates, **fields)


def told(
    provider: str, connection: str, status: int, *, token: bytes = b"", report_id: str = "", **fields: Any
) -> policy_pb2.ReportOutcomeRequest:
    """A report of an HTTP status, by the token or under a report id."""
    how = {"decision_token": token} if token else {"report_id": report_id or os.urandom(8).hex(), "elapsed_ms": 5}
    target = types_pb2.Target(provider=provider, connection=connection, model="m")
    return policy_pb2.ReportOutcomeRequest(target=target, http_status=status, final=True, **how, **fields)


async def refusal_of(replica: Replica, request: policy_pb2.SelectTargetRequest) -> float:
    """Wait until the replica refuses the request; the monotonic instant of the first refusal."""
    while True:
        answer = await replica.policy.SelectTarget(request, timeout=10)
        if answer.WhichOneof("verdict") == "reject":
            return time.monotonic()
        await asyncio.sleep(0.001)
