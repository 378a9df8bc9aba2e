"""Runs the vectors of spec/affinity.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from policy_service.domain.affinity import resolve_ttl
from policy_service.domain.session_key import SessionSources, session_hash, session_key
from tests.vectors.harness import Vector
from tests.vectors.matching import assert_expected
from tests.vectors.worlds_affinity import AffinityWorld, Fields


def _expanded(value: Any) -> Any:
    """{repeat, times} stands for the repeated text."""
    if isinstance(value, dict):
        if set(value) == {"repeat", "times"}:
            return value["repeat"] * value["times"]
        return {name: _expanded(each) for name, each in value.items()}
    return [_expanded(each) for each in value] if isinstance(value, list) else value


def _request(given: Fields) -> Fields:
    request = _expanded(given["request"])
    return {"key": session_key(SessionSources(request.get("headers") or {}, request.get("body") or {}))}


def _ttl(given: Fields) -> Fields:
    ttl = given["ttl"]
    return {"ttl_ms": resolve_ttl(ttl.get("override_ms"), ttl.get("generic_ms"), ttl.get("legacy_ms"))}


_CHECKS: dict[str, Callable[[Fields], Fields]] = {
    "request": _request,
    "ttl": _ttl,
    "store": lambda given: {"session_hash": session_hash(given["store"]["provider"], given["store"]["session_key"])},
}


def run(vector: Vector) -> None:
    """Raise AssertionError where an answer differs."""
    given: Fields = vector.get("given") or {}
    world = AffinityWorld(given)
    answer: Fields = {}
    for step in vector.get("steps", ()):
        answer = world.run(step)
        assert_expected(step.get("expect", {}), answer, f"at {world.now}")
    for name, check in _CHECKS.items():
        if name in given:
            answer = check(given)
    expected = dict(vector["expect"])
    if "affinities" in expected:
        expected["affinities"] = sorted(expected["affinities"])
    assert_expected(expected, answer, "result")
