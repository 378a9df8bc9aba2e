"""The entries of a catalogue document, each validated by itself; problems are collected, never raised one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from policy_service.domain.catalogue import Connection
from policy_service.domain.settings import REGISTRY, SettingSpec
from policy_service.settings.catalogue_models import (
    CallerEntry,
    CatalogueEntry,
    ConnectionEntry,
    ProviderStrategyEntry,
    RouteEntry,
    RuleEntry,
    TargetEntry,
)
from policy_service.settings.problems import ConfigError, Location, Problem, from_validation, join, shown, unknown
from policy_service.settings.provider_data import ProviderEntry, flat_profile
from policy_service.settings.values import refuse, unknown_setting
from policy_service.settings.yaml_text import Document

M = TypeVar("M", bound=BaseModel)
Canonical = Callable[[str], str]
_CLASSES = ("oauth", "api_key", "local", "default")
_LISTS: Mapping[str, type[BaseModel]] = {
    "providers": ProviderEntry,
    "connections": ConnectionEntry,
    "routes": RouteEntry,
    "callers": CallerEntry,
    "rules": RuleEntry,
}
_REMEDIES = {
    "key": "keys are kept as hashes only: write key_sha256, from printf %s KEY | sha256sum",
    "api_key": "never write a credential here: the service holds none",
    "target": "write targets, a list",
    "operator_rules": "write rules",
    "provider_error_rules": "write rules",
}


@dataclass(slots=True)
class Entries:
    """Validated entries with their place in the document; `problems` collects everything that is wrong."""

    document: Document
    providers: dict[int, ProviderEntry] = field(default_factory=dict)
    connections: dict[int, ConnectionEntry] = field(default_factory=dict)
    routes: dict[int, RouteEntry] = field(default_factory=dict)
    callers: dict[int, CallerEntry] = field(default_factory=dict)
    rules: dict[int, RuleEntry] = field(default_factory=dict)
    strategies: dict[str, ProviderStrategyEntry] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    named: dict[str, set[str]] = field(default_factory=dict)
    """Every id written in a list, usable or not, so that one mistake is reported once."""

    def refuse(self, location: Location, problem: Problem) -> None:
        """Add a problem with its place."""
        self.problems.append(replace(problem, where=self.document.locate(location)))

    def warn(self, location: Location, problem: Problem) -> None:
        """Add a warning with its place."""
        self.warnings.append(replace(problem, where=self.document.locate(location)))


def read_entries(document: Document) -> Entries:
    """Validate every entry by itself.

    Raises:
        ConfigError: the document is no mapping at all.
    """
    if not isinstance(document.data, dict):
        remedy = "write keys such as connections: and routes:, or {} for a catalogue without anything of its own"
        given = "an empty file" if document.data is None else shown(document.data)
        raise ConfigError([Problem("document", "not a mapping", given, "a mapping", remedy, document.source)])
    entries = Entries(document)
    _top_level(entries, document.data)
    for name, model in _LISTS.items():
        getattr(entries, name).update(_list_entries(entries, name, model))
    entries.strategies = dict(_strategies(entries))
    entries.settings = read_settings(entries, document.data.get("settings"), ("settings",))
    return entries


def _top_level(entries: Entries, data: Mapping[Any, Any]) -> None:
    known = list(CatalogueEntry.model_fields)
    for name in data:
        if name not in known:
            entries.refuse((str(name),), unknown(str(name), str(name), known, remedy=_REMEDIES.get(str(name), "")))
    if data.get("version", 1) != 1 or isinstance(data.get("version"), bool):
        problem = Problem("version", "unknown version of the format", shown(data["version"]), "1", "write version: 1")
        entries.refuse(("version",), problem)


def _list_entries(entries: Entries, name: str, model: type[M]) -> Iterator[tuple[int, M]]:
    items = entries.document.data.get(name)
    entries.named[name] = set()
    if items is None:
        return
    if not isinstance(items, list):
        remedy = "write each entry with a leading dash"
        entries.refuse((name,), Problem(name, "wrong type", shown(items), "a list", remedy))
        return
    for index, item in enumerate(items):
        entries.named[name] |= {str(item[key]) for key in ("id", "name") if isinstance(item, dict) and key in item}
        if (found := _entry(entries, model, item, (name, index))) is not None:
            yield index, found


def _entry(entries: Entries, model: type[M], item: object, location: Location) -> M | None:
    try:
        return model.model_validate(item)
    except ValidationError as error:
        locate = entries.document.locate
        found = from_validation(error, model, prefix=location, locate=locate, remedies=_REMEDIES)
        entries.problems += map(_without_key, found)
        return None


def _without_key(problem: Problem) -> Problem:
    """A key may stand where its hash belongs: what was given is not repeated."""
    is_secret = problem.path.endswith(".key_sha256") and problem.given
    return replace(problem, given="(hidden)") if is_secret else problem


def _strategies(entries: Entries) -> Iterator[tuple[str, ProviderStrategyEntry]]:
    block = entries.document.data.get("provider_strategies")
    if block is None:
        return
    if not isinstance(block, dict):
        allowed, remedy = "a mapping by provider", "write provider: {fallback_strategy: name}"
        entries.refuse(
            ("provider_strategies",), Problem("provider_strategies", "wrong type", shown(block), allowed, remedy)
        )
        return
    for name, item in block.items():
        if (found := _entry(entries, ProviderStrategyEntry, item, ("provider_strategies", str(name)))) is not None:
            yield str(name), found


# -- settings ----------------------------------------------------------------------------------------------
def read_settings(
    entries: Entries, block: object, location: Location, *, short_names: bool = False
) -> dict[str, object]:
    """Policy settings of a block, by full name; nested or dotted. Null leaves a setting to the next source.

    Args:
        entries: takes the problems.
        block: as parsed.
        location: where it stands.
        short_names: also accept names without the auth class, such as `breaker.failure_threshold`.
    """
    if block is None:
        return {}
    if not isinstance(block, dict):
        text = ".".join(map(str, location))
        entries.refuse(location, Problem(text, "wrong type", shown(block), "a mapping", "write name: value lines"))
        return {}
    found: dict[str, object] = {}
    for name, value in flat_profile({str(key): item for key, item in block.items()}).items():
        if _setting_is_usable(entries, name, value, location, short_names):
            found[name] = tuple(value) if isinstance(value, list) else value
    return {name: value for name, value in found.items() if value is not None}


def _setting_is_usable(entries: Entries, name: str, value: object, location: Location, short_names: bool) -> bool:
    place = (*location, *name.split("."))
    shown_path = join((*location, name))
    spec = REGISTRY.get(name) or (by_short_name(name) if short_names else None)
    if spec is None:
        entries.refuse(place, unknown_setting(name, shown_path))
        return False
    problem = None if value is None else refuse(spec, value, shown_path)
    if problem is not None:
        entries.refuse(place, problem)
    return problem is None


def by_short_name(name: str) -> SettingSpec | None:
    """Spec of a name without its auth class; type and range are the same for every class."""
    block, _, rest = name.partition(".")
    return next((spec for auth in _CLASSES if (spec := REGISTRY.get(f"{block}.{auth}.{rest}"))), None)


def target_provider(target: TargetEntry, connections: Mapping[str, Connection], canonical: Canonical) -> str:
    """Canonical provider of a target: the one it names, else its connection's."""
    declared = connections.get(target.connection)
    return canonical(target.provider) if target.provider or declared is None else declared.provider
