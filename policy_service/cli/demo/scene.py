"""Everything that a frame of the demo shows, gathered in one place for the live display and the plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from policy_service.cli.demo.board import Board
from policy_service.cli.demo.script import Pace
from policy_service.cli.demo.traffic import Score
from policy_service.cli.demo.upstreams import Upstreams


@dataclass(frozen=True, slots=True)
class Scene:
    """Both runs while they go on."""

    pace: Pace
    board: Board
    ours: Score
    theirs: Score
    our_upstreams: Upstreams
    their_upstreams: Upstreams
    added_ms: list[float]

    @property
    def elapsed_s(self) -> float:
        """Since the start of the traffic."""
        return time.monotonic() - self.board.started


class Screen(Protocol):
    """Where scenes are shown."""

    def every_s(self, pace: Pace) -> float:
        """Seconds between two frames."""

    def open(self) -> AbstractContextManager[Callable[[Scene], None]]:
        """Ready to show scenes, until the context ends."""
