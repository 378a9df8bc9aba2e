"""Port of the session pins (spec/affinity.md section 3, fleet.md section 6).

Every change is one statement, conditional on the connection and version that the decision saw; no locks, no guard
rows, nothing announced. A version is never given out twice, so that a pin which was deleted and made anew is
another pin; a refresh keeps the version.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

from policy_service.domain.affinity import PinRow
from policy_service.domain.ids import DurationMs, Instant


class PinKey(NamedTuple):
    """Primary key of a pin."""

    api_key_id: str
    provider: str
    session_hash: str


class SavedPin(NamedTuple):
    """The live pin after an insert or a move; `is_own` False: another writer was first."""

    row: PinRow
    is_own: bool


class PinSeen(NamedTuple):
    """What a decision saw of a pin. Version 0, of a pin that had not been stored: any version on that connection."""

    connection: str
    version: int


class PinStore(Protocol):
    """Pins of the fleet. Every method raises StoreUnavailableError when the store is away or late."""

    async def find(self, key: PinKey, *, timeout_ms: DurationMs) -> PinRow | None:
        """The live pin; None where there is none, also where it is over."""
        ...

    async def insert(self, row: PinRow, *, timeout_ms: DurationMs) -> SavedPin | None:
        """Write `row` unless a live one exists. None: there is none afterwards either (its own time is over)."""
        ...

    async def move(self, row: PinRow, seen: PinSeen, *, timeout_ms: DurationMs) -> SavedPin | None:
        """Write `row` over the pin that was seen. None: the pin is gone."""
        ...

    async def delete(self, key: PinKey, seen: PinSeen, *, timeout_ms: DurationMs) -> bool:
        """Delete the pin that was seen; False where it is another by now."""
        ...

    async def delete_all(self, provider: str, connection: str, *, timeout_ms: DurationMs) -> int:
        """Delete every pin of a provider and connection, empty: any; how many."""
        ...

    async def refresh(
        self, key: PinKey, seen: PinSeen, at: Instant, ttl_ms: DurationMs, *, timeout_ms: DurationMs
    ) -> PinRow | None:
        """The pin as it lives on: used at `at`, ending at `at` + `ttl_ms` at the earliest; deadlines only grow.

        A pin used less than `refresh_interval(ttl_ms)` before `at` stays as it is. Returns the live row, whoever's it
        is; None where there is none.
        """
        ...

    async def count(self, connections: Collection[str], *, timeout_ms: DurationMs) -> Mapping[str, int]:
        """Live pins by connection."""
        ...

    async def sweep(self, *, timeout_ms: DurationMs) -> int:
        """Delete pins that are over; how many."""
        ...


def key_of(row: PinRow) -> PinKey:
    """Key of a row."""
    return PinKey(row.api_key_id, row.provider, row.session_hash)
