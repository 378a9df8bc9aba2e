"""Watches the catalogue file and takes a changed one over whole or not at all.

The owner decides what taking over means (import into the store); this class only finds that the content
changed, reads it, and reports. A change of the time stamp without a change of content is no change.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from policy_service.settings.catalogue_file import MAX_BYTES, LoadedCatalogue, load_catalogue
from policy_service.settings.load import read_text
from policy_service.settings.problems import ConfigError, Problem

Applied = Callable[[LoadedCatalogue, bool], Awaitable[bool]]
"""Takes a catalogue over; the second argument is True where an import is forced (SIGHUP). False: not possible now
(the store is away), to be tried again at the next look."""
Refused = Callable[[ConfigError], None]
"""Hears that a changed file cannot be used; the catalogue in force stays."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the file looked like: (modified ns, size, inode), and the hash of its text."""

    stat: tuple[int, int, int] | None
    digest: str


class CatalogueWatch:
    """Follows one catalogue file.

    Args:
        path: the file.
        applied: called with each usable new content, again at each look until it says True.
        refused: called once for each unusable content.
        environment: variables of policy settings, for the checks of the file.
        poll_ms: how often `run` looks.
    """

    def __init__(
        self,
        path: str | Path,
        applied: Applied,
        refused: Refused,
        *,
        environment: Mapping[str, str] | None = None,
        poll_ms: int = 1_000,
    ) -> None:
        self._path = Path(path).expanduser()
        self._applied, self._refused = applied, refused
        self._environment = environment or {}
        self._poll_s = poll_ms / 1000
        self._seen = _Seen(None, "")
        self._forced = asyncio.Event()
        self._owed = False

    def remember(self, text: str) -> None:
        """Note content that is in force already, such as the one read at start."""
        self._seen = _Seen(self._stat(), _digest(text))

    def force(self) -> None:
        """Read and take over the file at the next opportunity, changed or not (handler of SIGHUP)."""
        self._forced.set()

    async def run(self) -> None:
        """Look at the file until cancelled; errors of `applied` end it."""
        while True:
            try:
                await asyncio.wait_for(self._forced.wait(), self._poll_s)
            except TimeoutError:
                await self.check()
            else:
                self._forced.clear()
                await self.check(force=True)

    async def check(self, *, force: bool = False) -> bool:
        """Look once; True where new content was taken over.

        Args:
            force: take the content over even where it did not change.
        """
        force = force or self._owed
        stat = self._stat()
        if not force and stat == self._seen.stat:
            return False
        try:
            self._require_file()
            return await self._read(stat, force)
        except ConfigError as error:
            self._report(error, stat)
            return False

    async def _read(self, stat: tuple[int, int, int] | None, force: bool) -> bool:
        text = await asyncio.to_thread(read_text, self._path, "catalogue", MAX_BYTES)
        digest = _digest(text)
        if digest == self._seen.digest and not force:
            self._seen = _Seen(stat, digest)
            return False
        loaded = await asyncio.to_thread(self._load, text)
        taken = await self._applied(loaded, force)
        self._owed = force and not taken
        self._seen = _Seen(stat, digest) if taken else self._seen
        return taken

    def _load(self, text: str) -> LoadedCatalogue:
        try:
            return load_catalogue(text, source=str(self._path), environment=self._environment)
        except ConfigError:
            raise
        except Exception as error:
            # A fault of ours with one file must not keep the next one from being followed.
            fault = Problem("catalogue", f"cannot be read: {error!r}", str(self._path), "", "report this file")
            raise ConfigError([fault]) from error

    def _require_file(self) -> None:
        """Reading a pipe or a device may never end, and nothing would be followed any more."""
        if self._path.exists() and not (self._path.is_file() or self._path.is_dir()):
            remedy = "put a file there"
            raise ConfigError([Problem("catalogue", "not a file", str(self._path), "a readable file", remedy)])

    def _report(self, error: ConfigError, stat: tuple[int, int, int] | None) -> None:
        """Unusable content is reported once, until the file changes again."""
        self._seen, self._owed = _Seen(stat, self._seen.digest), False
        self._refused(error)

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
