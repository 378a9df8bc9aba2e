"""A bounded memory of a pure function: gateways send and get the same pools again and again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Memo(Generic[K, V]):
    """Remembers up to `limit` results and then starts anew, which costs less than keeping an order of use.

    Args:
        make: pure function of the key; never gives None.
    """

    __slots__ = ("_known", "_limit", "_make")

    def __init__(self, make: Callable[[K], V], limit: int = 2_048) -> None:
        self._make = make
        self._limit = limit
        self._known: dict[K, V] = {}

    def __call__(self, key: K) -> V:
        """The result for a key."""
        found = self._known.get(key)
        return found if found is not None else self._learn(key)

    def __len__(self) -> int:
        return len(self._known)

    def _learn(self, key: K) -> V:
        value = self._make(key)
        if len(self._known) >= self._limit:
            self._known.clear()
        self._known[key] = value
        return value
