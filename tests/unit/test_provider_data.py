"""Provider entries: strict reading, helpful errors, and the facts of the built-in catalogue."""

from __future__ import annotations

from typing import Any

import pytest

from policy_service.domain.catalogue import ProviderDirectory
from policy_service.domain.ids import AuthClass
from policy_service.settings.provider_data import ProviderEntryError, builtin_providers, provider_from_entry

RULE = {"id": "r", "statuses": [429], "reason": "quota_exhausted", "scope": "model"}


@pytest.mark.parametrize(
    ("entry", "path", "remedy"),
    [
        ({"id": "x", "per_model_qouta": True}, "provider.per_model_qouta", "did you mean per_model_quota"),
        ({"auth_class": "oauth"}, "provider.id", "missing"),
        ({"id": 7}, "provider.id", "string"),
        ({"id": "x", "no_auth": "yes"}, "provider.no_auth", "boolean"),
        ({"id": "x", "auth_class": "key"}, "provider.auth_class", "'api_key'"),
        ({"id": "x", "error_rules": [{**RULE, "statuses": [999]}]}, "provider.error_rules[0].statuses[0]", "599"),
        ({"id": "x", "error_rules": [{**RULE, "scop": "x"}]}, "provider.error_rules[0].scop", "did you mean scope"),
        ({"id": "x", "error_rules": [RULE, RULE]}, "provider", "used twice: r"),
        ({"id": "x", "profile": {"breaker": {"failure_treshold": 3}}}, "provider", "breaker.failure_threshold"),
        (
            {"id": "x", "error_rules": [{**RULE, "cooldown_ms": 1, "cooldown_from_text": True}]},
            "provider.error_rules[0]",
            "keep one",
        ),
        (
            {"id": "x", "error_rules": [{**RULE, "headers": [{"names": ["a"]}]}]},
            "provider.error_rules[0].headers[0]",
            "one of",
        ),
        ({"id": "x", "code_meanings": {"1": "poor"}}, "provider.code_meanings.1", "'credits'"),
    ],
)
def test_a_wrong_entry_names_the_path_and_the_remedy(entry: dict[str, Any], path: str, remedy: str) -> None:
    with pytest.raises(ProviderEntryError) as caught:
        provider_from_entry(entry)
    assert [where for where, _ in caught.value.problems] == [path]
    assert remedy in caught.value.problems[0][1]


def test_all_problems_of_an_entry_are_told_at_once() -> None:
    with pytest.raises(ProviderEntryError) as caught:
        provider_from_entry({"id": "x", "no_auth": 1, "foo": 2, "error_rules": [{}]}, "providers[3]")
    paths = [where for where, _ in caught.value.problems]
    assert {"providers[3].no_auth", "providers[3].foo", "providers[3].error_rules[0].id"} <= set(paths)


def test_an_entry_that_is_no_mapping_is_an_error_too() -> None:
    with pytest.raises(ProviderEntryError, match="expected a mapping"):
        provider_from_entry("openai")  # type: ignore[arg-type]


def test_texts_are_lowered_once_and_profiles_flattened() -> None:
    entry = {"id": " Acme ", "wallet_texts": ["EMPTY"], "profile": {"breaker": {"failure_threshold": 3}}}
    read = provider_from_entry(entry)
    assert (read.id, read.wallet_texts, dict(read.profile)) == ("acme", ("empty",), {"breaker.failure_threshold": 3})


def test_the_built_in_flags_are_those_of_the_specification() -> None:
    providers = builtin_providers()
    flagged = {
        name: {p.id for p in providers.values() if getattr(p, name)}
        for name in ("full_text_rules", "honors_rule_scope", "egress_bucketed", "shared_wallet_402", "cloud_code")
    }
    assert flagged["full_text_rules"] == flagged["honors_rule_scope"] == {"agentrouter"}
    assert flagged["egress_bucketed"] == {"opencode-zen", "opencode-go", "opencode-cli"}
    assert flagged["shared_wallet_402"] == {"grok-cli", "grok-web", "xai-oauth"}
    assert flagged["cloud_code"] == {"antigravity", "agy", "gemini-cli", "*cloudcode*"}


def test_aliases_are_unique_and_no_alias_hides_an_id() -> None:
    providers = builtin_providers()
    aliases = [alias for p in providers.values() for alias in p.aliases]
    assert len(set(aliases)) == len(aliases)
    assert not set(aliases) & set(providers)


@pytest.mark.parametrize(
    ("name", "entry", "auth"),
    [
        ("CX", "codex", AuthClass.OAUTH),
        ("my-cloudcode-pro", "*cloudcode*", AuthClass.OAUTH),
        ("openai-compatible-foo", "openai-compatible-*", AuthClass.API_KEY),
        ("zhipu", "glm", AuthClass.API_KEY),
        ("nobody", "nobody", AuthClass.NONE),
    ],
)
def test_names_aliases_and_patterns_find_their_entry(name: str, entry: str, auth: AuthClass) -> None:
    read = ProviderDirectory(builtin_providers()).get(name)
    assert (read.id, read.auth_class) == (entry, auth)
