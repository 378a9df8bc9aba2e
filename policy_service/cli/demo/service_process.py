"""The real service in a process of its own, with a temporary data directory; both are gone at the end."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from policy_service.cli.output import progress

_START_LIMIT_S: Final = 60.0
_STOP_LIMIT_S: Final = 15.0
_ASK_AGAIN_S: Final = 0.1
_LOG_TAIL: Final = 2_000


class ServiceNotStartedError(Exception):
    """The service ended, or does not answer; the text has the end of its log."""


@asynccontextmanager
async def service(catalogue: Mapping[str, Any]) -> AsyncIterator[str]:
    """A running service with this catalogue; gives its address.

    Raises:
        ServiceNotStartedError: it does not serve within a minute.
    """
    with tempfile.TemporaryDirectory(prefix="policy-demo-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        (place / "catalogue.yaml").write_text(yaml.safe_dump(dict(catalogue), allow_unicode=True), encoding="utf-8")
        address = f"127.0.0.1:{_free_port()}"
        process = await _start(place, address)
        try:
            with progress("starting the service with an embedded Postgres"):
                await _until_serving(process, address, place)
            yield address
        finally:
            with progress("stopping the service"):
                await _stop(process)


async def _start(place: Path, address: str) -> asyncio.subprocess.Process:
    with (place / "service.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "policy_service", "serve"),
            *("--catalogue", str(place / "catalogue.yaml")),
            *("--data-dir", str(place / "data")),
            *("--listen", address),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_own_environment(),
            start_new_session=True,  # a Ctrl-C of the terminal reaches the demo only, which then stops the service
        )


def _own_environment() -> dict[str, str]:
    """Without settings that are meant for another service on this machine."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("POLICY_", "OTEL_"))}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


async def _until_serving(process: asyncio.subprocess.Process, address: str, place: Path) -> None:
    try:
        async with asyncio.timeout(_START_LIMIT_S):
            while not await _is_serving(address):
                if process.returncode is not None:
                    raise ServiceNotStartedError(f"the service ended with {process.returncode}\n{_tail(place)}")
                await asyncio.sleep(_ASK_AGAIN_S)
    except TimeoutError:
        raise ServiceNotStartedError(
            f"the service does not serve after {_START_LIMIT_S:.0f} s\n{_tail(place)}"
        ) from None


async def _is_serving(address: str) -> bool:
    async with grpc.aio.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        request = health_pb2.HealthCheckRequest(service="readiness")
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=1)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _tail(place: Path) -> str:
    return (place / "service.log").read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]


async def _stop(process: asyncio.subprocess.Process) -> None:
    """SIGTERM and wait for the drain; SIGKILL only where that takes too long."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_LIMIT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
