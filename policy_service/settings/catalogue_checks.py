"""Checks between the entries of a catalogue: references, duplicates, names of strategies, rules."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
        if not _is_whole_or_pattern(entry.id):
            _refuse_name(entries, (*here, "id"), "* where no pattern has one", entry.id, "`prefix*` or `*part*`")
        for alias in entry.aliases:
            _alias(entries, (*here, "aliases"), entry.id, alias, owners, ids)
            owners.setdefault(alias, entry.id)
        _profile(entries, index, entry.profile)


def _alias(
    entries: Entries, place: Location, owner: str, alias: str, owners: Mapping[str, str], ids: Collection[str]
) -> None:
    if "*" in owner:
        _refuse_name(entries, place, "a pattern has no aliases", alias, "aliases of whole ids")
    elif "*" in alias:
        _refuse_name(entries, place, "an alias is no pattern", alias, "a whole name")
    elif alias in ids or owners.get(alias, owner) != owner:
        taken = alias if alias in ids else owners[alias]
        _refuse_name(entries, place, f"already means {taken}", alias, "a free name")


def _refuse_name(entries: Entries, place: Location, text: str, given: str, allowed: str) -> None:
    remedy = "leave it out" if place[-1] == "aliases" else "put the * at the end, or one at each end"
    entries.refuse(place, Problem(join(place), text, given, allowed, remedy))


def _is_whole_or_pattern(name: str) -> bool:
    """A name without a star, `prefix*` or `*part*` (spec/provider_catalogue.md section 1)."""
    return "*" not in name.removeprefix("*" if name.endswith("*") else "").removesuffix("*")


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
    by_operator, by_provider = _operator_places(entries, catalogue), _provider_places(entries)
    for finding in lint(catalogue.providers, catalogue.operator_rules):
        if finding in known:
            continue
        place = by_operator.get(finding.rule_id) or by_provider.get((finding.provider, finding.rule_id), ("rules",))
        name = f"{finding.provider} {finding.rule_id}".strip()
        problem = Problem(join(place), f"rule linter: {finding.code}", name, "", finding.remedy)
        (entries.refuse if finding.level == ERROR else entries.warn)(place, problem)


@lru_cache(maxsize=1)
def _builtin_findings() -> tuple[Finding, ...]:
    return tuple(lint(builtin_providers()))


def _operator_places(entries: Entries, catalogue: Catalogue) -> dict[str, Location]:
    """Where each operator rule stands, by its id; the first one where an id is used twice."""
    found: dict[str, Location] = {}
    for index, rule in zip(entries.rules, catalogue.operator_rules, strict=True):
        found.setdefault(rule.id, ("rules", index))
    return found


def _provider_places(entries: Entries) -> dict[tuple[str, str], Location]:
    """Where each rule of a provider stands, by provider and id."""
    found: dict[tuple[str, str], Location] = {}
    for index, entry in entries.providers.items():
        for name in ("error_rules", "restatement"):
            for position, rule in enumerate(getattr(entry, name)):
                found.setdefault((entry.id, rule.id), ("providers", index, name, position))
    return found
