"""One run of the demo: upstreams, service and both gateways are started, driven on one time line, and stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import grpc

from policy_service.cli.demo import catalogue
from policy_service.cli.demo.board import Board
from policy_service.cli.demo.client import PolicyClient
from policy_service.cli.demo.control import NaiveGateway
from policy_service.cli.demo.gateway import ServiceGateway
from policy_service.cli.demo.scene import Scene, Screen
from policy_service.cli.demo.script import Pace
from policy_service.cli.demo.service_process import service
from policy_service.cli.demo.summary import Summary, side, summarize
from policy_service.cli.demo.traffic import Gateway, Score, schedule, send
from policy_service.cli.demo.upstreams import Upstreams


async def perform(pace: Pace, screen: Screen) -> Summary:
    """Run the demo.

    Args:
        pace: how fast.
        screen: where it is shown.

    Raises:
        ServiceNotStartedError: the service does not start.
    """
    async with _upstreams(pace) as ours, _upstreams(pace) as theirs:
        document = catalogue.derive(ours.addresses, pace)
        naive = NaiveGateway(catalogue.routes(document), theirs.addresses, pace)
        async with service(document) as address:
            return await _play(address, naive, ours, theirs, screen)


@asynccontextmanager
async def _upstreams(pace: Pace) -> AsyncIterator[Upstreams]:
    upstreams = Upstreams(pace)
    await upstreams.start()
    try:
        yield upstreams
    finally:
        await upstreams.stop()


async def _play(address: str, naive: NaiveGateway, ours: Upstreams, theirs: Upstreams, screen: Screen) -> Summary:
    """The traffic of both gateways, at the same time, each against its own upstreams."""
    pace, board = ours.pace, Board()
    async with grpc.aio.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        client = PolicyClient(channel, board)
        gateway = ServiceGateway(client, ours.addresses, pace)
        scene = Scene(pace, board, Score(), Score(), ours, theirs, gateway.added_ms)
        async with _showing(scene, screen):
            await _drive(scene, gateway, naive)
            await client.settle()
    return summarize(side(scene.ours, ours), side(scene.theirs, theirs), gateway, client, board)


async def _drive(scene: Scene, gateway: Gateway, naive: Gateway) -> None:
    requests = schedule(scene.pace)
    started = time.monotonic()
    scene.board.started = scene.our_upstreams.started = scene.their_upstreams.started = started
    async with asyncio.TaskGroup() as group:
        group.create_task(send(requests, gateway, scene.ours, scene.pace, started))
        group.create_task(send(requests, naive, scene.theirs, scene.pace, started))


@asynccontextmanager
async def _showing(scene: Scene, screen: Screen) -> AsyncIterator[None]:
    """Frames while the traffic goes on, and a last one."""
    with screen.open() as show:
        frames = asyncio.create_task(_frames(scene, show, screen.every_s(scene.pace)))
        try:
            yield
        finally:
            frames.cancel()
            with suppress(asyncio.CancelledError):
                await frames
        show(scene)


async def _frames(scene: Scene, show: Callable[[Scene], None], every_s: float) -> None:
    while True:
        show(scene)
        await asyncio.sleep(every_s)
