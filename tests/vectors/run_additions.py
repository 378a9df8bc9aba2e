"""Vectors of the service's own additions (spec/README.md, "Our additions")."""

from __future__ import annotations

from tests.vectors.harness import Vector
from tests.vectors.pool_world import play_pool
from tests.vectors.world_events import Player


def run(vector: Vector) -> None:
    """Play one vector; raises AssertionError on a mismatch."""
    given = vector.get("given", {})
    if "pool" in given:
        play_pool(vector)
    else:
        remembers = bool(given.get("enabled") or given.get("settings", {}).get("provider_cooldown.enabled"))
        # Failures of the provider cooldown's vectors are pool attempts, those of the connection's are direct calls.
        Player(given, default_connection="c1", pool_attempt=remembers).play(vector)
