"""Checks of the routes of a catalogue: strategies, targets, keys, timeouts."""

from __future__ import annotations

from collections.abc import Mapping

from policy_service.domain.policy import Policy
from policy_service.domain.strategies import IMPLEMENTED_STRATEGIES, ROUTE_STRATEGIES
from policy_service.settings.catalogue_entries import Entries, target_provider
from policy_service.settings.catalogue_models import RouteEntry, TargetEntry
from policy_service.settings.catalogue_names import Known, some
from policy_service.settings.problems import Location, Problem, did_you_mean, join, shown

QUOTA_SHARE = "quota-share"
QUOTA_SHARE_PREFIX = "qtSd/"
_ROOM_FOR_WAITS_MS = 10_000


def check_routes(entries: Entries, known: Known, environment: Mapping[str, str]) -> None:
    """Check every route; problems and warnings go to `entries`."""
    wait = Policy(known.catalogue, environment).route_wait
    least = wait.budget_ms + _ROOM_FOR_WAITS_MS if wait.effective else 0
    for index, entry in entries.routes.items():
        here: Location = ("routes", index)
        _strategy_name(entries, (*here, "strategy"), entry)
        keys = _targets(entries, here, entry, known)
        _keys_named(entries, here, entry, keys)
        _timeout(entries, (*here, "options", "target_timeout_ms"), entry, least)
        _weights(entries, (*here, "targets"), entry)


def _targets(entries: Entries, here: Location, entry: RouteEntry, known: Known) -> set[str]:
    """Check the targets of a route; their keys."""
    keys: dict[str, int] = {}
    for number, target in enumerate(entry.targets):
        place = (*here, "targets", number)
        _target(entries, place, target, known)
        provider = target_provider(target, known.catalogue.connections, known.directory.canonical)
        _target_key(entries, place, target.to_domain(provider).key, number, keys)
    return set(keys)


def _weights(entries: Entries, place: Location, entry: RouteEntry) -> None:
    if entry.strategy == "weighted" and not any(target.weight for target in entry.targets):
        entries.warn(place, Problem(join(place), "every weight is 0", "", "", "the choice is uniform then"))


def _strategy_name(entries: Entries, place: Location, entry: RouteEntry) -> None:
    name = entry.strategy
    if not name or name in IMPLEMENTED_STRATEGIES:
        return
    if name in ROUTE_STRATEGIES or (name == QUOTA_SHARE and entry.name.startswith(QUOTA_SHARE_PREFIX)):
        allowed = ", ".join(IMPLEMENTED_STRATEGIES)
        text, remedy = (
            "not implemented yet: every selection by this route is refused (UNKNOWN_STRATEGY)",
            "use one of them",
        )
        entries.warn(place, Problem(join(place), text, shown(name), allowed, remedy))
        return
    allowed = ", ".join(ROUTE_STRATEGIES)
    remedy = did_you_mean(name, ROUTE_STRATEGIES) or "use a name of the list; names are exact"
    if name == QUOTA_SHARE:
        remedy = f"quota-share is for routes named {QUOTA_SHARE_PREFIX}..."
    entries.refuse(place, Problem(join(place), "unknown strategy (UNKNOWN_STRATEGY)", shown(name), allowed, remedy))


def _target(entries: Entries, place: Location, target: TargetEntry, known: Known) -> None:
    if not target.provider and not target.connection:
        problem = Problem(join(place), "names neither provider nor connection", "", "at least one", "add provider")
        entries.refuse(place, problem)
    if target.connection and target.connection not in known.connections:
        where = (*place, "connection")
        allowed, remedy = known.connection_names(), known.connection_hint(target.connection)
        problem = Problem(join(where), "unknown connection", shown(target.connection), allowed, remedy)
        entries.refuse(where, problem)
    if target.provider:
        _target_provider(entries, (*place, "provider"), target, known)


def _target_provider(entries: Entries, place: Location, target: TargetEntry, known: Known) -> None:
    declared = known.catalogue.connections.get(target.connection)
    wanted = known.directory.canonical(target.provider)
    if declared is not None and declared.provider != wanted:
        remedy = f"write {declared.provider}, or leave the provider out"
        text = f"connection {target.connection} belongs to {declared.provider}"
        entries.refuse(place, Problem(join(place), text, shown(target.provider), declared.provider, remedy))
    if not known.directory.is_known(wanted) and wanted not in known.providers_in_use:
        remedy = known.provider_hint(wanted, "declare it below providers or connections")
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
                    place, Problem(join(place), "unknown target key", shown(key), some(sorted(keys)), remedy)
                )


def _timeout(entries: Entries, place: Location, entry: RouteEntry, least: int) -> None:
    given = entry.options.target_timeout_ms
    if given is not None and given < least:
        remedy = "raise it, lower cooldown_wait.budget_ms, or set cooldown_wait.enabled: false"
        text = "leaves no room for waiting out a cooldown"
        entries.refuse(place, Problem(join(place), text, str(given), f"at least {least}", remedy))
