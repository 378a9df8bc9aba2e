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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass(slots=True)
class _Asked:
    """Entries that somebody waits for; `refusal` says why they were not written."""

    entries: Sequence[tuple[str, bytes]]
    is_settled: bool = False
    refusal: str = ""


class SqliteSpool:
    """Spool in `root/<worker>`.

    Args:
        root: directory that all workers of this host share.
        worker: name of this worker's own directory.
        max_bytes: payload bytes kept at most; beyond it `append` refuses.
    """

    def __init__(self, root: Path, worker: str, max_bytes: int) -> None:
        self._root = root
        self._worker = worker
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._lock, self._directory = _claim_free(root, worker)
        self._database = _connect(self._directory / _FILE)
        self._asked: deque[_Asked] = deque()
        self._promised = 0
        # Measured once and counted from then on: a report must not cost more the more of them wait.
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
        """Write pairs in one durable transaction; a pair that is there already is kept.

        Raises:
            SpoolFullError: at the limit, or the disk does not take it; nothing was written.
        """
        own = _Asked(entries)
        self._asked.append(own)
        await self._call(lambda: self._write(own))

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

    def _write(self, own: _Asked) -> None:
        if not own.is_settled:
            self._write_asked()
        if own.refusal:
            raise SpoolFullError(own.refusal)

    def _write_asked(self) -> None:
        """Write what everybody has asked for by now, in one transaction: a flush to disk costs the same for all."""
        asked = [self._asked.popleft() for _ in range(len(self._asked))]
        taken = [each for each in asked if self._has_room(each)]
        try:
            self._return_to_disk()
            self._insert([entry for each in taken for entry in each.entries])
        except Exception as error:
            for each in taken:
                each.refusal = f"the spool cannot be written: {getattr(error, 'strerror', None) or error}"
        finally:
            self._promised = 0
            for each in asked:
                each.is_settled = True

    def _has_room(self, asked: _Asked) -> bool:
        size = sum(len(payload) for _, payload in asked.entries)
        if self._bytes + self._promised + size > self._max_bytes:
            asked.refusal = f"spool holds {self._bytes} of {self._max_bytes} bytes"
            return False
        self._promised += size
        return True

    def _insert(self, entries: Sequence[tuple[str, bytes]]) -> None:
        with self._database:
            added = [len(payload) for each, payload in entries if self._is_added(each, payload)]
        self._bytes += sum(added)
        self._count += len(added)

    def _is_added(self, event_id: str, payload: bytes) -> bool:
        statement = "INSERT OR IGNORE INTO spool (event_id, payload) VALUES (?, ?)"
        return self._database.execute(statement, (event_id, payload)).rowcount == 1

    def _return_to_disk(self) -> None:
        """Where the directory was deleted under us, start a new one with what the open, nameless file still holds."""
        if (self._directory / _FILE).exists():
            return
        rows = self._rows()
        lock, directory = _claim_free(self._root, self._worker)
        lost, self._database = self._database, _connect(directory / _FILE)
        lost.close()
        self._lock.close()
        self._lock, self._directory = lock, directory
        self._bytes = self._count = 0
        self._insert(rows)

    def _remove(self, event_ids: Sequence[str]) -> None:
        with self._database:
            removed = [size for each in event_ids for size in self._delete(each)]
        self._bytes -= sum(removed)
        self._count -= len(removed)

    def _delete(self, event_id: str) -> list[int]:
        rows = self._database.execute("DELETE FROM spool WHERE event_id = ? RETURNING length(payload)", (event_id,))
        return [size for (size,) in rows]

    def _load(self) -> list[tuple[str, bytes]]:
        for directory, lock in _orphans(self._root, self._directory):
            self._adopt(directory)
            lock.close()
        return self._rows()

    def _rows(self) -> list[tuple[str, bytes]]:
        return self._database.execute("SELECT event_id, payload FROM spool ORDER BY number").fetchall()

    def _adopt(self, directory: Path) -> None:
        """Copy another directory's entries durably before that directory is deleted."""
        source = _connect(directory / _FILE)
        rows = source.execute("SELECT event_id, payload FROM spool ORDER BY number").fetchall()
        source.close()
        self._insert(rows)
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
