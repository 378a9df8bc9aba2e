"""Loads the process configuration: flags > environment > file > defaults, unknown names fatal, all problems at once.

Policy settings come from the environment as well (spec/README.md, Configuration); their variables are recognised
here, so that a `POLICY_*` name nobody reads is found at start, and handed on in `LoadedConfig.environment`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from policy_service.domain import setting_specs  # noqa: F401  (fills the registry)
from policy_service.domain.settings import ENV_ALIASES, ENV_PREFIX, REGISTRY, SettingSpec, read_environment
from policy_service.settings.fields import FieldRow, server_fields
from policy_service.settings.problems import ConfigError, Location, Problem, did_you_mean, from_validation, shown
from policy_service.settings.server import ServerConfig
from policy_service.settings.yaml_text import Document, parse

CONFIG_VARIABLE = "POLICY_CONFIG"
"""Names the configuration file where the flag --config does not."""
MAX_FILE_BYTES = 1_048_576
SERVICE_LINK = re.compile(r"POLICY\w*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_[A-Z]+(_(PROTO|PORT|ADDR))?)?)")
"""Variables that Kubernetes and Docker set in every container for a service whose name begins with `policy`."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A usable configuration and where each value came from."""

    config: ServerConfig
    sources: Mapping[str, str] = field(default_factory=dict)
    """Dotted name -> `flag --workers`, `environment POLICY_WORKERS`, `file config.yaml:3`; absent: default."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of policy settings, aliases included; the argument of `Policy`."""
    warnings: tuple[str, ...] = ()


def load(
    *,
    file: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> LoadedConfig:
    """Load the process configuration.

    Args:
        file: YAML file; None: the one that POLICY_CONFIG names, else none.
        environment: process environment; only `POLICY_*` and the listed aliases are read.
        flags: values by dotted name; None means that the flag was not given.

    Raises:
        ConfigError: everything that is wrong, each with path, given, allowed and remedy.
    """
    variables = dict(environment or {})
    path = file or variables.get(CONFIG_VARIABLE) or None
    document = read_file(Path(path)) if path else None
    layers = _Layers(document)
    problems = [*layers.take_environment(variables), *layers.take_flags(flags or {}), *unknown_variables(variables)]
    config, found = layers.validate()
    problems += found
    if problems or config is None:
        raise ConfigError(problems)
    policy = policy_environment(variables)
    return LoadedConfig(config, layers.sources, policy, (*unusable_variables(policy), *_cautions(config)))


def read_file(path: Path) -> Document:
    """Read and parse a configuration file.

    Raises:
        ConfigError: it cannot be read or is not a mapping.
    """
    text = read_text(path, "config", MAX_FILE_BYTES)
    document = parse(text, source=str(path), max_bytes=MAX_FILE_BYTES)
    if document.data is not None and not isinstance(document.data, dict):
        given = type(document.data).__name__
        raise ConfigError(
            [Problem("config", "not a mapping", given, "keys and values", "write key: value lines", str(path))]
        )
    return document


def read_text(path: Path, name: str, max_bytes: int) -> str:
    """Text of a file, at most `max_bytes` and one more (so that `parse` can refuse it).

    Raises:
        ConfigError: unreadable, or not UTF-8.
    """
    try:
        with path.open("rb") as stream:
            return stream.read(max_bytes + 1).decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = "check the path and that this user may read it"
        raise ConfigError([Problem(name, f"cannot be read: {reason}", str(path), "a readable file", remedy)]) from None
    except UnicodeDecodeError as error:
        remedy = "save the file as UTF-8"
        raise ConfigError(
            [Problem(name, f"not UTF-8 at byte {error.start}", str(path), "UTF-8 text", remedy)]
        ) from None


class _Layers:
    """Values of file, environment and flags, folded into one nested mapping in order of precedence."""

    def __init__(self, document: Document | None) -> None:
        self._document = document
        self._data: dict[str, Any] = _copied(document.data) if document and document.data else {}
        self.sources: dict[str, str] = {}
        if document:
            for location in document.lines:
                self.sources[".".join(map(str, location))] = f"file {document.locate(location)}"

    def take_environment(self, variables: Mapping[str, str]) -> Iterator[Problem]:
        for row in server_fields().values():
            if (text := variables.get(row.environment)) is not None:
                yield from self._put(row, text, f"environment {row.environment}")

    def take_flags(self, flags: Mapping[str, object]) -> Iterator[Problem]:
        for name, value in flags.items():
            if value is None:
                continue
            row = server_fields().get(name)
            if row is None:
                yield _unknown_flag(name)
            else:
                yield from self._put(row, value, f"flag {row.flag or f'--set {name}'}")

    def _put(self, row: FieldRow, value: object, source: str) -> Iterator[Problem]:
        *outer, last = row.name.split(".")
        block: Any = self._data
        for part in outer:
            if not isinstance(block.get(part), dict):
                block[part] = {}
            block = block[part]
        block[last] = value
        for name in [name for name in self.sources if name.startswith(f"{row.name}.")]:
            del self.sources[name]
        self.sources[row.name] = source
        return iter(())

    def validate(self) -> tuple[ServerConfig | None, list[Problem]]:
        try:
            config = ServerConfig.model_validate(self._data)
        except ValidationError as error:
            found = from_validation(error, ServerConfig, locate=self._locate, remedies=_REMEDIES)
            return None, [_policy_hint(_without_secret(problem)) for problem in found]
        self.sources = {name: where for name, where in self.sources.items() if name in server_fields()}
        return config, []

    def _locate(self, location: Location) -> str:
        while location:
            if source := self.sources.get(".".join(map(str, location))):
                return source.removeprefix("file ")
            location = location[:-1]
        return self._document.source if self._document else ""


_REMEDIES = {
    "settings": "policy settings belong into the catalogue file, below settings:",
    "providers": "providers belong into the catalogue file",
    "connections": "connections belong into the catalogue file",
    "routes": "routes belong into the catalogue file",
}


def _copied(data: Any) -> Any:
    return {key: _copied(value) for key, value in data.items()} if isinstance(data, dict) else data


def _unknown_flag(name: str) -> Problem:
    hint = did_you_mean(name, server_fields()) or "the names are in docs/reference/configuration.md"
    problem = Problem(name, "unknown name", name, "names of the process configuration", hint, "flag --set")
    return _policy_hint(problem)


def _without_secret(problem: Problem) -> Problem:
    """What was given is not repeated where it is a secret."""
    name = problem.path.partition("[")[0]
    row = server_fields().get(name)
    return replace(problem, given="(hidden)") if row and row.secret and problem.given else problem


def _policy_hint(problem: Problem) -> Problem:
    """A policy setting in the place of one of the process: a block of a file, or a flag with the whole name."""
    blocks = {name.partition(".")[0] for name in REGISTRY}
    if problem.path in REGISTRY:
        variable = f"{ENV_PREFIX}{problem.path.upper().replace('.', '_')}"
    elif problem.problem == "unknown key" and problem.path in blocks:
        variable = f"{ENV_PREFIX}{problem.path.upper()}_..."
    else:
        return problem
    return replace(problem, remedy=f"a policy setting: write it below settings: of the catalogue, or set {variable}")


def known_variables() -> dict[str, str]:
    """Every variable that is read, with the name of what it sets."""
    names = {row.environment: row.name for row in server_fields().values()}
    names |= {spec.environment: spec.name for spec in REGISTRY.values() if spec.name != "affinity.legacy_ttl_ms"}
    names |= {alias: name for name, alias in ENV_ALIASES.items()}
    return names | {CONFIG_VARIABLE: "config"}


def unknown_variables(variables: Mapping[str, str]) -> list[Problem]:
    """`POLICY_*` variables that nothing reads, except those that an orchestrator sets by itself."""
    known = known_variables()
    ours = (name for name in variables if name.startswith(ENV_PREFIX) and not SERVICE_LINK.fullmatch(name))
    strangers = sorted(name for name in ours if name not in known)
    return [
        Problem(
            name,
            "unknown environment variable",
            name,
            "variables listed by `policy-service config docs`",
            did_you_mean(name, known) or "unset it",
            "environment",
        )
        for name in strangers
    ]


def policy_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of policy settings among `variables`."""
    wanted = {name for name, target in known_variables().items() if target in REGISTRY}
    return {name: value for name, value in variables.items() if name in wanted}


def unusable_variables(variables: Mapping[str, str]) -> Iterable[str]:
    """Warnings for variables of policy settings whose value is ignored (spec/README.md, Configuration 3 and 4)."""
    for variable, name in known_variables().items():
        if name in REGISTRY and variable in variables and read_environment(REGISTRY[name], variables[variable]) is None:
            yield (
                f"{variable}: value {shown(variables[variable])} is ignored; "
                f"allowed: {allowed_in_environment(REGISTRY[name])}; correct it or unset it"
            )


def allowed_in_environment(spec: SettingSpec) -> str:
    """What a variable of this setting may hold."""
    if spec.kind == "bool":
        return "true, 1, on, false, 0, off"
    if spec.kind == "choice":
        return ", ".join(spec.choices)
    if spec.kind in ("int", "float"):
        return "a positive whole number" if spec.environment_rule == "positive_int" else "a finite number, 0 or more"
    return "a comma list" if spec.kind.endswith("_list") else "any text"


def _cautions(config: ServerConfig) -> Iterator[str]:
    """Combinations that work but are seldom meant."""
    if config.listen.open_addresses and not config.auth.keys:
        places = ", ".join(config.listen.open_addresses)
        yield f"listen: {places} can be reached from other machines and no key is asked for; set auth.keys"
    if config.listen.open_addresses and not config.tls.enabled:
        yield "listen: reachable from other machines without TLS; set tls.cert_file and tls.key_file"
    if config.auth.keys and not config.auth.admin_keys:
        yield "auth: no admin key is set, so AdminService refuses every call; set auth.admin_keys"
    if config.store.pgbouncer and config.store.notifications:
        yield "store: notifications do not pass a transaction-pooling proxy; the change feed is polled"


def file_problems(config: ServerConfig) -> list[Problem]:
    """Files that the configuration names and that cannot be used."""
    named = {
        "tls.cert_file": config.tls.cert_file,
        "tls.key_file": config.tls.key_file,
        "tls.client_ca_file": config.tls.client_ca_file,
        "catalogue": config.catalogue,
    }
    return [problem for name, text in named.items() if text for problem in _unreadable(name, Path(text).expanduser())]


def _unreadable(name: str, path: Path) -> Iterator[Problem]:
    try:
        with path.open("rb"):
            return
    except OSError as error:
        reason = error.strerror or str(error)
        yield Problem(name, f"cannot be read: {reason}", str(path), "a readable file", "check path and permissions")
