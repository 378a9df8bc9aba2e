"""`envoy`: the door for Envoy as a process of its own, in front of a policy service elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import uvloop
from policy_envoy.remote import RemoteCalls, channel
from policy_envoy.server import serve
from policy_envoy.servicer import Door

from policy_service.bootstrap.envoy_door import door_options, fixed_watchdog
from policy_service.cli.envoy_config import checked_address
from policy_service.cli.output import note
from policy_service.settings.load import LoadedConfig
from policy_service.telemetry import logs
from policy_service.transport.grpc.tls import ListenError


class Place(NamedTuple):
    """Where the service is and where Envoy finds the door."""

    policy: str
    door: str
    policy_ca: Path | None
    key_file: Path | None


def run(loaded: LoadedConfig, place: Place) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    if not place.door.startswith("unix:"):
        checked_address("door", place.door)
    config = loaded.config
    logs.configure(config.log.level, config.log.format)
    return uvloop.run(_run(loaded, place))


async def _run(loaded: LoadedConfig, place: Place) -> int:
    authority = place.policy_ca.read_bytes() if place.policy_ca else None
    key = place.key_file.read_text(encoding="utf-8").strip() if place.key_file else ""
    async with channel(place.policy, root_certificates=authority) as opened:
        options = door_options(loaded.config.envoy, fixed_watchdog(loaded.environment))
        door = Door(RemoteCalls(opened, key), options)
        try:
            await serve(door, place.door, lambda address: note(f"Envoy may ask {address}; decisions by {place.policy}"))
        except RuntimeError as error:
            raise ListenError(f"cannot listen on {place.door}", "give --door a free address") from error
    return 0
