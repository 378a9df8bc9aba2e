"""Checks between the entries of a catalogue: references, duplicates, names of strategies, rules."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from policy_service.domain.catalogue import Catalogue, ProviderDirectory
from policy_service.domain.policy import Policy
from policy_service.domain.rule_linter import ERROR, Finding, lint
from policy_service.domain.setting_specs import ACCOUNT_STRATEGIES
from policy_service.domain.settings import REGISTRY
from policy_service.domain.strategies import ROUTE_STRATEGIES
from policy_service.settings.catalogue_entries import Entries, by_short_name, target_provider
from policy_service.settings.catalogue_models import RouteEntry, TargetEntry
from policy_service.settings.problems import Location, Problem, did_you_mean, join, shown
from policy_service.settings.provider_data import builtin_providers, flat_profile
from policy_service.settings.values import refuse

LEASE_SCOPE = "lease:exclusive"
QUOTA_SHARE = "quota-share"
QUOTA_SHARE_PREFIX = "qtSd/"
_ROOM_FOR_WAITS_MS = 10_000


def check(entries: Entries, catalogue: Catalogue, environment: Mapping[str, str]) -> None:
    """Run every check; problems and warnings go to `entries`."""
    directory = ProviderDirectory(catalogue.providers)
    _providers(entries)
    _duplicates(entries)
    _connections(entries, catalogue, directory)
    _routes(entries, catalogue, directory, environment)
    _callers(entries)
    _strategies(entries, catalogue, directory)
    _rules(entries, catalogue)


# -- providers ---------------------------------------------------------------------------------------------
def _providers(entries: Entries) -> None:
    owners = {alias: p.id for p in builtin_providers().values() for alias in p.aliases}
    ids = set(builtin_providers()) | {entry.id for entry in entries.providers.values()}
    for index, entry in entries.providers.items():
        here: Location = ("providers", index)
        if entry.id in owners and entry.id not in builtin_providers() and owners[entry.id] != entry.id:
            remedy = f"write id: {owners[entry.id]}"
            entries.refuse(
                (*here, "id"), Problem(join((*here, "id")), "is an alias", entry.id, "a canonical id", remedy)
            )
        for alias in entry.aliases:
            if alias in ids or owners.get(alias, entry.id) != entry.id:
                taken = alias if alias in ids else owners[alias]
                problem = Problem(
                    join((*here, "aliases")), f"already means {taken}", alias, "a free name", "leave it out"
                )
                entries.refuse((*here, "aliases"), problem)
            owners.setdefault(alias, entry.id)
        _profile(entries, index, entry.profile)


def _profile(entries: Entries, index: int, profile: Mapping[str, object]) -> None:
    for name, value in flat_profile(profile).items():
        place: Location = ("providers", index, "profile", *name.split("."))
        spec = REGISTRY.get(name) or by_short_name(name)
        if spec and (problem := refuse(spec, value, join(("providers", index, "profile", name)))):
            entries.refuse(place, problem)


# -- duplicates --------------------------------------------------------------------------------------------
def _duplicates(entries: Entries) -> None:
    for name, key in (("providers", "id"), ("connections", "id"), ("routes", "name"), ("callers", "id")):
        _unique(entries, name, key, {i: getattr(entry, key) for i, entry in getattr(entries, name).items()})
    _unique(entries, "callers", "key_sha256", {i: entry.digest for i, entry in entries.callers.items()})
    _unique(entries, "rules", "id", {i: entry.id for i, entry in entries.rules.items() if entry.id})


def _unique(entries: Entries, name: str, key: str, values: Mapping[int, str]) -> None:
    first: dict[str, int] = {}
    for index, value in values.items():
        if value in first:
            place = (name, index, key)
            text = f"already used by {name}[{first[value]}]"
            entries.refuse(place, Problem(join(place), text, shown(value), "each one once", "rename or remove one"))
        first.setdefault(value, index)


# -- connections -------------------------------------------------------------------------------------------
def _connections(entries: Entries, catalogue: Catalogue, directory: ProviderDirectory) -> None:
    for index, entry in entries.connections.items():
        if directory.is_known(entry.provider):
            continue
        place = ("connections", index, "provider")
        hint = did_you_mean(entry.provider.lower(), _provider_names(catalogue))
        remedy = hint or "add it to providers if it needs more than the defaults"
        text = "not in the catalogue: it takes the defaults" + ("" if entry.auth_class else " and has no auth class")
        entries.warn(place, Problem(join(place), text, shown(entry.provider), "", remedy))


def _provider_names(catalogue: Catalogue) -> list[str]:
    """Ids and aliases that a typing error may have meant."""
    return [name for p in catalogue.providers.values() if "*" not in p.id for name in (p.id, *p.aliases)]


# -- routes ------------------------------------------------------------------------------------------------
def _routes(
    entries: Entries, catalogue: Catalogue, directory: ProviderDirectory, environment: Mapping[str, str]
) -> None:
    wait = Policy(catalogue, environment).route_wait
    least = wait.budget_ms + _ROOM_FOR_WAITS_MS if wait.effective else 0
    for index, entry in entries.routes.items():
        here = ("routes", index)
        _strategy_name(entries, (*here, "strategy"), entry)
        keys: dict[str, int] = {}
        for number, target in enumerate(entry.targets):
            place = (*here, "targets", number)
            _target(entries, place, target, catalogue, directory)
            key = target.to_domain(target_provider(target, catalogue.connections, directory.canonical)).key
            _target_key(entries, place, key, number, keys)
        _keys_named(entries, here, entry, set(keys))
        _timeout(entries, (*here, "options", "target_timeout_ms"), entry, least)
        if not any(target.weight for target in entry.targets) and entry.strategy == "weighted":
            problem = Problem(join((*here, "targets")), "every weight is 0", "", "", "the choice is uniform then")
            entries.warn((*here, "targets"), problem)


def _strategy_name(entries: Entries, place: Location, entry: RouteEntry) -> None:
    name = entry.strategy
    if not name or name in ROUTE_STRATEGIES or (name == QUOTA_SHARE and entry.name.startswith(QUOTA_SHARE_PREFIX)):
        return
    allowed = ", ".join(ROUTE_STRATEGIES)
    remedy = did_you_mean(name, ROUTE_STRATEGIES) or "use a name of the list; names are exact"
    if name == QUOTA_SHARE:
        remedy = f"quota-share is for routes named {QUOTA_SHARE_PREFIX}..."
    entries.refuse(place, Problem(join(place), "unknown strategy (UNKNOWN_STRATEGY)", shown(name), allowed, remedy))


def _target(
    entries: Entries,
    place: Location,
    target: TargetEntry,
    catalogue: Catalogue,
    directory: ProviderDirectory,
) -> None:
    if not target.provider and not target.connection:
        problem = Problem(join(place), "names neither provider nor connection", "", "at least one", "add provider")
        entries.refuse(place, problem)
    declared = catalogue.connections.get(target.connection)
    if target.connection and declared is None and target.connection not in entries.named["connections"]:
        known = sorted(entries.named["connections"])
        remedy = did_you_mean(target.connection, known) or "declare it below connections"
        where = (*place, "connection")
        problem = Problem(join(where), "unknown connection", shown(target.connection), _some(known), remedy)
        entries.refuse(where, problem)
    if target.provider:
        _target_provider(entries, (*place, "provider"), target, catalogue, directory)


def _target_provider(
    entries: Entries,
    place: Location,
    target: TargetEntry,
    catalogue: Catalogue,
    directory: ProviderDirectory,
) -> None:
    declared = catalogue.connections.get(target.connection)
    wanted = directory.canonical(target.provider)
    if declared is not None and declared.provider != wanted:
        remedy = f"write {declared.provider}, or leave the provider out"
        text = f"connection {target.connection} belongs to {declared.provider}"
        entries.refuse(place, Problem(join(place), text, shown(target.provider), declared.provider, remedy))
    used = {connection.provider for connection in catalogue.connections.values()}
    if not directory.is_known(wanted) and wanted not in used:
        remedy = did_you_mean(wanted, _provider_names(catalogue)) or "declare it below providers or connections"
        entries.refuse(place, Problem(join(place), "unknown provider", shown(target.provider), "", remedy))


def _target_key(entries: Entries, place: Location, key: str, number: int, keys: dict[str, int]) -> None:
    if key in keys:
        text = f"same target as targets[{keys[key]}]"
        entries.refuse(place, Problem(join(place), text, shown(key), "each one once", "give one of them a key"))
    keys.setdefault(key, number)


def _keys_named(entries: Entries, here: Location, entry: RouteEntry, keys: set[str]) -> None:
    """Panel, judge and stages name targets of the route by key."""
    options = entry.options
    named = {"panel": options.panel or [], "judge": [options.judge or ""], "stages": options.stages or []}
    for option, wanted in named.items():
        for key in filter(None, wanted):
            if key not in keys:
                place = (*here, "options", option)
                remedy = did_you_mean(key, keys) or "name a target of this route by its key"
                entries.refuse(
                    place, Problem(join(place), "unknown target key", shown(key), _some(sorted(keys)), remedy)
                )


def _timeout(entries: Entries, place: Location, entry: RouteEntry, least: int) -> None:
    given = entry.options.target_timeout_ms
    if given is not None and given < least:
        remedy = "raise it, lower cooldown_wait.budget_ms, or set cooldown_wait.enabled: false"
        text = "leaves no room for waiting out a cooldown"
        entries.refuse(place, Problem(join(place), text, str(given), f"at least {least}", remedy))


def _some(names: list[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


# -- callers, strategies, rules ----------------------------------------------------------------------------
def _callers(entries: Entries) -> None:
    known = sorted(entries.named["connections"])
    for index, entry in entries.callers.items():
        place = ("callers", index, "allowed_connections")
        for name in entry.allowed_connections:
            if name not in known:
                remedy = did_you_mean(name, known) or "declare it below connections"
                entries.refuse(place, Problem(join(place), "unknown connection", shown(name), _some(known), remedy))
        if LEASE_SCOPE in entry.scopes and not entry.allowed_connections:
            text = f"scope {LEASE_SCOPE} without connections: every call with a lease is refused"
            entries.warn(place, Problem(join(place), text, "", "", "list the connections the key may hold"))


def _strategies(entries: Entries, catalogue: Catalogue, directory: ProviderDirectory) -> None:
    for name, entry in entries.strategies.items():
        place = ("provider_strategies", name)
        if entry.fallback_strategy not in ACCOUNT_STRATEGIES:
            given, allowed = entry.fallback_strategy, ", ".join(ACCOUNT_STRATEGIES)
            remedy = did_you_mean(given, ACCOUNT_STRATEGIES) or "use a name of the list; names are exact"
            text = "unknown strategy (UNKNOWN_STRATEGY)"
            where = (*place, "fallback_strategy")
            entries.refuse(where, Problem(join(where), text, shown(given), allowed, remedy))
        if not directory.is_known(name):
            remedy = did_you_mean(name.lower(), _provider_names(catalogue)) or "check the name"
            entries.warn(place, Problem(join(place), "not in the catalogue", shown(name), "", remedy))


def _rules(entries: Entries, catalogue: Catalogue) -> None:
    """What the rule linter says: errors refuse the file, warnings are reported; unchanged built-in rules are not."""
    known = set(_builtin_findings())
    for finding in lint(catalogue.providers, catalogue.operator_rules):
        if finding in known:
            continue
        place = _rule_place(entries, catalogue, finding)
        name = f"{finding.provider} {finding.rule_id}".strip()
        problem = Problem(join(place), f"rule linter: {finding.code}", name, "", finding.remedy)
        (entries.refuse if finding.level == ERROR else entries.warn)(place, problem)


@lru_cache(maxsize=1)
def _builtin_findings() -> tuple[Finding, ...]:
    return tuple(lint(builtin_providers()))


def _rule_place(entries: Entries, catalogue: Catalogue, finding: Finding) -> Location:
    for index, rule in zip(entries.rules, catalogue.operator_rules, strict=True):
        if rule.id == finding.rule_id:
            return ("rules", index)
    for index, entry in entries.providers.items():
        ids = {"error_rules": [r.id for r in entry.error_rules], "restatement": [r.id for r in entry.restatement]}
        for name, listed in ids.items():
            if entry.id == finding.provider and finding.rule_id in listed:
                return ("providers", index, name, listed.index(finding.rule_id))
    return ("rules",)
