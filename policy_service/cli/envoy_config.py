"""`envoy-config`: writes an Envoy bootstrap from a catalogue file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, TypeVar

import yaml
from policy_envoy.configuration import Choices, CredentialSource, FailMode, Layout, UpstreamError, bootstrap
from policy_envoy.configuration.upstreams import Upstream, upstreams

from policy_service.cli import exit_codes
from policy_service.cli.output import counted, note, say, warnings
from policy_service.settings.catalogue_file import load_catalogue_file
from policy_service.settings.problems import ConfigError, Problem
from policy_service.settings.server import split_address

T = TypeVar("T", bound=StrEnum)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Wishes(NamedTuple):
    """The options as given."""

    listen: str
    admin: str
    policy: str
    policy_key: str
    fail_mode: str
    layout: str
    credentials: str
    max_wait_ms: int
    ca_file: Path | None


def run(catalogue: Path, out: Path, wishes: Wishes) -> int:
    """Write the configuration; the exit code."""
    loaded = load_catalogue_file(str(catalogue), environment=os.environ)
    chosen = choices(wishes)
    try:
        data = bootstrap(loaded.catalogue, chosen)
        found = upstreams(loaded.catalogue).values()
    except UpstreamError as error:
        raise ConfigError(
            [Problem("catalogue", problem, where=str(catalogue)) for problem in error.problems]
        ) from error
    warnings(warning.text() for warning in loaded.warnings)
    warnings(_absent(chosen, found, is_ca_given=wishes.ca_file is not None))
    text = _HEAD.format(catalogue=catalogue.name) + yaml.safe_dump(data, sort_keys=False, width=120)
    if str(out) == "-":
        say(text)
    else:
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError([Problem("--out", f"cannot be written: {error.strerror}", str(out))]) from None
        connections = counted(len(loaded.catalogue.connections), "connection")
        note(f"{out}: {connections}, {counted(len(loaded.catalogue.routes), 'route')}")
    return exit_codes.OK


_HEAD = (
    "# Envoy 1.40 or newer. Made by `policy-service envoy-config` from {catalogue}; make it anew instead of editing.\n"
)


def _absent(chosen: Choices, found: Iterable[Upstream], *, is_ca_given: bool) -> Iterator[str]:
    """Files that Envoy will read and that are not on this machine; it may run on another one."""
    if (is_ca_given or any(each.tls for each in found)) and not Path(chosen.ca_file).is_file():
        yield (
            f"--ca-file: no file {chosen.ca_file} on this machine; Envoy starts only where it exists and holds the "
            "authorities of the upstreams (PEM): put it there, or give the path of one"
        )
    if chosen.credentials is not CredentialSource.FILES:
        return
    directory = Path(chosen.credential_directory)
    missing = sorted(
        f"{each.connection}.yaml" for each in found if not (directory / f"{each.connection}.yaml").is_file()
    )
    if missing:
        yield (
            f"--credentials: {directory} on this machine lacks {', '.join(missing)}; Envoy starts only where every "
            "connection has its secret there: write them before"
        )


def choices(wishes: Wishes) -> Choices:
    """The choices as the generator reads them.

    Raises:
        ConfigError: an option has another value than those it may have.
    """
    source, colon, directory = wishes.credentials.partition(":")
    made = _choices(wishes, source, directory)
    has_directory = made.credentials is CredentialSource.FILES
    if bool(directory) is not has_directory or bool(colon) is not has_directory:
        allowed = "none, environment, files:<directory>"
        raise ConfigError(
            [Problem("--credentials", "files needs a directory, nothing else has one", wishes.credentials, allowed)]
        )
    return made if wishes.ca_file is None else replace(made, ca_file=str(wishes.ca_file))


def _choices(wishes: Wishes, source: str, directory: str) -> Choices:
    return Choices(
        listen=checked_address("listen", wishes.listen),
        admin=checked_address("admin", wishes.admin) if wishes.admin else "",
        policy=_doors(wishes.policy),
        policy_key=_variable("policy-key", wishes.policy_key),
        fail_mode=_one_of(FailMode, "fail-mode", wishes.fail_mode),
        layout=_one_of(Layout, "layout", wishes.layout),
        credentials=_one_of(CredentialSource, "credentials", source),
        credential_directory=directory,
        max_wait_ms=wishes.max_wait_ms,
    )


def _doors(given: str) -> str:
    """Addresses of the door, with commas; Envoy cannot have host names and Unix sockets in one cluster."""
    doors = [door.strip() for door in given.split(",")]
    found = [door if door.startswith("unix:") else checked_address("policy", door) for door in doors]
    if any(door.startswith("unix:") for door in found) and Choices(policy=",".join(found)).has_named_doors:
        raise ConfigError([Problem("--policy", "a host name and a Unix socket do not go together", given)])
    return ",".join(found)


def _one_of(kind: type[T], name: str, given: str) -> T:
    try:
        return kind(given)
    except ValueError:
        raise ConfigError([Problem(f"--{name}", "unknown value", given, ", ".join(kind))]) from None


def _variable(name: str, given: str) -> str:
    """The name of an environment variable; a key itself, written there by mistake, is not repeated."""
    if given and _VARIABLE.fullmatch(given) is None:
        remedy = "give the name of the variable, such as POLICY_KEY, and set it to the key where Envoy runs"
        allowed = "letters, digits and _, no digit first"
        raise ConfigError([Problem(f"--{name}", "no name of an environment variable", "", allowed, remedy)])
    return given


def checked_address(name: str, given: str) -> str:
    """The address given for an option.

    Raises:
        ConfigError: it is none.
    """
    try:
        split_address(given)
    except ValueError as error:
        raise ConfigError([Problem(f"--{name}", str(error), given)]) from None
    return given
