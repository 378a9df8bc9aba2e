"""Randomness of a running replica: strategy draws and fresh ids."""

from __future__ import annotations

import os
import random
import time


class SystemEntropy:
    """Draws from a seeded generator (the operating system's seed by default); ids from the system."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def draw(self) -> float:
        """Uniform in [0, 1)."""
        return self._random.random()

    def new_id(self) -> str:
        """32 hex digits: 48 bits of host time, so that ids sort roughly by age, then 80 random bits."""
        return f"{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"
