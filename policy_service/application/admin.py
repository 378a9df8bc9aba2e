"""Acts of operators: the way in which each of them reaches the fleet (spec/operator_surface.md section 1).

An act is one guarded unit: it is computed against the locked rows, records who acted, leaves its facts in the same
transaction and shows in this replica's view at once; the others follow by the feed. What an act does to the state
is said by the pure folds of `admin_plan` and `connection_acts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from policy_service.application.errors import StoreLostError
from policy_service.application.ports import Committed, Entropy, Scope, Store, StoreUnavailableError, Unit, UnitResult
from policy_service.application.view import View
from policy_service.domain.facts import Cause, FactLog
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.state import StateBook

T = TypeVar("T")
Act = Callable[[StateBook, Instant, FactLog], T]

ACT_MS: DurationMs = 5_000
"""Longest wait for the store; nobody's traffic waits for an act."""
RETRY_AFTER_MS: DurationMs = 1_000


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts, and why; both go into the facts."""

    name: str
    note: str = ""

    @property
    def text(self) -> str:
        """As the facts have it."""
        return f"{self.name} ({self.note})" if self.note else self.name


class Acts:
    """Carries out acts.

    Args:
        replica: name of this replica, recorded in the facts.
    """

    def __init__(self, store: Store, view: View, entropy: Entropy, replica: str) -> None:
        self._store = store
        self._view = view
        self._entropy = entropy
        self.replica = replica

    async def act(self, scope: Scope, actor: Actor, act: Act[T], reason: str = "") -> Committed[T]:
        """Carry out one act.

        Args:
            scope: what it locks and reads.
            act: fold over the locked rows; it may run more than once.
            reason: reason of those facts that name none themselves.

        Raises:
            StoreLostError: the store is away.
        """
        event_id = f"admin/{self.new_id()}"

        def run(book: StateBook, now: Instant, _known: object) -> UnitResult[T]:
            facts = FactLog(Cause(event_id, now, self.replica, actor=actor.text, reason=reason))
            return UnitResult(act(book, now, facts), facts.facts)

        return await self.commit(Unit(scope, run))

    async def commit(self, unit: Unit[T]) -> Committed[T]:
        """Run a unit and show what it wrote.

        Raises:
            StoreLostError: the store is away.
        """
        try:
            committed = await self._store.run(unit, timeout_ms=ACT_MS)
        except StoreUnavailableError as error:
            raise store_lost() from error
        self._view.apply_committed(committed.rows)
        return committed

    def new_id(self) -> str:
        """A fresh id."""
        return self._entropy.new_id()


def store_lost() -> StoreLostError:
    """The error of a call that cannot do without the store."""
    return StoreLostError("the store is away or too slow; repeat the call", retry_after_ms=RETRY_AFTER_MS)
