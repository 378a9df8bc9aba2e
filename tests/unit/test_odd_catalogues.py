"""Catalogues that somebody will write one day: each is answered with the field and what to do about it, never with a
traceback, and none of them takes a service down by its size."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from policy_service.settings.catalogue_file import load_catalogue, load_catalogue_file
from policy_service.settings.problems import ConfigError, Problem

RULE = "statuses: [429], body_any: [x], reason: quota_exhausted, scope: model"


def refused(text: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_catalogue(text, source="c.yaml")
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("text", "path", "problem", "remedy"),
    [
        ("providers: [{id: a}, {id: A}]", "providers[1].id", "already used by providers[0]", "rename or remove one"),
        ("providers: [{id: a, aliases: [openai]}]", "providers[0].aliases", "already means openai", "leave it out"),
        ("providers: [{id: a, aliases: [cx]}]", "providers[0].aliases", "already means codex", "leave it out"),
        ("providers: [{id: a, aliases: [x]}, {id: b, aliases: [X]}]", "providers[1].aliases", "already means a", ""),
        ("providers: [{id: cx}]", "providers[0].id", "is an alias", "write id: codex"),
        ("providers: [{id: a, aliases: [b]}, {id: b, aliases: [a]}]", "providers[0].aliases", "already means b", ""),
        ("providers: [{id: 'a*b'}]", "providers[0].id", "* where no pattern has one", "put the * at the end"),
        ("providers: [{id: '*b'}]", "providers[0].id", "* where no pattern has one", "or one at each end"),
        ("providers: [{id: 'a**'}]", "providers[0].id", "* where no pattern has one", "put the * at the end"),
        ("providers: [{id: 'a-*', aliases: [a]}]", "providers[0].aliases", "a pattern has no aliases", "leave it out"),
        ("providers: [{id: a, aliases: ['a-*']}]", "providers[0].aliases", "an alias is no pattern", "leave it out"),
        ("providers: [{id: a, passthru: true}]", "providers[0].passthru", "unknown key", "did you mean passthrough?"),
        ("providers: [{id: a, aliases: 5}]", "providers[0].aliases", "wrong type", "correct the value"),
        ("providers: [{id: a, aliases: null}]", "providers[0].aliases", "wrong type", "correct the value"),
        ("providers: [{aliases: [x]}]", "providers[0].id", "required key is missing", "add id"),
        (
            f"providers: [{{id: a, error_rules: [{{id: r, body_regex: '([', {RULE}}}]}}]",
            "providers[0].error_rules[0].body_regex",
            "unknown key",
            "",
        ),
        (
            f"providers: [{{id: a, error_rules: [{{id: r, {RULE.replace('429', '4290')}}}]}}]",
            "providers[0].error_rules[0].statuses[0]",
            "out of range",
            "correct the value",
        ),
        (
            "providers: [{id: a, quota_family: colours}]",
            "providers[0].quota_family",
            "not one of the allowed values",
            "",
        ),
        ("providers: [{id: a, code_meanings: {X: poor}}]", "providers[0].code_meanings.X", "not one of the", ""),
        ("providers: [{id: a, profile: {breaker: 5}}]", "providers[0]", "profile.breaker is no setting", ""),
        (
            "settings: {egress_lock: {providers: off}}",
            "settings.egress_lock.providers",
            "wrong type",
            "put it in quotes",
        ),
        (
            "settings: {egress_lock: {providers: [a, b]}}",
            "settings.egress_lock.providers",
            "wrong type",
            "write one text with commas",
        ),
        (
            "settings: {breaker.oauth.failure_threshold: five}",
            "settings.breaker.oauth.failure_threshold",
            "wrong type",
            "write a whole number",
        ),
        (
            "settings: {breaker.oauth.failure_threshold: '5'}",
            "settings.breaker.oauth.failure_threshold",
            "wrong type",
            "write it without quotes",
        ),
        ("settings: {breaker.reopen_jitter: .nan}", "settings.breaker.reopen_jitter", "wrong type", ""),
        ("", "document", "not a mapping", "{} for a catalogue"),
        ("# nothing", "document", "not a mapping", "write keys such as"),
        ("- a", "document", "not a mapping", "write keys such as"),
        ("providers: &x [*x]", "document", "aliases expand without bound", "write the values out"),
        ("providers: [{id: a", "document", "not valid YAML", "correct the line"),
        ("providers:\n\t- id: a", "document", "not valid YAML", "correct the line"),
        ("providers: !!python/object/apply:os.system ['true']", "document", "not valid YAML", "correct the line"),
        (f"providers: {'[' * 3_000}{']' * 3_000}", "document", "not valid YAML", "correct the line"),
    ],
)
def test_an_odd_catalogue_is_answered_with_the_field_and_the_remedy(
    text: str, path: str, problem: str, remedy: str
) -> None:
    found = {each.path: each for each in refused(text)}
    assert path in found, found
    assert problem in found[path].problem
    assert remedy in found[path].remedy
    assert found[path].remedy


@pytest.mark.parametrize("name", ["*", "acme-*", "*acme*", "acme"])
def test_whole_names_and_patterns_are_names_of_providers(name: str) -> None:
    assert name in load_catalogue(f"providers: [{{id: '{name}'}}]").catalogue.providers


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("providers: [{id: café}]".encode("latin-1"), "not UTF-8 at byte"),
        ("providers: []".encode("utf-16"), "not UTF-8 at byte"),
        (bytes(range(256)), "not UTF-8 at byte"),
        (b'providers: [{id: "a\x00b"}]', "not valid YAML"),
    ],
)
def test_bytes_that_are_no_text_are_refused_with_their_place(tmp_path: Path, content: bytes, problem: str) -> None:
    place = tmp_path / "catalogue.yaml"
    place.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_catalogue_file(place)
    assert problem in caught.value.problems[0].problem


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    place = tmp_path / "catalogue.yaml"
    place.write_bytes(b"\xef\xbb\xbfproviders: [{id: acme}]")
    assert "acme" in load_catalogue_file(place).catalogue.providers


def test_a_merge_key_takes_over_what_an_anchor_has_written() -> None:
    text = "providers:\n  - &x {id: a, auth_class: oauth, passthrough: true}\n  - {<<: *x, id: b}\n"
    providers = load_catalogue(text).catalogue.providers
    assert (providers["b"].auth_class, providers["b"].passthrough) == ("oauth", True)


def test_a_thousand_providers_with_a_warning_each_are_read_in_seconds() -> None:
    """Finding the place of each warning went through every provider: ten thousand took five minutes."""
    rule = RULE.replace("body_any", "codes")
    lines = (f"  - {{id: p{n}, auth_class: api_key, error_rules: [{{id: r{n}, {rule}}}]}}\n" for n in range(3_000))
    began = time.process_time()
    loaded = load_catalogue("providers:\n" + "".join(lines))
    assert len(loaded.warnings) == 3_000
    assert time.process_time() - began < 15


def test_a_warning_points_at_the_rule_of_its_own_provider() -> None:
    rules = ", ".join(f"{{id: {name}, {RULE}}}" for name in ("q", "r"))
    text = f"providers:\n  - {{id: a, auth_class: api_key}}\n  - {{id: b, error_rules: [{rules}]}}\n"
    found = {(each.path, each.problem) for each in load_catalogue(text).warnings}
    assert ("providers[1].error_rules[1]", "rule linter: shadowed") in found
