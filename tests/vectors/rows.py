"""Rows of the service as vectors write them and look at them: names, times and what counts as a write."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from policy_service.domain import cooldown
from policy_service.domain.connection_state import TERMINAL_STATES, ConnectionState
from policy_service.domain.settings import REGISTRY
from policy_service.domain.state import Row, StateBook
from policy_service.settings.provider_data import flat_profile, profile_names

_RANGE = re.compile(r"^(.*)\{(\d+)\.\.(\d+)\}(.*)$")
CONNECTION_FLAGS = ("disable_cooling", "passthrough_models", "spare_keys", "base_url_is_local")
"""Traits of a vector's connection that are declared in the catalogue."""
_ELSEWHERE = (*CONNECTION_FLAGS, "provider", "egress", "node_clock")
_NAMES = {"attempts": "retry_attempts", "last_attempt_at_ms": "retry_at"}
_INSTANTS = frozenset(
    {"rate_limited_until", "last_error_at", "token_expires_at", "quota_reset_at", "retry_at", "streak_at"}
    | {"streak_until", "soft_since", "limited_since"}
)
_WHEN_HEARD: Mapping[str, Any] = {"failure_heard_at": None, "last_event_at": None}


def stored_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a vector by full name: nested blocks are laid flat, a switch may be named by its block.

    Raises:
        AssertionError: a name that no setting has; it would be passed over.
    """
    flat = flat_profile(given)
    named = {name if name in REGISTRY else f"{name}.enabled": value for name, value in flat.items()}
    unknown = sorted(set(named) - set(REGISTRY))
    assert not unknown, f"settings: nobody reads {', '.join(unknown)}"
    return named


def profile_numbers(given: Mapping[str, Any], named: Callable[[str], str]) -> dict[str, Any]:
    """Overrides of a provider's profile by the names that the catalogue knows."""
    numbers = {named(name): value for name, value in flat_profile(given).items()}
    unknown = sorted(set(numbers) - profile_names())
    assert not unknown, f"profile: nobody reads {', '.join(unknown)}"
    return numbers


def network_error_of(step: Mapping[str, Any]) -> str:
    """Network error of a step; a transport that failed before any status is named by its code."""
    is_bare = step.get("origin") == "transport" and step.get("status") is None
    return str(step.get("network_error") or (step.get("code") or "connection_reset" if is_bare else ""))


def expand(name: str) -> list[str]:
    """`p{1..3}` is p1, p2, p3."""
    found = _RANGE.match(name)
    if found is None:
        return [name]
    head, first, last, tail = found.groups()
    return [f"{head}{n}{tail}" for n in range(int(first), int(last) + 1)]


def row_from(row: Any, given: Mapping[str, Any]) -> Any:
    """`row` with the fields of a vector laid over it; times carry `_ms` there."""
    names = {field.name for field in dataclasses.fields(row)}
    return replace(row, **{_field(name, names): value for name, value in given.items()})


def _field(name: str, names: set[str]) -> str:
    return name if name in names else name.removesuffix("_ms")


def connection_row(provider: str, name: str, traits: Mapping[str, Any], base: int = 0) -> ConnectionState:
    """Row of a connection from its traits; a field that no row has is a TypeError."""
    own = {each: value for each, value in traits.items() if each not in _ELSEWHERE}
    fields = {_NAMES.get(each, each.removesuffix("_ms")): value for each, value in own.items()}
    read: dict[str, Any] = {
        each: _instant(value, base) if each in _INSTANTS else value for each, value in fields.items()
    }
    row = ConnectionState(provider, name, **read)
    if row.rate_limited_until is None or row.limited_since is not None:
        return row
    return replace(row, limited_since=row.last_error_at)


def _instant(value: object, base: int) -> int | None:
    """Absolute instant of a relative one, in any stored form; None where it cannot be read."""
    instant = cooldown.read_instant(value)
    return None if instant is None else instant + base


def connection_writes(before: Mapping[Any, Row], changed: Iterable[Row]) -> int:
    """Connection rows whose status, timer, level or error fields are written (the table of connection_cooldown.md
    section 4). When a failure was last heard of is none of them; README ruling 9 needs it of every failure."""
    book = StateBook(before)
    return sum(_is_write(book, row) for row in changed)


def _is_write(book: StateBook, row: Row) -> bool:
    if not isinstance(row, ConnectionState):
        return False
    before = book.get(ConnectionState, row.provider, row.connection)
    return replace(row, **_WHEN_HEARD) != replace(before, **_WHEN_HEARD)


CONNECTION: Mapping[str, Callable[[ConnectionState], object]] = {
    "test_status": lambda row: row.test_status,
    "rate_limited_until_ms": lambda row: row.rate_limited_until,
    "backoff_level": lambda row: row.backoff_level,
    "last_error": lambda row: row.last_error,
    "last_error_set": lambda row: bool(row.last_error),
    "last_error_type": lambda row: row.last_error_type,
    "last_error_source": lambda row: row.last_error_source,
    "last_error_at_ms": lambda row: row.last_error_at,
    "error_code": lambda row: int(row.error_code) if row.error_code else None,
    "generation": lambda row: row.generation,
    "streak": lambda row: row.streak,
    "active": lambda row: row.active,
    "attempts": lambda row: row.retry_attempts,
    "terminal": lambda row: row.test_status in TERMINAL_STATES,
}
"""What a vector may expect of a connection's row."""


def connection_field(row: ConnectionState, name: str, base: int = 0) -> object:
    """Value of one expectation; instants are relative to `base`. A name that no vector knows is a KeyError."""
    value = CONNECTION[name](row)
    return value - base if name.endswith("_ms") and isinstance(value, int) else value


def is_eligible(row: ConnectionState, now: int) -> bool:
    """May the connection serve, as far as its own row says?"""
    return not row.is_terminal and row.active and not cooldown.is_cooling(row, now)
