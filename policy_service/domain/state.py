"""Rows of state and the book in which a fold reads and writes them.

Every mechanism keeps its state in frozen rows, one class a mechanism (one table each). A fold never
touches a store: it gets a `StateBook` over the rows that were read (under lock, or from the view) and
leaves its writes in `changes`. Used by the commit, the view's projection and the memory store alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Protocol, Self, TypeVar, runtime_checkable

Key = tuple[str, ...]
"""(kind, canonical provider, further parts ...); the second part names the guard row."""


@runtime_checkable
class Row(Protocol):
    """What every state row offers. Rows are frozen dataclasses; a missing row reads as `default`."""

    KIND: ClassVar[str]

    @property
    def key(self) -> Key:
        """(KIND, provider, ...)."""
        ...

    @property
    def is_default(self) -> bool:
        """True when the row says nothing that its absence would not say (generation aside)."""
        ...

    @property
    def generation(self) -> int:
        """Fence number; rows of kinds without generations answer 1."""
        ...

    @classmethod
    def default(cls, key: Key) -> Self:
        """The row that absence stands for."""
        ...


R = TypeVar("R", bound=Row)


class StateBook:
    """Rows by key with the writes of one fold on top; reading an absent row gives its default."""

    __slots__ = ("_base", "changes")

    def __init__(self, base: Mapping[Key, Row] | None = None) -> None:
        self._base: Mapping[Key, Row] = {} if base is None else base
        self.changes: dict[Key, Row] = {}

    def get(self, kind: type[R], *parts: str) -> R:
        """Row of `kind` at `parts` = (provider, ...); never None."""
        key = (kind.KIND, *parts)
        row = self.changes.get(key)
        if row is None:
            row = self._base.get(key)
        if row is None:
            return kind.default(key)
        assert isinstance(row, kind)
        return row

    def put(self, row: Row) -> None:
        """Write `row`; a write that changes nothing is dropped, so `changes` lists real changes only."""
        key = row.key
        present = self.changes.get(key) or self._base.get(key) or type(row).default(key)
        if row != present:
            self.changes[key] = row

    def rows(self, kind: type[R]) -> Iterator[R]:
        """All rows of a kind, changes first; order is not defined."""
        yield from (row for row in self.changes.values() if isinstance(row, kind))
        for key, row in self._base.items():
            if isinstance(row, kind) and key not in self.changes:
                yield row
