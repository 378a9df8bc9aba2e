"""Running one process of the service until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable, Mapping

import uvloop

from policy_service.bootstrap.service import Service, Worker
from policy_service.settings.server import ServerConfig
from policy_service.telemetry import logs

log = logging.getLogger(__name__)

GC_THRESHOLDS = (10_000, 10, 20)
"""With the 700 objects of the interpreter's own first threshold nearly every call under way is taken for long-lived,
and full collections follow from that."""

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
    _spare_the_collector()
    loop.add_signal_handler(signal.SIGHUP, service.reload)
    announce(service)
    await ended.wait()
    log.info("draining")
    await service.stop()
    return 0


def _spare_the_collector() -> None:
    """A full collection walks through every object: on a busy machine some hundred milliseconds in which this process
    decides nothing and follows nobody. What the start has left lives as long as the process: it is left out."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def serve(
    config: ServerConfig, environment: Mapping[str, str], announce: Announce, worker: Worker | None = None
) -> int:
    """Run one process of the service on uvloop."""
    logs.configure(config.log.level, config.log.format)
    return uvloop.run(run(config, environment, announce, worker))
