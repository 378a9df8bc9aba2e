"""The vectors of settings.yaml that need no running service: reading, environment, PATCH."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from policy_service.domain.catalogue import Catalogue
from policy_service.domain.policy import Policy
from policy_service.domain.settings import REGISTRY, SettingSources
from policy_service.settings.patch import patch
from policy_service.settings.problems import ConfigError
from policy_service.settings.resolved import REST_NAMES, rest_values
from tests.vectors.harness import DATA, Vector, load

PURE_EVENTS = {"patch", "get", "set_environment"}
NEEDS_A_SERVICE = {"version", "token", "state"}


def is_pure(vector: Vector) -> bool:
    """No second replica, no stored state, no version, no token: reading and patching alone."""
    steps = vector.get("steps", [])
    events = {step["event"] for step in steps}
    alone = all(step.get("replica", "r1") == "r1" and "if_match" not in step for step in steps)
    return events <= PURE_EVENTS and alone and not NEEDS_A_SERVICE & set(vector["given"])


VECTORS = load(Path(DATA) / "settings.yaml")
PURE = [vector for vector in VECTORS if is_pure(vector)]


def dotted(values: Mapping[str, object] | None) -> dict[str, object]:
    return {REST_NAMES[name]: value for name, value in (values or {}).items()}


def effective(sources: SettingSources) -> dict[str, object]:
    values: dict[str, object] = {name: found.value for name, found in rest_values(sources).items()}
    policy = Policy(Catalogue(stored_settings=sources.stored), sources.environment)
    return values | {"wait_effective": policy.route_wait.effective}


def fallback_environment(given: Mapping[str, Any]) -> dict[str, str]:
    """The value of the next source, handed in as the environment's."""
    if "fallback" not in given:
        return {}
    fallback = given["fallback"]
    names = given["read"]
    values = fallback if isinstance(fallback, Mapping) else dict.fromkeys(names, fallback)
    return {REGISTRY[REST_NAMES[name]].environment: str(value) for name, value in values.items()}


class Replica:
    """Stored settings and environment of one replica, with the answer to the last call."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.stored: Mapping[str, object] = dotted(given.get("stored") or given.get("read"))
        self.environment: dict[str, str] = dict(given.get("environment") or fallback_environment(given))
        self.status = 200
        self.paths: set[str] = set()

    def take(self, step: Mapping[str, Any]) -> None:
        self.status, self.paths = 200, set()
        if step["event"] == "set_environment":
            self.environment = dict(step["environment"])
        elif step["event"] == "patch":
            self._patch(step["body"])

    def _patch(self, body: object) -> None:
        try:
            self.stored = patch(self.stored, body).stored
        except ConfigError as error:
            self.status, self.paths = 400, {problem.path for problem in error.problems}

    def check(self, expect: Mapping[str, Any]) -> None:
        sources = SettingSources(self.stored, self.environment)
        values = effective(sources)
        assert self.status == expect.get("http_status", self.status)
        assert set(expect.get("error_paths", ())) <= self.paths
        if "stored" in expect:
            assert self.stored == dotted(expect["stored"])
        for name, value in expect.get("effective", {}).items():
            assert values[name] == value, name
        for name, source in expect.get("sources", {}).items():
            assert rest_values(sources)[name].source == source, name


@pytest.mark.parametrize("vector", PURE, ids=[vector["id"] for vector in PURE])
def test_settings_vector_holds(vector: Vector) -> None:
    replica = Replica(vector["given"])
    for step in vector.get("steps", []):
        replica.take(step)
        replica.check(step.get("expect", {}))
    replica.check(vector["expect"])


def test_every_vector_that_needs_no_service_is_run() -> None:
    left = [vector["id"] for vector in VECTORS if vector not in PURE]

    assert len(PURE) == 33
    assert left == [
        "set-038", "set-039", "set-040", "set-046", "set-047", "set-049", "set-050", "set-051", "set-052", "set-053",
        "set-055", "set-056", "set-057", "set-058", "set-059",
    ]  # fmt: skip
