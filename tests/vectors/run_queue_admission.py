"""Runs the vectors of spec/queue_admission.md."""

from __future__ import annotations

from collections.abc import Callable

from policy_service.domain import setting_specs  # noqa: F401  (fills the registry)
from policy_service.domain.profiles import QueueProfile
from policy_service.domain.queue_admission import (
    HTTP_STATUS,
    QueueCode,
    effective_wait_ms,
    execution_limit_ms,
    is_line_full,
    limiter_gate,
    wait_budget_ms,
)
from policy_service.domain.queue_learning import RateEvidence, learn
from policy_service.domain.settings import REGISTRY, SettingSources
from tests.vectors.harness import Vector
from tests.vectors.matching import assert_expected
from tests.vectors.worlds_gates import Fields
from tests.vectors.worlds_queue_admission import QueueWorld

_FLOORS_MS = {"zai-web": 60_000, "maxai": 300_000, "mx": 300_000}
"""What the catalogue declares for these providers (queue_admission.md section 1)."""
_LOCAL = {"local": True, "breaker": False, "cooldown": False, "lockout": False, "grpc": "OK"}


def _depth(given: Fields) -> Fields:
    full = is_line_full(given["depth"]["max_queue_depth"], given["depth"]["queued"])
    return {"admitted": not full} | (_refusal(QueueCode.QUEUE_FULL) if full else {})


def _refusal(code: QueueCode) -> Fields:
    return {"code": code, "http_status": HTTP_STATUS[code], **_LOCAL}


def _resolve(given: Fields) -> Fields:
    asked = given["resolve"]
    spec = REGISTRY[f"queue.{asked['setting']}"]
    environment = dict(asked.get("environment_names") or {})
    if "environment" in asked:
        environment[spec.environment] = asked["environment"]
    stored = {spec.name: asked["stored"]} if "stored" in asked else {}
    configured = SettingSources(stored, environment).resolve(spec.name, default=asked.get("default"))
    assert isinstance(configured, int | float)
    is_queue_wait = asked["setting"] == "max_wait_ms"
    floor = _FLOORS_MS.get(asked.get("provider", ""), 0) if is_queue_wait else 0
    return {"effective_ms": effective_wait_ms(configured, override=asked.get("connection"), floor=floor)}


def _execution(given: Fields) -> Fields:
    asked = given["execution"]
    effective = effective_wait_ms(asked["execution_max_wait_ms"], override=asked.get("connection_override_ms"))
    return {"execution_limit_ms": execution_limit_ms(effective, asked.get("start_timeout_ms"))}


def _budget(given: Fields) -> Fields:
    asked = given["budget"]
    unbounded = asked.get("unbounded_wait", False)
    return {
        "budget_ms": wait_budget_ms(asked["max_wait_ms"], asked.get("remaining_budget_ms"), unbounded_wait=unbounded)
    }


def _learn(given: Fields) -> Fields:
    asked = given["learn"]
    profile = QueueProfile(
        requests_per_minute=asked["configured_rpm"],
        min_time_between_requests_ms=asked["configured_gap_ms"],
        rpm_override=asked.get("rpm_override"),
    )
    before = limiter_gate("p:c1", profile).pace
    assert before is not None
    cap = asked.get("body_cap")
    evidence = RateEvidence(
        status=asked.get("status"),
        limit=asked.get("limit"),
        remaining=asked.get("remaining"),
        reset_ms=asked.get("reset_ms"),
        body_hint_ms=asked.get("body_hint_ms"),
        over_limit=asked.get("over_limit", False),
        body_cap=(cap["count"], cap["window_ms"]) if cap else None,
    )
    after = learn(before, profile, evidence, 0, asked.get("queue_budget_ms", profile.max_wait_ms))
    unchanged = (after.tokens, after.refill_to, after.refill_at) == (before.tokens, before.refill_to, before.refill_at)
    return {
        "gap_ms": after.gap_ms,
        "reservoir": "unchanged" if unchanged else "off" if after.tokens is None else after.tokens,
        "refresh_to": after.refill_to,
        "refresh_in_ms": after.refill_at,
    }


_CHECKS: dict[str, Callable[[Fields], Fields]] = {
    "depth": _depth,
    "resolve": _resolve,
    "execution": _execution,
    "budget": _budget,
    "learn": _learn,
    "code": lambda given: _refusal(QueueCode(given["code"])),
}


def run(vector: Vector) -> None:
    """Raise AssertionError where an answer differs."""
    given: Fields = vector["given"]
    answer: Fields = {}
    for name, check in _CHECKS.items():
        if name in given:
            answer = check(given)
    if "limiter" in given:
        world = QueueWorld(given["limiter"])
        for step in vector["steps"]:
            answer = world.run(step)
            assert_expected(step.get("expect", {}), answer, f"at {world.now}")
    assert_expected(vector["expect"], answer, "result")
