"""Randomized lease histories over real replicas and a real Postgres (fleet.md section 6).

Owners acquire, renew, move, release and dispatch through three replica processes, retry elsewhere when an answer does
not come, and sleep past their TTL. Meanwhile replicas are stopped for twice the TTL and the database is restarted.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from policy_service.storage.postgres import schema
from policy_service.storage.postgres.embedded import EmbeddedServer
from tests.contract.beside import driver, eventually, place_for_clusters
from tests.fleet.lease_checker import Checked, Period, periods

REPLICAS = 3
TTL_MS = (1_000, 2_000)
PATIENCE_S = 0.8
"""A client asks elsewhere when an answer takes longer."""
TRIES = 40
OWNERS, CONNECTIONS, STEPS = 3, 2, 10
ROOT = Path(__file__).parents[2]


class Line:
    """A client's line to one replica process."""

    def __init__(self, socket: Path, process: asyncio.subprocess.Process) -> None:
        self.socket = socket
        self.process = process
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ids = count(1)
        self._writer: asyncio.StreamWriter
        self._reading: asyncio.Task[None]

    async def open(self) -> None:
        """Connect once the process listens."""
        while True:
            assert self.process.returncode is None, "the replica ended"
            with suppress(OSError):
                reader, self._writer = await asyncio.open_unix_connection(str(self.socket))
                break
            await asyncio.sleep(0.02)
        self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            answer = json.loads(line)
            waiting = self._waiting.pop(answer["id"], None)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

    async def ask(self, op: str, **call: Any) -> dict[str, Any] | None:
        """The answer; None where none comes in time. What was asked may still happen later."""
        number = next(self._ids)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps({"id": number, "op": op, "call": call}).encode() + b"\n")
        try:
            return await asyncio.wait_for(waiting, PATIENCE_S)
        except TimeoutError:
            return None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, which this test started."""
        if self.process.returncode is None:
            self.process.send_signal(number)

    async def close(self) -> None:
        """End the process."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        await self.process.wait()
        self._reading.cancel()


@dataclass(slots=True)
class Cluster:
    """Three replica processes on one server of their own."""

    directory: Path
    server: EmbeddedServer
    lines: list[Line] = field(default_factory=list)
    stops: int = 0
    restarts: int = 0

    async def ask(self, first: int, op: str, **call: Any) -> dict[str, Any]:
        """Ask one replica after the other until one answers."""
        for attempt in range(TRIES):
            answer = await self.lines[(first + attempt) % REPLICAS].ask(op, **call)
            if answer is not None and "error" not in answer:
                return answer
            await asyncio.sleep(min(1.0, 0.05 * 2**attempt))
        raise AssertionError(f"no replica answered {op}: {answer}")

    async def stop_replica(self, index: int, seconds: float) -> None:
        """Freeze one replica, whatever it is doing."""
        self.stops += 1
        self.lines[index].signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.lines[index].signal(signal.SIGCONT)

    async def restart_server(self) -> None:
        """End the server at once, as a crash does, and start it again."""
        self.restarts += 1
        pid = self.server.pid
        assert pid is not None
        os.kill(pid, signal.SIGQUIT)
        await eventually(self._is_down)
        old, self.server = self.server, await open_server(self.directory)
        old.close()

    async def _is_down(self) -> bool:
        return self.server.pid is None

    async def stored(self) -> list[Period]:
        """Every row of the table."""
        async with driver(self.server.url) as connection:
            return periods(await connection.fetch("SELECT * FROM lease ORDER BY id"))


async def open_server(directory: Path) -> EmbeddedServer:
    """The server of a directory; its data need not outlive the machine."""
    return await EmbeddedServer.start(directory, {"fsync": "off"})


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    """A fresh server with replicas."""
    directory = Path(tempfile.mkdtemp(prefix="lease-fleet-", dir=place_for_clusters()))
    fleet = Cluster(directory, await open_server(directory))
    try:
        await schema.upgrade(fleet.server.url)
        fleet.lines = [await _replica(fleet.server.url, directory, index) for index in range(REPLICAS)]
        await asyncio.gather(*(line.open() for line in fleet.lines))
        yield fleet
    finally:
        await asyncio.gather(*(line.close() for line in fleet.lines))
        fleet.server.close()
        shutil.rmtree(directory, ignore_errors=True)


async def _replica(url: str, directory: Path, index: int) -> Line:
    socket = directory / f"replica-{index}.sock"
    command = (sys.executable, "-m", "tests.fleet.lease_replica", url, str(socket), f"replica-{index}")
    with (directory / f"replica-{index}.log").open("wb") as log:  # broken connections are what the run is about
        return Line(socket, await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=log))


@dataclass(slots=True)
class Owner:
    """One client session: knows what it was told, and believes it until told otherwise."""

    fleet: Cluster
    chance: random.Random
    name: str
    connections: Sequence[str]
    checks: list[Checked]
    is_careful: bool = True
    """False: dispatches without asking for the fence (the control run)."""
    connection: str = ""
    generation: int = 0

    async def live(self) -> None:
        """Acquire, then do whatever comes to mind."""
        await self.acquire()
        often = (self.renew, self.acquire, self.dispatch) * 2
        acts = (*often, self.move, self.release, self.sleep, self.sweep)
        for _ in range(STEPS):
            await self.chance.choice(acts)()
            await asyncio.sleep(self.chance.uniform(0, 0.25))
        await self.sleep()
        await self.dispatch()

    async def ask(self, op: str, **more: Any) -> dict[str, Any]:
        call = {"owner_hash": self.name, "api_key_id": "key", "generation": self.generation, **more}
        return await self.fleet.ask(self.chance.randrange(REPLICAS), op, **call)

    async def acquire(self) -> None:
        wanted = self.chance.choice(self.connections)
        answer = await self.ask("acquire", provider="p", connection_id=wanted, ttl_ms=self.chance.randint(*TTL_MS))
        if "generation" in answer:
            self.connection, self.generation = answer["connection"], answer["generation"]

    async def move(self) -> None:
        wanted = self.chance.choice(self.connections)
        answer = await self.ask("transition", provider="p", connection_id=wanted)
        if answer["result"] == "TRANSITIONED":
            self.connection = answer["connection"]

    async def renew(self) -> None:
        await self.ask("renew")

    async def release(self) -> None:
        if self.chance.random() < 0.5:
            await self.ask("release")

    async def sweep(self) -> None:
        await self.ask("sweep")

    async def sleep(self) -> None:
        await asyncio.sleep(self.chance.uniform(0, TTL_MS[1] / 1_000 * 1.2))

    async def dispatch(self) -> None:
        """Call the provider, the fence permitting."""
        if not self.connection:
            return
        if self.is_careful:
            answer = await self.ask("fence", connection_id=self.connection)
        else:
            answer = {"at": (await self.fleet.ask(0, "clock"))["at"], "verdict": ""}
        self.checks.append(Checked(self.name, self.connection, self.generation, answer["at"], answer["verdict"]))


def owners_of(fleet: Cluster, seed: int, checks: list[Checked], *, is_careful: bool) -> list[Owner]:
    """The sessions of one history; they compete for fewer connections than they are."""
    connections = [f"history-{seed}/{number}" for number in range(CONNECTIONS)]
    return [
        Owner(
            fleet,
            random.Random(f"{seed}/{number}"),
            sha256(f"{seed}/{number}".encode()).hexdigest(),
            connections,
            checks,
            is_careful,
        )
        for number in range(OWNERS)
    ]


async def disturb(fleet: Cluster, chance: random.Random) -> None:
    """Stop replicas for twice the TTL and restart the server, until cancelled."""
    while True:
        await asyncio.sleep(chance.uniform(0.5, 1.5))
        await fleet.stop_replica(chance.randrange(REPLICAS), 2 * TTL_MS[chance.randrange(2)] / 1_000)
        await asyncio.sleep(chance.uniform(0.2, 1.0))
        await fleet.restart_server()


async def run_histories(
    fleet: Cluster, seeds: Sequence[int], *, at_once: int, is_careful: bool = True, is_disturbed: bool = True
) -> list[Checked]:
    """Live through one history a seed; what was checked and dispatched."""
    checks: list[Checked] = []
    gate = asyncio.Semaphore(at_once)

    async def history(seed: int) -> None:
        async with gate:
            await asyncio.gather(*(owner.live() for owner in owners_of(fleet, seed, checks, is_careful=is_careful)))

    disturbing = asyncio.create_task(disturb(fleet, random.Random(seeds[0]))) if is_disturbed else None
    try:
        await asyncio.gather(*(history(seed) for seed in seeds))
    finally:
        if disturbing is not None:
            await _calm(fleet, disturbing)
    return checks


async def _calm(fleet: Cluster, disturbing: asyncio.Task[None]) -> None:
    """End the disturbance; a failure of its own is a failure of the run."""
    failed = disturbing.done()
    disturbing.cancel()
    outcome = (await asyncio.gather(disturbing, return_exceptions=True))[0]
    for line in fleet.lines:
        line.signal(signal.SIGCONT)
    if failed and isinstance(outcome, BaseException):
        raise outcome
    if fleet.server.pid is None:
        fleet.server = await open_server(fleet.directory)
