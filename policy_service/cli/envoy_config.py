"""`envoy-config`: writes an Envoy bootstrap from a catalogue file."""

from __future__ import annotations

import os
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, TypeVar

import yaml
from policy_envoy.configuration import Choices, CredentialSource, FailMode, Layout, UpstreamError, bootstrap

from policy_service.cli import exit_codes
from policy_service.cli.output import note, say
from policy_service.settings.catalogue_file import load_catalogue_file
from policy_service.settings.problems import ConfigError, Problem
from policy_service.settings.server import split_address

T = TypeVar("T", bound=StrEnum)


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
    try:
        data = bootstrap(loaded.catalogue, choices(wishes))
    except UpstreamError as error:
        raise ConfigError(
            [Problem("catalogue", problem, where=str(catalogue)) for problem in error.problems]
        ) from error
    text = _HEAD.format(catalogue=catalogue.name) + yaml.safe_dump(data, sort_keys=False, width=120)
    if str(out) == "-":
        say(text)
    else:
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError([Problem("--out", f"cannot be written: {error.strerror}", str(out))]) from None
        note(f"{out}: {len(loaded.catalogue.connections)} connections, {len(loaded.catalogue.routes)} routes")
    return exit_codes.OK


_HEAD = (
    "# Envoy 1.40 or newer. Made by `policy-service envoy-config` from {catalogue}; make it anew instead of editing.\n"
)


def choices(wishes: Wishes) -> Choices:
    """The choices as the generator reads them.

    Raises:
        ConfigError: an option has another value than those it may have.
    """
    source, _, directory = wishes.credentials.partition(":")
    made = _choices(wishes, source, directory)
    return made if wishes.ca_file is None else replace(made, ca_file=str(wishes.ca_file))


def _choices(wishes: Wishes, source: str, directory: str) -> Choices:
    return Choices(
        listen=checked_address("listen", wishes.listen),
        admin=checked_address("admin", wishes.admin) if wishes.admin else "",
        policy=wishes.policy if wishes.policy.startswith("unix:") else checked_address("policy", wishes.policy),
        policy_key=wishes.policy_key,
        fail_mode=_one_of(FailMode, "fail-mode", wishes.fail_mode),
        layout=_one_of(Layout, "layout", wishes.layout),
        credentials=_one_of(CredentialSource, "credentials", source),
        credential_directory=directory,
        max_wait_ms=wishes.max_wait_ms,
    )


def _one_of(kind: type[T], name: str, given: str) -> T:
    try:
        return kind(given)
    except ValueError:
        raise ConfigError([Problem(f"--{name}", "unknown value", given, ", ".join(kind))]) from None


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
