"""Stops an embedded server when its last user is gone, `kill -9` included. Run as a script, standard library only.

Every user holds a shared lock on one file for as long as it lives; the kernel gives it back when the user dies. The
watch waits for the exclusive lock: when it gets it, nobody is left.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

STOP_WAIT_S = 60.0
POLL_S = 0.02


def postmaster_pid(data: Path) -> int | None:
    """Process id in `postmaster.pid`, where that process is a living Postgres; None otherwise."""
    try:
        pid = int((data / "postmaster.pid").read_text().split("\n", 1)[0])
    except (OSError, ValueError):
        return None
    return pid if is_postgres(pid) else None


def is_postgres(pid: int) -> bool:
    """True for a running process named postgres (after a reboot the number may be anyone's)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return not Path("/proc/self").exists() and _answers(pid)
    name, _, rest = status.partition("(")[2].rpartition(")")
    return name == "postgres" and not rest.startswith(" Z")


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def stop(data: Path) -> bool:
    """Fast shutdown; True when the server is gone."""
    pid = postmaster_pid(data)
    if pid is None:
        return True
    os.kill(pid, signal.SIGINT)
    ends_at = time.monotonic() + STOP_WAIT_S
    while is_postgres(pid) and time.monotonic() < ends_at:
        time.sleep(POLL_S)
    return not is_postgres(pid)


def watch(users: Path, turn: Path, data: Path) -> None:
    """Wait for the last user to go, then stop the server. At most one watch a directory; opens files that exist
    only, because a directory may be removed while the watch is starting."""
    with turn.open() as mine, users.open() as everyone:
        try:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        fcntl.flock(everyone, fcntl.LOCK_EX)
        stop(data)


if __name__ == "__main__":
    with suppress(FileNotFoundError):
        watch(*(Path(argument) for argument in sys.argv[1:4]))
