"""Vectors of the provider cooldown (spec/provider_cooldown.md)."""

from __future__ import annotations

from tests.vectors.harness import Vector
from tests.vectors.world_events import Player


def run(vector: Vector) -> None:
    """Play one vector; failures and successes are pool attempts unless they say otherwise."""
    Player(vector.get("given", {}), pool_attempt=True).play(vector)
