"""Every setting reaches its place in the profile of a connection, and nothing else moves with it.

Compiled policies are kept up to a bound, and shared where a connection says nothing of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from policy_service.domain import policy as policy_module
from policy_service.domain import setting_specs  # noqa: F401  (fills the registry)
from policy_service.domain.catalogue import Catalogue, Connection, Provider
from policy_service.domain.ids import AuthClass
from policy_service.domain.policy import ConnectionPolicy, Policy
from policy_service.domain.profiles import KindThreshold

ACME = Provider(id="acme", auth_class=AuthClass.API_KEY, ambiguous_401_soft=True)


def compiled(stored: dict[str, object], provider: Provider = ACME, own: dict[str, object] | None = None) -> Policy:
    connection = Connection("c", "acme", settings=own or {})
    return Policy(Catalogue({"acme": provider}, connections={"c": connection}, stored_settings=stored))


def profile_of(stored: dict[str, object], **more: Any) -> ConnectionPolicy:
    return compiled(stored, **more).for_connection("acme", "c")


PLACES: list[tuple[str, object, str, str, object]] = [
    ("breaker.api_key.failure_threshold", 9, "breaker", "failure_threshold", 9),
    ("breaker.api_key.reset_timeout_ms", 9_000, "breaker", "reset_timeout_ms", 9_000),
    ("breaker.api_key.max_backoff_multiplier", 9, "breaker", "max_backoff_multiplier", 9),
    ("breaker.api_key.backoff_escalation_cycles", 9, "breaker", "backoff_escalation_cycles", 9),
    ("breaker.half_open_probes", 2, "breaker", "half_open_probes", 2),
    ("breaker.successes_to_close", 2, "breaker", "successes_to_close", 2),
    ("breaker.count_mode", "consecutive", "breaker", "count_mode", "consecutive"),
    ("breaker.kind_hints", False, "breaker", "kind_hints", False),
    ("breaker.per_connection", True, "breaker", "per_connection", True),
    ("breaker.reopen_jitter", 0.2, "breaker", "reopen_jitter", 0.2),
    ("breaker.quorum.enabled", True, "breaker", "quorum_enabled", True),
    ("breaker.quorum.min_replicas", 3, "breaker", "quorum_min_replicas", 3),
    ("breaker.quorum.min_connections", 4, "breaker", "quorum_min_connections", 4),
    ("breaker.slow_start.enabled", True, "breaker", "slow_start_enabled", True),
    ("breaker.slow_start.duration_ms", 9_000, "breaker", "slow_start_duration_ms", 9_000),
    ("breaker.slow_start.min_share", 0.3, "breaker", "slow_start_min_share", 0.3),
    ("breaker.slow_start.aggression", 2.0, "breaker", "slow_start_aggression", 2.0),
    ("breaker.slow_start.failure_budget", 5, "breaker", "slow_start_failure_budget", 5),
    ("connection.api_key.base_cooldown_ms", 9_000, "ladder", "base_cooldown_ms", 9_000),
    ("connection.api_key.max_backoff_steps", 3, "ladder", "max_backoff_steps", 3),
    ("provider_cooldown.enabled", True, "provider_cooldown", "enabled", True),
    ("provider_cooldown.api_key.failure_threshold", 9, "provider_cooldown", "failure_threshold", 9),
    ("provider_cooldown.api_key.failure_window_ms", 90_000, "provider_cooldown", "failure_window_ms", 90_000),
    ("provider_cooldown.api_key.cooldown_ms", 90_000, "provider_cooldown", "cooldown_ms", 90_000),
    ("provider_cooldown.min_ms", 9_000, "provider_cooldown", "min_ms", 9_000),
    ("provider_cooldown.max_ms", 90_000, "provider_cooldown", "max_ms", 90_000),
    ("model_lockout.enabled", True, "lockout", "pool_enabled", True),
    ("model_lockout.error_codes", [418, 500], "lockout", "error_codes", frozenset({418, 500})),
    ("model_lockout.base_cooldown_ms", 90_000, "lockout", "base_cooldown_ms", 90_000),
    ("model_lockout.max_cooldown_ms", 900_000, "lockout", "max_cooldown_ms", 900_000),
    ("model_lockout.max_backoff_steps", 3, "lockout", "max_backoff_steps", 3),
    ("model_lockout.use_exponential_backoff", False, "lockout", "use_exponential_backoff", False),
    ("terminal.custom_ban_signals", ["gone"], "terminal", "custom_ban_signals", ("gone",)),
    ("terminal.auto_disable_banned", True, "terminal", "auto_disable_banned", True),
    ("terminal.auto_disable_scope", "subscription", "terminal", "auto_disable_scope", "subscription"),
    ("terminal.ambiguous_401_soft_lockout", True, "terminal", "ambiguous_401_soft", True),
    ("retry_hints.extended_texts", False, "hints", "extended_texts", False),
    ("retry_hints.extended_reset_headers", False, "hints", "extended_reset_headers", False),
    ("rotation.enabled", True, "rotation", "enabled", True),
    ("rotation.window_ms", 90_000, "rotation", "window_ms", 90_000),
    ("rotation.rate_limit_reset_seconds", 1.5, "rotation", "rate_limit_reset_ms", 1_500),
]


@pytest.mark.parametrize(("name", "value", "profile", "field", "expected"), PLACES, ids=[row[0] for row in PLACES])
def test_a_stored_setting_reaches_its_field(
    name: str, value: object, profile: str, field: str, expected: object
) -> None:
    before, after = getattr(profile_of({}), profile), getattr(profile_of({name: value}), profile)
    assert getattr(before, field) != expected
    assert getattr(after, field) == expected


OF_THE_POLICY: list[tuple[dict[str, object], Callable[[Policy], object], object]] = [
    ({"cooldown_wait.enabled": False}, lambda p: p.route_wait.enabled, False),
    ({"cooldown_wait.max_wait_ms": 9_000}, lambda p: p.route_wait.max_wait_ms, 9_000),
    ({"cooldown_wait.max_attempts": 2}, lambda p: p.route_wait.max_attempts, 2),
    ({"cooldown_wait.budget_ms": 200_000}, lambda p: p.route_wait.budget_ms, 200_000),
    ({"cooldown_wait.budget_ms": 1_000, "cooldown_wait.max_wait_ms": 9_000}, lambda p: p.route_wait.budget_ms, 9_000),
    ({"direct_wait.max_retry_wait_s": 7}, lambda p: p.direct_wait.max_wait_ms, 7_000),
    ({"pool_guard.enabled": True}, lambda p: p.pool_guard.enabled, True),
    ({"pool_guard.max_excluded_share": 0.25}, lambda p: p.pool_guard.max_excluded_share, 0.25),
    ({"pool_guard.panic_max_in_flight": 3}, lambda p: p.pool_guard.panic_max_in_flight, 3),
]


@pytest.mark.parametrize(("stored", "read", "expected"), OF_THE_POLICY, ids=[str(row[0]) for row in OF_THE_POLICY])
def test_a_setting_of_the_whole_reaches_its_field(
    stored: dict[str, object], read: Callable[[Policy], object], expected: object
) -> None:
    assert read(compiled({})) != expected
    assert read(compiled(stored)) == expected


def test_bounds_that_depend_on_each_other_are_kept_in_order() -> None:
    crossed = profile_of({"provider_cooldown.min_ms": 90_000, "provider_cooldown.max_ms": 10_000})
    assert crossed.provider_cooldown.max_ms == 90_000
    locked = profile_of({"model_lockout.base_cooldown_ms": 200_000, "model_lockout.max_cooldown_ms": 100_000})
    assert locked.lockout.max_cooldown_ms == 200_000
    assert locked.ladder.cap_ms == 200_000


def test_numbers_outside_the_range_of_a_list_are_dropped() -> None:
    codes = profile_of({"model_lockout.error_codes": [99, 100, 429, 599, 600, "x", None]}).lockout.error_codes
    assert codes == {100, 429, 599}
    assert profile_of({"model_lockout.error_codes": ["x"]}).lockout.error_codes == profile_of({}).lockout.error_codes


def test_a_connections_own_value_beats_the_catalogues_and_a_short_name_serves_its_class() -> None:
    told = replace(ACME, profile={"breaker.failure_threshold": 7})
    assert profile_of({}, provider=told).breaker.failure_threshold == 7
    assert profile_of({}, provider=told, own={"breaker.failure_threshold": 8}).breaker.failure_threshold == 8
    both = {"breaker.failure_threshold": 8, "breaker.api_key.failure_threshold": 9}
    assert profile_of({}, provider=told, own=both).breaker.failure_threshold == 9


def test_the_soft_401_needs_the_provider_too_and_kind_hints_a_profiled_class() -> None:
    hard = replace(ACME, ambiguous_401_soft=False)
    assert not profile_of({"terminal.ambiguous_401_soft_lockout": True}, provider=hard).terminal.ambiguous_401_soft
    for auth, hinted in ((AuthClass.OAUTH, True), (AuthClass.LOCAL, False), (AuthClass.NONE, False)):
        policy = profile_of({"breaker.kind_hints": True}, provider=replace(ACME, auth_class=auth))
        assert policy.breaker.kind_hints is hinted
        assert bool(policy.breaker.open_ms_by_kind) is hinted
    by_default = replace(ACME, kind_hints_default=True)
    assert profile_of({}, provider=by_default).breaker.kind_hints
    assert not profile_of({"breaker.kind_hints": False}, provider=by_default).breaker.kind_hints


def test_the_thresholds_of_failure_kinds_are_the_providers() -> None:
    thresholds = {"rate_limit": KindThreshold(2)}
    assert profile_of({}, provider=replace(ACME, kind_thresholds=thresholds)).breaker.kind_thresholds == thresholds


def test_kinds_give_no_hints_by_default_where_the_provider_says_so() -> None:
    assert profile_of({}).breaker.kind_hints
    assert not profile_of({}, provider=replace(ACME, kind_hints_default=False)).breaker.kind_hints


@pytest.mark.parametrize(
    ("text", "providers"),
    [
        (None, {"acme"}),
        ("", {"acme"}),
        ("a, B ,", {"a", "b"}),
        ("AC, b", {"acme", "b"}),
        ("off", set()),
        ("none", set()),
        (" FALSE ", set()),
        ("0", set()),
    ],
)
def test_the_egress_set_is_the_catalogues_unless_it_is_named(text: str | None, providers: set[str]) -> None:
    acme = replace(ACME, egress_bucketed=True, aliases=("ac",))
    policy = compiled({} if text is None else {"egress_lock.providers": text}, acme)
    assert policy.egress_providers == providers


def test_fractions_of_the_environment_give_whole_milliseconds_and_whole_steps() -> None:
    """A fraction is taken as it stands; timers and levels are stored whole, and a store would refuse the rest."""
    environment = {
        "POLICY_CONNECTION_API_KEY_BASE_COOLDOWN_MS": "1500.5",
        "POLICY_CONNECTION_API_KEY_MAX_BACKOFF_STEPS": "2.5",
        "POLICY_MODEL_LOCKOUT_BASE_COOLDOWN_MS": "1000.5",
        "POLICY_MODEL_LOCKOUT_MAX_COOLDOWN_MS": "9000.5",
        "POLICY_MODEL_LOCKOUT_MAX_BACKOFF_STEPS": "1.5",
        "POLICY_BREAKER_API_KEY_RESET_TIMEOUT_MS": "700.5",
    }
    policy = Policy(Catalogue({"acme": ACME}), environment=environment).for_connection("acme", "c")
    ladder, lockout = policy.ladder, policy.lockout
    numbers = [ladder.base_cooldown_ms, ladder.max_backoff_steps, ladder.cap_ms, lockout.base_cooldown_ms]
    numbers += [lockout.max_cooldown_ms or 0, lockout.max_backoff_steps, lockout.reset_after_ms]
    assert numbers == [1_501, 2, 9_001, 1_001, 9_001, 1, 701]
    assert all(isinstance(number, int) for number in numbers)


def test_a_cap_of_zero_leaves_the_ladder_its_half_hour() -> None:
    environment = {f"POLICY_MODEL_LOCKOUT_{name}_COOLDOWN_MS": "0" for name in ("BASE", "MAX")}
    policy = Policy(Catalogue({"acme": ACME}), environment).for_connection("acme", "c")
    assert (policy.lockout.max_cooldown_ms, policy.ladder.cap_ms) == (0, 1_800_000)


def test_a_setting_that_is_asked_for_by_name_is_whole_where_a_whole_number_is_meant() -> None:
    environment = {"POLICY_CONCURRENCY_PERMIT_TTL_MS": "1000.5", "POLICY_BREAKER_REOPEN_JITTER": "0.25"}
    policy = Policy(Catalogue(), environment=environment)
    assert policy.setting("concurrency.permit_ttl_ms") == 1_001
    assert policy.setting("breaker.reopen_jitter") == 0.25


# -- what is kept and shared -------------------------------------------------------------------------------------
def is_kept(policy: Policy, provider: str, connection: str) -> bool:
    """Is the second answer the first one?"""
    return policy.for_connection(provider, connection) is policy.for_connection(provider, connection)


def are_shared(policy: Policy, provider: str) -> bool:
    """Do two connections of a provider have the same profiles?"""
    breakers = [policy.for_connection(provider, name).breaker for name in ("a", "b")]
    return breakers[0] is breakers[1]


def test_so_many_connections_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "MEMO_ENTRIES", 2)
    policy = Policy(Catalogue())
    assert [is_kept(policy, "p", name) for name in ("a", "b", "c")] == [True, True, False]
    assert [is_kept(policy, "p", name) for name in ("a", "b")] == [True, True]


def test_so_many_providers_share_profiles_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "MEMO_ENTRIES", 2)
    policy = Policy(Catalogue())
    assert [are_shared(policy, provider) for provider in ("p", "q", "r")] == [True, True, False]


def test_what_tells_connections_apart_is_not_shared() -> None:
    own = Connection("own", "p", settings={"breaker.half_open_probes": 7})
    paced = {"queue.auto_enable_api_key_providers": True}
    off, oauth = Connection("off", "p", enabled=False), Connection("oauth", "p", auth_class=AuthClass.OAUTH)
    connections = {each.id: each for each in (own, off, oauth, Connection("plain", "p"))}
    policy = Policy(Catalogue(connections=connections, stored_settings=paced), unlisted=AuthClass.API_KEY)
    plain = policy.for_connection("p", "plain")
    assert (plain.auth_class, plain.breaker.half_open_probes, plain.queue is None) == (AuthClass.API_KEY, 1, False)
    assert policy.for_connection("p", "own").breaker.half_open_probes == 7
    assert policy.for_connection("p", "off").queue is None
    assert policy.for_connection("p", "oauth").auth_class is AuthClass.OAUTH
    assert policy.for_connection("p", "plain", AuthClass.OAUTH).auth_class is AuthClass.OAUTH
    assert policy.for_connection("q", "plain").provider.id == "q"


def test_connections_that_share_profiles_keep_their_own_declaration() -> None:
    connections = {name: Connection(name, "p", passthrough_models=name == "b") for name in ("a", "b")}
    policy = Policy(Catalogue(connections=connections))
    assert [policy.for_connection("p", name).connection for name in ("a", "b")] == list(connections.values())


def test_settings_of_one_connection_are_not_those_of_another() -> None:
    connections = {n: Connection(n, "p", settings={"breaker.half_open_probes": int(n)}) for n in ("3", "4")}
    policy = Policy(Catalogue(connections=connections))
    assert [policy.for_connection("p", name).breaker.half_open_probes for name in ("3", "4")] == [3, 4]
