"""Starts Envoy and a door of its own for `policy-service conformance`; Envoy takes the place of this process.

policy-service conformance --command "python -m tests.envoy.conformed"
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import yaml
from policy_envoy.configuration import Choices, CredentialSource, bootstrap
from policy_envoy.configuration.filters import variable_of

from policy_service.settings.catalogue_file import load_catalogue
from tests.envoy.world import ENVOY, free_port


def catalogue(upstreams: dict[str, dict[str, str]]) -> str:
    """The connections of the stage; the script of the kit decides about their order."""
    named = [(*name.split("/", 1), each["base_url"]) for name, each in upstreams.items()]
    connections = [{"id": name, "provider": provider, "base_url": url} for provider, name, url in named]
    targets = [{"connection": name, "model": f"model-of-{name}"} for _, name, _ in named]
    route = {"name": "conformance", "strategy": "priority", "targets": targets}
    return yaml.safe_dump({"version": 1, "connections": connections, "routes": [route]})


def until_it_listens(address: str) -> None:
    """Envoy without its door would refuse."""
    host, _, port = address.rpartition(":")
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.05)


def main() -> None:
    """Door first, then Envoy."""
    place, door = Path(sys.argv[1]), f"127.0.0.1:{free_port()}"
    upstreams = json.loads(Path(os.environ["UPSTREAMS_FILE"]).read_text())["upstreams"]
    command = [sys.executable, "-m", "policy_service", "envoy", "--policy", os.environ["POLICY_TARGET"], "--door", door]
    settings = ("envoy.reads_body=true", "envoy.writes_model=true", "envoy.max_wait_ms=5000")
    with (place / "door.log").open("wb") as log:
        more = [word for setting in settings for word in ("--set", setting)]
        own = {name: value for name, value in os.environ.items() if not name.startswith("POLICY_")}
        subprocess.Popen([*command, *more], stdout=log, stderr=log, env=own)
    until_it_listens(door)
    choices = Choices(
        listen=os.environ["GATEWAY_LISTEN"],
        admin="",
        policy=door,
        credentials=CredentialSource.ENVIRONMENT,
        max_wait_ms=5_000,
    )
    file = place / "envoy.yaml"
    file.write_text(yaml.safe_dump(bootstrap(load_catalogue(catalogue(upstreams), source="kit").catalogue, choices)))
    keys = {variable_of(name.split("/", 1)[1]): each["key"] for name, each in upstreams.items()}
    arguments = [str(ENVOY), "-c", str(file), "--concurrency", "1", "--disable-hot-restart", "-l", "warning"]
    os.execve(ENVOY, arguments, {**os.environ, **keys})


if __name__ == "__main__":
    main()
