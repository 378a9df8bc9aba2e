"""What the commands print: results on standard output, everything else on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policy_service.settings.problems import Problem


def say(text: str) -> None:
    """A line of the result."""
    sys.stdout.write(text + "\n")


def note(text: str) -> None:
    """A line beside the result."""
    sys.stderr.write(text + "\n")


def counted(count: int, noun: str) -> str:
    """`1 route`, `2 routes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def problems(found: Iterable[Problem], *, level: str = "error") -> None:
    """Problems, one a line, all of them."""
    for problem in found:
        note(f"{level}: {problem.text()}")


def warnings(texts: Iterable[str]) -> None:
    """Warnings, one a line."""
    for text in texts:
        note(f"warning: {text}")


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Shows that something is going on, where a person is watching."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield
