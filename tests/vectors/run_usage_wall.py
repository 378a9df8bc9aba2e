"""Runs the vectors of spec/usage_wall.md."""

from __future__ import annotations

from tests.vectors.harness import Vector
from tests.vectors.matching import assert_expected
from tests.vectors.worlds_usage_wall import Fields, WallWorld


def run(vector: Vector) -> None:
    """Raise AssertionError where an answer differs."""
    world = WallWorld(vector.get("given") or {})
    answer: Fields = {}
    for step in vector["steps"]:
        answer = world.run(step)
        assert_expected(step.get("expect", {}), answer, f"at {step.get('at_ms')}")
    assert_expected(vector["expect"], answer, "result")
