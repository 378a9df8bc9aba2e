"""Parts of the grouped commit: the pure functions that it runs, its bounds, and an event on its way through it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from policy_service.application.events import OutcomeEvent
from policy_service.application.ports import Scope
from policy_service.domain.facts import Fact
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.policy import Policy
from policy_service.domain.state import StateBook


class Result(Protocol):
    """What folding one event gives; the answer to its reporter is made of it."""

    @property
    def facts(self) -> Sequence[Fact]: ...


R = TypeVar("R", bound=Result)


@dataclass(frozen=True, slots=True)
class Folding(Generic[R]):
    """The pure functions that the commit runs.

    `scope` says what an event locks and reads; `encode` and `decode` are the compact stored answer.
    """

    scope: Callable[[Sequence[OutcomeEvent], Policy], Scope]
    fold: Callable[[StateBook, OutcomeEvent, Policy, Instant, int | None], R]
    encode: Callable[[R], bytes]
    decode: Callable[[bytes], R]


@dataclass(frozen=True, slots=True)
class Reported(Generic[R]):
    """Answer to one report. `durable`: it survives the loss of this replica."""

    result: R
    durable: bool
    duplicate: bool = False


@dataclass(slots=True, eq=False)
class Item(Generic[R]):
    """One event of the queue, and everybody who waits for its commit."""

    number: int
    event: OutcomeEvent
    provisional: R
    """Result of folding the event on the view; the answer while the commit is not known."""
    done: asyncio.Future[Reported[R]]
    size: int
    spooled: bool = False
    securing: asyncio.Future[None] | None = None
    """Being written to the spool, or taken back where that refuses."""

    @property
    def is_settled(self) -> bool:
        """Committed, or refused."""
        return self.done.done()


@dataclass(slots=True)
class CommitCounters:
    """What this replica's commit did so far."""

    batches: int = 0
    committed: int = 0
    duplicates: int = 0
    spooled: int = 0
    refused: int = 0
    failed_folds: int = 0
    store_failures: int = 0


@dataclass(frozen=True, slots=True)
class CommitLimits:
    """Budgets and bounds of the commit."""

    report_ms: DurationMs = 200
    commit_ms: DurationMs = 2_000
    interval_ms: DurationMs = 20
    """Between the starts of two batches, at least."""
    away_after: int = 3
    """Failures of the store in a row after which it counts as away."""
    retry_ms: DurationMs = 500
    """How often an absent store is tried again."""
    max_pending: int = 20_000
    max_pending_bytes: int = 64 * 1024 * 1024
