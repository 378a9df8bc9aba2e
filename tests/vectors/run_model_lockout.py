"""Runs model lockout vectors (spec/model_lockout.md): the lock writer, and outcomes with the pool lockout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from policy_service.domain import lockout_upkeep
from tests.vectors.account_world import AccountWorld, same

Step = Mapping[str, Any]


def run(vector: dict[str, Any]) -> None:
    """Raise AssertionError where the world differs from `expect`."""
    world = AccountWorld(vector["given"])
    now = world.base
    seen: Step = {}
    for step in vector["steps"]:
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
    profile = world.profile().lockout
    return getattr(profile, _EFFECTIVE.get(name, name.removeprefix("model_lockout.")))


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
    if step.get("provider") in (None, world.given.get("provider")):
        return {}
    return {"locked": False, "remaining_ms": 0}


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
