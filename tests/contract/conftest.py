"""The databases of the contract suites as seen through pgbouncer in transaction mode."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL, make_url

SETTINGS = """[databases]
* = host={host} port={port} user={user} {password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
user = {runs_as}
auth_type = any
pool_mode = transaction
default_pool_size = 20
max_client_conn = 1000
server_reset_query =
ignore_startup_parameters = extra_float_digits
logfile = {directory}/log
"""
"""As docs/sidecar-guide.md tells; `user` counts only where root starts it, which pgbouncer refuses to run as."""
START_S = 10.0


@pytest.fixture(scope="session")
def pooler(server_url: URL) -> Iterator[int | None]:
    """Port of a real pgbouncer before the server of the tests; None where none is installed."""
    program = shutil.which("pgbouncer")
    if program is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="pooler-") as place, socket.socket() as probe:
        directory = Path(place)
        directory.chmod(0o777)
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        file = directory / "pgbouncer.ini"
        host = str(server_url.query.get("host") or server_url.host)
        file.write_text(
            SETTINGS.format(
                host=host,
                port=server_url.port or 5432,
                user=server_url.username,
                password=f"password={server_url.password}" if server_url.password else "",
                listen=port,
                directory=directory,
                runs_as=Path(host).owner() if Path(host).is_dir() else "nobody",
            )
        )
        process = subprocess.Popen([program, str(file)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _await_listening(port, process)
        yield port
        process.terminate()
        process.wait()


@pytest.fixture
def pooled_url(embedded_url: str, pooler: int | None) -> str:
    """A fresh migrated database behind pgbouncer; straight at the server where pgbouncer is not installed."""
    if pooler is None:
        return embedded_url
    url = make_url(embedded_url).difference_update_query(["host"]).set(host="127.0.0.1", port=pooler)
    return url.render_as_string(hide_password=False)


def _await_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("pgbouncer did not start") from None
            time.sleep(0.02)
