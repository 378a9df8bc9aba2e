"""Lock events of the vectors of a `World`: the writer alone, listing, decay (model_lockout.yaml)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policy_service.application.connection_case import Attempt
from policy_service.application.connection_locks import LockWriter, decay_locks
from policy_service.domain import breaker, lockout_upkeep
from policy_service.domain.lockout import Decay, LockEvidence
from tests.vectors.world import World


def record(world: World, step: Mapping[str, Any], now: int) -> None:
    """One failure handed to the lock writer."""
    place, policy = world.place(step["model"], step.get("connection", "c1")), world.profile("c1")
    evidence = LockEvidence(
        step.get("status"),
        step.get("reason", ""),
        step.get("base_ms", 0),
        step.get("exact_ms", 0),
        step.get("exact_source", ""),
        step.get("uncapped", False),
        step.get("scope"),
        local=policy.auth_class == "local",
    )
    book, facts = world.book(), world.log(now, "record", step.get("replica", "r1"))
    attempt = Attempt(now, now, breaker_blocks=breaker.blocks(world.breaker(), now))
    LockWriter(book, place, policy, attempt, facts).write(evidence)
    world.commit(book, facts)
    world.rows.update({row.key: row for row in lockout_upkeep.evictions(world.locks(), now)})


def decay(world: World, step: Mapping[str, Any], now: int) -> Decay:
    """A success as far as the counters of a model are concerned."""
    book, facts = world.book(), world.log(now, "decay", step.get("replica", "r1"))
    place = world.place(step["model"], step.get("connection", "c1"))
    result = decay_locks(book, place, world.profile("c1"), Attempt(now, step.get("started_at_ms", now)), facts)
    world.commit(book, facts)
    return result


def listed(world: World, now: int) -> list[str]:
    """Models of the active locks, as operators see them."""
    return [item.model for item in lockout_upkeep.listing(world.locks(), now)]
