"""Vectors of the circuit breaker (spec/breaker.md)."""

from __future__ import annotations

from tests.vectors.harness import Vector
from tests.vectors.world_events import Player


def run(vector: Vector) -> None:
    """Play one vector; raises AssertionError on a mismatch."""
    Player(vector.get("given", {})).play(vector)
