"""Runs egress lock vectors (spec/egress_lock.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from policy_service.domain import egress
from tests.vectors.account_checks import check
from tests.vectors.account_world import AccountWorld, same


def run(vector: dict[str, Any]) -> None:
    """Raise AssertionError where the world differs from `expect`."""
    world = AccountWorld(vector["given"])
    expect = dict(vector["expect"])
    failed = _play(world, vector)
    if "providers" in expect:
        same("providers", sorted(world.policy.egress_providers), sorted(expect.pop("providers")))
    if "error" in expect:
        same("error", failed, expect.pop("error"))
    check(world, expect, world.base + max([step["at_ms"] for step in vector["steps"]], default=0))


def _play(world: AccountWorld, vector: dict[str, Any]) -> bool:
    """Run the steps; True if an error reached the caller."""
    try:
        for step in _steps(vector):
            world.failure(step)
    except LookupError:
        return True
    return False


def _steps(vector: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if not vector["given"].get("lookup_error"):
        yield from vector["steps"]
        return
    with patch.object(egress, "siblings", side_effect=LookupError("no siblings today")):
        yield from vector["steps"]
