"""Running one process of the service until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping

import uvloop

from policy_service.bootstrap.service import Service, Worker
from policy_service.settings.server import ServerConfig
from policy_service.telemetry import logs

log = logging.getLogger(__name__)

Announce = Callable[[Service], None]


async def run(
    config: ServerConfig,
    environment: Mapping[str, str],
    announce: Announce,
    worker: Worker | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    service = Service(config, environment, worker)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, ended.set)
    await service.start()
    loop.add_signal_handler(signal.SIGHUP, service.reload)
    announce(service)
    await ended.wait()
    log.info("draining")
    await service.stop()
    return 0


def serve(
    config: ServerConfig, environment: Mapping[str, str], announce: Announce, worker: Worker | None = None
) -> int:
    """Run one process of the service on uvloop."""
    logs.configure(config.log.level, config.log.format)
    return uvloop.run(run(config, environment, announce, worker))
