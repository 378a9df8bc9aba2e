"""A full disk answered INTERNAL to reporters; a deleted spool directory went on taking reports that nothing kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from policy_service.application.ports import SpoolFullError
from policy_service.storage.spool import SqliteSpool


async def test_a_full_disk_is_a_full_spool(tmp_path: Path) -> None:
    spool = SqliteSpool(tmp_path, "r1", 1_000_000)
    spool._database.execute("PRAGMA max_page_count = 8")
    with pytest.raises(SpoolFullError, match="cannot be written"):
        await spool.append([("large", b"x" * 100_000)])
    await spool.append([("small", b"x")])
    assert await spool.load() == [("small", b"x")]
    await spool.close()


async def test_a_deleted_directory_is_made_anew_with_what_it_held(tmp_path: Path) -> None:
    spool = SqliteSpool(tmp_path / "spool", "r1", 1_000_000)
    await spool.append([("before", b"1")])
    shutil.rmtree(tmp_path / "spool")
    await spool.append([("after", b"2")])
    await spool.remove(["unknown"])
    await spool.close()
    next_life = SqliteSpool(tmp_path / "spool", "r1", 1_000_000)
    assert await next_life.load() == [("before", b"1"), ("after", b"2")]
    assert next_life.entries == 2
    await next_life.close()


async def test_a_directory_that_cannot_be_made_again_names_no_path(tmp_path: Path) -> None:
    spool = SqliteSpool(tmp_path / "spool", "r1", 1_000_000)
    shutil.rmtree(tmp_path / "spool")
    (tmp_path / "spool").write_text("in the way")
    with pytest.raises(SpoolFullError) as refused:
        await spool.append([("e", b"1")])
    assert str(tmp_path) not in str(refused.value)
    (tmp_path / "spool").unlink()
    await spool.append([("e", b"1")])
    assert spool.entries == 1
    await spool.close()
