"""Runs egress lock vectors (spec/egress_lock.md); steps and checks are those of the connections."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from policy_service.domain import egress
from tests.vectors.account_world import AccountWorld, same
from tests.vectors.run_connection_cooldown import finish, play
from tests.vectors.step_fields import ACCOUNT_GIVEN, check_given


def run(vector: dict[str, Any]) -> None:
    """Raise AssertionError where the world differs from `expect`."""
    check_given(vector["given"], ACCOUNT_GIVEN)
    world, expect = AccountWorld(vector["given"]), dict(vector["expect"])
    with _search(vector["given"]):
        failed = _fails(world, vector)
    if "providers" in expect:
        same("providers", sorted(world.policy.egress_providers), sorted(expect.pop("providers")))
    if "error" in expect:
        same("error", failed, expect.pop("error"))
    finish(world, vector["steps"], expect)


def _fails(world: AccountWorld, vector: dict[str, Any]) -> bool:
    """Run the steps; True if an error of the search reached the caller."""
    try:
        play(world, vector["steps"])
    except LookupError:
        return True
    return False


def _search(given: dict[str, Any]) -> AbstractContextManager[object]:
    if not given.get("lookup_error"):
        return nullcontext()
    return patch.object(egress, "siblings", side_effect=LookupError("no siblings today"))
