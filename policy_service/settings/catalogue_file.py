"""Reads a catalogue file: whole or not at all, every problem at once.

Merging. Entries of `providers` are laid over the built-in providers: a field that the entry names replaces the
built-in one, lists included; `profile` merges number by number; a field that it leaves out keeps the built-in
value. Everything else in the file stands alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from policy_service.domain.catalogue import Catalogue, Connection, Provider, ProviderDirectory, Route
from policy_service.domain.rules import operator_rule_id
from policy_service.settings.catalogue_checks import check
from policy_service.settings.catalogue_entries import Canonical, Entries, read_entries, read_settings, target_provider
from policy_service.settings.catalogue_explain import Override, explain
from policy_service.settings.catalogue_models import ConnectionEntry, RouteEntry
from policy_service.settings.load import read_text
from policy_service.settings.problems import ConfigError, Problem
from policy_service.settings.provider_data import ProviderEntry, builtin_providers
from policy_service.settings.yaml_text import parse

MAX_BYTES = 16 * 1024 * 1024
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_DOMAIN_NAME = {"quota_metrics": "quota_metrics_host"}


@dataclass(frozen=True, slots=True)
class LoadedCatalogue:
    """A usable catalogue file."""

    catalogue: Catalogue
    document_json: str
    """The document as canonical JSON; `load_catalogue` reads it back."""
    sha256: str
    """Of `document_json`: comments and layout do not make a new revision."""
    warnings: tuple[Problem, ...] = ()
    overrides: tuple[Override, ...] = ()


def load_catalogue(
    text: str, *, source: str = "catalogue", environment: Mapping[str, str] | None = None
) -> LoadedCatalogue:
    """Read a catalogue.

    Args:
        text: YAML, or the JSON of a stored revision.
        source: name of the text in messages, such as its path.
        environment: variables of policy settings, for checks against resolved values and for `overrides`.

    Raises:
        ConfigError: everything that is wrong with it; nothing of it is used then.
    """
    document = parse(text, source=source, max_bytes=MAX_BYTES)
    entries = read_entries(document)
    catalogue = compile_catalogue(entries)
    check(entries, catalogue, environment or {})
    if entries.problems:
        raise ConfigError(sorted(entries.problems, key=_place))
    canonical = _canonical(document.data)
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    overrides = tuple(explain(entries, catalogue, environment or {}))
    return LoadedCatalogue(catalogue, canonical, digest, tuple(entries.warnings), overrides)


def load_catalogue_file(path: str | Path, *, environment: Mapping[str, str] | None = None) -> LoadedCatalogue:
    """`load_catalogue` of a file.

    Raises:
        ConfigError: unreadable, or anything wrong with its content.
    """
    place = Path(path).expanduser()
    return load_catalogue(read_text(place, "catalogue", MAX_BYTES), source=str(place), environment=environment)


def builtin_catalogue() -> Catalogue:
    """The catalogue without any file: the providers that ship with the service."""
    return Catalogue(providers=builtin_providers())


def _canonical(data: Any) -> str:
    """The document as JSON that `load_catalogue` reads as the same document.

    Numbers that are not finite mean "none" where the catalogue takes them, and JSON knows none of them. Characters that
    YAML refuses or takes for line breaks are escaped.
    """
    text = json.dumps(_finite(data), ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _place(problem: Problem) -> tuple[str, int]:
    name, _, line = problem.where.rpartition(":")
    return (name, int(line)) if line.isdigit() else (problem.where, 0)


# -- compilation -------------------------------------------------------------------------------------------
def compile_catalogue(entries: Entries) -> Catalogue:
    """The domain catalogue of the entries that validated."""
    providers = merged_providers(entries)
    canonical = ProviderDirectory(providers).canonical
    connections = {
        entry.id: _connection(entries, index, entry, canonical) for index, entry in entries.connections.items()
    }
    return Catalogue(
        providers=providers,
        connections=connections,
        routes={entry.name: _route(entry, connections, canonical) for entry in entries.routes.values()},
        callers={entry.id: entry.to_domain() for entry in entries.callers.values()},
        operator_rules=tuple(
            rule.to_domain(canonical(rule.provider), operator_rule_id(i + 1)) for i, rule in entries.rules.items()
        ),
        stored_settings=entries.settings,
        provider_strategies={canonical(name): entry.fallback_strategy for name, entry in entries.strategies.items()},
    )


def merged_providers(entries: Entries) -> dict[str, Provider]:
    """Built-in providers with the file's entries laid over them."""
    merged = dict(builtin_providers())
    for entry in entries.providers.values():
        merged[entry.id] = overlay(merged.get(entry.id), entry)
    return merged


def overlay(base: Provider | None, entry: ProviderEntry) -> Provider:
    """`base` with the fields that `entry` names; `profile` merges number by number."""
    whole = entry.to_domain()
    if base is None:
        return whole
    named = {_DOMAIN_NAME.get(name, name) for name in entry.model_fields_set} - {"id", "profile"}
    fields: dict[str, Any] = {name: getattr(whole, name) for name in named}
    return replace(base, **fields, profile={**base.profile, **whole.profile})


def _connection(entries: Entries, index: int, entry: ConnectionEntry, canonical: Canonical) -> Connection:
    settings = read_settings(entries, entry.settings, ("connections", index, "settings"), short_names=True)
    return entry.to_domain(canonical(entry.provider), settings)


def _route(entry: RouteEntry, connections: Mapping[str, Connection], canonical: Canonical) -> Route:
    targets = (t.to_domain(target_provider(t, connections, canonical)) for t in entry.targets)
    return entry.to_domain(tuple(targets))
