"""The types hold what they promise and catch what they should: mypy over two files, one right, one wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

from tests.docs_pages import ROOT

HERE = Path(__file__).parent / "typing"
_MARK = re.compile(r"#\s*error: ([\w-]+)\s*$")
_FOUND = re.compile(r"^(?P<file>[^:]+):(?P<line>\d+): error: .*\[(?P<code>[\w-]+)\]$", re.MULTILINE)


def marked(file: Path) -> set[tuple[int, str]]:
    """Lines with the error that they are to have."""
    lines = enumerate(file.read_text().splitlines(), 1)
    return {(number, mark[1]) for number, line in lines if (mark := _MARK.search(line))}


def found(file: Path) -> set[tuple[int, str]]:
    """Lines with the errors that mypy finds."""
    report, complaints, _ = api.run(["--config-file", str(ROOT / "pyproject.toml"), "--no-pretty", str(file)])
    assert not complaints, complaints
    hits = list(_FOUND.finditer(report))
    assert all(Path(hit["file"]).name == file.name for hit in hits), report
    return {(int(hit["line"]), hit["code"]) for hit in hits}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["right.py", "wrong.py"])
def test_types_are_as_marked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert found(HERE / name) == marked(HERE / name)


def test_the_wrong_file_marks_enough() -> None:
    assert len(marked(HERE / "wrong.py")) >= 10
    assert marked(HERE / "right.py") == set()
