"""Runs connection cooldown vectors (spec/connection_cooldown.md): each failure is handed to the algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from policy_service.application import connection_acts as acts
from policy_service.domain.cooldown import RecoveryView
from policy_service.domain.state import StateBook
from tests.vectors.account_checks import check
from tests.vectors.account_world import AccountWorld, same
from tests.vectors.step_fields import ACCOUNT as FIELDS
from tests.vectors.step_fields import ACCOUNT_GIVEN, check_fields, check_given

Step = Mapping[str, Any]


def run(vector: dict[str, Any]) -> None:
    """Raise AssertionError where the world differs from `expect`."""
    check_given(vector["given"], ACCOUNT_GIVEN)
    world = AccountWorld(vector["given"])
    play(world, vector["steps"])
    finish(world, vector["steps"], vector["expect"])


def play(world: AccountWorld, steps: Sequence[Step]) -> None:
    """The steps, each with its own expectations."""
    for number, step in enumerate(steps, 1):
        check_fields(step, FIELDS)
        seen = EVENTS[step["event"]](world, step)
        expected = dict(step.get("expect", {}))
        for name in set(expected) & set(seen):
            same(name, seen[name], expected.pop(name))
        check(world, expected, world.at(step), _model(steps[:number]))


def finish(world: AccountWorld, steps: Sequence[Step], expect: Mapping[str, Any]) -> None:
    """The expectations at the instant of the last step."""
    check(world, expect, world.at(steps[-1]) if steps else world.base, _model(steps))


def _model(steps: Sequence[Step]) -> str:
    """Model of the newest step that names one."""
    return next((str(step["model"]) for step in reversed(steps) if "model" in step), "")


def _failure(world: AccountWorld, step: Step) -> Step:
    world.failure(step)
    return {}


def _success(world: AccountWorld, step: Step) -> Step:
    world.success(step)
    return {}


def _restart(world: AccountWorld, step: Step) -> Step:
    world.restart()
    return {}


def _nothing(world: AccountWorld, step: Step) -> Step:
    return {}


def _recover(world: AccountWorld, step: Step) -> Step:
    wanted = step["expected"]
    seen = RecoveryView(
        wanted["test_status"],
        world.stored(wanted.get("last_error_at_ms")),
        world.stored(wanted.get("rate_limited_until_ms")),
    )
    log, book = world.log(step), StateBook(world.rows)
    applied = acts.recover_connection(book, world.provider(), "c1", seen, world.at(step), log)
    world.commit(book, log)
    return {"applied": applied}


def _act(act: Callable[..., object]) -> Callable[[AccountWorld, Step], Step]:
    def run_act(world: AccountWorld, step: Step) -> Step:
        log, book = world.log(step), StateBook(world.rows)
        act(book, world.provider(), "c1", world.at(step), log)
        world.commit(book, log)
        return {}

    return run_act


def _retry_due(world: AccountWorld, step: Step) -> Step:
    log, book = world.log(step), StateBook(world.rows)
    permit = acts.grant_retry(book, world.provider(), "c1", f"p{step['at_ms']}", world.at(step), log)
    world.commit(book, log)
    return {"due": permit is not None}


def _retry_result(world: AccountWorld, step: Step) -> Step:
    log, book = world.log(step), StateBook(world.rows)
    acts.retry_result(book, world.provider(), "c1", step["ok"], world.at(step), log)
    world.commit(book, log)
    return {}


EVENTS: Mapping[str, Callable[[AccountWorld, Step], Step]] = {
    "failure": _failure,
    "success": _success,
    "read": _nothing,
    "restart": _restart,
    "recover": _recover,
    "operator_reset": _act(acts.reset_connection),
    "credential_change": _act(acts.change_credential),
    "retry_due": _retry_due,
    "retry_result": _retry_result,
}
