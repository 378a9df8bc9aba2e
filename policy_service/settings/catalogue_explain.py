"""What of a catalogue file takes the place of something else, and what of it has no effect; for `config check`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from policy_service.domain.catalogue import Catalogue, Provider
from policy_service.domain.settings import ENV_ALIASES, REGISTRY
from policy_service.settings.catalogue_entries import Entries
from policy_service.settings.problems import shown
from policy_service.settings.provider_data import builtin_providers


@dataclass(frozen=True, slots=True)
class Override:
    """Something of the file that takes the place of something else; shown by `config check`."""

    path: str
    replaces: str
    by: str
    note: str = ""


def explain(entries: Entries, catalogue: Catalogue, environment: Mapping[str, str]) -> Iterator[Override]:
    """What of the file takes the place of something else, and what of it has no effect."""
    for entry in entries.providers.values():
        if (base := builtin_providers().get(entry.id)) is not None:
            yield from _changed_fields(base, catalogue.providers[entry.id])
        yield from _profiles_beaten_by_environment(catalogue.providers[entry.id], environment)
    for name, value in catalogue.stored_settings.items():
        yield from _beaten_environment(name, value, environment)
        yield from _beaten_profiles(name, value, catalogue)


def _changed_fields(base: Provider, merged: Provider) -> Iterator[Override]:
    for name in base.__dataclass_fields__:
        before, after = getattr(base, name), getattr(merged, name)
        if before != after:
            yield Override(f"providers.{base.id}.{name}", f"built-in {_brief(before)}", f"file {_brief(after)}")


def _beaten_environment(name: str, value: object, environment: Mapping[str, str]) -> Iterator[Override]:
    for variable in (REGISTRY[name].environment, ENV_ALIASES.get(name)):
        if variable and variable in environment:
            given = f"{variable}={environment[variable]}"
            yield Override(f"settings.{name}", given, f"file {_brief(value)}", "a stored value beats the environment")


def _profiles_beaten_by_environment(provider: Provider, environment: Mapping[str, str]) -> Iterator[Override]:
    for name, value in provider.profile.items():
        block, _, rest = name.partition(".")
        spec = REGISTRY.get(name) or REGISTRY.get(f"{block}.{provider.auth_class}.{rest}")
        for variable in (spec.environment, ENV_ALIASES.get(spec.name)) if spec else ():
            if variable and variable in environment:
                path, given = f"providers.{provider.id}.profile.{name}", f"{variable}={environment[variable]}"
                yield Override(path, f"file {_brief(value)}", given, "the environment beats a provider's profile")


def _beaten_profiles(name: str, value: object, catalogue: Catalogue) -> Iterator[Override]:
    short = ".".join(part for part in name.split(".") if part not in ("oauth", "api_key", "local", "default"))
    for provider in catalogue.providers.values():
        found = provider.profile.get(name, provider.profile.get(short))
        fits = f".{provider.auth_class}." in name or short == name
        if found is not None and fits:
            given = f"providers.{provider.id}.profile {_brief(found)}"
            yield Override(
                f"settings.{name}", given, f"file {_brief(value)}", "a stored value beats a provider's profile"
            )


def _brief(value: object) -> str:
    if isinstance(value, tuple) and value and not isinstance(value[0], (str, int, float)):
        return f"{len(value)} entries ({', '.join(str(getattr(item, 'id', item)) for item in value[:5])})"
    if isinstance(value, (frozenset, tuple)):
        return shown(sorted(value)) if isinstance(value, frozenset) else shown(list(value))
    return shown(value if not isinstance(value, Mapping) else dict(value))
