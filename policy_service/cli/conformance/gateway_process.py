"""The gateway under test: what it is told about the stage, its process where the kit starts it, and the wait for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from policy_service.cli.conformance.answers import PROVIDER
from policy_service.cli.conformance.stage import Stage
from policy_service.settings.server import split_address

_ASK_AGAIN_S: Final = 0.05
_STOP_LIMIT_S: Final = 10.0
_LOG_TAIL: Final = 2_000


class GatewayNotReadyError(Exception):
    """The gateway ended, or does not take connections in time; the text has the end of its log."""


@dataclass(frozen=True, slots=True)
class Running:
    """A gateway that takes connections. `process` and `log` are None where somebody else started it."""

    address: str
    process: asyncio.subprocess.Process | None = None
    log: Path | None = None

    def must_run(self) -> None:
        """The gateway has not ended.

        Raises:
            GatewayNotReadyError: it has.
        """
        if self.process is not None and self.process.returncode is not None:
            raise GatewayNotReadyError(f"the gateway ended with {self.process.returncode}\n{_tail(self.log)}")


def environment(stage: Stage, place: Path, listen: str, client_key: str) -> dict[str, str]:
    """Variables that tell a gateway about the stage; the upstreams also as a file.

    Args:
        place: directory for the file.
        listen: host:port where the gateway is to listen; empty: it knows.
    """
    file = place / "upstreams.json"
    upstreams = {f"{PROVIDER}/{name}": _upstream(stage, name) for name in stage.upstreams}
    file.write_text(json.dumps({"upstreams": upstreams}, indent=2) + "\n", encoding="utf-8")
    single = {f"UPSTREAM_{name.upper()}_URL": _upstream(stage, name)["base_url"] for name in stage.upstreams}
    single |= {f"UPSTREAM_{name.upper()}_KEY": stage.keys[name] for name in stage.upstreams}
    own = {"POLICY_TARGET": stage.policy, "UPSTREAMS_FILE": str(file), "CLIENT_KEY": client_key, **single}
    return {**own, "GATEWAY_LISTEN": listen} if listen else own


def _upstream(stage: Stage, connection: str) -> dict[str, Any]:
    """Base URL without /v1, and the key; also as the header that carries it."""
    key = stage.keys[connection]
    return {
        "base_url": f"http://{stage.upstreams[connection]}",
        "key": key,
        "headers": {"authorization": f"Bearer {key}"},
    }


@asynccontextmanager
async def started(command: str, variables: Mapping[str, str], log: Path, wait_s: float) -> AsyncIterator[Running]:
    """Run a command line of the shell until the end of the block; it listens by then. `log`: for what it prints.

    Raises:
        GatewayNotReadyError: it ends, or does not listen within `wait_s`.
    """
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_shell(
            command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**_inherited(), **variables},
            start_new_session=True,  # so that the whole group can be ended, and Ctrl-C reaches the kit only
        )
    gateway = Running(variables["GATEWAY_LISTEN"], process, log)
    try:
        await listening(gateway, wait_s)
        yield gateway
    finally:
        await _stop(process)


def _inherited() -> dict[str, str]:
    """Without variables that are meant for a policy service."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("POLICY_", "OTEL_"))}


async def listening(gateway: Running, wait_s: float) -> None:
    """Wait until it takes connections.

    Raises:
        GatewayNotReadyError: nobody does within `wait_s`, or the process ended.
    """
    try:
        async with asyncio.timeout(wait_s):
            while not await _takes_connections(gateway.address):
                gateway.must_run()
                await asyncio.sleep(_ASK_AGAIN_S)
    except TimeoutError:
        raise GatewayNotReadyError(
            f"nobody listens at {gateway.address} after {wait_s:.0f} s\n{_tail(gateway.log)}"
        ) from None


async def _takes_connections(address: str) -> bool:
    host, port = split_address(address)
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


def _tail(log: Path | None) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:] if log else ""


async def _stop(process: asyncio.subprocess.Process) -> None:
    """SIGTERM to the group that was started; SIGKILL to what is left once its leader has ended or takes too long."""
    _signal(process, signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(_STOP_LIMIT_S):
            await process.wait()
    _signal(process, signal.SIGKILL)
    await process.wait()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
