"""Connection cooldown: timer, error fields, clearing, health score (spec/connection_cooldown.md). Pure.

A timer only ever grows: it is written as the later of the old end and the new one. It is removed by a fresh
success, an operator, a credential change or a terminal state. Nothing here runs by itself: a timer that is over
is simply no longer in force.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time
from typing import Final

from policy_service.domain.connection_state import (
    ACTIVE,
    CREDITS_EXHAUSTED,
    UNAVAILABLE,
    ConnectionState,
    EarlyProbe,
)
from policy_service.domain.ids import DurationMs, Instant

__all__ = [
    "ACTIVE",
    "CREDITS_EXHAUSTED",
    "UNAVAILABLE",
    "ConnectionState",
    "EarlyProbe",
    "ErrorFields",
    "RecoveryView",
    "clear",
    "clear_timer",
    "excerpt",
    "health_score",
    "heard",
    "is_cooling",
    "is_fresh",
    "merge_error",
    "note_rotation",
    "read_instant",
    "recover",
    "remaining_ms",
    "rotation_count",
    "start_timer",
    "success",
    "was_cooling_at",
]

_MASKED: Final = re.compile(r"[A-Za-z0-9_\-]{20,}")
_MAX_EXCERPT: Final = 200


@dataclass(frozen=True, slots=True)
class ErrorFields:
    """The newest failure as a connection remembers it; `at` None leaves last_error_at alone (health checks)."""

    error: str
    type: str
    source: str
    code: str
    at: Instant | None


@dataclass(frozen=True, slots=True)
class RecoveryView:
    """What a recovery job saw when it decided; it acts only if all three still hold."""

    test_status: str
    last_error_at: Instant | None
    rate_limited_until: Instant | None


# -- reading -----------------------------------------------------------------------------------------
def read_instant(value: object) -> Instant | None:
    """Instant in ms from any form in which a time may have been stored; None where it cannot be read.

    Accepts numbers, numeric texts such as "1781696905131.0", ISO texts (UTC without a zone), dates.
    """
    for kinds, reader in _READERS:
        if isinstance(value, kinds):
            return None if isinstance(value, bool) else reader(value)
    return None


def _from_number(value: object) -> Instant | None:
    number = float(value)  # type: ignore[arg-type]
    return int(number) if math.isfinite(number) else None


def _from_datetime(value: object) -> Instant | None:
    assert isinstance(value, datetime)
    aware = value if value.tzinfo else value.replace(tzinfo=UTC)
    return round(aware.timestamp() * 1000)


def _from_date(value: object) -> Instant | None:
    assert isinstance(value, date)
    return _from_datetime(datetime.combine(value, time(), UTC))


def _from_text(value: object) -> Instant | None:
    text = str(value).strip()
    for reader in (float, datetime.fromisoformat):
        try:
            return read_instant(reader(text))
        except (ValueError, OverflowError):
            continue
    return None


_READERS: tuple[tuple[type | tuple[type, ...], Callable[[object], Instant | None]], ...] = (
    ((int, float), _from_number),
    (datetime, _from_datetime),
    (date, _from_date),
    (str, _from_text),
)


def is_cooling(row: ConnectionState, now: Instant) -> bool:
    """True while the timer's end lies ahead; at the very end the connection is eligible."""
    return row.rate_limited_until is not None and row.rate_limited_until > now


def was_cooling_at(row: ConnectionState, at: Instant) -> bool:
    """True if the timer covers `at`, which may lie before the newest event (late evidence)."""
    return is_cooling(row, at) and (row.limited_since is None or row.limited_since <= at)


def remaining_ms(row: ConnectionState, now: Instant) -> DurationMs:
    """Time until the connection is eligible again; 0 when it is."""
    return max(0, (row.rate_limited_until or 0) - now)


def health_score(row: ConnectionState, now: Instant) -> int:
    """Preference between two candidates, 0..100 (section 8)."""
    burden = 10 * row.backoff_level + 20 * bool(row.last_error) + 30 * is_cooling(row, now)
    return max(0, 100 - burden)


def is_fresh(row: ConnectionState, started_at: Instant) -> bool:
    """False for evidence of a call that began before the newest failure, whether or not that one was counted."""
    return all(at is None or started_at >= at for at in (row.last_error_at, row.failure_heard_at))


# -- writing -----------------------------------------------------------------------------------------
def start_timer(row: ConnectionState, at: Instant, until: Instant, hint_source: str = "") -> ConnectionState:
    """Cool until `until` at the earliest: a later end stays, with the source that stated it."""
    existing = row.rate_limited_until
    if existing is not None and existing >= until:
        return replace(row, test_status=UNAVAILABLE)
    running = is_cooling(row, at)
    return replace(
        row,
        test_status=UNAVAILABLE,
        rate_limited_until=until,
        limited_since=row.limited_since if running and row.limited_since is not None else at,
        hint_source=hint_source,
        early_probe=row.early_probe if running else None,
    )


def merge_error(row: ConnectionState, fields: ErrorFields) -> ConnectionState:
    """Record a failure unless a newer one is recorded already."""
    newest = row.last_error_at
    if fields.at is not None and newest is not None and newest > fields.at:
        return row
    return replace(
        row,
        last_error=fields.error,
        last_error_type=fields.type,
        last_error_source=fields.source,
        error_code=fields.code,
        last_error_at=newest if fields.at is None else fields.at,
    )


def heard(row: ConnectionState, at: Instant) -> ConnectionState:
    """Row that knows of a failure at `at`; nothing else moves, and nothing at all where a newer one is known."""
    return replace(row, failure_heard_at=at) if at > max(row.last_error_at or 0, row.failure_heard_at or 0) else row


def clear_timer(row: ConnectionState) -> ConnectionState:
    """Row without a timer and without the permit to test it early."""
    return replace(row, rate_limited_until=None, limited_since=None, hint_source="", early_probe=None)


def clear(row: ConnectionState) -> ConnectionState:
    """Active, no error, no timer, level 0."""
    return replace(
        clear_timer(row),
        test_status=ACTIVE,
        backoff_level=0,
        last_error="",
        last_error_type="",
        last_error_source="",
        error_code="",
        last_error_at=None,
        failure_heard_at=None,
    )


def success(row: ConnectionState, started_at: Instant) -> ConnectionState:
    """Effect of a success: clears a connection that is not terminal, unless a newer failure is known (section 6)."""
    return row if row.is_terminal or not is_fresh(row, started_at) else clear(row)


def recover(row: ConnectionState, seen: RecoveryView) -> ConnectionState | None:
    """Clear a connection found healthy, if the row is still as the recovery job saw it; None: do nothing."""
    present = RecoveryView(row.test_status, row.last_error_at, row.rate_limited_until)
    return None if present != seen or row.is_terminal else clear(row)


def note_rotation(row: ConnectionState, status: int, at: Instant, window_ms: DurationMs) -> ConnectionState:
    """Remember one failure for the rotation gate (classification.md section 6); older ones fall out."""
    kept = tuple(each for each in row.rotation_failures if at - each[1] < window_ms)
    return replace(row, rotation_failures=(*kept, (status, at)))


def rotation_count(row: ConnectionState, status: int, at: Instant, window_ms: DurationMs) -> int:
    """Failures with this status within the window, the one at hand included."""
    return 1 + sum(each[0] == status and at - each[1] < window_ms for each in row.rotation_failures)


def excerpt(text: str) -> str:
    """Short form of an error text that is fit to be stored: one line, long tokens masked."""
    return _MASKED.sub("…", " ".join(text.split()))[:_MAX_EXCERPT]
