"""Resets of what is kept outside the rows of the book: session pins and waiting permits (operator_surface.md
section 4). Each is carried out by the use case that owns the state; the facts of the act are written by `admin_state`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from policy_service.application.admin_plan import OWNED_SCOPES, Selection
from policy_service.application.permits import Permits
from policy_service.application.pins import Pins
from policy_service.application.view import View
from policy_service.domain.facts import FactLog
from policy_service.domain.permits import account_gate, connection_gate
from policy_service.domain.policy import Policy


class OwnedState:
    """Pins and lines of the fleet."""

    def __init__(self, view: View, pins: Pins, permits: Permits) -> None:
        self._view = view
        self._pins = pins
        self._permits = permits

    async def reset(self, scopes: Iterable[str], selection: Selection) -> dict[str, int]:
        """Pins deleted and requests ended, by scope; scopes of the book are passed over.

        Raises:
            StoreUnavailableError: the store is away.
        """
        found = {}
        for scope in scopes:
            if scope == "affinity_pins":
                found[scope] = await self._pins.reset(selection.provider, selection.connection)
            elif scope == "permits":
                found[scope] = await self._end_waiting(selection)
        return found

    async def _end_waiting(self, selection: Selection) -> int:
        """Held permits stay."""
        policy = self._view.policy
        waiting = [status.gate.key for status in await self._permits.list_gates() if status.load.waiting]
        return sum([await self._permits.reset_gate(key) for key in waiting if is_of(key, selection, policy)])


def is_of(key: str, selection: Selection, policy: Policy) -> bool:
    """Is the gate one of the provider, or of the connection? Gates of several providers only without a selection."""
    if not selection.provider:
        return True
    return any(key == gate or key.startswith(f"{gate}:") for gate in _gates(selection, policy))


def _gates(selection: Selection, policy: Policy) -> Iterator[str]:
    provider, connection = selection.provider, selection.connection
    if connection:
        yield from (connection_gate(connection), account_gate(provider, connection))
        return
    yield provider
    for each in policy.catalogue.connections.values():
        if policy.canonical(each.provider) == provider:
            yield connection_gate(each.id)


def note_resets(counts: dict[str, int], selection: Selection, facts: FactLog) -> int:
    """Record what was reset beside the book, one fact a scope; the sum."""
    for scope, count in counts.items():
        if count:
            facts.add(
                OWNED_SCOPES[scope],
                ":".join(filter(None, (selection.provider, selection.connection))) or "*",
                "present",
                "none",
                provider=selection.provider,
                connection=selection.connection,
                reason="reset",
            )
    return sum(counts.values())
