"""The project's copy of every vector passes, and so do the vectors of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vectors.harness import DATA, OWN, Vector, kind_of, runner, vectors

CASES = [(path, vector) for folder in (DATA, OWN) for path, vector in vectors(folder) if kind_of(path)]


@pytest.mark.parametrize(("path", "vector"), CASES, ids=[f"{p.stem}-{v['id']}" for p, v in CASES])
def test_vector(path: Path, vector: Vector) -> None:
    kind = kind_of(path)
    assert kind is not None
    runner(kind)(vector)
