"""The two servers as processes of their own: started, asked until they answer, measured in CPU time, ended."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 20.0
_LOOK_S: Final = 0.1
_FOREIGN: Final = ("POLICY_", "OTEL_")
"""Variables that would change what is measured."""


class BenchError(RuntimeError):
    """The measurement could not be made; the text says why."""


@dataclass(frozen=True, slots=True)
class Child:
    """A running server."""

    address: str
    pid: int

    def cpu_s(self) -> float | None:
        """CPU time of all its threads so far; None where the kernel does not tell (not Linux)."""
        tasks = Path(f"/proc/{self.pid}/task")
        try:
            return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9
        except (OSError, ValueError, IndexError):
            return None


def plain_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without settings of the service and without exporters."""
    return {name: value for name, value in environment.items() if not name.startswith(_FOREIGN)}


def free_address() -> str:
    """A loopback address that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@asynccontextmanager
async def running(module: str, *arguments: str, address: str, log: Path) -> AsyncIterator[Child]:
    """Run a module of this package as a server at `address`, until the block ends.

    Raises:
        BenchError: it ended or did not answer within a minute; the end of its log is in the text.
    """
    process = await asyncio.to_thread(_start, module, arguments, log)
    try:
        await _until_connected(process, address, log)
        yield Child(address, process.pid)
    finally:
        await asyncio.to_thread(_end, process)


def _start(module: str, arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    # Not by the event loop: its fork runs the handlers of the gRPC library, which complains about every child.
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=output,
            stderr=output,
            env=plain_environment(os.environ),
        )


async def _until_connected(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    async with grpc.aio.insecure_channel(address, CLIENT_OPTIONS) as channel:
        ready = asyncio.ensure_future(channel.channel_ready())
        end = time.monotonic() + START_TIMEOUT_S
        while not ready.done() and process.poll() is None and time.monotonic() < end:
            await asyncio.wait({ready}, timeout=_LOOK_S)
        is_ready = ready.done() and process.poll() is None
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)
    if not is_ready:
        raise BenchError(f"the server at {address} did not start: {log.read_text(errors='replace')[-2_000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


CLIENT_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # one connection for each channel
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
]
