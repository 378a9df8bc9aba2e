"""The local spool: a SQLite file (WAL, synchronous FULL) that keeps acknowledged reports over an outage.

One directory a worker, held by a file lock; directories beside it whose owner is gone are adopted, so that a
restarted or renumbered worker loses nothing. Runs in one thread of its own: SQLite never blocks the event loop.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

from policy_service.application.ports import SpoolFullError

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS spool (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    event_id TEXT NOT NULL UNIQUE,
    payload BLOB NOT NULL
)
"""
_LOCK = "lock"
_FILE = "spool.db"


class SqliteSpool:
    """Spool in `root/<worker>`.

    Args:
        root: directory that all workers of this host share.
        worker: name of this worker's own directory.
        max_bytes: payload bytes kept at most; beyond it `append` refuses.
    """

    def __init__(self, root: Path, worker: str, max_bytes: int) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._lock, self._directory = _claim_free(root, worker)
        self._database = _connect(self._directory / _FILE)
        self._bytes, self._count = self._measure()

    @property
    def entries(self) -> int:
        """Events spooled and not removed."""
        return self._count

    @property
    def directory(self) -> Path:
        """This worker's own directory."""
        return self._directory

    async def append(self, entries: Sequence[tuple[str, bytes]]) -> None:
        """Write pairs in one durable transaction; a pair that is there already is kept."""
        await self._call(lambda: self._append(entries))

    async def remove(self, event_ids: Sequence[str]) -> None:
        """Forget committed events."""
        if self._count:
            await self._call(lambda: self._remove(event_ids))

    async def load(self) -> Sequence[tuple[str, bytes]]:
        """Own entries and those of adopted directories, oldest first within each."""
        return await self._call(self._load)

    async def close(self) -> None:
        """Close the file and give the lock back."""
        await self._call(self._database.close)
        self._thread.shutdown()
        self._lock.close()

    async def _call(self, work: Callable[[], T]) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        return await asyncio.shield(future)

    def _append(self, entries: Sequence[tuple[str, bytes]]) -> None:
        size = sum(len(payload) for _, payload in entries)
        if self._bytes + size > self._max_bytes:
            raise SpoolFullError(f"spool holds {self._bytes} of {self._max_bytes} bytes")
        with self._database:
            self._database.executemany("INSERT OR IGNORE INTO spool (event_id, payload) VALUES (?, ?)", entries)
        self._bytes, self._count = self._measure()

    def _remove(self, event_ids: Sequence[str]) -> None:
        with self._database:
            self._database.executemany("DELETE FROM spool WHERE event_id = ?", [(i,) for i in event_ids])
        self._bytes, self._count = self._measure()

    def _load(self) -> list[tuple[str, bytes]]:
        for directory, lock in _orphans(self._root, self._directory):
            self._adopt(directory)
            lock.close()
        rows = self._database.execute("SELECT event_id, payload FROM spool ORDER BY number")
        return [(event_id, payload) for event_id, payload in rows]

    def _adopt(self, directory: Path) -> None:
        """Copy another directory's entries durably before that directory is deleted."""
        source = _connect(directory / _FILE)
        rows = source.execute("SELECT event_id, payload FROM spool ORDER BY number").fetchall()
        source.close()
        with self._database:
            self._database.executemany("INSERT OR IGNORE INTO spool (event_id, payload) VALUES (?, ?)", rows)
        self._bytes, self._count = self._measure()
        shutil.rmtree(directory, ignore_errors=True)

    def _measure(self) -> tuple[int, int]:
        size, count = self._database.execute("SELECT coalesce(sum(length(payload)), 0), count(*) FROM spool").fetchone()
        return int(size), int(count)


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, check_same_thread=False)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute(_SCHEMA)
    return database


def _claim_free(root: Path, worker: str) -> tuple[IO[bytes], Path]:
    """Lock `root/worker`, or the first `root/worker-<n>` that nobody holds."""
    for attempt in range(1_000):
        directory = root / (worker if attempt == 0 else f"{worker}-{attempt}")
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (lock := _try_lock(directory)) is not None:
            return lock, directory
    raise OSError(f"no free spool directory below {root}")


def _try_lock(directory: Path) -> IO[bytes] | None:
    handle: IO[bytes] = (directory / _LOCK).open("ab")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        return None
    if not os.path.exists(directory / _LOCK):  # the owner before us deleted it after adoption
        handle.close()
        return None
    return handle


def _orphans(root: Path, own: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    for directory in sorted(path for path in root.iterdir() if path.is_dir() and path != own):
        if (directory / _FILE).exists() and (lock := _try_lock(directory)) is not None:
            yield directory, lock
