"""Clients that load a server: what they are asked for and what they give, and the client in Python."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import grpc

from policy_service.cli.bench.processes import CLIENT_OPTIONS, BenchError

CONNECTIONS: Final = 8
_KEPT_EVERY: Final = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Connections and calls in flight on each."""

    connections: int
    streams: int


ONE_AT_A_TIME: Final = Shape(1, 1)


@dataclass(frozen=True, slots=True)
class Work:
    """What to send where.

    Args:
        address, path: the server and the method.
        body: request bytes of the n-th call.
        answer_bytes: size of a right answer; a load whose answers are much smaller got errors instead.
        is_distinct: the bodies differ.
    """

    address: str
    path: str
    body: Callable[[int], bytes]
    answer_bytes: int
    is_distinct: bool = False


@dataclass(slots=True)
class Sample:
    """What one load saw: calls answered, seconds taken, latencies in us, some of the answers."""

    calls: int
    seconds: float
    latencies_us: list[float] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Calls a second."""
        return self.calls / self.seconds


class Client(Protocol):
    """A load generator."""

    name: str

    async def load(self, work: Work, shape: Shape, seconds: float) -> Sample:
        """Load a server for that long; BenchError if calls failed. Too short a time gives a sample without calls."""
        ...


class PythonClient:
    """grpc.aio with ready bytes: slower than the servers it loads, but everywhere there, and able to vary its calls."""

    name = "own client (grpc.aio)"

    async def load(self, work: Work, shape: Shape, seconds: float) -> Sample:
        """As `Client`; the time starts once every connection stands."""
        channels = [grpc.aio.insecure_channel(work.address, CLIENT_OPTIONS) for _ in range(shape.connections)]
        try:
            await asyncio.gather(*(channel.channel_ready() for channel in channels))
            return await _loaded([channel.unary_unary(work.path) for channel in channels], work, shape, seconds)
        except grpc.aio.AioRpcError as error:
            raise BenchError(f"{work.path} failed: {error.code().name}: {error.details()}") from error
        finally:
            await asyncio.gather(*(channel.close() for channel in channels))


async def _loaded(calls: list[Callable[[bytes], object]], work: Work, shape: Shape, seconds: float) -> Sample:
    sample, number = Sample(0, 0.0), 0
    started = time.perf_counter()
    end = started + seconds

    async def keep_calling(call: Callable[[bytes], object]) -> None:
        nonlocal number
        while (sent := time.perf_counter()) < end:
            number += 1
            answer = await call(work.body(number))  # type: ignore[misc]
            sample.latencies_us.append((time.perf_counter() - sent) * 1e6)
            if number % _KEPT_EVERY == 1:
                sample.answers.append(answer)

    await asyncio.gather(*(keep_calling(call) for call in calls for _ in range(shape.streams)))
    sample.calls, sample.seconds = len(sample.latencies_us), time.perf_counter() - started
    return sample
