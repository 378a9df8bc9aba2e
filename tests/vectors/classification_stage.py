"""Stages of classification and rule vectors that need no state: `record`, `kind` and `guard`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from policy_service.domain.classification import classify, resolve
from policy_service.domain.error_types import breaker_kind
from policy_service.domain.guards import guard_allows_fallback, local_guard
from tests.vectors.account_stage import run_account
from tests.vectors.account_world import AccountWorld, same

Vector = Mapping[str, Any]
_NOW = "2026-01-01T12:00:00Z"


def run_failure(vector: Vector) -> None:
    """Run one failure through its stage; raise AssertionError where the result differs."""
    _STAGES[vector["given"].get("stage", "record")](vector)


def _world(vector: Vector) -> AccountWorld:
    return AccountWorld({"now": _NOW, **vector["given"]})


def _record(vector: Vector) -> None:
    world, given = _world(vector), vector["given"]
    policy = world.profile()
    found = classify(world.outcome(given), policy, world.base, given.get("rotation_failures", 1))
    record = resolve(found, given.get("backoff_level", 0), policy)
    for name, wanted in vector["expect"].items():
        same(name, getattr(record, name), wanted)


def _kind(vector: Vector) -> None:
    world = _world(vector)
    same("kind", breaker_kind(world.outcome(vector["given"]), world.base), vector["expect"]["kind"])


def _guard(vector: Vector) -> None:
    world = _world(vector)
    guard = local_guard(world.outcome(vector["given"]), world.profile())
    shown = {"ignored": bool(guard), "should_fallback": bool(guard) and guard_allows_fallback(guard), "cooldown_ms": 0}
    for name, wanted in vector["expect"].items():
        same(name, shown[name], wanted)


_STAGES: dict[str, Callable[[Vector], None]] = {
    "record": _record,
    "account": run_account,
    "kind": _kind,
    "guard": _guard,
}
