"""Units of work that the store tests run: a failure counted on a breaker, and its like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from policy_service.application.ports import Scope, Unit, UnitResult
from policy_service.domain.breaker import BreakerState, State
from policy_service.domain.facts import Fact
from policy_service.domain.ids import Instant
from policy_service.domain.state import StateBook

TIMEOUT_MS = 5_000


def count_failure(
    provider: str = "openai",
    event_id: str = "",
    *,
    connection: str = "",
    progress: tuple[str, int] | None = None,
    facts: bool = False,
) -> Unit[int]:
    """Adds 1 to the breaker's failures unless the event is known; the value is the count afterwards."""

    def run(book: StateBook, now: Instant, known: Mapping[str, bytes]) -> UnitResult[int]:
        row = book.get(BreakerState, provider, connection)
        if event_id in known:
            return UnitResult(row.failure_count)
        counted = replace(row, failure_count=row.failure_count + 1, last_failure_at=now)
        book.put(counted)
        noted = [fact(f"{event_id}.0", now, provider)] if facts else []
        return UnitResult(counted.failure_count, noted, {event_id: b"counted"} if event_id else {})

    scope = Scope(frozenset({provider}), frozenset({(provider, connection)}))
    return Unit(scope, run, (event_id,) if event_id else (), progress)


def write_breaker(row: BreakerState) -> Unit[None]:
    """Writes one breaker row as it stands."""

    def run(book: StateBook, now: Instant, known: Mapping[str, bytes]) -> UnitResult[None]:
        book.put(row)
        return UnitResult(None)

    return Unit(Scope(frozenset({row.provider}), frozenset({(row.provider, row.connection)})), run)


def read_breaker(provider: str, connection: str = "", *, whole: bool = False) -> Unit[BreakerState]:
    """Reads one breaker row; writes nothing."""

    def run(book: StateBook, now: Instant, known: Mapping[str, bytes]) -> UnitResult[BreakerState]:
        return UnitResult(book.get(BreakerState, provider, connection))

    named = frozenset({provider})
    return Unit(Scope(named, whole_providers=named if whole else frozenset()), run)


def open_breaker(provider: str, generation: int = 2) -> BreakerState:
    """An OPEN breaker row."""
    return BreakerState(provider, state=State.OPEN, generation=generation, reopen_at=1_000)


def fact(fact_id: str, at: Instant, provider: str, decision_id: str = "") -> Fact:
    """A transition of a breaker."""
    return Fact(
        id=fact_id,
        at=at,
        mechanism="breaker",
        key=provider,
        from_state="CLOSED",
        to_state="OPEN",
        provider=provider,
        decision_id=decision_id,
    )


def record(*facts: Fact) -> Unit[None]:
    """Records facts and nothing else."""

    def run(book: StateBook, now: Instant, known: Mapping[str, bytes]) -> UnitResult[None]:
        return UnitResult(None, facts)

    return Unit(Scope(frozenset({facts[0].provider})), run)
