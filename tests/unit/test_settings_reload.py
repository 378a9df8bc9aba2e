"""Following a catalogue file: only changed content is taken over, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from policy_service.settings.catalogue_file import LoadedCatalogue
from policy_service.settings.problems import ConfigError
from policy_service.settings.reload import CatalogueWatch


class Owner:
    """Takes catalogues over, or cannot."""

    def __init__(self, path: Path) -> None:
        self.taken: list[tuple[int, bool]] = []
        self.refused: list[ConfigError] = []
        self.is_able = True
        self.watch = CatalogueWatch(path, self._applied, self.refused.append)

    async def _applied(self, loaded: LoadedCatalogue, forced: bool) -> bool:
        if self.is_able:
            self.taken.append((len(loaded.catalogue.connections), forced))
        return self.is_able


def write(path: Path, count: int) -> str:
    """A catalogue with `count` connections and a time stamp of its own."""
    text = "connections:\n" + "".join(f"  - {{id: c{i}, provider: openai}}\n" for i in range(count))
    return write_text(path, text)


def write_text(path: Path, text: str) -> str:
    stamp = path.stat().st_mtime + 1 if path.exists() else 1_000_000
    path.write_text(text, encoding="utf-8")
    os.utime(path, (stamp, stamp))
    return text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalogue.yaml"


async def test_new_content_is_taken_over_once(path: Path) -> None:
    owner = Owner(path)
    write(path, 1)

    assert [await owner.watch.check() for _ in range(3)] == [True, False, False]
    assert owner.taken == [(1, False)]


async def test_content_known_from_the_start_is_not_taken_over_again(path: Path) -> None:
    owner = Owner(path)
    owner.watch.remember(write(path, 1))

    assert await owner.watch.check() is False
    write(path, 2)
    assert await owner.watch.check() is True
    assert owner.taken == [(2, False)]


async def test_a_new_time_stamp_alone_is_no_change(path: Path) -> None:
    owner = Owner(path)
    write(path, 1)
    await owner.watch.check()
    write(path, 1)

    assert await owner.watch.check() is False


async def test_unusable_content_changes_nothing_and_is_reported_once(path: Path) -> None:
    owner = Owner(path)
    write(path, 1)
    await owner.watch.check()
    write_text(path, "connections: [{id: c0}]\n")

    assert [await owner.watch.check() for _ in range(3)] == [False] * 3
    assert owner.taken == [(1, False)]
    assert len(owner.refused) == 1


async def test_a_file_that_vanishes_is_reported_once_and_followed_when_it_is_back(path: Path) -> None:
    owner = Owner(path)
    write(path, 1)
    await owner.watch.check()
    path.unlink()
    await owner.watch.check()
    await owner.watch.check()
    assert len(owner.refused) == 1

    write(path, 3)
    assert await owner.watch.check() is True
    assert owner.taken[-1] == (3, False)


async def test_content_is_offered_again_until_it_is_taken(path: Path) -> None:
    owner = Owner(path)
    owner.is_able = False
    write(path, 1)
    assert await owner.watch.check() is False

    owner.is_able = True
    assert await owner.watch.check() is True


async def test_a_forced_look_takes_over_unchanged_content(path: Path) -> None:
    owner = Owner(path)
    owner.watch.remember(write(path, 1))

    assert await owner.watch.check(force=True) is True
    assert owner.taken == [(1, True)]


async def test_a_forced_look_that_could_not_be_taken_stays_forced(path: Path) -> None:
    owner = Owner(path)
    owner.watch.remember(write(path, 1))
    owner.is_able = False
    await owner.watch.check(force=True)
    owner.is_able = True

    assert await owner.watch.check() is True
    assert owner.taken == [(1, True)]
