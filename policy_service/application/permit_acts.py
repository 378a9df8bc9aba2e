"""What operators do at gates, as the pure halves of guarded units: shut one, send its line away. The facts of an act go
into its transaction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from policy_service.application.ports_permits import Locked
from policy_service.domain import line
from policy_service.domain.facts import Cause, FactLog
from policy_service.domain.ids import DurationMs, Instant


def reset(key: str, cause: Cause) -> Callable[[Locked], int]:
    """End everybody who waits at a gate; the number of requests."""

    def run(locked: Locked) -> int:
        ended = len(line.reset(locked.book, key, locked.now)) if key in locked.book.gates else 0
        if ended:
            _note(locked, cause, key, "waiting", "reset", failure_count=ended)
        return ended

    return run


def block(
    key: str, for_ms: DurationMs | None, until: Instant | None, cause: Cause
) -> Callable[[Locked], Instant | None]:
    """Shut a gate; its end in force, None where it is open."""

    def run(locked: Locked) -> Instant | None:
        book, now = locked.book, locked.now
        before = "blocked" if book.gates[key].is_blocked(now) else "open"
        end = now + for_ms if for_ms is not None else until
        if end is not None and line.block(book, key, end, now):
            _note(locked, cause, key, before, "blocked", deadline_at=end)
        gate = book.gates[key]
        return gate.blocked_until if gate.is_blocked(now) else None

    return run


def _note(locked: Locked, cause: Cause, key: str, before: str, after: str, **values: Any) -> None:
    """Record the act of an operator at a gate. An act without an actor is part of a larger one, which records it."""
    if not cause.actor:
        return
    log = FactLog(replace(cause, at=locked.now))
    log.add("concurrency", key, before, after, **values)
    locked.facts.extend(log.facts)
