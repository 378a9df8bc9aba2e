"""Catalogue files: what is read, how it is laid over the built-in providers, and what is refused."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from policy_service.domain.ids import AuthClass
from policy_service.domain.policy import Policy
from policy_service.domain.strategies import IMPLEMENTED_STRATEGIES, ROUTE_STRATEGIES
from policy_service.settings.catalogue_file import builtin_catalogue, load_catalogue, load_catalogue_file, overlay
from policy_service.settings.catalogue_models import catalogue_schema, whole_cap
from policy_service.settings.problems import ConfigError, Problem
from policy_service.settings.provider_data import ProviderEntry, builtin_providers

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "catalogue.yaml"
HASH = "ab" * 32
BASE = """
connections:
  - {id: a, provider: openai, auth_class: api_key}
  - {id: b, provider: mistral}
"""


def refused(text: str) -> dict[str, Problem]:
    """Problems by path; the last one of a path counts."""
    with pytest.raises(ConfigError) as caught:
        load_catalogue(text, source="c.yaml")
    return {problem.path: problem for problem in caught.value.problems}


# -- what is read ------------------------------------------------------------------------------------------
def test_the_example_is_realistic_and_free_of_warnings() -> None:
    loaded = load_catalogue_file(EXAMPLE)
    catalogue = loaded.catalogue

    assert loaded.warnings == ()
    used = {connection.provider for connection in catalogue.connections.values()}
    assert (len(used), len(catalogue.connections), len(catalogue.routes)) == (3, 6, 4)
    assert {"priority", "weighted", "round-robin"} < {route.strategy for route in catalogue.routes.values()}
    assert (len(catalogue.callers), len(catalogue.operator_rules)) == (2, 1)
    assert catalogue.stored_settings["cooldown_wait.budget_ms"] == 60_000


def test_a_stored_document_reads_back_as_the_same_catalogue() -> None:
    first = load_catalogue_file(EXAMPLE)
    second = load_catalogue(first.document_json)

    assert second.catalogue == first.catalogue
    assert second.sha256 == first.sha256


def test_comments_and_layout_do_not_change_the_hash_but_content_does() -> None:
    plain = load_catalogue("routes: []\nsettings: {queue.max_wait_ms: 5}\n")
    same = load_catalogue("# hello\nsettings:\n  queue.max_wait_ms: 5\nroutes: []\n")
    other = load_catalogue("routes: []\nsettings: {queue.max_wait_ms: 6}\n")

    assert plain.sha256 == same.sha256 != other.sha256


def test_without_a_file_the_built_in_providers_apply() -> None:
    assert builtin_catalogue().providers == builtin_providers()
    assert load_catalogue("{}").catalogue == builtin_catalogue()


def test_an_entry_of_a_provider_changes_only_the_fields_that_it_names() -> None:
    text = "providers: [{id: codex, aliases: [], profile: {breaker: {failure_threshold: 3}}}]"

    merged = load_catalogue(text).catalogue.providers["codex"]

    base = builtin_providers()["codex"]
    assert merged.aliases == ()
    assert (merged.quota_family, merged.family_pools, merged.auth_class) == ("codex", True, AuthClass.OAUTH)
    assert merged.profile == {**base.profile, "breaker.failure_threshold": 3}


def test_a_profile_merges_number_by_number() -> None:
    base = replace(
        builtin_providers()["codex"], profile={"breaker.failure_threshold": 3, "breaker.reset_timeout_ms": 9_000}
    )
    entry = ProviderEntry.model_validate({"id": "codex", "profile": {"breaker": {"failure_threshold": 4}}})

    assert overlay(base, entry).profile == {"breaker.failure_threshold": 4, "breaker.reset_timeout_ms": 9_000}


def test_a_list_of_rules_replaces_the_built_in_one_and_the_file_says_so() -> None:
    loaded = load_catalogue("providers: [{id: openrouter, error_rules: []}]")

    assert loaded.catalogue.providers["openrouter"].error_rules == ()
    assert [override.path for override in loaded.overrides] == ["providers.openrouter.error_rules"]


def test_a_provider_of_ones_own_needs_nothing_built_in() -> None:
    text = "providers: [{id: House-LLM, auth_class: local, aliases: [hl]}]\nconnections: [{id: x, provider: HL}]"

    catalogue = load_catalogue(text).catalogue

    assert catalogue.connections["x"].provider == "house-llm"
    assert Policy(catalogue).for_connection("hl", "x").auth_class is AuthClass.LOCAL


def test_a_connection_keeps_settings_of_its_own_with_or_without_the_auth_class() -> None:
    text = (
        "connections: [{id: x, provider: openai, auth_class: api_key,"
        " settings: {breaker: {failure_threshold: 4}, connection.api_key.base_cooldown_ms: 9}}]"
    )

    policy = Policy(load_catalogue(text).catalogue).for_connection("openai", "x")

    assert (policy.breaker.failure_threshold, policy.ladder.base_cooldown_ms) == (4, 9)


@pytest.mark.parametrize(
    ("given_value", "cap"),
    [(None, None), (0, None), (-3, None), (float("inf"), None), (float("nan"), None), (2, 2), (2.9, 2), (0.5, None)],
)
def test_a_cap_is_truncated_and_nothing_positive_means_no_limit(given_value: float | None, cap: int | None) -> None:
    assert whole_cap(given_value) == cap


def test_a_target_takes_the_provider_of_its_connection_and_a_key_from_its_parts() -> None:
    text = BASE + "routes: [{name: r, targets: [{connection: a, model: m}, {provider: cx}, {key: k, connection: b}]}]"

    targets = load_catalogue(text).catalogue.routes["r"].targets

    assert [target.key for target in targets] == ["openai/a/m", "codex", "k"]
    assert [target.provider for target in targets] == ["openai", "codex", "mistral"]


def test_an_empty_strategy_is_priority() -> None:
    text = BASE + "routes: [{name: r, strategy: '', targets: [{connection: a}]}]"

    assert load_catalogue(text).catalogue.routes["r"].strategy == "priority"


def test_account_strategies_are_kept_by_canonical_provider() -> None:
    loaded = load_catalogue("provider_strategies: {CX: {fallback_strategy: p2c}}")

    assert loaded.catalogue.provider_strategies == {"codex": "p2c"}


def test_settings_may_be_nested_or_dotted_and_null_leaves_them_alone() -> None:
    text = "settings: {queue: {max_wait_ms: 5, max_queue_depth: null}, model_lockout.error_codes: [429]}"

    stored = load_catalogue(text).catalogue.stored_settings

    assert stored == {"queue.max_wait_ms": 5, "model_lockout.error_codes": (429,)}


# -- what is refused ---------------------------------------------------------------------------------------
def test_a_key_written_where_its_hash_belongs_is_not_repeated() -> None:
    found = refused("callers: [{id: k, key_sha256: my-secret-key}]")

    assert "my-secret-key" not in found["callers[0].key_sha256"].text()


def test_every_problem_of_every_section_is_listed_at_once_in_order_of_lines() -> None:
    text = f"""
nope: 1
providers:
  - {{id: openai, auth_clas: oauth}}
connections:
  - {{id: a, provider: openai, weight: -1}}
routes:
  - {{name: r, strategy: round_robin, targets: [{{provider: openai}}]}}
callers:
  - {{id: k, key_sha256: {HASH}, allowed_connections: [zz]}}
rules:
  - {{provider: openai, status: 9999, match: '', scope: model}}
settings: {{queue: {{max_wait_ms: '5'}}}}
"""
    with pytest.raises(ConfigError) as caught:
        load_catalogue(text, source="c.yaml")

    places = [(problem.where, problem.path) for problem in caught.value.problems]
    assert places == [
        ("c.yaml:2", "nope"),
        ("c.yaml:4", "providers[0].auth_clas"),
        ("c.yaml:6", "connections[0].weight"),
        ("c.yaml:8", "routes[0].strategy"),
        ("c.yaml:10", "callers[0].allowed_connections"),
        ("c.yaml:12", "rules[0]"),
        ("c.yaml:12", "rules[0]"),
        ("c.yaml:13", "settings.queue.max_wait_ms"),
    ]


def test_an_unknown_strategy_is_answered_with_the_valid_names_in_order() -> None:
    found = refused(BASE + "routes: [{name: r, strategy: cost_optimized, targets: [{connection: a}]}]")

    problem = found["routes[0].strategy"]
    assert "UNKNOWN_STRATEGY" in problem.problem
    assert problem.given == "'cost_optimized'"
    assert problem.allowed == ", ".join(ROUTE_STRATEGIES)
    assert problem.remedy == "did you mean cost-optimized?"


def test_quota_share_is_for_routes_of_its_name_only() -> None:
    route = "routes: [{{name: {name}, strategy: quota-share, targets: [{{connection: a}}]}}]"

    assert "routes[0].strategy" in refused(BASE + route.format(name="r"))
    assert load_catalogue(BASE + route.format(name="qtSd/x")).catalogue.routes["qtSd/x"].strategy == "quota-share"


@pytest.mark.parametrize(
    ("addition", "path", "remedy"),
    [
        ("routes: [{name: r, targets: [{connection: aa}]}]", "routes[0].targets[0].connection", "did you mean a?"),
        ("routes: [{name: r, targets: [{provider: opena}]}]", "routes[0].targets[0].provider", "did you mean openai?"),
        ("routes: [{name: r, targets: [{}]}]", "routes[0].targets[0]", "add provider"),
        ("routes: [{name: r, targets: []}]", "routes[0].targets", "correct the value"),
        (
            "routes: [{name: r, targets: [{provider: mistral, connection: a}]}]",
            "routes[0].targets[0].provider",
            "write openai, or leave the provider out",
        ),
        (
            "routes: [{name: r, targets: [{connection: a}, {connection: a}]}]",
            "routes[0].targets[1]",
            "give one of them a key",
        ),
        (
            "routes: [{name: r, targets: [{connection: a}], options: {judge: x}}]",
            "routes[0].options.judge",
            "name a target of this route by its key",
        ),
        ("routes: [{name: r, targets: [{connection: a, weight: .nan}]}]", "routes[0].targets[0].weight", ""),
        (
            "routes: [{name: r, targets: [{connection: a}], options: {weights: {quta: 1}}}]",
            "routes[0].options.weights.quta",
            "",
        ),
        (f"callers: [{{id: k, key: secret, key_sha256: {HASH}}}]", "callers[0].key", "sha256sum"),
        ("callers: [{id: k, key_sha256: abc}]", "callers[0].key_sha256", ""),
        (
            "provider_strategies: {openai: {fallback_strategy: weighted}}",
            "provider_strategies.openai.fallback_strategy",
            "",
        ),
        ("settings: {queue.max_depth: 1}", "settings.queue.max_depth", "did you mean queue.max_queue_depth?"),
        ("settings: {cooldown_wait.budget_ms: 300001}", "settings.cooldown_wait.budget_ms", ""),
        ("settings: [1]", "settings", "write name: value lines"),
        ("version: 2", "version", "write version: 1"),
        ("providers: [{id: cx}]", "providers[0].id", "write id: codex"),
        ("providers: [{id: mine, aliases: [codex]}]", "providers[0].aliases", "leave it out"),
        ("providers: [{id: mine, aliases: [cx]}]", "providers[0].aliases", "leave it out"),
        (
            "providers: [{id: mine, profile: {breaker: {failure_threshold: 0}}}]",
            "providers[0].profile.breaker.failure_threshold",
            "",
        ),
        ("routes: 5", "routes", "leading dash"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(addition: str, path: str, remedy: str) -> None:
    found = refused(BASE + addition)

    assert set(found) == {path}
    assert remedy in found[path].remedy
    assert found[path].where.startswith("c.yaml:")


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ("connections: [{id: a, provider: openai}, {id: a, provider: openai}]", "connections[1].id"),
        (
            "routes: [{name: r, targets: [{provider: openai}]}, {name: r, targets: [{provider: mistral}]}]",
            "routes[1].name",
        ),
        (f"callers: [{{id: k, key_sha256: {HASH}}}, {{id: l, key_sha256: '{HASH.upper()}'}}]", "callers[1].key_sha256"),
        ("providers: [{id: mine}, {id: MINE}]", "providers[1].id"),
    ],
)
def test_nothing_is_declared_twice(section: str, path: str) -> None:
    assert set(refused(section)) == {path}


def test_a_mistake_in_a_connection_does_not_make_the_routes_to_it_wrong_too() -> None:
    found = refused(
        "connections: [{id: a, provider: openai, weight: x}]\nroutes: [{name: r, targets: [{connection: a}]}]"
    )

    assert set(found) == {"connections[0].weight"}


@pytest.mark.parametrize(("timeout", "is_valid"), [(310_000, True), (309_999, False)])
def test_an_attempt_must_leave_room_for_waiting_out_a_cooldown(timeout: int, is_valid: bool) -> None:
    text = BASE + f"routes: [{{name: r, targets: [{{connection: a}}], options: {{target_timeout_ms: {timeout}}}}}]"

    if is_valid:
        assert load_catalogue(text).catalogue.routes["r"].options == {"target_timeout_ms": timeout}
    else:
        assert refused(text)["routes[0].options.target_timeout_ms"].allowed == "at least 310000"


def test_no_room_is_needed_where_nothing_waits() -> None:
    text = BASE + "routes: [{name: r, targets: [{connection: a}], options: {target_timeout_ms: 5}}]\n"

    assert load_catalogue(text + "settings: {cooldown_wait.enabled: false}").catalogue.routes


def test_more_than_fifty_operator_rules_are_refused_as_a_whole() -> None:
    rule = "  - {{provider: openai, status: 400, match: text number {0} of many, scope: model}}\n"
    many = "rules:\n" + "".join(rule.format(f"{i:03}") for i in range(51))

    assert "too_many_rules" in refused(many)["rules"].problem


# -- warnings and overrides --------------------------------------------------------------------------------
def test_an_unlisted_provider_takes_the_defaults_with_a_warning() -> None:
    loaded = load_catalogue("connections: [{id: x, provider: opnai, auth_class: api_key}]")

    assert [warning.remedy for warning in loaded.warnings] == ["did you mean openai?"]


@pytest.mark.parametrize("strategy", [*ROUTE_STRATEGIES, "quota-share"])
def test_a_route_whose_strategy_is_refused_by_every_selection_draws_a_warning(strategy: str) -> None:
    route = f"routes: [{{name: qtSd/r, strategy: {strategy}, targets: [{{connection: a}}]}}]"
    found = [(warning.path, warning.allowed) for warning in load_catalogue(BASE + route).warnings]

    is_fine = strategy in IMPLEMENTED_STRATEGIES
    assert found == ([] if is_fine else [("routes[0].strategy", ", ".join(IMPLEMENTED_STRATEGIES))])


def test_a_lease_scope_without_connections_draws_a_warning() -> None:
    loaded = load_catalogue(f"callers: [{{id: k, key_sha256: {HASH}, scopes: ['lease:exclusive']}}]")

    assert [warning.path for warning in loaded.warnings] == ["callers[0].allowed_connections"]


def test_linter_warnings_point_at_the_rule_and_do_not_refuse() -> None:
    text = "rules:\n  - {provider: openai, status: 418, match: teapot is short, scope: provider}\n"

    warnings = load_catalogue(text, source="c.yaml").warnings

    assert {warning.where for warning in warnings} == {"c.yaml:2"}
    assert {warning.problem for warning in warnings} == {"rule linter: no_path", "rule linter: scope_provider"}


def test_a_stored_value_that_beats_environment_or_profile_is_explained() -> None:
    providers = "providers: [{id: claude, profile: {breaker: {failure_threshold: 3}}}]\n"
    text = providers + "settings: {breaker.oauth.failure_threshold: 9}"

    loaded = load_catalogue(text, environment={"POLICY_BREAKER_OAUTH_FAILURE_THRESHOLD": "4"})

    notes = {(override.path, override.note) for override in loaded.overrides}
    assert ("settings.breaker.oauth.failure_threshold", "a stored value beats the environment") in notes
    assert ("settings.breaker.oauth.failure_threshold", "a stored value beats a provider's profile") in notes


def test_an_environment_value_that_beats_a_profile_is_explained() -> None:
    loaded = load_catalogue(
        "providers: [{id: claude, profile: {breaker: {failure_threshold: 3}}}]",
        environment={"POLICY_BREAKER_OAUTH_FAILURE_THRESHOLD": "4"},
    )

    assert ("providers.claude.profile.breaker.failure_threshold", "POLICY_BREAKER_OAUTH_FAILURE_THRESHOLD=4") in {
        (override.path, override.by) for override in loaded.overrides
    }


def test_a_large_file_full_of_mistakes_is_answered_in_reasonable_time() -> None:
    connections = "".join(f"  - {{id: c{i}, provider: nobody{i}}}\n" for i in range(3000))
    targets = "".join(f"      - {{connection: d{i}}}\n" for i in range(3000))
    started = time.process_time()

    found = refused(f"connections:\n{connections}routes:\n  - name: r\n    targets:\n{targets}")

    assert len(found) == 3000
    assert time.process_time() - started < 20


# -- hostile YAML ------------------------------------------------------------------------------------------
def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a mapping"),
        ("[]", "not a mapping"),
        ("a: 1\na: 2\n", "key given twice, first in line 1"),
        (bomb(9), "aliases expand without bound"),
        ("a: &a [*a]\n", "aliases expand without bound"),
        ("a: " + "[" * 300 + "]" * 300, "nested too deeply"),
        ("a: " + "[" * 100_000, "not valid YAML"),
        ("a: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
        ("a: [1\n", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("? [a, b]\n: 1\n", "a key must be a plain text"),
        ("a: \x00\n", "not valid YAML"),
        ("a: " + "9" * 5000 + "\n", "unusable value"),
    ],
)
def test_hostile_yaml_is_refused_before_anything_is_built(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_catalogue(text, source="c.yaml")

    assert reason in caught.value.problems[0].problem
    assert caught.value.problems[0].where.startswith("c.yaml")


def test_a_duplicate_key_is_named_with_both_lines() -> None:
    found = refused("connections:\n  - id: a\n    provider: x\n    id: b\n")

    assert found["connections[0].id"].where == "c.yaml:4"
    assert "first in line 2" in found["connections[0].id"].problem


def test_a_file_beyond_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_bytes(b"# " + b"x" * (16 * 1024 * 1024 + 10))

    with pytest.raises(ConfigError, match="too large"):
        load_catalogue_file(path)


def test_a_file_that_is_not_utf8_is_refused_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"a: \xe9\n")

    with pytest.raises(ConfigError, match="not UTF-8 at byte 3"):
        load_catalogue_file(path)


# -- schema ------------------------------------------------------------------------------------------------
def test_the_schema_knows_every_section_and_refuses_others() -> None:
    schema = catalogue_schema()

    assert schema["additionalProperties"] is False
    assert set(yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))) <= set(schema["properties"])
    json.dumps(schema)


KEYS = ["id", "name", "provider", "targets", "strategy", "connection", "settings", "key_sha256", "status", "match"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=15,
)
SECTIONS = ["providers", "connections", "routes", "callers", "rules", "provider_strategies", "settings", "version"]


@given(st.dictionaries(st.sampled_from(SECTIONS), VALUES, max_size=4))
def test_any_document_is_either_usable_or_refused_with_problems(document: dict[str, object]) -> None:
    try:
        loaded = load_catalogue(json.dumps(document))
    except ConfigError as error:
        complete = all(problem.path and problem.problem for problem in error.problems)
    else:
        complete = load_catalogue(loaded.document_json).catalogue == loaded.catalogue
    assert complete
