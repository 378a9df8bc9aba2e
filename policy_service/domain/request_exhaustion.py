"""Exhaustion within one client request: which later targets an earlier failure rules out (spec/diagnostics.md 3).

Pure. Failures are those that the gateway names as earlier attempts; nothing here outlives the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from policy_service.domain.ids import Target

SKIP_CONNECTION_STATUSES = frozenset({408, 500, 502, 503, 504, 524})
INPUT_BOUND_CODES = frozenset({"context_length_exceeded", "context_window_exceeded"})


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """One earlier attempt of the request, provider canonical."""

    target: Target
    status: int | None = None
    reason: str = ""
    scope: str = ""
    code: str = ""
    connection_scope_quota: bool = False
    """A rule of scope `connection` with reason `quota_exhausted` matched (row 0)."""


@dataclass(frozen=True, slots=True)
class Exhausted:
    """What is ruled out for the rest of the request."""

    targets: frozenset[Target] = frozenset()
    connections: frozenset[tuple[str, str]] = frozenset()
    providers: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()

    def covers(self, target: Target) -> bool:
        """True if `target` must not be tried again."""
        return (
            target in self.targets
            or target.provider in self.providers
            or (target.provider, target.connection) in self.connections
            or (bool(target.model) and target.model in self.models)
        )


NOTHING = Exhausted()


def exhausted(attempts: Iterable[FailedAttempt], counts_per_model: Callable[[Target], bool]) -> Exhausted:
    """Everything that the earlier attempts rule out.

    Args:
        attempts: earlier attempts of the client request.
        counts_per_model: whether the target's provider counts quota per model.
    """
    targets: set[Target] = set()
    connections: set[tuple[str, str]] = set()
    providers: set[str] = set()
    models: set[str] = set()
    for attempt in attempts:
        target = attempt.target
        targets.add(target)
        if attempt.code.lower() in INPUT_BOUND_CODES and target.model:
            models.add(target.model)
        elif attempt.connection_scope_quota:
            connections.add((target.provider, target.connection))
        elif counts_per_model(target):
            continue
        elif attempt.reason == "quota_exhausted" and not target.connection:
            providers.add(target.provider)
        elif attempt.status in SKIP_CONNECTION_STATUSES:
            _skip_connection(target, connections, providers)
    return Exhausted(frozenset(targets), frozenset(connections), frozenset(providers), frozenset(models))


def _skip_connection(target: Target, connections: set[tuple[str, str]], providers: set[str]) -> None:
    if target.connection:
        connections.add((target.provider, target.connection))
    else:
        providers.add(target.provider)
