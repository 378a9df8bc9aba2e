"""`config check | show | schema | docs`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policy_service.cli import exit_codes
from policy_service.cli.errors import write_text
from policy_service.cli.output import counted, note, problems, say, warnings
from policy_service.settings.problems import ConfigError, Problem

if TYPE_CHECKING:
    from policy_service.cli.process_options import ProcessFlags
    from policy_service.settings.catalogue_file import LoadedCatalogue
    from policy_service.settings.load import LoadedConfig

RULES_FILE = "signals-and-rules.md"
"""Written beside the configuration reference."""


def check(flags: ProcessFlags, *, as_json: bool, strict: bool) -> int:
    """Check process configuration and catalogue; problems of both are listed together."""
    found: list[Problem] = []
    loaded = _attempt(flags.load, found)
    catalogue = _attempt(lambda: _catalogue(flags, loaded), found)
    cautions = list(loaded.warnings) if loaded else []
    cautions += [warning.text() for warning in catalogue.warnings] if catalogue else []
    if loaded:
        found += _other_files(loaded)
    report = _json_report if as_json else _text_report
    report(found, cautions, loaded, catalogue)
    return exit_codes.CONFIGURATION if found or (strict and cautions) else exit_codes.OK


def _attempt(read: Any, found: list[Problem]) -> Any:
    try:
        return read()
    except ConfigError as error:
        found += error.problems
        return None


def _other_files(loaded: LoadedConfig) -> list[Problem]:
    """Unusable files, except the catalogue, which is read anyway."""
    from policy_service.settings.load import file_problems

    return [problem for problem in file_problems(loaded.config) if problem.path != "catalogue"]


def _catalogue(flags: ProcessFlags, loaded: LoadedConfig | None) -> LoadedCatalogue | None:
    """The catalogue that is named, also where the rest of the configuration is unusable."""
    named = loaded.config.catalogue if loaded else flags.values.get("catalogue") or os.environ.get("POLICY_CATALOGUE")
    if not named:
        return None
    from policy_service.settings.catalogue_file import load_catalogue_file
    from policy_service.settings.load import policy_environment

    return load_catalogue_file(str(named), environment=policy_environment(os.environ))


def _text_report(
    found: list[Problem], cautions: list[str], loaded: LoadedConfig | None, catalogue: LoadedCatalogue | None
) -> None:
    problems(found)
    warnings(cautions)
    for override in catalogue.overrides if catalogue else ():
        tail = f" ({override.note})" if override.note else ""
        say(f"override: {override.path}: {override.by} instead of {override.replaces}{tail}")
    if catalogue:
        say(_summary(catalogue))
    if found:
        note(f"{len(found)} problem(s), {len(cautions)} warning(s)")
    else:
        say(f"configuration is usable, {len(cautions)} warning(s)")


def _summary(loaded: LoadedCatalogue) -> str:
    catalogue = loaded.catalogue
    counts = {
        "provider": len(catalogue.providers),
        "connection": len(catalogue.connections),
        "route": len(catalogue.routes),
        "caller": len(catalogue.callers),
        "operator rule": len(catalogue.operator_rules),
        "setting": len(catalogue.stored_settings),
    }
    listed = ", ".join(counted(count, name) for name, count in counts.items())
    return f"catalogue {loaded.sha256[:12]}: {listed}"


def _json_report(
    found: list[Problem], cautions: list[str], loaded: LoadedConfig | None, catalogue: LoadedCatalogue | None
) -> None:
    overrides = catalogue.overrides if catalogue else ()
    body: dict[str, Any] = {
        "usable": not found,
        "problems": [problem.as_dict() for problem in found],
        "warnings": cautions,
        "overrides": [{"path": o.path, "replaces": o.replaces, "by": o.by, "note": o.note} for o in overrides],
        "catalogue_sha256": catalogue.sha256 if catalogue else None,
    }
    say(json.dumps(body, indent=2, ensure_ascii=False))


def show(flags: ProcessFlags, *, as_json: bool, policy: bool) -> int:
    """Print every value with its source."""
    loaded = flags.load()
    rows = _process_rows(loaded)
    if policy:
        rows |= _policy_rows(flags, loaded)
    if as_json:
        say(json.dumps({name: {"value": value, "source": source} for name, (value, source) in rows.items()}, indent=2))
    else:
        _table(rows)
    warnings(loaded.warnings)
    return exit_codes.OK


def _process_rows(loaded: LoadedConfig) -> dict[str, tuple[object, str]]:
    from policy_service.settings.fields import server_fields, shown_value

    return {
        name: (shown_value(loaded.config, row), loaded.sources.get(name, "default"))
        for name, row in server_fields().items()
    }


def _policy_rows(flags: ProcessFlags, loaded: LoadedConfig) -> dict[str, tuple[object, str]]:
    from policy_service.domain.settings import SettingSources
    from policy_service.settings.resolved import plain, resolve_all

    catalogue = _catalogue(flags, loaded)
    stored: Mapping[str, object] = catalogue.catalogue.stored_settings if catalogue else {}
    resolved = resolve_all(SettingSources(stored, loaded.environment))
    return {name: (plain(found.value), found.source) for name, found in resolved.items()}


def _table(rows: Mapping[str, tuple[object, str]]) -> None:
    """Aligned columns; plain text, so that it can be piped."""
    texts = {name: json.dumps(value, ensure_ascii=False) for name, (value, _) in rows.items()}
    wide, middle = max(map(len, rows)), min(40, max(map(len, texts.values())))
    for name, (_, source) in rows.items():
        say(f"{name:<{wide}}  {texts[name]:<{middle}}  {source}")


def schema(*, catalogue: bool) -> str:
    """JSON schema of a configuration or catalogue file."""
    if catalogue:
        from policy_service.settings.catalogue_models import catalogue_schema as make
    else:
        from policy_service.settings.server import server_schema as make
    return json.dumps(make(), indent=2, ensure_ascii=False)


def docs(out: Path, *, check_only: bool) -> int:
    """Write the references, or compare the files with what would be written. `-` prints the configuration's."""
    texts = _references(out)
    if str(out) == "-":
        say(texts[out].rstrip("\n"))
        return exit_codes.OK
    if check_only:
        return _compare(texts)
    for path, text in texts.items():
        write_text(path, "--out", text)
        say(f"wrote {path}")
    return exit_codes.OK


def _references(out: Path) -> dict[Path, str]:
    """What belongs into `out`, and into the reference of signals and rules beside it."""
    from policy_service.settings import reference, reference_rules

    return {out: reference.render(exit_codes.MEANINGS), out.with_name(RULES_FILE): reference_rules.render()}


def _compare(texts: Mapping[Path, str]) -> int:
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_bytes() != text.encode()]
    for path in stale:
        note(f"{path} is out of date; run `policy-service config docs`")
    return exit_codes.FAILED if stale else exit_codes.OK
