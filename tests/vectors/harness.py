"""Loads vector files and runs each vector through the runner of its kind.

A file `<name>*.yaml` is run by `tests/vectors/run_<name>.py`, whose `run(vector)` raises AssertionError on a
mismatch. Kinds without a runner are reported, never passed over in silence.
"""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).parent / "data"
OWN = Path(__file__).parent / "own"
"""Vectors of the project's own for sentences of the specification that those of `DATA` leave untested."""
Vector = dict[str, Any]


def kinds() -> list[str]:
    """Names that have a runner module, longest first."""
    found = (path.stem.removeprefix("run_") for path in Path(__file__).parent.glob("run_*.py"))
    return sorted(found, key=lambda name: -len(name))


def kind_of(path: Path) -> str | None:
    """Runner name for a file: the longest runner name that the file name contains."""
    return next((name for name in kinds() if name in path.stem), None)


def load(path: Path) -> list[Vector]:
    """Vectors of one file."""
    return list(yaml.safe_load(path.read_text(encoding="utf-8")) or [])


def runner(kind: str) -> Callable[[Vector], None]:
    """`run` of the runner module of a kind."""
    module = importlib.import_module(f"tests.vectors.run_{kind}")
    run: Callable[[Vector], None] = module.run
    return run


@dataclass
class Report:
    """Result of one folder."""

    passed: dict[str, int] = field(default_factory=dict)
    failed: list[tuple[str, str, str]] = field(default_factory=list)
    without_runner: dict[str, int] = field(default_factory=dict)


def vectors(folder: Path) -> Iterator[tuple[Path, Vector]]:
    """Every vector below a folder, with its file."""
    for path in sorted([*folder.rglob("*.yaml"), *folder.rglob("*.yml")]):
        for vector in load(path):
            yield path, vector


def run_folder(folder: Path) -> Report:
    """Run every vector below `folder`."""
    report = Report()
    for path, vector in vectors(folder):
        kind = kind_of(path)
        if kind is None:
            report.without_runner[path.stem] = report.without_runner.get(path.stem, 0) + 1
            continue
        try:
            runner(kind)(vector)
        except Exception as error:  # a vector that crashes is a failed vector
            detail = str(error) or traceback.format_exc(limit=-2)
            report.failed.append((path.stem, str(vector.get("id")), detail))
        else:
            report.passed[path.stem] = report.passed.get(path.stem, 0) + 1
    return report
