"""Edges of what concerns one request: guards by status, waiting, early probes, pools, exhaustion, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policy_service.domain import early_probe, guards, pool_guard
from policy_service.domain.catalogue import Catalogue, Connection, Provider
from policy_service.domain.connection_state import EarlyProbe
from policy_service.domain.cooldown_wait import WaitBudget, WaitDecision, decide_wait
from policy_service.domain.early_probe import Block
from policy_service.domain.exclusions import REASONS, Exclusion, Level, Mechanism
from policy_service.domain.ids import ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.inflight import ENTRY_LIFE_MS, MAX_ENTRIES, InFlight
from policy_service.domain.outcome import CallKind, Origin, Outcome
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import ConnectionPolicy, Policy
from policy_service.domain.pool_guard import Member, PanicPermit, PanicState
from policy_service.domain.profiles import EarlyProbeProfile, PoolGuardProfile, WaitProfile
from policy_service.domain.request_exhaustion import Exhausted, FailedAttempt, exhausted
from policy_service.domain.terminal_answer import retry_after_s, terminal_answer


def place(provider: str = "acme", connection: str = "c", model: str = "m") -> Target:
    return Target(ProviderId(provider), ConnectionId(connection), ModelId(model))


TARGET = place()


def policy(provider: Provider | None = None, spare_keys: bool = False) -> ConnectionPolicy:
    connection = Connection("c", "acme", spare_keys=spare_keys)
    catalogue = Catalogue(providers={"acme": provider or Provider(id="acme")}, connections={"c": connection})
    return Policy(catalogue).for_connection("acme", "c")


def outcome(status: int | None = None, body: str = "", **fields: Any) -> Outcome:
    return parse_outcome(RawOutcome(status=status, body=body, **fields))


# -- guards --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("predicate", "fields", "statuses"),
    [
        (guards.is_abort, {}, {499}),
        (guards.is_overload, {}, {529}),
        (guards.is_own_key_policy, {"code": "token_limit_exceeded"}, {429}),
        (guards.is_request_resource, {"body": "file-abc123 does not exist"}, {404}),
    ],
)
def test_guards_that_ask_for_a_status_ask_for_exactly_that(
    predicate: Any, fields: dict[str, str], statuses: set[int]
) -> None:
    assert {status for status in range(400, 600) if predicate(outcome(status, **fields))} == statuses


def test_only_five_statuses_count_for_a_breaker() -> None:
    counted = {status for status in range(100, 600) if not guards.breaker_exclusion(outcome(status), None)}
    assert counted == {408, 500, 502, 503, 504} == guards.COUNTED_STATUSES


def test_a_request_type_forgives_where_no_account_can_be_meant() -> None:
    forgiven = {
        status
        for status in range(400, 600)
        if guards.local_guard(outcome(status, type="invalid_request_error"), policy()) == "request-scoped"
    }
    assert forgiven == {408, *range(500, 600)}
    assert guards.local_guard(outcome(None, type="invalid_request_error", network_error="reset"), policy()) != "abort"
    assert guards.local_guard(outcome(401, code="context_length_exceeded"), policy()) == "input-bound"


def test_a_spare_key_forgives_a_401_alone() -> None:
    spare = policy(spare_keys=True)
    forgiven = {s for s in range(400, 600) if guards.local_guard(outcome(s), spare) == "spare-key"}
    assert forgiven == {401}
    assert guards.local_guard(outcome(401), policy()) == ""


def test_the_caller_who_left_and_the_gateways_own_codes_are_known_by_origin() -> None:
    assert guards.is_abort(outcome(502, origin=Origin.CLIENT))
    assert not guards.is_abort(outcome(502))
    assert guards.is_own_key_policy(outcome(402, code="budget_exceeded", origin=Origin.GATEWAY))
    assert not guards.is_own_key_policy(outcome(402, code="budget_exceeded"))
    assert not guards.is_own_key_policy(outcome(402, origin=Origin.GATEWAY))
    assert guards.is_local_fault(outcome(500, code="ENOENT"))
    assert not guards.is_local_fault(outcome(500, code="EPIPE", origin=Origin.TRANSPORT))


def test_a_walk_counts_once_unless_the_proxy_was_out_of_reach() -> None:
    both: dict[str, Any] = {"pool_attempt": True, "next_target_same_provider": True}
    assert guards.is_walk_on_same_provider(outcome(503, **both))
    for missing in both:
        assert not guards.is_walk_on_same_provider(outcome(503, **{**both, missing: False}))
    assert not guards.is_walk_on_same_provider(outcome(503, code="proxy_unreachable", **both))


def test_own_limits_are_known_by_flag_code_or_type() -> None:
    assert guards.is_own_limiter(outcome(503, own_queue_timeout=True))
    assert guards.is_own_limiter(outcome(503, code="rate_limit_queue_full"))
    assert guards.is_own_limiter(outcome(503, type="local_queue_capacity"))
    assert not guards.is_own_limiter(outcome(503))
    assert guards.is_input_bound(outcome(400, code="context_length_exceeded"))
    assert guards.is_input_bound(outcome(400, type="context_window_exceeded"))
    assert guards.is_request_scoped(outcome(500, code="heap_pressure"))
    assert guards.is_request_scoped(outcome(500, type="freetiererror"))
    assert not guards.is_request_scoped(outcome(500))


def test_each_guard_says_whether_another_account_may_be_tried() -> None:
    assert {name for name, _, _ in guards.LOCAL_GUARDS if not guards.guard_allows_fallback(name)} == {
        "abort", "own-key-policy", "own-limiter", "local-fault", "request-resource"
    }  # fmt: skip


def test_a_health_check_counts_for_no_breaker() -> None:
    kinds = {kind for kind in CallKind if not guards.breaker_exclusion(outcome(503, call_kind=kind), None)}
    assert kinds == {CallKind.CLIENT}


# -- waiting -------------------------------------------------------------------------------------------------
WAITS = WaitProfile(max_wait_ms=1_000, max_attempts=2, budget_ms=1_500)


def held(until: int | None, reason: str = "model_lockout", cause: str = "rate_limit") -> Exclusion:
    return Exclusion(TARGET, reason, until, cause=cause)


def test_waiting_at_the_edge_of_every_limit() -> None:
    def wait(until: int, **more: Any) -> WaitDecision | None:
        return decide_wait([held(until)], 1_000, WAITS, WaitBudget(**more))

    assert wait(1_950) == WaitDecision(1_000, "rate_limit")
    assert wait(1_951) is None
    assert wait(1_000) is None
    assert wait(1_001) == WaitDecision(51, "rate_limit")
    assert wait(1_950, attempts=1) is not None
    assert wait(1_950, attempts=2) is None
    assert wait(1_950, spent_ms=500) is not None
    assert wait(1_950, spent_ms=501) is None
    assert wait(1_950, caller_ms=1_000) is not None
    assert wait(1_950, caller_ms=999) is None
    assert decide_wait([held(1_500)], 1_000, replace(WAITS, enabled=False), WaitBudget()) is None


@pytest.mark.parametrize("off", [{"enabled": False}, {"max_wait_ms": 0}, {"max_attempts": 0}])
def test_waiting_is_effective_only_where_it_may_happen(off: dict[str, Any]) -> None:
    assert replace(WAITS, max_wait_ms=1, max_attempts=1).effective
    assert not replace(WAITS, **off).effective


def test_of_locks_that_end_together_the_first_listed_decides_and_what_is_no_timer_never_does() -> None:
    both = [held(1_500, cause="overloaded"), held(1_500)]
    assert decide_wait(both, 1_000, WAITS, WaitBudget()) == WaitDecision(550, "overloaded")
    others = [held(1_100, "quota_cutoff"), held(None), held(900), held(1_500)]
    assert decide_wait(others, 1_000, WAITS, WaitBudget(), 600) == WaitDecision(650, "rate_limit")
    assert decide_wait([held(1_500, "circuit_open", "")], 1_000, WAITS, WaitBudget(), 900) == WaitDecision(
        550, "circuit_open"
    )


# -- early probes --------------------------------------------------------------------------------------------
PROBES = EarlyProbeProfile(enabled=True, min_block_ms=1_000, interval_ms=300)


def test_early_probes_at_their_edges() -> None:
    block = Block(1_000, 2_001)
    assert early_probe.next_permit_at(block, PROBES) == 1_300
    assert early_probe.next_permit_at(Block(1_000, 2_000), PROBES) is None
    assert early_probe.next_permit_at(block, replace(PROBES, interval_ms=1_001)) is None
    assert early_probe.next_permit_at(block, replace(PROBES, interval_ms=1_000)) == 2_000
    assert early_probe.next_permit_at(replace(block, permit=EarlyProbe("e", 1_400, 1_450)), PROBES) == 1_450
    assert early_probe.next_permit_at(replace(block, permit=EarlyProbe("e", 1_400, 1_450, True)), PROBES) == 1_700
    assert early_probe.grant(block, PROBES, 1_299, "p", 50) is None
    assert early_probe.grant(block, PROBES, 1_300, "p", 50) == EarlyProbe("p", 1_300, 1_350)
    assert early_probe.grant(block, PROBES, 2_000, "p", 50) is not None
    assert early_probe.grant(block, PROBES, 2_001, "p", 50) is None


def test_a_permit_is_held_by_its_id_until_its_test_failed() -> None:
    permit = EarlyProbe("p", 1, 2)
    assert early_probe.holds(permit, "p")
    assert not early_probe.holds(permit, "q")
    assert not early_probe.holds(replace(permit, id=""), "")
    assert not early_probe.holds(None, "p")
    assert not early_probe.holds(early_probe.failed(permit), "p")
    assert early_probe.failed(permit) == EarlyProbe("p", 1, 2, used=True)


# -- pools ---------------------------------------------------------------------------------------------------
GUARD = PoolGuardProfile(enabled=True, max_excluded_share=0.5, panic_max_in_flight=2)


def test_panic_permits_are_counted_while_they_run() -> None:
    state = PanicState("pool", (PanicPermit("a", 10), PanicPermit("b", 20)))
    assert state.live(9) == state.permits
    assert state.live(10) == state.permits[1:]
    new = PanicPermit("c", 99)
    assert pool_guard.take_panic(state, new, 9, 2) == (state, None)
    assert pool_guard.take_panic(state, new, 10, 2) == (PanicState("pool", (state.permits[1], new)), new)
    again = PanicPermit("b", 99)
    assert pool_guard.take_panic(state, again, 10, 1) == (PanicState("pool", state.permits[1:]), state.permits[1])
    assert pool_guard.give_panic_back(state, "a") == PanicState("pool", state.permits[1:])
    assert pool_guard.give_panic_back(state, "x") == state
    assert PanicState.default(state.key) == PanicState("pool")
    assert PanicState("pool").is_default
    assert not state.is_default
    assert state.generation == 1


def test_the_room_of_a_pool_is_rounded_down_and_fixed_members_take_it_first() -> None:
    members = [Member("a", 60, 1), Member("b", 60, 2, fixed=True), Member("c", 60, 3), Member("d"), Member("e")]
    assert pool_guard.limit_of(members, GUARD) == 2
    verdict = pool_guard.judge_pool(members, GUARD, 59)
    assert (verdict.excluded, verdict.not_enforced, verdict.selectable) == (("a", "b"), ("c",), ("c", "d", "e"))
    assert pool_guard.judge_pool(members, GUARD, 60).excluded == ()
    crowded = [replace(member, fixed=True) for member in members[:3]] + [Member("d", 60, 0)]
    assert pool_guard.judge_pool(crowded, GUARD, 0).not_enforced == ("d",)
    all_fixed = [replace(member, until=60, fixed=member.name != "a") for member in members]
    everything = replace(GUARD, max_excluded_share=1.0)
    assert pool_guard.judge_pool(all_fixed, everything, 0, in_flight=1).panic == ("a",)
    assert pool_guard.judge_pool(all_fixed, everything, 0, in_flight=2).panic == ()


# -- exhaustion ----------------------------------------------------------------------------------------------
def test_what_an_earlier_failure_rules_out() -> None:
    def ruled_out(*attempts: FailedAttempt, per_model: bool = False) -> Exhausted:
        return exhausted(attempts, lambda _: per_model)

    nowhere = place(connection="")
    targets = frozenset({TARGET})
    account = Exhausted(targets, connections=frozenset({("acme", "c")}))
    assert ruled_out(FailedAttempt(TARGET, 429)) == Exhausted(targets)
    assert ruled_out(FailedAttempt(TARGET, 400, code="Context_Length_Exceeded")) == Exhausted(
        targets, models=frozenset({"m"})
    )
    assert ruled_out(FailedAttempt(place(model=""), 400, code="context_length_exceeded")) == Exhausted(
        frozenset({place(model="")})
    )
    assert ruled_out(FailedAttempt(TARGET, 429, connection_scope_quota=True), per_model=True) == account
    assert ruled_out(FailedAttempt(TARGET, 503), per_model=True) == Exhausted(targets)
    assert ruled_out(FailedAttempt(TARGET, 429, "quota_exhausted")) == Exhausted(targets)
    assert ruled_out(FailedAttempt(nowhere, 429, "quota_exhausted")).providers == {"acme"}
    assert ruled_out(FailedAttempt(nowhere, 503)).providers == {"acme"}
    skipping = {s for s in range(400, 600) if ruled_out(FailedAttempt(TARGET, s)) == account}
    assert skipping == {408, 500, 502, 503, 504, 524}


def test_what_is_ruled_out_covers_targets_accounts_providers_and_models() -> None:
    assert Exhausted(targets=frozenset({TARGET})).covers(TARGET)
    assert Exhausted(connections=frozenset({("acme", "c")})).covers(place(model="x"))
    assert not Exhausted(connections=frozenset({("acme", "c")})).covers(place(connection="d"))
    assert Exhausted(providers=frozenset({"acme"})).covers(place(connection="d"))
    assert Exhausted(models=frozenset({"m"})).covers(place("other", "x"))
    assert not Exhausted(models=frozenset({""})).covers(place(model=""))
    assert not Exhausted().covers(TARGET)


# -- refusals ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("left", "seconds"), [(0, 1), (1, 1), (1_000, 1), (1_001, 2), (2_000, 2)])
def test_a_refusal_names_whole_seconds_and_never_none(left: int, seconds: int) -> None:
    assert retry_after_s([held(5_000 + left), held(9_000), held(None)], 5_000) == seconds
    assert retry_after_s([], 0, [left]) == seconds
    assert retry_after_s([held(None)], 0) is None


@pytest.mark.parametrize(
    ("strategy", "reasons", "status", "code"),
    [
        ("priority", [], 404, "model_not_found"),
        ("weighted", ["banned", "disabled"], 404, "model_not_found"),
        ("priority", ["banned", "disabled"], 503, "ALL_TARGETS_SKIPPED"),
        ("weighted", ["banned", "tags"], 503, "ALL_TARGETS_SKIPPED"),
        ("weighted", ["banned", "connection_cooldown"], 503, "all_targets_cooling_down"),
        ("priority", ["circuit_open", "circuit_open"], 503, "all_targets_cooling_down"),
        ("priority", ["circuit_open", "model_lockout"], 503, "ALL_TARGETS_SKIPPED"),
        ("priority", ["banned", "connection_cooldown"], 429, "ALL_TARGETS_SKIPPED"),
    ],
)
def test_the_kind_of_a_refusal_follows_from_all_exclusions(
    strategy: str, reasons: list[str], status: int, code: str
) -> None:
    timed = {"connection_cooldown", "circuit_open", "model_lockout"}
    found = terminal_answer(strategy, [held(9_000 if each in timed else None, each) for each in reasons], 0)
    assert (found.http_status, found.code) == (status, code)
    assert found.retry_after_s == (9 if timed & set(reasons) else None)


def test_an_exclusion_knows_its_mechanism_level_and_remaining_time() -> None:
    assert (held(5).spec.mechanism, held(5).spec.level) == (Mechanism.MODEL_LOCKOUT, Level.MODEL)
    assert [held(5).remaining_ms(now) for now in (4, 5, 6)] == [1, 0, 0]
    timers = {"circuit_open", "provider_cooldown", "connection_cooldown", "model_lockout"}
    assert {reason for reason, spec in REASONS.items() if spec.is_recovery_timer} == timers


# -- in flight -----------------------------------------------------------------------------------------------
def test_entries_in_flight_live_two_minutes_and_are_bounded() -> None:
    entries = InFlight()
    assert entries.reserve("c", "a", 0)
    assert entries.own("c", ENTRY_LIFE_MS - 1) == 1
    assert entries.own("c", ENTRY_LIFE_MS) == 0
    assert (ENTRY_LIFE_MS, MAX_ENTRIES) == (120_000, 4_096)
    assert all(entries.reserve("d", f"e{n}", 0) for n in range(MAX_ENTRIES))
    assert not entries.reserve("d", "one more", 0)
    assert entries.reserve("d", "e0", 0)
    assert entries.uncounted == 1
    assert entries.snapshot(0) == {"d": MAX_ENTRIES}
    entries.release("d", "e0")
    entries.release("d", "never")
    entries.set_peers({"d": 2, "x": 1})
    assert entries.count("d", 0) == MAX_ENTRIES + 1
    assert entries.count("x", 0) == 1
    assert entries.count("x", 0, permits_held=3) == 3
