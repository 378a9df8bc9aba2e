"""Options of a connection in a catalogue file: session slots and the usage wall (usage_wall.md section 1)."""

from __future__ import annotations

import json

import pytest

from policy_service.domain.catalogue import Connection
from policy_service.settings.catalogue_file import builtin_catalogue, load_catalogue
from policy_service.settings.problems import ConfigError


def read(**fields: object) -> Connection:
    document = {"connections": [{"id": "c1", "provider": "claude", **fields}]}
    return load_catalogue(json.dumps(document)).catalogue.connections["c1"]


@pytest.mark.parametrize(
    ("name", "alias", "value"),
    [
        ("low_priority_mode", "lowPriorityMode", True),
        ("auto_limit_reset", "autoLimitReset", True),
        ("organization_uuid", "organizationUUID", "org-1"),
    ],
)
def test_options_of_the_usage_wall_have_two_names(name: str, alias: str, value: object) -> None:
    assert getattr(read(**{name: value}), name) == getattr(read(**{alias: value}), name) == value


@pytest.mark.parametrize("value", ["true", 1, "on", []])
def test_only_a_literal_true_switches_an_option_on(value: object) -> None:
    with pytest.raises(ConfigError):
        read(low_priority_mode=value)


def test_everything_is_off_by_default() -> None:
    read_back = read()
    assert (read_back.low_priority_mode, read_back.auto_limit_reset, read_back.max_sessions) == (False, False, None)


def test_an_organisation_that_cannot_stand_in_a_url_is_refused() -> None:
    with pytest.raises(ConfigError):
        read(organization_uuid="../x")


def test_of_the_built_in_providers_claude_alone_has_a_usage_wall() -> None:
    assert [p.id for p in builtin_catalogue().providers.values() if p.usage_wall] == ["claude"]
