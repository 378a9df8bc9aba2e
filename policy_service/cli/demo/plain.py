"""The demo without a terminal: a line now and then, for logs and pipes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from policy_service.cli.demo.display import words
from policy_service.cli.demo.scene import Scene
from policy_service.cli.demo.script import CONNECTIONS, Pace
from policy_service.cli.output import say

_LINES: Final = 20
"""Lines of a run."""


class PlainScreen:
    """A screen for logs and pipes."""

    def every_s(self, pace: Pace) -> float:
        """The same number of lines, however long the run is."""
        return pace.length_s / _LINES

    @contextmanager
    def open(self) -> Iterator[Callable[[Scene], None]]:
        """Print one line a scene."""
        yield _print


def line(scene: Scene) -> str:
    """The state of the scene in one line."""
    ours, theirs = scene.ours.failures.total(), scene.theirs.failures.total()
    parts = [
        f"{scene.elapsed_s:5.1f} s",
        f"{scene.ours.requests} requests",
        f"client failures {ours} with, {theirs} without",
        f"wasted calls {scene.our_upstreams.wasted} with, {scene.their_upstreams.wasted} without",
        *_breakers(scene),
        *_blocks(scene),
    ]
    return " | ".join(parts)


def _breakers(scene: Scene) -> list[str]:
    states = {provider: scene.board.breaker(provider) for provider in scene.board.breakers}
    return [f"breaker {name} {breaker.state}" for name, breaker in states.items() if breaker.state != "CLOSED"]


def _blocks(scene: Scene) -> list[str]:
    blocks = {connection: scene.board.block(connection) for connection in CONNECTIONS}
    return [f"{name} {_said(scene, block.reason, block.until)}" for name, block in blocks.items() if block]


def _said(scene: Scene, reason: str, until: int) -> str:
    return words(reason) + (f" {scene.board.left_ms(until) / 1000:.1f} s" if until else "")


def _print(scene: Scene) -> None:
    say(line(scene))
    sys.stdout.flush()
