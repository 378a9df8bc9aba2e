"""The table form of a phase machine: (phase, kind of event) -> a small function; anything not listed is a fault.

`Step` is what such a function returns: the state after it, and what is to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from policy_envoy.actions import Action


class UnexpectedEventError(Exception):
    """Envoy sent what the phase does not expect: the filter is configured in another way than the door assumes."""


class Next(NamedTuple):
    """State after an event, and what to do."""

    state: Any
    actions: tuple[Action, ...] = ()


Handler: TypeAlias = Callable[[Any, Any], Next]
Table: TypeAlias = Mapping[tuple[StrEnum, type], Handler]


def step(table: Table, state: Any, event: Any) -> Next:
    """Take one event.

    Raises:
        UnexpectedEventError: the table has no entry for it.
    """
    handler = table.get((state.phase, type(event)))
    if handler is None:
        raise UnexpectedEventError(f"{type(event).__name__} in phase {state.phase}")
    return handler(state, event)
