"""Addresses of the server: TCP that says clearly why it cannot be had, and Unix sockets that never steal.

grpc unlinks whatever lies at a socket path, a living server's socket included, so ownership is settled here first.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from policy_service.transport.grpc.tls import ListenError

SOCKET_MODE = 0o660


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """Host and port; port 0 takes a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> TcpAddress:
        """From `host:port` or `[v6]:port`."""
        host, _, port = text.rpartition(":")
        return cls(host.strip("[]"), int(port))

    @property
    def text(self) -> str:
        """As grpc wants it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def require_free_port(address: TcpAddress) -> None:
    """Raise ListenError if nobody can listen there.

    The probe does not share the port: with SO_REUSEPORT a second service would silently take half of the calls. Where
    several workers share a port, their parent calls this once before it starts them.
    """
    try:
        family, kind, proto, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen()
    except OSError as error:
        raise ListenError(f"cannot listen on {address.text}: {_cause(error)}", _remedy(error)) from error


def _cause(error: OSError) -> str:
    return "address in use" if error.errno == errno.EADDRINUSE else (error.strerror or str(error))


def _remedy(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "stop the other process or choose another port (listen.tcp)"
    return "check the host and port of listen.tcp"


class UnixSocket:
    """A Unix socket path that this process owns while the object is held.

    Raises:
        ListenError: on construction, if somebody listens there, or the path cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _locked(path)
        try:
            _clear_stale(path)
        except ListenError:
            os.close(self._lock)
            raise
        self._inode: int | None = None

    @property
    def text(self) -> str:
        """As grpc wants it."""
        return f"unix:{self.path}"

    def opened(self) -> None:
        """Set the mode once the server has bound the path."""
        self.path.chmod(SOCKET_MODE)
        self._inode = self.path.stat().st_ino

    def close(self) -> None:
        """Remove the socket if it is still this one, and let the path go."""
        with suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()
        os.close(self._lock)


@contextmanager
def private_umask() -> Iterator[None]:
    """New files get no more than SOCKET_MODE: the socket is never open to others, not even between bind and chmod."""
    before = os.umask(0o777 & ~SOCKET_MODE)
    try:
        yield
    finally:
        os.umask(before)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _locked(path: Path) -> int:
    try:
        lock = os.open(_lock_path(path), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ListenError(f"cannot listen on {path}: {error.strerror}", "choose a writable directory") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise _in_use(path) from error
    return lock


def _clear_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"cannot listen on {path}: it is a file, not a socket", "choose another path (listen.unix)")
    if _somebody_listens(path):
        raise _in_use(path)
    path.unlink()


def _somebody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            # A full backlog or a slow peer is somebody; better to refuse than to steal.
            return True
    return True


def _in_use(path: Path) -> ListenError:
    return ListenError(f"cannot listen on {path}: another server listens there", "stop it or choose another path")
