"""Checks between the entries of a catalogue: references, duplicates, names of strategies, rules."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from policy_service.domain.catalogue import Catalogue
from policy_service.domain.rule_linter import ERROR, Finding, lint
from policy_service.domain.setting_specs import ACCOUNT_STRATEGIES
from policy_service.domain.settings import REGISTRY
from policy_service.settings.catalogue_entries import Entries, by_short_name
from policy_service.settings.catalogue_names import Known
from policy_service.settings.catalogue_routes import check_routes
from policy_service.settings.problems import Location, Problem, did_you_mean, join, shown
from policy_service.settings.provider_data import builtin_providers, flat_profile
from policy_service.settings.values import refuse

LEASE_SCOPE = "lease:exclusive"


def check(entries: Entries, catalogue: Catalogue, environment: Mapping[str, str]) -> None:
    """Run every check; problems and warnings go to `entries`."""
    known = Known.of(entries, catalogue)
    _providers(entries)
    _duplicates(entries)
    _connections(entries, known)
    check_routes(entries, known, environment)
    _callers(entries, known)
    _strategies(entries, known)
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
def _connections(entries: Entries, known: Known) -> None:
    for index, entry in entries.connections.items():
        if known.directory.is_known(entry.provider):
            continue
        place: Location = ("connections", index, "provider")
        remedy = known.provider_hint(entry.provider, "add it to providers if it needs more than the defaults")
        text = "not in the catalogue: it takes the defaults" + ("" if entry.auth_class else " and has no auth class")
        entries.warn(place, Problem(join(place), text, shown(entry.provider), "", remedy))


# -- callers, strategies, rules ----------------------------------------------------------------------------
def _callers(entries: Entries, known: Known) -> None:
    for index, entry in entries.callers.items():
        place: Location = ("callers", index, "allowed_connections")
        for name in entry.allowed_connections:
            if name not in known.connections:
                allowed, remedy = known.connection_names(), known.connection_hint(name)
                entries.refuse(place, Problem(join(place), "unknown connection", shown(name), allowed, remedy))
        if LEASE_SCOPE in entry.scopes and not entry.allowed_connections:
            text = f"scope {LEASE_SCOPE} without connections: every call with a lease is refused"
            entries.warn(place, Problem(join(place), text, "", "", "list the connections the key may hold"))


def _strategies(entries: Entries, known: Known) -> None:
    for name, entry in entries.strategies.items():
        place = ("provider_strategies", name)
        if entry.fallback_strategy not in ACCOUNT_STRATEGIES:
            given, allowed = entry.fallback_strategy, ", ".join(ACCOUNT_STRATEGIES)
            remedy = did_you_mean(given, ACCOUNT_STRATEGIES) or "use a name of the list; names are exact"
            text = "unknown strategy (UNKNOWN_STRATEGY)"
            where = (*place, "fallback_strategy")
            entries.refuse(where, Problem(join(where), text, shown(given), allowed, remedy))
        if not known.directory.is_known(name):
            remedy = known.provider_hint(name, "check the name")
            entries.warn(place, Problem(join(place), "not in the catalogue", shown(name), "", remedy))


def _rules(entries: Entries, catalogue: Catalogue) -> None:
    """What the rule linter says: errors refuse the file, warnings are reported; unchanged built-in rules are not."""
    own = {e.id for e in entries.providers.values() if {"error_rules", "restatement"} & e.model_fields_set}
    known = {finding for finding in _builtin_findings() if finding.provider not in own}
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
