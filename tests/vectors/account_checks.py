"""Comparison of an `AccountWorld` with the `expect` of a vector; only the listed keys are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from policy_service.domain import cooldown
from policy_service.domain.connection_state import TERMINAL_STATES, ConnectionState
from tests.vectors.account_world import AccountWorld, same

Expect = Mapping[str, Any]


def check(world: AccountWorld, expect: Expect, now: int, model: str = "") -> None:
    """Compare every key of `expect` at instant `now`; `model` is the model of the last failure."""
    for name, wanted in expect.items():
        reader = _READERS.get(name)
        assert reader is not None, f"unknown expectation {name}"
        reader(world, wanted, now, model)


def _answer(world: AccountWorld, wanted: Expect, now: int, model: str) -> None:
    assert world.last is not None
    for name, value in wanted.items():
        same(f"answer.{name}", getattr(world.last, name), value)


def _decision(world: AccountWorld, wanted: Expect, now: int, model: str) -> None:
    assert world.last is not None
    for name, value in wanted.items():
        same(f"decision.{name}", getattr(world.last.record, name), value)


def check_connection(world: AccountWorld, name: str, wanted: Expect) -> None:
    """Compare one connection row."""
    row = world.row(name)
    for field, value in wanted.items():
        same(f"{name}.{field}", _FIELDS[field](world, row), value)


def _relative(world: AccountWorld, instant: int | None) -> int | None:
    return None if instant is None else instant - world.base


_FIELDS: Mapping[str, Callable[[AccountWorld, ConnectionState], object]] = {
    "test_status": lambda world, row: row.test_status,
    "rate_limited_until_ms": lambda world, row: _relative(world, row.rate_limited_until),
    "backoff_level": lambda world, row: row.backoff_level,
    "last_error_set": lambda world, row: bool(row.last_error),
    "error_code": lambda world, row: int(row.error_code) if row.error_code else None,
    "writes": lambda world, row: world.writes,
}


def _connections(world: AccountWorld, wanted: Expect, now: int, model: str) -> None:
    for name, fields in wanted.items():
        check_connection(world, name, fields)


def _model_lock(world: AccountWorld, wanted: Expect | None, now: int, model: str) -> None:
    if wanted is None:
        held = [row for row in world.locks() if row.until is not None and now <= row.until]
        return same("model_lock", held, [])
    lock = world.lock(model, now)
    assert lock is not None, f"model {model!r} is not locked"
    assert lock.until is not None
    shown = {
        "key": lock.written_as,
        "reason": lock.reason,
        "remaining_ms": lock.until - now,
        "failure_count": lock.failure_count,
    }
    for name, value in wanted.items():
        same(f"model_lock.{name}", shown[name], value)
    return None


def _eligible(world: AccountWorld, wanted: bool, now: int, model: str) -> None:
    row = world.row()
    same("eligible", not (row.is_terminal or cooldown.is_cooling(row, now)), wanted)


_READERS: Mapping[str, Callable[[AccountWorld, Any, int, str], None]] = {
    "answer": _answer,
    "decision": _decision,
    "connection": lambda world, wanted, now, model: check_connection(world, "c1", wanted),
    "connections": _connections,
    "model_lock": _model_lock,
    "eligible": _eligible,
    "cooling": lambda w, wanted, now, m: same("cooling", cooldown.is_cooling(w.row(), now), wanted),
    "remaining_ms": lambda w, wanted, now, m: same("remaining_ms", cooldown.remaining_ms(w.row(), now), wanted),
    "health_score": lambda w, wanted, now, m: same("health_score", cooldown.health_score(w.row(), now), wanted),
    "state": lambda w, wanted, now, m: same("state", w.row().test_status, wanted),
    "terminal": lambda w, wanted, now, m: same("terminal", w.row().test_status in TERMINAL_STATES, wanted),
    "error_type": lambda w, wanted, now, m: same("error_type", (w.last and w.last.error_type) or None, wanted),
    "streak": lambda w, wanted, now, m: same("streak", w.row().streak, wanted),
    "active": lambda w, wanted, now, m: same("active", w.row().active, wanted),
    "attempts": lambda w, wanted, now, m: same("attempts", w.row().retry_attempts, wanted),
    "test_status": lambda w, wanted, now, m: same("test_status", w.row().test_status, wanted),
    "writes": lambda w, wanted, now, m: same("writes", w.writes, wanted),
}
