"""Rotation state of strategies: kept per replica in a bounded map (spec/strategies.md section 2)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

S = TypeVar("S")


class BoundedStates(Generic[S]):
    """State by route name, least recently used out."""

    def __init__(self, initial: S, limit: int = 1_000) -> None:
        self._initial = initial
        self._limit = limit
        self._states: OrderedDict[str, S] = OrderedDict()

    def get(self, name: str) -> S:
        """State of a route; the initial one where there is none."""
        return self._states.get(name, self._initial)

    def put(self, name: str, state: S) -> None:
        """Remember, dropping the least recently used beyond the limit."""
        self._states[name] = state
        self._states.move_to_end(name)
        if len(self._states) > self._limit:
            self._states.popitem(last=False)

    def __len__(self) -> int:
        return len(self._states)
