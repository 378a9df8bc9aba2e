"""No expectation of a vector is passed over: each one, changed on its own, makes its vector fail; so does a step's
field, a trait or an event that no runner knows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vectors.harness import DATA, OWN, Vector, kind_of, runner, vectors

KINDS = (
    "additions", "borrowed_state_machines", "breaker", "connection_cooldown", "egress", "model_lockout",
    "provider_cooldown", "terminal",
)  # fmt: skip
CASES = [(path, vector) for folder in (DATA, OWN) for path, vector in vectors(folder) if kind_of(path) in KINDS]
IDS = [f"{path.stem}-{vector['id']}" for path, vector in CASES]


def places(node: Any, path: tuple[Any, ...] = (), expected: bool = False) -> Iterator[tuple[Any, ...]]:
    """Where single expected values lie."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "state_in":
                continue
            yield from places(value, (*path, name), expected or name == "expect")
    elif isinstance(node, list) and not (expected and all(not isinstance(item, (dict, list)) for item in node)):
        for index, value in enumerate(node):
            yield from places(value, (*path, index), expected)
    elif expected:
        yield path


def another(value: Any) -> Any:
    """A value that is not this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, list):
        return [*value, "nobody"]
    return f"{value}x"


def changed(vector: Vector, path: tuple[Any, ...]) -> Vector:
    """The vector with another value at one place."""
    copied = copy.deepcopy(vector)
    node: Any = copied
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = another(node[path[-1]])
    return copied


@pytest.mark.parametrize(("path", "vector"), CASES, ids=IDS)
def test_every_changed_expectation_is_noticed(path: Path, vector: Vector) -> None:
    run = runner(str(kind_of(path)))
    for place in places(vector):
        try:
            run(changed(vector, place))
        except Exception:
            continue
        pytest.fail(f"{'.'.join(map(str, place))} may have any value")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["given", "step", "expect", "event"])
def test_a_name_that_no_runner_knows_is_no_passed_vector(kind: str, where: str) -> None:
    own = [vector for path, vector in CASES if kind_of(path) == kind and vector["steps"]]
    odd = copy.deepcopy(own[0])
    if where == "event":
        odd["steps"][0]["event"] = "unheard_of"
    else:
        {"given": odd["given"], "step": odd["steps"][0], "expect": odd["expect"]}[where]["unheard_of"] = 1
    with pytest.raises((AssertionError, KeyError, TypeError)):
        runner(kind)(odd)
