"""Which rows a unit's scope covers: the same rule for every store."""

from __future__ import annotations

from collections.abc import Iterable

from policy_service.application.ports import Scope, UnitRefusedError
from policy_service.domain.state import Key, Row


def covers(scope: Scope, row: Row) -> bool:
    """True where a unit of this scope reads, and therefore may write, the row."""
    provider = row.key[1]
    if scope.all_providers or provider in scope.whole_providers:
        return True
    connection = getattr(row, "connection", "")
    if connection and (provider, connection) not in scope.connections:
        return False
    return provider in scope.providers


def refuse_foreign_writes(scope: Scope, rows: Iterable[Row]) -> None:
    """Raise UnitRefusedError for a row that was not read under its guard: it would be overwritten blindly."""
    foreign: list[Key] = [row.key for row in rows if not covers(scope, row)]
    if foreign:
        kinds = sorted({key[0] for key in foreign})
        raise UnitRefusedError(f"a unit wrote rows outside its scope ({', '.join(kinds)})")
