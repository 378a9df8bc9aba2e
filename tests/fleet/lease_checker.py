"""Independent judge of lease histories: reads what is stored and what was dispatched, shares no code with the service.

An interval is what a row says: from its acquisition to its end, or to its expiry where that came first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class Period:
    """One stored row."""

    id: int
    owner: str
    connection: str
    generation: int
    state: str
    begins: int
    ends: int
    ended_at: int | None

    def covers(self, at: int) -> bool:
        """Owned at that instant. An end within the same millisecond may have come after it."""
        return self.begins <= at < self.ends or at == self.ended_at == self.ends


@dataclass(frozen=True, slots=True)
class Checked:
    """A fence check as the client saw it; `verdict` empty: the check was skipped and the call made all the same."""

    owner: str
    connection: str
    generation: int
    at: int
    verdict: str = ""

    @property
    def was_dispatched(self) -> bool:
        return self.verdict in ("", "VALID")


def periods(rows: Iterable[Any]) -> list[Period]:
    """Rows of the table, oldest first."""
    return [
        Period(
            row["id"],
            row["owner_hash"],
            row["connection_id"],
            row["generation"],
            row["state"],
            row["acquired_at"],
            min(row["expires_at"], row["ended_at"] if row["ended_at"] is not None else row["expires_at"]),
            row["ended_at"],
        )
        for row in rows
    ]


def _grouped(found: Iterable[Period], name: Callable[[Period], str]) -> Iterable[list[Period]]:
    groups: dict[str, list[Period]] = defaultdict(list)
    for period in found:
        groups[name(period)].append(period)
    return groups.values()


def shared_ownership(found: Sequence[Period]) -> list[str]:
    """Two owners of a connection, or two connections of an owner, at one instant."""
    problems: list[str] = []
    for what, name in (("connection", lambda p: p.connection), ("owner", lambda p: p.owner)):
        for group in _grouped(found, name):
            ordered = sorted(group, key=lambda p: (p.begins, p.id))
            problems += [f"two periods of one {what}: {a} {b}" for a, b in pairwise(ordered) if b.begins < a.ends]
    return problems


def shrinking_generations(found: Sequence[Period]) -> list[str]:
    """A generation that did not grow; a move keeps it and begins at the instant at which the old row ended."""
    problems: list[str] = []
    for group in _grouped(found, lambda p: p.owner):
        for old, new in pairwise(sorted(group, key=lambda p: p.id)):
            is_move = old.state == "INVALIDATED" and new.begins == old.ended_at
            allowed = {old.generation + 1, *([old.generation] if is_move else [])}
            if new.generation not in allowed:
                problems.append(f"generation {old.generation} then {new.generation}: {old} {new}")
    return problems


def illegal_dispatches(found: Sequence[Period], checks: Iterable[Checked]) -> list[str]:
    """Calls made by somebody who did not own the connection under that generation at that instant."""
    return [f"illegal: {check}" for check in checks if check.was_dispatched and not _holds(found, check)]


def wrongly_refused(found: Sequence[Period], checks: Iterable[Checked]) -> list[str]:
    """Fences refused although the lease held, edges of its period left out."""
    refused = (check for check in checks if not check.was_dispatched)
    return [
        f"refused: {check}"
        for check in refused
        if any(_is_named(period, check) and period.begins < check.at < period.ends for period in found)
    ]


def stale_refusals(found: Sequence[Period], checks: Iterable[Checked]) -> int:
    """Checks of a generation that was over, and were refused."""
    newest: dict[str, int] = {}
    for period in found:
        newest[period.owner] = max(newest.get(period.owner, 0), period.generation)
    return sum(not check.was_dispatched and check.generation < newest.get(check.owner, 0) for check in checks)


def _is_named(period: Period, check: Checked) -> bool:
    named = (check.owner, check.connection, check.generation)
    return (period.owner, period.connection, period.generation) == named


def _holds(found: Sequence[Period], check: Checked) -> bool:
    return any(_is_named(period, check) and period.covers(check.at) for period in found)
