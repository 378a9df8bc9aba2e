"""Reads YAML that may come from anyone: safe tags only, bounded size, no duplicate keys, no alias bombs.

The result remembers the line of every value, so that a problem can name its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from policy_service.settings.problems import ConfigError, Location, Problem, join, shown

MAX_BYTES = 4 * 1024 * 1024
MAX_NODES = 500_000
MAX_DEPTH = 64
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):  # type: ignore[misc]
    """Safe tags only, and every number of JSON: YAML 1.1 takes `1e-05` for a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+\Z"), list("-+0123456789")
)


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed document; `lines` by location."""

    data: Any
    source: str
    lines: dict[Location, int] = field(default_factory=dict)

    def locate(self, location: Location) -> str:
        """`file:line` of a location, or of the nearest one around it."""
        while location and location not in self.lines:
            location = location[:-1]
        line = self.lines.get(location)
        return f"{self.source}:{line}" if line else self.source


def parse(text: str, *, source: str, max_bytes: int = MAX_BYTES) -> Document:
    """Parse one YAML document.

    Args:
        text: the YAML (or JSON) text.
        source: its name for messages.
        max_bytes: limit of its size in UTF-8 bytes.

    Raises:
        ConfigError: too large, not YAML, duplicate keys, unsafe tags, too deep, or aliases that grow without bound.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        remedy = "split the file or remove what is not needed"
        raise ConfigError(
            [Problem("document", "too large", f"{size} bytes", f"at most {max_bytes} bytes", remedy, source)]
        )
    try:
        return _parse(text, source)
    except yaml.YAMLError as error:
        raise ConfigError([_syntax(error, source)]) from None
    except RecursionError:
        raise ConfigError([_too_deep(source)]) from None
    except (ValueError, TypeError) as error:
        raise ConfigError([Problem("document", f"unusable value: {error}", "", "", "quote it", source)]) from None


def _parse(text: str, source: str) -> Document:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return Document(None, source)
        walk = _Walk(source)
        walk.visit(node, (), 0)
        if walk.problems:
            raise ConfigError(walk.problems)
        return Document(loader.construct_document(node), source, walk.lines)
    finally:
        loader.dispose()


class _Walk:
    """Goes over the composed nodes before anything is constructed from them."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[Location, int] = {}
        self.problems: list[Problem] = []
        self._visited = 0
        self._open: set[int] = set()

    def visit(self, node: yaml.Node, location: Location, depth: int) -> None:
        self._visited += 1
        self._check_bounds(node, depth)
        self.lines[location] = node.start_mark.line + 1
        self._open.add(id(node))
        for part, child in self._children(node, location):
            self.visit(child, (*location, part), depth + 1)
        self._open.discard(id(node))

    def _check_bounds(self, node: yaml.Node, depth: int) -> None:
        where = f"{self.source}:{node.start_mark.line + 1}"
        if self._visited > MAX_NODES or id(node) in self._open:
            allowed = f"at most {MAX_NODES} values once aliases are expanded, and no alias inside its own anchor"
            raise ConfigError(
                [Problem("document", "aliases expand without bound", "", allowed, "write the values out", where)]
            )
        if depth > MAX_DEPTH:
            raise ConfigError([_too_deep(where)])

    def _children(self, node: yaml.Node, location: Location) -> Iterator[tuple[int | str, yaml.Node]]:
        if isinstance(node, yaml.SequenceNode):
            yield from enumerate(node.value)
        elif isinstance(node, yaml.MappingNode):
            yield from self._entries(node, location)

    def _entries(self, node: yaml.MappingNode, location: Location) -> Iterator[tuple[str, yaml.Node]]:
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(location, "a key must be a plain text", shown(key.tag), "write a simple key", line)
                continue
            name = str(key.value)
            if name in first and name != "<<":
                here = (*location, name)
                self._refuse(here, f"key given twice, first in line {first[name]}", name, "keep one of them", line)
            first.setdefault(name, line)
            yield name, value

    def _refuse(self, location: Location, problem: str, given: str, remedy: str, line: int) -> None:
        where = f"{self.source}:{line}"
        self.problems.append(Problem(join(location) or "document", problem, given, "each key once", remedy, where))


def _syntax(error: yaml.YAMLError, source: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    where = f"{source}:{mark.line + 1}" if mark else source
    reason = getattr(error, "problem", None) or str(error).split("\n", 1)[0]
    return Problem(
        "document", f"not valid YAML: {reason}", "", "one YAML document of plain values", "correct the line", where
    )


def _too_deep(where: str) -> Problem:
    return Problem("document", "nested too deeply", "", f"at most {MAX_DEPTH} levels", "flatten it", where)
