"""A real service for tests: in this process, or as a process of its own that a test may kill."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from policy_service.bootstrap import Service
from policy_service.generated.policy.v1 import policy_pb2, policy_pb2_grpc, types_pb2
from policy_service.settings.server import ServerConfig

OPENAI = "openai"


def config(directory: Path, database_url: str | None, **fields: Any) -> ServerConfig:
    """Loopback on a free port, everything else below `directory`."""
    listen = fields.pop("listen", {"tcp": ["127.0.0.1:0"]})
    return ServerConfig.model_validate(
        {
            "data_dir": str(directory),
            "database_url": (database_url or "").replace("+asyncpg", ""),
            "listen": listen,
            "drain_ms": 500,
            **fields,
        }
    )


@asynccontextmanager
async def serving(
    settings: ServerConfig, environment: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[Service, Any]]:
    """A started service and a stub of PolicyService."""
    service = Service(settings, environment)
    await service.start()
    try:
        async with grpc.aio.insecure_channel(service.server.addresses[-1]) as channel:
            yield service, policy_pb2_grpc.PolicyServiceStub(channel)
    finally:
        await service.stop()


def candidate(connection: str, provider: str = OPENAI, model: str = "gpt") -> types_pb2.Candidate:
    return types_pb2.Candidate(provider=provider, connection=connection, model=model)


def selection(*connections: str, **fields: Any) -> policy_pb2.SelectTargetRequest:
    """A selection over inline candidates that never answers Wait."""
    fields.setdefault("allow_wait", False)
    return policy_pb2.SelectTargetRequest(candidates=[candidate(c) for c in connections], **fields)


def outcome(connection: str, status: int, **fields: Any) -> policy_pb2.ReportOutcomeRequest:
    """A report of an HTTP status; without a token under a report id."""
    if not fields.get("decision_token"):
        fields.setdefault("report_id", os.urandom(8).hex())
        fields.setdefault("elapsed_ms", 5)
    return policy_pb2.ReportOutcomeRequest(
        target=types_pb2.Target(provider=OPENAI, connection=connection, model="gpt"),
        http_status=status,
        final=True,
        **fields,
    )


@dataclass
class Process:
    """`policy-service serve` as a process of its own."""

    child: subprocess.Popen[str]
    address: str
    log: Path

    def kill(self) -> None:
        """kill -9."""
        self.child.send_signal(signal.SIGKILL)
        self.child.wait(10)

    def end(self) -> int:
        """SIGTERM, then the exit code."""
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(20)


@contextmanager
def process(directory: Path, port: int, *flags: str, environment: Mapping[str, str] | None = None) -> Iterator[Process]:
    """Start a process; it is killed at the end if the test has not ended it."""
    log = directory / f"serve-{port}-{os.urandom(3).hex()}.log"
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "policy_service", "serve", "--data-dir", str(directory / "data")]
    command += ["--set", f"listen.tcp=127.0.0.1:{port}", "--set", "drain_ms=1000", *flags]
    with log.open("w") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=output, text=True, env={**os.environ, **(environment or {})}
        )
    try:
        yield Process(child, f"127.0.0.1:{port}", log)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait(10)


async def ready(address: str, timeout_s: float = 30.0) -> None:
    """Wait for readiness by the health service."""
    request = health_pb2.HealthCheckRequest(service="readiness")
    async with asyncio.timeout(timeout_s), grpc.aio.insecure_channel(address) as channel:
        while True:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError:
                pass
            await asyncio.sleep(0.05)
