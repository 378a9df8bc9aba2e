"""A weight of 0.00001 was imported, stored as `1e-05`, and read back as a text: the import said `changed`, no replica
could use the revision, and none could start any more. Infinite caps ended in INTERNAL, and the watch of the file."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_service.settings.catalogue_file import load_catalogue
from policy_service.settings.problems import ConfigError
from policy_service.settings.yaml_text import parse


def connection(**fields: object) -> str:
    return json.dumps({"connections": [{"id": "c", "provider": "openai", **fields}]})


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1e9, allow_nan=False))
def test_any_weight_is_read_back_as_it_was_stored(weight: float) -> None:
    loaded = load_catalogue(connection(weight=weight))
    assert loaded.catalogue.connections["c"].weight == weight
    again = load_catalogue(loaded.document_json)
    assert (again.catalogue, again.sha256) == (loaded.catalogue, loaded.sha256)


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers()))
def test_every_number_of_json_is_a_number(number: float) -> None:
    assert parse(json.dumps({"n": number}), source="t").data == {"n": number}


@pytest.mark.parametrize("text", ["1e", "e5", "1.5.2e3", "1e5x", "0x1e5z", "gpt-1e5"])
def test_a_text_that_only_resembles_a_number_stays_a_text(text: str) -> None:
    assert parse(f"n: {text}", source="t").data == {"n": text}


@pytest.mark.parametrize("cap", [".inf", "-.inf", "1e308"])
def test_a_cap_without_bound_is_stored_and_read_back(cap: str) -> None:
    loaded = load_catalogue(f"connections: [{{id: c, provider: openai, max_concurrent: {cap}}}]")
    assert load_catalogue(loaded.document_json).catalogue == loaded.catalogue


@pytest.mark.parametrize("character", ["\x7f", "\x85", "\u2028", "\ufeff"])
def test_a_text_with_odd_characters_is_stored_and_read_back(character: str) -> None:
    text = f'{{"connections": [{{"id": "c", "provider": "openai", "account_names": ["a\\u{ord(character):04x}b"]}}]}}'
    loaded = load_catalogue(text)
    again = load_catalogue(loaded.document_json)
    assert again.catalogue.connections["c"].account_names == (f"a{character}b",)
    assert again.sha256 == loaded.sha256


@pytest.mark.parametrize("field", ["key", "provider", "connection", "model"])
def test_a_target_with_the_separator_of_tokens_is_refused(field: str) -> None:
    target = {"provider": "openai", "model": "m", field: "a\x1fb"}
    with pytest.raises(ConfigError, match="control characters"):
        load_catalogue(json.dumps({"routes": [{"name": "r", "targets": [target]}]}))
