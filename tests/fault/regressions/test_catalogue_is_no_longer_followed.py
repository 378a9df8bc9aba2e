"""A pipe in the place of the catalogue file: the watch read it for ever, and heard neither changes nor SIGHUP again."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from policy_service.settings import reload
from policy_service.settings.catalogue_file import LoadedCatalogue
from policy_service.settings.problems import ConfigError
from policy_service.settings.reload import CatalogueWatch


async def test_a_pipe_is_refused_and_the_next_file_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.yaml"
    taken: list[LoadedCatalogue] = []
    refused: list[ConfigError] = []

    async def apply(loaded: LoadedCatalogue, force: bool) -> bool:
        taken.append(loaded)
        return True

    watch = CatalogueWatch(path, apply, refused.append)
    os.mkfifo(path)
    async with asyncio.timeout(5):
        assert not await watch.check(force=True)
        assert "not a file" in str(refused[0])
        path.unlink()
        path.write_text("settings: {}\n")
        assert await watch.check()
    assert len(taken) == 1


async def test_a_fault_with_one_file_leaves_the_next_one_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "catalogue.yaml"
    refused: list[ConfigError] = []

    async def apply(loaded: LoadedCatalogue, force: bool) -> bool:
        return True

    def broken(text: str, **given: object) -> LoadedCatalogue:
        raise ValueError("a fault of ours")

    watch = CatalogueWatch(path, apply, refused.append)
    path.write_text("settings: {}\n")
    with monkeypatch.context() as patched:
        patched.setattr(reload, "load_catalogue", broken)
        assert not await watch.check()
    assert "a fault of ours" in str(refused[0])
    path.write_text("settings: {affinity.ttl_ms: 60001}\n")
    assert await watch.check()
