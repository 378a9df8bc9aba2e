"""A setting reaches its field from every source that may state it, and the nearer source wins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from policy_service.domain.catalogue import Caller, Catalogue, Connection, Provider, ProviderDirectory
from policy_service.domain.ids import AuthClass, Generations
from policy_service.domain.policy import ConnectionPolicy, Policy, effective_degradation
from policy_service.domain.settings import SettingSources, SettingSpec, read_environment, read_flag, read_stored
from tests.unit.test_policy_compiled import ACME, PLACES, profile_of

ONLY_AS_A_WHOLE = {"provider_cooldown.enabled"}
"""Switched by a stored value or the environment, never for one connection (provider_cooldown.md section 1)."""
CLASSED = ("api_key",)

Read = Callable[[ConnectionPolicy], object]
MORE: list[tuple[str, object, Read]] = [
    ("early_probe.enabled", True, lambda p: p.early_probe.enabled),
    ("early_probe.min_block_ms", 9_000, lambda p: p.early_probe.min_block_ms),
    ("early_probe.interval_ms", 9_000, lambda p: p.early_probe.interval_ms),
    ("early_probe.include_server_stated", True, lambda p: p.early_probe.include_server_stated),
    ("model_lockout.slow_first_output.threshold_ms", 9_000, lambda p: p.lockout.slow_first_output.threshold_ms),
    ("daily_reset_zone", "Asia/Tokyo", lambda p: p.daily_reset_zone),
    ("connection.health_check_can_disable", True, lambda p: p.health_check_can_disable),
    ("connection.api_key.honor_upstream_hints", False, lambda p: p.ladder.honor_upstream_hints),
    *((f"rotation.on_{s}", False, lambda p, s=s: p.rotation.on_status[s]) for s in (429, 500, 502, 400)),
    *((f"rotation.threshold_{s}", 9, lambda p, s=s: p.rotation.threshold[s]) for s in (429, 500, 502, 400)),
]  # fmt: skip


def _place(profile: str, field: str) -> Read:
    return lambda policy: getattr(getattr(policy, profile), field)


ALL = [(name, value, _place(profile, field)) for name, value, profile, field, _ in PLACES] + MORE
BY_SOURCE = [row for row in ALL if row[0] not in ONLY_AS_A_WHOLE]


@pytest.mark.parametrize(("name", "value", "read"), MORE, ids=[row[0] for row in MORE])
def test_a_stored_setting_reaches_its_field_too(name: str, value: object, read: Read) -> None:
    assert read(profile_of({})) != value
    assert read(profile_of({name: value})) == value


@pytest.mark.parametrize(("name", "value", "read"), BY_SOURCE, ids=[row[0] for row in BY_SOURCE])
def test_a_setting_reaches_its_field_from_connection_and_catalogue_as_from_the_store(
    name: str, value: object, read: Read
) -> None:
    stored = read(profile_of({name: value}))
    assert read(profile_of({}, own={name: value})) == stored
    assert read(profile_of({}, provider=replace(ACME, profile={name: value}))) == stored
    assert read(profile_of({})) != stored


@pytest.mark.parametrize(
    ("name", "value"), [("max_queue_depth", 7), ("unbounded_wait", True), ("wedge_after_ms", 9_000)]
)
def test_what_else_the_queue_of_a_connection_has_comes_from_connection_and_catalogue_too(
    name: str, value: object
) -> None:
    told = {"queue.requests_per_minute": 5, f"queue.{name}": value}
    of_connection = profile_of({}, own=told).queue
    of_catalogue = profile_of({}, provider=replace(ACME, profile=told)).queue
    assert [getattr(queue, name) for queue in (of_connection, of_catalogue)] == [value, value]


@pytest.mark.parametrize(
    ("stored", "catalogue", "own", "found"),
    [(7, 8, 9, 9), (7, 8, None, 7), (None, 8, None, 8), (None, None, 9, 9), (7, None, None, 7), (None, None, None, 1)],
)
def test_the_nearer_source_wins(stored: int | None, catalogue: int | None, own: int | None, found: int) -> None:
    name = "breaker.half_open_probes"

    def block(value: int | None) -> dict[str, object]:
        return {} if value is None else {name: value}

    policy = profile_of(block(stored), provider=replace(ACME, profile=block(catalogue)), own=block(own))
    assert policy.breaker.half_open_probes == found


CLASSES = {AuthClass.API_KEY: "api_key", AuthClass.OAUTH: "oauth", AuthClass.LOCAL: "local", AuthClass.NONE: "default"}


@pytest.mark.parametrize("auth", CLASSES)
def test_every_class_reads_its_own_block(auth: AuthClass) -> None:
    entry = replace(ACME, auth_class=auth)
    name = f"breaker.{CLASSES[auth]}.failure_threshold"
    assert profile_of({name: 77}, provider=entry).breaker.failure_threshold == 77
    for other in CLASSES.values():
        if other != CLASSES[auth]:
            told = profile_of({f"breaker.{other}.failure_threshold": 77}, provider=entry)
            assert told.breaker.failure_threshold != 77


@pytest.mark.parametrize(
    ("auth", "hints", "opens", "cap_ms", "reset_after_ms"),
    [
        (AuthClass.API_KEY, True, True, 1_800_000, 30_000), (AuthClass.OAUTH, True, True, 1_800_000, 60_000),
        (AuthClass.LOCAL, False, False, 120_000, 15_000), (AuthClass.NONE, False, False, 120_000, 1_800_000),
    ],
)  # fmt: skip
def test_what_only_profiled_classes_have(
    auth: AuthClass, hints: bool, opens: bool, cap_ms: int, reset_after_ms: int
) -> None:
    policy = profile_of({"breaker.kind_hints": True}, provider=replace(ACME, auth_class=auth))
    assert policy.breaker.kind_hints is hints
    assert policy.breaker.open_ms_by_kind == ({"rate_limit": 60_000, "quota_exhausted": 3_600_000} if opens else {})
    assert (policy.ladder.cap_ms, policy.lockout.reset_after_ms) == (cap_ms, reset_after_ms)


@pytest.mark.parametrize(
    ("threshold", "explicit", "found"),
    [(5, None, 3), (1, None, 1), (10, None, 6), (5, 4, 4), (5, 5, 4), (5, 9, 4), (5, 1, 1), (5, 0, 1), (1, 3, 1),
     (2, 2, 1), (6, None, 4)],
)  # fmt: skip
def test_the_degradation_threshold_lies_below_the_other_where_it_was_told(
    threshold: int, explicit: int | None, found: int
) -> None:
    assert effective_degradation(threshold, explicit) == found


def test_slow_first_output_needs_switch_and_provider() -> None:
    switch, watched = "model_lockout.slow_first_output.enabled", "model_lockout.slow_first_output.providers"
    assert not profile_of({switch: True}).lockout.slow_first_output.enabled
    assert not profile_of({watched: ["acme"]}).lockout.slow_first_output.enabled
    assert profile_of({switch: True, watched: ["acme"]}).lockout.slow_first_output.enabled


# -- the policy as a whole -----------------------------------------------------------------------------------
def test_a_direct_call_has_waits_of_its_own() -> None:
    waits = Policy(Catalogue(stored_settings={"direct_wait.enabled": False, "direct_wait.max_retries": 2})).direct_wait
    assert (waits.enabled, waits.max_attempts, waits.max_wait_ms, waits.budget_ms) == (False, 2, 90_000, 300_000)
    short = {"direct_wait.budget_ms": 1_000, "direct_wait.max_retry_wait_s": 2}
    assert Policy(Catalogue(stored_settings=short)).direct_wait.budget_ms == 2_000
    long = {"direct_wait.budget_ms": 9_000, "direct_wait.max_retry_wait_s": 2}
    assert Policy(Catalogue(stored_settings=long)).direct_wait.budget_ms == 9_000


@pytest.mark.parametrize(("cap", "capped"), [(None, False), (0, False), (-1, False), (1, True), (8, True)])
def test_a_connection_is_capped_by_a_positive_limit_alone(cap: int | None, capped: bool) -> None:
    policy = Policy(Catalogue(connections={"c": Connection("c", "acme", max_concurrent=cap)}))
    assert policy.is_capped("c") is capped
    assert policy.has_gates is capped
    assert not policy.is_capped("other")


@pytest.mark.parametrize(
    ("stored", "own", "profile", "gates"),
    [
        ({}, {}, {}, False), ({"queue.auto_enable_api_key_providers": True}, {}, {}, True),
        ({}, {"queue.requests_per_minute": 5}, {}, True), ({}, {}, {"queue.requests_per_minute": 5}, True),
        ({}, {"breaker.half_open_probes": 2}, {"breaker.half_open_probes": 2}, False),
        ({"queue.requests_per_minute": 5}, {}, {}, False),
    ],
)  # fmt: skip
def test_a_policy_has_gates_where_any_connection_may_be_paced(
    stored: dict[str, object], own: dict[str, object], profile: dict[str, object], gates: bool
) -> None:
    entry = replace(ACME, profile=profile)
    connection = Connection("c", "acme", settings=own)
    made = Policy(Catalogue({"acme": entry}, connections={"c": connection}, stored_settings=stored))
    assert made.has_gates is gates


def test_the_fleets_limit_is_none_at_zero() -> None:
    assert Policy(Catalogue()).queue_fleet_limit is None
    assert Policy(Catalogue(stored_settings={"queue.global_concurrent_requests": 1})).queue_fleet_limit == 1


def test_addresses_and_switches_of_declared_connections() -> None:
    declared = {
        "a": Connection("a", "acme", address="h:1"),
        "b": Connection("b", "acme", enabled=False, settings={"affinity.ttl_ms": 5}),
    }
    policy = Policy(Catalogue({"acme": ACME}, connections=declared))
    assert [policy.address_of(name) for name in ("a", "b", "c")] == ["h:1", "", ""]
    assert policy.disabled_connections == {"b"}
    assert policy.setting("affinity.ttl_ms", declared["b"]) == 5
    assert policy.setting("affinity.ttl_ms", declared["a"]) == policy.setting("affinity.ttl_ms") == 0


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize(("quota", "passthrough"), [(False, False), (True, False), (False, True), (True, True)])
def test_the_connections_flag_for_models_wins(quota: bool, passthrough: bool, flag: bool | None) -> None:
    policy = profile_of({}, provider=replace(ACME, per_model_quota=quota, passthrough=passthrough))
    told = replace(policy, connection=replace(policy.connection, passthrough_models=flag))
    assert told.counts_per_model is ((quota or passthrough) if flag is None else flag)


@pytest.mark.parametrize(("told", "rules"), [(False, False), (True, False), (False, True)])
def test_rules_see_and_scope_where_the_provider_or_an_operator_says_so(told: bool, rules: bool) -> None:
    policy = profile_of({}, provider=replace(ACME, full_text_rules=told, honors_rule_scope=told))
    policy = replace(policy, operator_rules=(object(),) if rules else ())  # type: ignore[arg-type]
    assert policy.sees_full_text is policy.honors_rule_scope is (told or rules)


@pytest.mark.parametrize(
    ("provider", "stated", "unlisted", "auth"),
    [
        ("acme", None, AuthClass.OAUTH, AuthClass.API_KEY), ("acme", AuthClass.LOCAL, AuthClass.OAUTH, AuthClass.LOCAL),
        ("nobody", None, AuthClass.OAUTH, AuthClass.OAUTH), ("nobody", AuthClass.NONE, AuthClass.OAUTH, AuthClass.NONE),
        ("nobody", AuthClass.LOCAL, AuthClass.OAUTH, AuthClass.LOCAL), ("nobody", None, AuthClass.NONE, AuthClass.NONE),
        ("plain", None, AuthClass.OAUTH, AuthClass.NONE),
    ],
)  # fmt: skip
def test_the_class_of_a_connection_by_declaration_statement_and_provider(
    provider: str, stated: AuthClass | None, unlisted: AuthClass, auth: AuthClass
) -> None:
    entries = {"acme": ACME, "plain": Provider(id="plain", auth_class=AuthClass.NONE)}
    policy = Policy(Catalogue(entries), unlisted=unlisted)
    assert policy.for_connection(provider, "x", stated).auth_class is auth


def test_a_declared_connection_of_another_provider_is_not_meant() -> None:
    declared = {"c": Connection("c", "other", auth_class=AuthClass.OAUTH)}
    policy = Policy(Catalogue({"acme": replace(ACME, aliases=("ac",))}, connections=declared))
    assert policy.for_connection("acme", "c").connection == Connection("c", "acme")
    aliased = Policy(Catalogue({"acme": replace(ACME, aliases=("ac",))}, connections={"c": Connection("c", "AC")}))
    assert aliased.for_connection("acme", "c").connection == Connection("c", "AC")


def test_what_was_compiled_once_is_handed_out_again() -> None:
    policy = Policy(Catalogue({"acme": ACME}))
    assert policy.for_connection("acme", "c") is policy.for_connection("acme", "c")
    directory = ProviderDirectory({})
    assert directory.get("nobody") is directory.get("nobody")


def test_names_defaults_and_generations() -> None:
    assert Generations() == (1, 1, 1)
    caller = Caller("a", "0" * 64)
    assert (caller.enabled, caller.scopes, caller.allowed_connections) == (True, frozenset(), ())


# -- values of settings --------------------------------------------------------------------------------------
def spec(
    kind: str, low: float | None = None, high: float | None = None, rule: str = "as_is", **more: Any
) -> SettingSpec:
    return SettingSpec("x", kind, None, low, high, environment_rule=rule, **more)


@pytest.mark.parametrize(
    ("kind", "raw", "found"),
    [
        ("bool", True, True), ("bool", False, False), ("bool", 1, None), ("bool", "true", None), ("int", 0, 2),
        ("int", 2, 2), ("int", 3, 3), ("int", 9, 9), ("int", 10, 9), ("int", 5.9, 5), ("int", "7", 7),
        ("int", " 7 ", 7), ("int", "7.0", 7), ("int", "x", None), ("int", True, None), ("int", float("inf"), None),
        ("int", [5], None), ("float", 2.5, 2.5), ("float", 1.5, 2.0), ("float", 9.5, 9.0),
        ("float", "2.5", 2.5), ("float", "1e0", 2),
        ("text", "a", "a"), ("text", "", ""), ("text", 5, None), ("choice", "a", "a"), ("choice", "c", None),
        ("text_list", ["a", 5], ("a", "5")), ("text_list", "a", None), ("text_list", [], ()), ("bool", None, None),
        ("int_list", [1, 2, 9, 10, "5", "x"], (2, 9, 5)), ("int_list", [1], None), ("int_list", (3,), (3,)),
    ],
)  # fmt: skip
def test_a_stored_value_is_clamped_or_not_usable(kind: str, raw: object, found: object) -> None:
    read = read_stored(spec(kind, 2, 9, choices=("a", "b")), raw)
    assert (read, type(read)) == (found, type(found))


@pytest.mark.parametrize(
    ("kind", "rule", "raw", "found"),
    [
        ("bool", "as_is", " ON ", True), ("bool", "as_is", "0", False), ("bool", "as_is", "yes", None),
        ("int", "as_is", "1", 1), ("int", "as_is", "99", 99), ("int", "as_is", "0", 0), ("int", "as_is", "-1", None),
        ("int", "as_is", "x", None), ("int", "clamped", "1", 2), ("int", "clamped", "99", 9),
        ("int", "positive_int", "1", 1), ("int", "positive_int", "0", None), ("int", "positive_int", "1.5", None),
        ("int", "as_is", "1.5", 1.5), ("text", "as_is", " a ", "a"), ("choice", "as_is", "b", "b"),
        ("choice", "as_is", "c", None), ("text_list", "as_is", "a, b,,", ("a", "b")),
        ("int_list", "as_is", "5, 99", (5,)),
    ],
)  # fmt: skip
def test_a_value_of_the_environment_by_its_rule(kind: str, rule: str, raw: str, found: object) -> None:
    assert read_environment(spec(kind, 2, 9, rule, choices=("a", "b")), raw) == found


@pytest.mark.parametrize(
    ("raw", "found"),
    [("yes", True), ("NO", False), (" on ", True), ("off", False), ("1", True), ("0", False), ("x", None)],
)
def test_a_flag_knows_yes_and_no(raw: str, found: bool | None) -> None:
    assert read_flag(raw) is found


def test_a_value_is_told_with_its_source() -> None:
    name, variable = "breaker.half_open_probes", "POLICY_BREAKER_HALF_OPEN_PROBES"
    sources = SettingSources({name: 3}, {variable: "4"})
    assert sources.resolve_with_source(name, connection={name: 2}) == (2, "connection")
    assert sources.resolve_with_source(name, connection={name: "x"}) == (3, "stored")
    assert SettingSources({name: "x"}, {variable: "4"}).resolve_with_source(name, catalogue=5) == (4, "environment")
    assert SettingSources({}, {variable: "x"}).resolve_with_source(name, catalogue=5) == (5, "catalogue")
    assert SettingSources().resolve_with_source(name, catalogue="x") == (1, "default")
    assert SettingSources().resolve_with_source(name, default=6) == (6, "default")


def test_an_older_name_serves_where_the_newer_is_not_set() -> None:
    older, newer = "affinity.legacy_ttl_ms", "affinity.ttl_ms"
    assert SettingSources({older: 5}).resolve(newer) == 5
    assert SettingSources({older: 5, newer: 6}).resolve(newer) == 6
    assert SettingSources({older: 5, newer: 0}).resolve(newer) == 0
    assert SettingSources({"breaker.half_open_probes": 3}).resolve(newer) == 0


def test_any_source_may_switch_the_window_gate_on() -> None:
    name = "provider_cooldown.enabled"
    assert SettingSources({name: True}).any_source_on(name)
    assert SettingSources({name: False}, {"PROVIDER_COOLDOWN_ENABLED": "true"}).any_source_on(name)
    assert not SettingSources({name: False}, {"PROVIDER_COOLDOWN_ENABLED": "false"}).any_source_on(name)
    assert not SettingSources({name: 1}).any_source_on(name)
