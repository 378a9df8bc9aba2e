"""Registry of the state rows that the stores keep: one class, one table and one line here per mechanism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policy_service.domain.breaker import BreakerState
from policy_service.domain.breaker_burst import BurstState
from policy_service.domain.cooldown import ConnectionState
from policy_service.domain.egress import EgressSighting
from policy_service.domain.lockout import FamilyPoolState, ModelLockState
from policy_service.domain.pool_guard import PanicState
from policy_service.domain.provider_cooldown import ProviderCooldownState
from policy_service.domain.state import Row
from policy_service.domain.usage_wall_state import Lane
from policy_service.storage.codec import row_codec

STATE_ROWS: tuple[type[Row], ...] = (
    BreakerState,
    BurstState,
    ProviderCooldownState,
    ConnectionState,
    ModelLockState,
    FamilyPoolState,
    EgressSighting,
    Lane,
    PanicState,
)

ROW_BY_KIND: Mapping[str, type[Row]] = {row.KIND: row for row in STATE_ROWS}


def encode_row(row: Row) -> dict[str, Any]:
    """JSON object of a state row; raises KeyError for a kind that is not registered."""
    return row_codec(ROW_BY_KIND[row.KIND]).encode(row)


def decode_row(kind: str, stored: Mapping[str, Any]) -> Row | None:
    """State row of a JSON object; None for a kind that this release does not know."""
    row_type = ROW_BY_KIND.get(kind)
    return None if row_type is None else row_codec(row_type).decode(stored)
