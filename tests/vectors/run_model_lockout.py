"""Runs model lockout vectors (spec/model_lockout.md): the lock writer, and outcomes with the pool lockout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from policy_service.domain import lockout, lockout_upkeep
from policy_service.domain.lockout import Place
from policy_service.domain.state import StateBook
from tests.vectors.account_world import AccountWorld, same
from tests.vectors.step_fields import ACCOUNT_GIVEN, LOCKS, check_fields, check_given

Step = Mapping[str, Any]


def run(vector: dict[str, Any]) -> None:
    """Raise AssertionError where the world differs from `expect`."""
    check_given(vector["given"], ACCOUNT_GIVEN)
    world = AccountWorld({**vector["given"], "steps": vector["steps"]})
    now = world.base
    seen: Step = {}
    for step in vector["steps"]:
        check_fields(step, LOCKS)
        seen = _EVENTS[step["event"]](world, step)
        now = world.at(step)
        _check(world, step.get("expect", {}), now, seen, step.get("model", ""))
    _check(world, vector["expect"], now, {n: v for n, v in seen.items() if n not in _READERS}, "")


def _check(world: AccountWorld, expect: Step, now: int, seen: Step, model: str) -> None:
    for name, wanted in expect.items():
        if name in seen:
            same(name, seen[name], wanted)
        elif isinstance(wanted, Mapping):
            for each, value in wanted.items():
                same(f"{name} {each}", _READERS[name](world, each, now), value)
        else:
            same(name, _READERS[name](world, model, now), wanted)


def _remaining(world: AccountWorld, model: str, now: int) -> int:
    lock = world.lock(model, now)
    return 0 if lock is None or lock.until is None else lock.until - now


def _effective(world: AccountWorld, name: str, now: int) -> object:
    """A setting as the mechanism reads it; what its profile does not hold, as it resolves."""
    profile = world.profile().lockout
    held = dataclasses.asdict(profile) | {
        f"slow_first_output.{field}": value for field, value in dataclasses.asdict(profile.slow_first_output).items()
    }
    own = _EFFECTIVE.get(name, name.removeprefix("model_lockout."))
    value = held[own] if own in held else world.policy.setting(name)
    return sorted(value) if isinstance(value, (set, frozenset)) else list(value) if isinstance(value, tuple) else value


_EFFECTIVE = {"model_lockout.enabled": "pool_enabled"}
_READERS: Mapping[str, Callable[[AccountWorld, str, int], object]] = {
    "locked": lambda world, model, now: world.lock(model, now) is not None,
    "remaining_ms": _remaining,
    "failure_count": lambda world, model, now: world.count(model),
    "effective": _effective,
    "key": lambda world, model, now: world.written_key,
    "lock_count": lambda world, model, now: sum(row.until is not None for row in world.locks()),
}


def _failure(world: AccountWorld, step: Step) -> Step:
    world.failure(step)
    return {}


def _record(world: AccountWorld, step: Step) -> Step:
    world.record(step)
    return {}


def _decay(world: AccountWorld, step: Step) -> Step:
    result = world.decay(step)
    return {"cleared": result.cleared, "new_failure_count": result.new_failure_count}


def _success(world: AccountWorld, step: Step) -> Step:
    world.success(step)
    return {}


def _read(world: AccountWorld, step: Step) -> Step:
    provider = world.policy.canonical(step.get("provider", world.provider()))
    entry = world.policy.for_connection(provider).provider
    place = Place(provider, step.get("connection", "c1"), step["model"], entry)
    lock = lockout.longest_lock(lockout.lock_rows(StateBook(world.rows), place), world.at(step))
    until = lock.until if lock else None
    return {"locked": lock is not None, "remaining_ms": 0 if until is None else until - world.at(step)}


def _delete(world: AccountWorld, step: Step) -> Step:
    world.delete(step)
    return {}


def _restart(world: AccountWorld, step: Step) -> Step:
    world.restart()
    return {}


def _list(world: AccountWorld, step: Step) -> Step:
    listed = lockout_upkeep.listing(world.locks(), world.at(step))
    return {"models": [item.model for item in listed]}


_EVENTS: Mapping[str, Callable[[AccountWorld, Step], Step]] = {
    "record": _record,
    "failure": _failure,
    "success": _success,
    "decay": _decay,
    "read": _read,
    "delete": _delete,
    "list": _list,
    "restart": _restart,
}
