"""Randomness of a running replica: strategy draws and fresh ids."""

from __future__ import annotations

import os
import random
import time

ID_RANDOM_DIGITS = 20
POOL_BYTES = 640
"""Random bytes are drawn for many ids at a time: a call to the system for each would cost more than the rest."""


class SystemEntropy:
    """Draws from a seeded generator (the operating system's seed by default); ids from the system."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._bytes = ""

    def draw(self) -> float:
        """Uniform in [0, 1)."""
        return self._random.random()

    def new_id(self) -> str:
        """32 hex digits: 48 bits of host time, so that ids sort roughly by age, then 80 random bits."""
        if len(self._bytes) < ID_RANDOM_DIGITS:
            self._bytes = os.urandom(POOL_BYTES).hex()
        taken, self._bytes = self._bytes[:ID_RANDOM_DIGITS], self._bytes[ID_RANDOM_DIGITS:]
        return f"{time.time_ns() // 1_000_000:012x}{taken}"
