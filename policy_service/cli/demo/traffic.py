"""The client requests: one fixed schedule, sent to both gateways at the same instants, and what clients got."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Final, Protocol

from policy_service.cli.demo.script import Pace

ROUTE_SHARES: Final = {"chat": 40, "embed": 16, "house": 14, "batch": 14, "resale": 16}
_SEED: Final = 20


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request of a client, due `at_s` real seconds after the start."""

    number: int
    route: str
    at_s: float


@dataclass(frozen=True, slots=True)
class ClientAnswer:
    """What the client got: an HTTP status; 504 where its patience ended."""

    status: int

    @property
    def is_failure(self) -> bool:
        """Not a 2xx."""
        return not 200 <= self.status < 300


class Gateway(Protocol):
    """Serves client requests."""

    async def serve(self, request: ClientRequest) -> ClientAnswer: ...


@dataclass(slots=True)
class Score:
    """What the clients of one gateway got."""

    requests: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Client-visible failures by route."""
    latencies_ms: list[float] = field(default_factory=list)

    def add(self, request: ClientRequest, answer: ClientAnswer, latency_ms: float) -> None:
        """Count one finished client request."""
        self.requests += 1
        self.failures[request.route] += answer.is_failure
        self.latencies_ms.append(latency_ms)


def schedule(pace: Pace) -> list[ClientRequest]:
    """Requests with random gaps of a fixed seed: the same in every run of a pace."""
    source = random.Random(_SEED)
    routes, weights = list(ROUTE_SHARES), list(ROUTE_SHARES.values())
    times = sorted(source.uniform(0, pace.length_s) for _ in range(round(pace.length_s * pace.requests_per_s)))
    return [ClientRequest(number, source.choices(routes, weights)[0], at) for number, at in enumerate(times)]


async def send(requests: list[ClientRequest], gateway: Gateway, score: Score, pace: Pace, started: float) -> None:
    """Send every request when it is due, however many are still on their way, and wait for all answers."""
    async with asyncio.TaskGroup() as group:
        for request in requests:
            await asyncio.sleep(max(0.0, started + request.at_s - time.monotonic()))
            group.create_task(_one(request, gateway, score, pace))


async def _one(request: ClientRequest, gateway: Gateway, score: Score, pace: Pace) -> None:
    began = time.monotonic()
    try:
        async with asyncio.timeout(pace.patience_s):
            answer = await gateway.serve(request)
    except TimeoutError:
        answer = ClientAnswer(504)
    score.add(request, answer, (time.monotonic() - began) * 1000)


def middle(values: list[float]) -> float:
    """Median; 0 where nothing was measured."""
    return median(values) if values else 0.0


def ninety_fifth(values: list[float]) -> float:
    """95th percentile; 0 where too little was measured."""
    return quantiles(values, n=20)[-1] if len(values) > 1 else 0.0
