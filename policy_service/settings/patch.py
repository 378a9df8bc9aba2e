"""PATCH of stored policy settings: pure, all or nothing, every problem at once (spec/operator_surface.md section 3)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from policy_service.domain.settings import REGISTRY
from policy_service.settings.problems import ConfigError, Problem, did_you_mean, shown
from policy_service.settings.provider_data import flat_profile
from policy_service.settings.resolved import REST_NAMES, plain
from policy_service.settings.values import refuse


@dataclass(frozen=True, slots=True)
class Patched:
    """What is to be stored after a patch. `changed` are the dotted names whose stored value differs."""

    stored: Mapping[str, object]
    changed: tuple[str, ...]


Tree = dict[str, "Tree | str"]
"""Names of settings: a block, or the dotted name of a setting."""


def patch(stored: Mapping[str, object], body: object, tree: Tree | None = None) -> Patched:
    """Merge a PATCH body into the stored settings.

    Args:
        stored: stored values by dotted setting name; values that the body does not name are left alone.
        body: parsed JSON: nested objects merge, lists and scalars replace, null removes.
        tree: names that the body may use; None: the REST names.

    Raises:
        ConfigError: everything that is wrong with the body, by its own path; then nothing changes.
    """
    if not isinstance(body, Mapping):
        raise ConfigError([Problem("body", "not an object", shown(body), "a JSON object", "send an object")])
    problems: list[Problem] = []
    values = dict(_leaves(body, REST_TREE if tree is None else tree, "", problems))
    if problems:
        raise ConfigError(problems)
    after = {name: value for name, value in {**stored, **values}.items() if value is not None}
    changed = tuple(name for name in values if stored.get(name) != after.get(name))
    return Patched(after, changed)


def patch_document(document: str | None, body: object, tree: Tree) -> tuple[str, tuple[str, ...]]:
    """Patch the `settings` block of a catalogue document.

    Args:
        document: a stored document; None: there is none yet.
        body, tree: as in `patch`; names may also be dotted.

    Returns:
        The document with the block replaced, and the names of the settings whose stored value differs.

    Raises:
        ConfigError: everything that is wrong with the body.
    """
    data: dict[str, Any] = json.loads(document) if document else {"version": 1}
    stored = {name: value for name, value in flat_profile(data.get("settings") or {}).items() if value is not None}
    patched = patch(stored, _unfolded(body), tree)
    settings = {name: plain(value) for name, value in sorted(patched.stored.items())}
    changed = tuple(name for name in patched.changed if plain(stored.get(name)) != settings.get(name))
    return json.dumps({**data, "settings": settings}, ensure_ascii=False), changed


def _unfolded(body: object) -> object:
    """Dotted names as nested objects, merged with those that are nested already."""
    if not isinstance(body, Mapping):
        return body
    whole: dict[str, object] = {}
    for name, value in body.items():
        first, _, rest = str(name).partition(".")
        whole[first] = _joined(whole.get(first), _unfolded({rest: value} if rest else value))
    return whole


def _joined(present: object, value: object) -> object:
    if not (isinstance(present, Mapping) and isinstance(value, Mapping)):
        return value
    return {**present, **{name: _joined(present.get(name), item) for name, item in value.items()}}


def _tree(names: Iterable[tuple[str, str]]) -> Tree:
    tree: Tree = {}
    for rest, name in names:
        *outer, last = rest.split(".")
        block = tree
        for part in outer:
            inner = block.setdefault(part, {})
            assert isinstance(inner, dict), rest
            block = inner
        block[last] = name
    return tree


REST_TREE: Tree = _tree(REST_NAMES.items())
"""Names below /api/resilience."""
NAME_TREE: Tree = _tree((name, name) for name in REGISTRY)
"""Full names of settings."""


def _leaves(
    body: Mapping[object, object], tree: Tree, prefix: str, problems: list[Problem]
) -> Iterator[tuple[str, object]]:
    for key, value in body.items():
        path = f"{prefix}{key}"
        found = tree.get(key) if isinstance(key, str) else None
        if found is None:
            problems.append(_unknown(path, str(key), tree))
        elif isinstance(found, str):
            yield from _leaf(found, value, path, problems)
        elif isinstance(value, Mapping):
            yield from _leaves(value, found, f"{path}.", problems)
        elif value is None:
            yield from ((name, None) for name in _names(found))
        else:
            remedy = f"send an object, such as {{{next(iter(found))!r}: ...}}"
            problems.append(Problem(path, "wrong type", shown(value), "an object", remedy))


def _leaf(name: str, value: object, path: str, problems: list[Problem]) -> Iterator[tuple[str, object]]:
    problem = None if value is None else refuse(REGISTRY[name], value, path)
    if problem is not None:
        problems.append(problem)
    else:
        yield name, tuple(value) if isinstance(value, list) else value


def _names(tree: Tree) -> Iterator[str]:
    """Every setting of a block: null for a block takes all of it back."""
    for found in tree.values():
        if isinstance(found, str):
            yield found
        else:
            yield from _names(found)


def _unknown(path: str, name: str, tree: Tree) -> Problem:
    hint = did_you_mean(name, tree) or "leave it out"
    return Problem(path, "unknown key", shown(name), ", ".join(tree), hint)
