"""Port of the lease rows (spec/leases.md sections 3 and 4, fleet.md section 6).

One guarded transaction serves every operation: lock the owners and connections at hand, then read their rows and
database time, run a pure function on them, write, commit. What the operations are is said in `lease_book`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from policy_service.domain.facts import Fact
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.lease import LeaseRow

T = TypeVar("T")

GRANT_KEPT_MS: DurationMs = 600_000
"""A repeated request id within this time gets its own grant (fleet.md section 1)."""
CONFLICTS = 3
"""Times that an operation is tried when another writer takes its owner or connection in between."""


@dataclass(frozen=True, slots=True)
class LeaseScope:
    """What an operation locks and reads.

    Of an owner: the active row, the one with the highest generation, and the newest of `generation`. Of a connection:
    the active row and the newest one. `everything` adds every active row there is; a unit gets, and locks, only the
    lapsed ones that nobody else is working on.
    """

    owners: tuple[str, ...] = ()
    connections: tuple[str, ...] = ()
    generation: int = 0
    listed_in: int = 0
    """Catalogue revision whose time of creation is wanted; 0: none."""
    everything: bool = False
    event_id: str = ""
    """Idempotency key whose grant is wanted; of that grant's generation the newest row is read too."""


@dataclass(frozen=True, slots=True)
class LeaseSight:
    """What an operation sees under its locks. `now` is `clock_timestamp()` read after them."""

    rows: tuple[LeaseRow, ...]
    now: Instant
    epoch: int = 1
    """Fleet epoch; above 1 the database has failed over before."""
    raised_at: Instant = 0
    """When the epoch last rose."""
    newest_revision: int = 0
    listed_at: Instant | None = None
    """When the revision `listed_in` of the scope was stored."""
    granted: int | None = None
    """Generation that the call `event_id` of the scope was granted, not longer than GRANT_KEPT_MS ago."""


@dataclass(frozen=True, slots=True)
class LeaseWrites(Generic[T]):
    """What a pure function leaves: its value, rows to write (id 0: to insert) and facts."""

    value: T
    rows: tuple[LeaseRow, ...] = ()
    facts: tuple[Fact, ...] = ()
    grant: tuple[str, int] | None = None
    """Idempotency key and generation to remember."""


@dataclass(frozen=True, slots=True)
class LeaseUnit(Generic[T]):
    """One operation. `run` is pure and may run more than once (deadlock, conflict, unknown commit result)."""

    scope: LeaseScope
    run: Callable[[LeaseSight], LeaseWrites[T]]


class LeaseStore(Protocol):
    """Lease rows of the fleet. Every method raises StoreUnavailableError where the store is away or does not answer
    within `timeout_ms`, `run` also where CONFLICTS tries met another writer."""

    async def run(self, unit: LeaseUnit[T], *, timeout_ms: DurationMs) -> T:
        """Run one operation and return its value."""
        ...

    async def look(self, scope: LeaseScope, *, timeout_ms: DurationMs) -> LeaseSight:
        """Read without locks; writes nothing."""
        ...

    async def settled(self, scope: LeaseScope, *, timeout_ms: DurationMs) -> LeaseSight:
        """Read once no operation is under way on the owners' active leases; changes nothing.

        What a fence is judged by: an end that was decided before `now` but committed later shows in it.
        """
        ...
