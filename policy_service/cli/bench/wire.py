"""Service against echo over the wire: the same client, the same bytes, in turn, round after round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final
from uuid import uuid4

import grpc

from policy_service.cli.bench.cases import SERVICE, Case, build
from policy_service.cli.bench.figures import ROUNDS, Figure, alone, compared
from policy_service.cli.bench.load import CONNECTIONS, ONE_AT_A_TIME, Client, PythonClient, Sample, Shape, Work
from policy_service.cli.bench.processes import CLIENT_OPTIONS, BenchError, Child
from policy_service.cli.output import progress
from policy_service.generated.policy.v1 import policy_pb2

SLICE_S: Final = 0.2
MOST_ROUNDS: Final = 25
_SHORTEST_S: Final = 0.05
_LONGER: Final = (1, 4, 16)
"""On a machine so busy that no call returns in a round, the round is made this many times as long."""
_CALL_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two servers and where it answers a case."""

    name: str
    server: Child
    path: Callable[[Case], str]


@dataclass(slots=True)
class Spent:
    """CPU time and items of one side over all busy rounds; `is_known` where the kernel tells."""

    cpu_s: float = 0.0
    items: int = 0
    is_known: bool = True

    def add(self, before: float | None, after: float | None, items: int) -> None:
        """Count one load."""
        self.items += items
        if before is None or after is None:
            self.is_known = False
        else:
            self.cpu_s += after - before

    @property
    def per_item_us(self) -> float:
        """CPU time of one decision or report, us."""
        return self.cpu_s / self.items * 1e6


@dataclass(slots=True)
class Rounds:
    """Samples of one case and shape, service and echo side by side."""

    pairs: list[tuple[Sample, Sample]] = field(default_factory=list)
    spent: dict[str, Spent] = field(default_factory=dict)

    def compared(self, case: Case, what: str, unit: str, title: str, value: Callable[[Sample], float]) -> Figure:
        """A figure of each pair."""
        values = [(value(ours), value(theirs)) for ours, theirs in self.pairs]
        return compared(f"{case.name}.{what}", f"{case.title}: {title}", unit, values)


def rounds(seconds: float) -> int:
    """Rounds of a measurement: many short ones, so that both sides of a pair meet the same machine."""
    return min(max(round(seconds / SLICE_S), ROUNDS), MOST_ROUNDS)


def service_path(case: Case) -> str:
    """Path of a case on the service."""
    return f"/{SERVICE.full_name}/{case.method}"


async def record(address: str) -> tuple[tuple[Case, ...], dict[str, bytes]]:
    """The cases, and what the running service answers to each."""
    async with grpc.aio.insecure_channel(address, CLIENT_OPTIONS) as channel:

        async def ask(method: str, request: bytes) -> bytes:
            call = channel.unary_unary(f"/{SERVICE.full_name}/{method}")
            answer: bytes = await call(request, timeout=_CALL_TIMEOUT_S, wait_for_ready=True)
            return answer

        cases = await build(ask)
        return cases, {case.name: await ask(case.method, case.body("record", 0)) for case in cases}


class Comparison:
    """Loads both sides.

    Args:
        sides: service and echo.
        answers: right answers by case.
        client: load generator of calls that are always the same; the others take the one in Python.
        seconds: length of each measurement over all rounds.
    """

    def __init__(self, sides: tuple[Side, Side], answers: dict[str, bytes], client: Client, seconds: float) -> None:
        self._sides = sides
        self._answers = answers
        self._client = client
        self._rounds_each = rounds(seconds)
        self._slice_s = max(seconds / self._rounds_each, _SHORTEST_S)

    async def figures(self, case: Case) -> list[Figure]:
        """Every figure of a case."""
        busy = await self._rounds(case, Shape(CONNECTIONS, case.streams))
        figures = [busy.compared(case, "throughput", "1/s", "throughput", lambda s: s.rate * case.items)]
        figures += self._cpu(case, busy.spent)
        single = await self._rounds(case, ONE_AT_A_TIME)
        figures.append(single.compared(case, "p50", "us", "p50, one at a time", lambda s: quantile(s, 0.5)))
        figures.append(single.compared(case, "p99", "us", "p99, one at a time", lambda s: quantile(s, 0.99)))
        if case.is_distinct:
            figures.append(_durable(case, busy))
        return figures

    def _cpu(self, case: Case, spent: dict[str, Spent]) -> list[Figure]:
        ours, theirs = (spent[side.name] for side in self._sides)
        if not (ours.is_known and theirs.is_known):
            return []
        pair = (ours.per_item_us, theirs.per_item_us)
        return [compared(f"{case.name}.cpu", f"{case.title}: server CPU", "us", [pair])]

    async def _rounds(self, case: Case, shape: Shape) -> Rounds:
        taken = Rounds(spent={side.name: Spent() for side in self._sides})
        for number in range(-1, self._rounds_each):  # round -1 warms up
            pair: dict[str, Sample] = {}
            for side in self._sides if number % 2 else reversed(self._sides):
                with progress(f"{case.title}, {shape.connections * shape.streams} in flight: {side.name}"):
                    pair[side.name] = await self._load(side, case, shape, taken.spent[side.name])
            if number < 0:
                taken.spent = {side.name: Spent() for side in self._sides}
            else:
                taken.pairs.append((pair[self._sides[0].name], pair[self._sides[1].name]))
        return taken

    async def _load(self, side: Side, case: Case, shape: Shape, spent: Spent) -> Sample:
        run = uuid4().hex
        answer_bytes = len(self._answers[case.name])
        path = side.path(case)
        work = Work(side.server.address, path, lambda n: case.body(run, n), answer_bytes, case.is_distinct)
        for factor in _LONGER:
            before = side.server.cpu_s()
            sample = await self._client_of(case).load(work, shape, self._slice_s * factor)
            spent.add(before, side.server.cpu_s(), sample.calls * case.items)
            if sample.latencies_us:
                return sample
        raise BenchError(f"{path}: no call was answered within {self._slice_s * _LONGER[-1]:g} s")

    def _client_of(self, case: Case) -> Client:
        return PythonClient() if case.is_distinct else self._client


def quantile(sample: Sample, share: float) -> float:
    """Latency that this share of the calls did not exceed, us."""
    ordered = sorted(sample.latencies_us)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def _durable(case: Case, busy: Rounds) -> Figure:
    """Share of the sampled reports that were committed when they were answered."""
    answers = [policy_pb2.ReportOutcomeResponse.FromString(a) for ours, _ in busy.pairs for a in ours.answers]
    share = sum(answer.durable for answer in answers) / max(len(answers), 1)
    return alone(f"{case.name}.durable", f"{case.title}: committed at answer", "", [share])
