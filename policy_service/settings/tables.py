"""Markdown tables of the generated references."""

from __future__ import annotations

from collections.abc import Iterable


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; a bar inside a cell is escaped."""
    head = tuple(head)
    lines = [_line(head), _line("---" for _ in head), *map(_line, rows)]
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    """`text` as code; nothing stays nothing. A text with a backtick gets the longer fence."""
    if not text:
        return ""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
