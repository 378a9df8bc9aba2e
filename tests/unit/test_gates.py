"""The gates of one target, whole records: reason, end, evidence, start, cause, and when time alone changes the answer
(spec/diagnostics.md section 2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policy_service.domain.breaker import BreakerState, Override, ReplicaOpen, State
from policy_service.domain.catalogue import Catalogue, Provider
from policy_service.domain.connection_state import ConnectionState, EarlyProbe
from policy_service.domain.eligibility import Gate, check_target, early_probe_due, lock_keys, longest_timer
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.lockout import FamilyPoolState, ModelLockState
from policy_service.domain.policy import ConnectionPolicy, Policy
from policy_service.domain.profiles import EarlyProbeProfile
from policy_service.domain.provider_cooldown import ProviderCooldownState
from policy_service.domain.state import Key, Row

ACME = Provider(id="acme", quota_family="codex", family_pools=True)
BASE = Policy(Catalogue(providers={"acme": ACME})).for_connection("acme", "c")


def place(provider: str, connection: str, model: str) -> Target:
    return Target(ProviderId(provider), ConnectionId(connection), ModelId(model))


TARGET = place("acme", "c", "spark-1")
OPEN = BreakerState("acme", state=State.OPEN, reopen_at=2_000, fact_id="b.0", generation_since=900)
COOLING = ConnectionState(
    "acme", "c", rate_limited_until=2_000, limited_since=900, last_error_type="server_error", last_error_at=950,
    hint_source="text", fact_id="c.0",
)  # fmt: skip
LOCK = ModelLockState(
    "acme", "c", "family", "spark", until=2_000, locked_at=900, reason="rate_limit", hint_source="text", fact_id="l.0"
)
POOL = FamilyPoolState("acme", "c", "spark", 2_000, fact_id="p.0")
PROVIDER = ProviderCooldownState("acme", cooling_until=2_000, last_failure_at=900, fact_id="w.0")


def policy(**profiles: dict[str, Any]) -> ConnectionPolicy:
    changed = {name: replace(getattr(BASE, name), **fields) for name, fields in profiles.items()}
    return replace(BASE, **changed)


def rows(*each: Row) -> dict[Key, Row]:
    return {row.key: row for row in each}


def gate(*each: Row, now: int = 1_000, target: Target = TARGET, using: ConnectionPolicy = BASE, **more: Any) -> Gate:
    return check_target(rows(*each), target, using, now, **more)


def excluded(reason: str, until: int | None = None, evidence: str = "", **more: Any) -> Exclusion:
    return Exclusion(TARGET, reason, until, evidence, **more)


ON = policy(provider_cooldown={"enabled": True})


@pytest.mark.parametrize(
    ("row", "exclusion", "free_at"),
    [
        (replace(OPEN, override=Override.FORCE_OPEN), excluded("forced_open", None, "b.0"), None),
        (ConnectionState("acme", "c", "banned", fact_id="c.0"), excluded("banned", None, "c.0"), None),
        (OPEN, excluded("circuit_open", 2_000, "b.0", since=900), 2_000),
        (PROVIDER, excluded("provider_cooldown", 2_000, "w.0", since=900), 2_000),
        (replace(PROVIDER, connection="c", count=1), excluded("provider_cooldown", 2_000, "w.0", since=900), 2_000),
        (COOLING, excluded("connection_cooldown", 2_000, "c.0", cause="server_error", since=900), 2_000),
        (
            replace(COOLING, hint_source="header"),
            excluded("connection_cooldown", 2_000, "c.0", cause="server_error", since=900, is_fixed=True),
            2_000,
        ),
        (POOL, excluded("model_lockout", 2_000, "p.0", cause="rate_limit_exceeded"), 2_001),
        (LOCK, excluded("model_lockout", 2_000, "l.0", cause="rate_limit", since=900), 2_001),
        (
            replace(LOCK, hint_source="header"),
            excluded("model_lockout", 2_000, "l.0", cause="rate_limit", since=900, is_fixed=True),
            2_001,
        ),
        (ConnectionState("acme", "c", active=False, fact_id="c.0"), excluded("disabled", None, "c.0"), None),
    ],
)
def test_each_gate_gives_its_whole_record(row: Row, exclusion: Exclusion, free_at: int | None) -> None:
    assert gate(row, using=ON) == Gate(exclusion, changes_at=free_at)
    assert gate(row, using=ON, key="k").exclusion == replace(exclusion, target_key="k")


@pytest.mark.parametrize("row", [OPEN, PROVIDER, COOLING, POOL])
def test_a_gate_is_free_at_its_end(row: Row) -> None:
    assert gate(row, now=1_999, using=ON).exclusion is not None
    assert gate(row, now=2_000, using=ON).exclusion is None


def test_a_model_is_locked_up_to_and_including_its_end() -> None:
    assert gate(LOCK, now=2_000).exclusion is not None
    assert gate(LOCK, now=2_001) == Gate()
    later = replace(LOCK, key_kind="exact", model_key="spark-1", until=2_500, fact_id="l.1")
    found = gate(LOCK, later).exclusion
    assert found is not None
    assert (found.until, found.evidence_id) == (2_500, "l.1")


def test_gates_stand_in_their_order() -> None:
    everything: list[Row] = [
        replace(OPEN, override=Override.FORCE_OPEN), COOLING, POOL, LOCK, PROVIDER,
    ]  # fmt: skip
    assert gate(*everything, using=ON).exclusion == excluded("forced_open", None, "b.0")
    everything[0] = OPEN
    reasons = []
    while everything:
        found = gate(*everything, using=ON, is_disabled=True).exclusion
        assert found is not None
        reasons.append(found.evidence_id)
        everything = [row for row in everything if row.fact_id != found.evidence_id]  # type: ignore[attr-defined]
    assert reasons == ["b.0", "w.0", "c.0", "p.0", "l.0"]
    assert gate(is_disabled=True).exclusion == excluded("disabled")


def test_what_concerns_other_models_connections_and_replicas_excludes_nobody() -> None:
    bare = place("acme", "", "")
    assert gate(COOLING, LOCK, POOL, target=bare, using=ON) == Gate()
    assert gate(LOCK, POOL, target=place("acme", "c", "")) == Gate()
    assert gate(COOLING, allow_cooling=True) == Gate()
    assert gate(PROVIDER) == Gate()
    alone = BreakerState("acme", replica_opens=(ReplicaOpen("r1", 2_000),), fact_id="b.0")
    assert gate(alone, replica="r2").exclusion is None
    assert gate(alone, replica="r1").exclusion == excluded("circuit_open", 2_000, "b.0")
    assert gate(replace(OPEN, override=Override.DISABLED)) == Gate()
    single = replace(BASE, provider=replace(ACME, family_pools=False))
    assert gate(POOL, using=single) == Gate()


def test_a_target_without_a_connection_has_no_state_of_one() -> None:
    nameless = replace(COOLING, connection="", test_status="banned")
    assert gate(nameless, target=place("acme", "", "spark-1")) == Gate()


def test_a_connections_own_breaker_counts_where_that_option_is_on() -> None:
    own = replace(OPEN, connection="c", fact_id="b.1")
    assert gate(own) == Gate()
    on = policy(breaker={"per_connection": True})
    assert gate(own, using=on).exclusion == excluded("circuit_open", 2_000, "b.1", since=900)
    assert gate(own, using=on, target=place("acme", "", "m")).exclusion is None


def test_a_providers_breaker_switched_off_leaves_the_connections_own_in_force() -> None:
    own = replace(OPEN, connection="c", fact_id="o.0")
    using = policy(breaker={"per_connection": True})
    found = gate(replace(OPEN, override=Override.DISABLED), own, using=using)
    assert found.exclusion == excluded("circuit_open", 2_000, "o.0", since=900)


def test_half_open_passes_with_a_permit_to_be_taken() -> None:
    assert gate(OPEN, now=2_000) == Gate(needs_grant=True)
    assert gate() == Gate()


def test_a_finished_slow_start_does_not_make_every_decision_look_at_the_whole_pool_again() -> None:
    slow = policy(breaker={"slow_start_enabled": True, "slow_start_duration_ms": 1_000})
    closed = BreakerState("acme", closed_at=1_000)
    assert gate(closed, now=1_999, using=slow) == Gate(needs_grant=True, changes_at=2_000)
    assert gate(closed, now=2_000, using=slow) == Gate()
    assert gate(closed, now=1_500) == Gate()


def test_a_result_that_changes_earlier_is_the_same_result() -> None:
    assert Gate(excluded("disabled"), changes_at=9).changing_at(5) == Gate(excluded("disabled"), changes_at=5)


def test_the_timer_that_ends_last_is_the_one_to_wait_for() -> None:
    timers = rows(OPEN, replace(PROVIDER, cooling_until=3_000), COOLING, replace(LOCK, until=2_500))
    found = longest_timer(timers, TARGET, ON, 1_000)
    assert found is not None
    assert (found.reason, found.until) == ("provider_cooldown", 3_000)
    assert longest_timer({}, TARGET, ON, 1_000) is None


def test_a_cooling_connection_is_a_timer_to_wait_for() -> None:
    found = longest_timer(rows(COOLING), TARGET, ON, 1_000)
    assert found is not None
    assert found.until == COOLING.rate_limited_until


def test_the_keys_of_locks_are_those_of_the_model() -> None:
    assert lock_keys(BASE, TARGET) == (
        ("model_lock", "acme", "c", "family", "spark"),
        ("model_lock", "acme", "c", "bare", "spark-1"),
        ("model_lock", "acme", "c", "exact", "spark-1"),
    )
    assert lock_keys(BASE, place("acme", "c", "")) == ()


# -- early probes --------------------------------------------------------------------------------------------
EARLY = replace(BASE, early_probe=EarlyProbeProfile(True, 1_000, 300))


def due(*each: Row, now: int = 1_000, using: ConnectionPolicy = EARLY) -> int | None:
    return early_probe_due(rows(*each), TARGET, using, now)


def test_a_long_timer_may_be_tested_one_interval_after_its_start() -> None:
    assert due(COOLING) == 1_200
    assert due(replace(COOLING, limited_since=None)) == 1_250
    assert due(replace(COOLING, limited_since=1_000)) is None
    assert due(replace(COOLING, hint_source="header")) is None
    assert due(COOLING, using=BASE) is None
    assert due(COOLING, now=2_000) is None
    used = EarlyProbe("e", 1_300, 1_350, used=True)
    assert due(replace(COOLING, early_probe=used)) == 1_600


def test_every_lock_in_force_must_be_due() -> None:
    exact = replace(LOCK, key_kind="exact", model_key="spark-1")
    assert due(LOCK) == 1_200
    assert due(LOCK, replace(exact, locked_at=950)) == 1_250
    assert due(replace(LOCK, locked_at=0)) == 300
    assert due(LOCK, replace(exact, locked_at=1_000)) is None
    assert due(LOCK, replace(exact, until=999)) == 1_200
    assert due() is None
