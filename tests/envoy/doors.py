"""Two processes of the door behind one Envoy: the stages of one request meet in different ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import aiohttp
import yaml
from policy_envoy.configuration import Choices, bootstrap

from policy_service.generated.policy.v1 import policy_pb2
from policy_service.settings.catalogue_file import load_catalogue
from policy_service.transport.grpc.policy_servicer import PolicyServicer
from tests.envoy.upstreams import Answer, running
from tests.envoy.world import Gateway, catalogue_of, door_process, envoy, free_port
from tests.integration.serving import config, serving

DOORS = 2


@dataclass(frozen=True)
class Door:
    """One process of the door, and where it listens."""

    place: str
    process: Popen[bytes]


async def in_hand(world: Gateway, doors: Sequence[Door]) -> dict[str, int]:
    """Requests whose two stages are open in each door, by place."""
    async with world.client.get(f"{world.admin}/clusters?format=json") as answer:
        clusters = (await answer.json(content_type=None))["cluster_statuses"]
    found = {door.place: 0 for door in doors}
    for host in (host for cluster in clusters for host in cluster.get("host_statuses", ())):
        where = host["address"]["socket_address"]
        place = f"{where['address']}:{where['port_value']}"
        if place in found:
            streams = next(int(stat.get("value", 0)) for stat in host["stats"] if stat["name"] == "rq_active")
            found[place] = streams // 2
    return found


@contextmanager
def heard_by_the_service() -> Iterator[tuple[list[Any], list[Any]]]:
    """Every ReportOutcome that reaches the service, and its answer, whichever door sent it."""
    reports: list[Any] = []
    answers: list[Any] = []
    report = PolicyServicer.report_outcome

    async def recorded(
        self: PolicyServicer, message: policy_pb2.ReportOutcomeRequest
    ) -> policy_pb2.ReportOutcomeResponse:
        reports.append(message)
        answer = await report(self, message)
        answers.append(answer)
        return answer

    PolicyServicer.report_outcome = recorded  # type: ignore[method-assign]
    try:
        yield reports, answers
    finally:
        PolicyServicer.report_outcome = report  # type: ignore[method-assign]


@asynccontextmanager
async def two_doors(
    directory: Path,
    database_url: str,
    scripts: Mapping[str, list[Answer]],
    *,
    catalogue: Mapping[str, Any] | None = None,
    **choices: Any,
) -> AsyncIterator[tuple[Gateway, list[Door]]]:
    """As `gateway`, with two doors in front of the service; Envoy's streams take turns between them."""
    async with running(scripts) as upstreams, AsyncExitStack() as stack:
        document = yaml.safe_dump(catalogue_of(upstreams, **(catalogue or {})))
        file = directory / "catalogue.yaml"
        file.write_text(document)
        patient = {"select_ms": 2_000}  # slots are asked for on a busy machine
        settings = config(directory / "data", database_url, catalogue=str(file), store=patient)
        reports, answers = stack.enter_context(heard_by_the_service())
        service, _ = await stack.enter_async_context(serving(settings))
        places = [f"127.0.0.1:{free_port()}" for _ in range(DOORS)]
        doors = []
        for number, place in enumerate(places):
            below = directory / f"door{number}"
            below.mkdir()
            process = await stack.enter_async_context(door_process(below, service.server.addresses[-1], place))
            doors.append(Door(place, process))
        chosen = Choices(f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", policy=",".join(places), **choices)
        data = bootstrap(load_catalogue(document, source="test").catalogue, chosen)
        await stack.enter_async_context(envoy(directory, data, chosen.admin))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        url, admin = f"http://{chosen.listen}", f"http://{chosen.admin}"
        yield Gateway(url, admin, client, service, upstreams, reports, answers), doors
