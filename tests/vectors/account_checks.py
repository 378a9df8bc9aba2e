"""Comparison of an `AccountWorld` with the `expect` of a vector; only the listed keys are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from policy_service.domain import cooldown, lockout
from policy_service.domain.connection_state import TERMINAL_STATES
from policy_service.domain.lockout import ModelLockState
from tests.vectors.account_world import AccountWorld, same
from tests.vectors.rows import connection_field, is_eligible

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
        seen = world.writes if field == "writes" else connection_field(row, field, world.base)
        same(f"{name}.{field}", seen, value)


def _connections(world: AccountWorld, wanted: Expect, now: int, model: str) -> None:
    for name, fields in wanted.items():
        check_connection(world, name, fields)


def _model_lock(world: AccountWorld, wanted: Expect | None, now: int, model: str) -> None:
    """`null`: none for the model of the newest failure; none at all where it named none."""
    if not model:
        held = [row for row in world.locks() if lockout.is_locked(row, now)]
        return same("model_lock", held, []) if wanted is None else _lock_shown(held[0], wanted, now)
    lock = world.lock(model, now, world.last_connection)
    if wanted is None:
        return same("model_lock", lock, None)
    assert lock is not None, f"model {model!r} is not locked"
    return _lock_shown(lock, wanted, now)


def _lock_shown(lock: ModelLockState, wanted: Expect, now: int) -> None:
    assert lock.until is not None
    shown = {
        "locked": True,
        "key": lock.written_as,
        "reason": lock.reason,
        "remaining_ms": lock.until - now,
        "failure_count": lock.failure_count,
        "hint_source": lock.hint_source or None,
    }
    for name, value in wanted.items():
        same(f"model_lock.{name}", shown[name], value)


_READERS: Mapping[str, Callable[[AccountWorld, Any, int, str], None]] = {
    "answer": _answer,
    "decision": _decision,
    "connection": lambda world, wanted, now, model: check_connection(world, "c1", wanted),
    "connections": _connections,
    "model_lock": _model_lock,
    "eligible": lambda w, wanted, now, m: same("eligible", is_eligible(w.row(), now), wanted),
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
