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
from policy_service.settings.load import LoadedConfig, read_text
from policy_service.telemetry import logs
from policy_service.transport.grpc.tls import ListenError

_MAX_BYTES = 1_048_576


class Place(NamedTuple):
    """Where the service is and where Envoy finds the door."""

    policy: str
    door: str
    policy_ca: Path | None
    key_file: Path | None


def run(loaded: LoadedConfig, place: Place) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    for name, address in (("door", place.door), ("policy", place.policy)):
        if not address.startswith("unix:"):
            checked_address(name, address)
    authority = read_text(place.policy_ca, "--policy-ca", _MAX_BYTES).encode() if place.policy_ca else None
    key = read_text(place.key_file, "--key-file", _MAX_BYTES).strip() if place.key_file else ""
    config = loaded.config
    logs.configure(config.log.level, config.log.format)
    return uvloop.run(_run(loaded, place, authority, key))


async def _run(loaded: LoadedConfig, place: Place, authority: bytes | None, key: str) -> int:
    async with channel(place.policy, root_certificates=authority) as opened:
        options = door_options(loaded.config.envoy, fixed_watchdog(loaded.environment))
        door = Door(RemoteCalls(opened, key), options)
        try:
            await serve(door, place.door, lambda address: note(f"Envoy may ask {address}; decisions by {place.policy}"))
        except RuntimeError as error:
            raise ListenError(f"cannot listen on {place.door}", "give --door a free address") from error
    return 0
