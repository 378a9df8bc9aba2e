"""Embedded Postgres for one machine: started on first use, shared by the replicas on it, stopped with its last user.

Layout of a data directory: `postgres/` the cluster, `users.lock` shared by every user, `start.lock` held by whoever
starts the server, `watch.lock` held by the watch, `server.log`. The server listens on a Unix socket only. Postgres
refuses to run as root; root starts it under the account `postgres` or `nobody`.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import hashlib
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from policy_service.storage.postgres import embedded_watch
from policy_service.storage.postgres.embedded_host import (
    POLL_S,
    Account,
    EmbeddedServerError,
    await_lock,
    binaries,
    binary_version,
    environment,
    last_line,
    let_pass,
    open_lock,
    owner_name,
    server_account,
    try_lock,
)

SOCKET_NAME = ".s.PGSQL.5432"
SOCKET_PATH_LIMIT = 107
"""Bytes of a Unix socket path that the kernel takes, final NUL not counted."""
CLUSTER_NAME = "policy-service-embedded"
START_TIMEOUT_S = 60.0
ORPHAN_WAIT_S = 0.1
ORPHAN_WAITS = 100
SERVER_SETTINGS = {
    "cluster_name": CLUSTER_NAME,
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "100",
    "shared_buffers": "32MB",
    "max_wal_size": "256MB",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "fsync": "on",
    "synchronous_commit": "on",
    "max_parallel_workers": "0",
    "autovacuum_naptime": "20s",
    "client_connection_check_interval": "1s",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
"""A sidecar's server: durable, small, quick to notice a client that is gone."""


class EmbeddedServer:
    """This process's use of the embedded server of one data directory; close it (or exit) to end the use."""

    def __init__(self, directory: Path, account: Account, settings: Mapping[str, str] | None = None) -> None:
        self.directory = directory
        self.settings = SERVER_SETTINGS | dict(settings or {})
        self.account = account
        self.data = directory / "postgres"
        self.log = directory / "server.log"
        self._users: IO[str] | None = None
        self._children: list[subprocess.Popen[bytes]] = []

    @classmethod
    def open(cls, directory: str | Path, settings: Mapping[str, str] | None = None) -> EmbeddedServer:
        """Start the server of `directory`, or join the one that runs. Blocks; see `start` for asyncio.

        `settings` are server settings on top of SERVER_SETTINGS; they count for whoever starts the server.

        Raises EmbeddedServerError: directory of another owner, damaged or of another version, served by a
        postmaster that is not ours, no answer within the start time-out.
        """
        server = cls(Path(directory).expanduser().resolve(), server_account(), settings)
        try:
            server._join()
        except BaseException:
            server._leave()
            raise
        atexit.register(server.close)
        return server

    @classmethod
    async def start(cls, directory: str | Path, settings: Mapping[str, str] | None = None) -> EmbeddedServer:
        """As `open`, without blocking the event loop."""
        return await asyncio.to_thread(cls.open, directory, settings)

    @property
    def url(self) -> str:
        """SQLAlchemy URL of the server's default database."""
        return self.database_url("postgres")

    def database_url(self, database: str) -> str:
        """SQLAlchemy URL of one database of the server."""
        return f"postgresql+asyncpg://postgres@/{database}?host={self.socket_directory}"

    @property
    def socket_directory(self) -> Path:
        """The cluster's own directory, or a short one where the socket's path would be too long."""
        if len(os.fsencode(self.data / SOCKET_NAME)) <= SOCKET_PATH_LIMIT:
            return self.data
        digest = hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:16]
        return Path("/tmp") / f"policy-pg-{self.account.uid}-{digest}"

    @property
    def pid(self) -> int | None:
        """Process id of the running server."""
        return embedded_watch.postmaster_pid(self.data)

    def revive(self) -> bool:
        """Start the server again where it is gone although it is in use, as after `kill -9`. Blocks; True where it did.

        Raises EmbeddedServerError: as `open`, or its data is gone too.
        """
        if self._users is None or self.pid is not None:
            return False
        with open_lock(self.directory / "start.lock") as start:
            await_lock(start, fcntl.LOCK_EX, "another process to start the server")
            if self.pid is not None:
                return False
            if not self.data.exists():
                raise EmbeddedServerError(f"{self.data} is gone: restore it and start again")
            self._ensure_running()
        return True

    def close(self) -> None:
        """End the use; stops the server where this was the last one. Safe to repeat."""
        atexit.unregister(self.close)
        if self._users is not None:
            self._stop_if_last(self._users)
            self._leave()
        for child in self._children:
            child.poll()

    def _stop_if_last(self, users: IO[str]) -> None:
        """Whoever gets the exclusive lock is alone. Neither lock to be had: the watch is stopping the server."""
        for _ in range(int(embedded_watch.STOP_WAIT_S / embedded_watch.POLL_S)):
            if try_lock(users, fcntl.LOCK_EX):
                embedded_watch.stop(self.data)
                return
            if try_lock(users, fcntl.LOCK_SH):
                return
            time.sleep(embedded_watch.POLL_S)

    def _leave(self) -> None:
        if self._users is not None:
            self._users.close()
            self._users = None

    def _join(self) -> None:
        self._prepare_directory()
        self._users = open_lock(self.directory / "users.lock")
        await_lock(self._users, fcntl.LOCK_SH, "the server's last user to stop it")
        with open_lock(self.directory / "start.lock") as start:
            await_lock(start, fcntl.LOCK_EX, "another process to start the server")
            self._ensure_running()

    def _prepare_directory(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EmbeddedServerError(f"cannot create {self.directory}: {error.strerror}") from None
        if not os.access(self.directory, os.W_OK | os.X_OK):
            raise EmbeddedServerError(f"{self.directory} is owned by {owner_name(self.directory)}: run as that user")
        if self.account.is_other:
            let_pass(self.directory)
            let_pass(binaries())

    def _ensure_running(self) -> None:
        if self.data.exists():
            self._check_cluster()
        else:
            self._create_cluster()
        if self.pid is None:
            self._start()
        elif not self._is_ours():
            raise EmbeddedServerError(f"{self.data} is served by another postmaster (pid {self.pid}): stop it first")
        else:
            self._await_ready()

    def _start(self) -> None:
        """Start until it holds: orphans of a killed server keep its shared memory for a moment."""
        self._make_socket_directory()
        self._disown_stale_locks()
        self._start_watch()
        for _ in range(ORPHAN_WAITS):
            self._launch()
            if self._await_ready():
                return
            time.sleep(ORPHAN_WAIT_S)
        raise EmbeddedServerError(f"processes of a killed server still use {self.data}: end them first")

    def _check_cluster(self) -> None:
        owner = self.data.stat().st_uid
        if owner != self.account.uid:
            raise EmbeddedServerError(
                f"{self.data} is owned by {owner_name(self.data)}, the server would run as {self.account.name}: "
                "change the owner or use another data directory"
            )
        self._check_version()

    def _check_version(self) -> None:
        try:
            found = (self.data / "PG_VERSION").read_text().strip()
        except OSError:
            raise EmbeddedServerError(
                f"{self.data} is no Postgres cluster or is damaged: restore or remove it"
            ) from None
        needed = binary_version()
        if found != needed:
            raise EmbeddedServerError(
                f"{self.data} was made by Postgres {found}, this release brings {needed}: dump and load it"
            )

    def _is_ours(self) -> bool:
        try:
            options = (self.data / "postmaster.opts").read_text()
        except OSError:
            return False
        return f"cluster_name={CLUSTER_NAME}" in options and f'"{self.socket_directory}"' in options

    def _create_cluster(self) -> None:
        """Made aside and renamed, so that an interrupted start leaves no half cluster."""
        unfinished = self.directory / "postgres.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        os.chown(unfinished, self.account.uid, self.account.gid)
        options = ["-U", "postgres", "-E", "UTF8", "--locale=C", "-A", "trust", "--no-instructions"]
        made = self._run("initdb", "-D", str(unfinished), *options)
        if made.returncode:
            raise EmbeddedServerError(f"initdb failed: {last_line(made.stderr)}")
        unfinished.rename(self.data)

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(binaries() / program), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment(), cwd="/", check=False, **self.account.run_as()
        )

    def _launch(self) -> None:
        settings = [f"--{name}={value}" for name, value in self.settings.items()]
        place = ["-D", str(self.data), "-k", str(self.socket_directory)]
        self._spawn([str(binaries() / "postgres"), *place, *settings], **self.account.run_as())

    def _disown_stale_locks(self) -> None:
        """Put our number into lock files that no server holds.

        After `kill -9` the number in them may be a zombie's or a neighbour's, which Postgres would take for a server;
        that of its own parent it ignores, and still checks for orphans that use the shared memory.
        """
        for lock in (self.data / "postmaster.pid", self.socket_directory / f"{SOCKET_NAME}.lock"):
            if self.pid is None and lock.exists():
                _, _, rest = lock.read_text().partition("\n")
                lock.write_text(f"{os.getpid()}\n{rest}")

    def _make_socket_directory(self) -> None:
        place = self.socket_directory
        if place == self.data:
            return
        place.mkdir(mode=0o700, exist_ok=True)
        found = place.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() != self.account.uid:
            os.chown(place, self.account.uid, self.account.gid)
        elif not stat.S_ISDIR(found.st_mode) or found.st_uid != self.account.uid:
            raise EmbeddedServerError(f"{place} belongs to somebody else: remove it or use a shorter data directory")

    def _start_watch(self) -> None:
        if sys.executable:
            files = [str(self.directory / "users.lock"), str(self.directory / "watch.lock"), str(self.data)]
            Path(files[1]).touch()
            self._spawn([sys.executable, "-I", "-S", embedded_watch.__file__, *files])

    def _spawn(self, command: list[str], **options: Any) -> None:
        """A child in a session of its own: Ctrl-C at the terminal is not meant for it."""
        with self.log.open("ab") as log:
            self._children.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env=environment(),
                    start_new_session=True,
                    **options,
                )
            )

    def _await_ready(self) -> bool:
        """True when the server takes connections; False where orphans of a killed one kept it from starting."""
        ends_at = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self._has_failed():
                return self._explain_failure()
            if time.monotonic() > ends_at:
                raise EmbeddedServerError(f"the server did not get ready in {START_TIMEOUT_S:.0f} s, see {self.log}")
            time.sleep(POLL_S)
        return True

    def _explain_failure(self) -> bool:
        complaint = self._last_complaint()
        if "still in use" in complaint:
            return False
        raise EmbeddedServerError(f"the server did not start: {complaint}")

    def _is_ready(self) -> bool:
        try:
            status = (self.data / "postmaster.pid").read_text().split("\n")
        except OSError:
            return False
        return len(status) > 7 and status[7].strip() == "ready" and self._takes_connections()

    def _takes_connections(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket_directory / SOCKET_NAME))
            except OSError:
                return False
        return True

    def _has_failed(self) -> bool:
        return bool(self._children) and self._children[-1].poll() is not None

    def _last_complaint(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-20:]
        complaints = [line for line in lines if re.search(r"FATAL|PANIC|ERROR", line)]
        return last_line("\n".join(complaints or lines))
