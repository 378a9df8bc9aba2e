"""Stage `account` of classification and rule vectors: one failure on an active connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.vectors.account_checks import check
from tests.vectors.account_world import AccountWorld, same

_CLASSIFICATION_NOW = "2026-01-01T12:00:00Z"
_WORLD_KEYS = frozenset({"connection", "model_lock", "test_status", "writes", "eligible", "error_type", "state"})


def run_account(vector: Mapping[str, Any]) -> None:
    """Hand the vector's failure to the failure algorithm; raise AssertionError where the result differs."""
    given = {"now": _CLASSIFICATION_NOW, **vector["given"]}
    row = {"backoff_level": given.get("backoff_level", 0), **given.get("connection", {})}
    world = AccountWorld({**given, "connection": row})
    step = {name: value for name, value in given.items() if name not in ("connection", "operator_rules")}
    answer = world.failure({"at_ms": 0, **step})
    shown = {"account_fallback": answer.fallback, "cooldown_ms": answer.cooldown_ms, "reason": answer.reason}
    for name, wanted in vector["expect"].items():
        if name in _WORLD_KEYS:
            check(world, {name: wanted}, world.base, given.get("model", ""))
        elif name in shown:
            same(name, shown[name], wanted)
        else:
            same(name, getattr(answer.record, name), wanted)
