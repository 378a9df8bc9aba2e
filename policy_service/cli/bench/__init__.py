"""`bench`: what the service costs on top of the RPC itself, and whether the goals hold on this machine.

An echo server with the same messages and the service run side by side and are loaded in turn by the same client.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from policy_service.cli import exit_codes
from policy_service.cli.bench import h2load, inprocess, report, streams, wire
from policy_service.cli.bench.cases import Case, catalogue
from policy_service.cli.bench.echo import echo_path, write_script
from policy_service.cli.bench.figures import Figure, alone
from policy_service.cli.bench.load import Client, PythonClient
from policy_service.cli.bench.processes import BenchError, free_address, running
from policy_service.cli.output import note, progress, say


def run(seconds: float, as_json: bool, *, with_envoy: bool = False) -> int:
    """Measure and print.

    Args:
        seconds: length of each measurement, over all its rounds.
        as_json: print JSON instead of a table.
        with_envoy: measure the Envoy door instead.

    Returns:
        0 whether goals are met or not (the output says so); 1 where something could not be measured.
    """
    client, before = _client(), _load()
    try:
        figures = uvloop.run(_measure_envoy(seconds) if with_envoy else _measure(seconds, client))
    except BenchError as error:
        note(f"error: {error}")
        return exit_codes.FAILED
    conditions = _conditions(client, before, seconds)
    if as_json:
        say(report.as_json(conditions, figures))
    else:
        report.print_table(conditions, figures, report.NO_OP if with_envoy else report.ECHO)
    return exit_codes.OK


def _client() -> Client:
    program = h2load.available()
    return h2load.H2Load(program) if program else PythonClient()


def _conditions(client: Client, load_before: float, seconds: float) -> report.Conditions:
    return report.Conditions(
        cpus=os.cpu_count() or 1,
        python=platform.python_version(),
        client=client.name,
        failure_client=PythonClient.name,
        load_before=load_before,
        load_after=_load(),
        seconds=seconds,
        rounds=wire.rounds(seconds),
    )


def _load() -> float:
    return os.getloadavg()[0]


async def _measure_envoy(seconds: float) -> list[Figure]:
    from policy_service.cli.bench import envoy  # needs the extra `envoy`

    return await envoy.figures(seconds)


async def _measure(seconds: float, client: Client) -> list[Figure]:
    with TemporaryDirectory(prefix="policy-bench-") as name:
        place = Path(name)
        file = place / "catalogue.yaml"
        file.write_text(catalogue(), encoding="utf-8")
        with progress("in-process figures"):
            inside = [*await inprocess.figures(place, file, seconds), *streams.figures(seconds)]
        return [*await _compare(place, file, client, seconds), *inside]


async def _compare(place: Path, file: Path, client: Client, seconds: float) -> list[Figure]:
    """Figures of both servers over the wire."""
    address, other = free_address(), free_address()
    serve = ("serve", "--listen", address, "--data-dir", str(place), "--catalogue", str(file))
    options = ("--replica", "bench", "--log-level", "warning", "--set", "drain_ms=400")
    script = place / "echo.json"
    async with running("policy_service", *serve, *options, address=address, log=place / "serve.log") as service:
        cases, answers = await wire.record(address)
        write_script(script, cases, answers)
        echo_module = "policy_service.cli.bench.echo"
        async with running(echo_module, other, str(script), address=other, log=place / "echo.log") as echo:
            sides = (wire.Side("service", service, wire.service_path), wire.Side("echo", echo, echo_path))
            return await _each(wire.Comparison(sides, answers, client, seconds), cases, seconds)


async def _each(comparison: wire.Comparison, cases: tuple[Case, ...], seconds: float) -> list[Figure]:
    """Figures of every case. Classification is timed in between, so that one busy moment does not decide on it."""
    figures: list[Figure] = []
    reading: list[float] = []
    for case in cases:
        figures += await comparison.figures(case)
        reading.append(inprocess.classification(seconds))
    return [*figures, alone("classify.p50", "classification of a typical error", "us", reading)]
