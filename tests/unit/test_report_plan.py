"""The fold of one outcome: order of evaluation, idempotency, generations, permits of several targets."""

from __future__ import annotations

from typing import Any

import pytest

from policy_service.application.breaker_plan import is_network_error
from policy_service.application.events import OutcomeEvent, ProbeRef
from policy_service.application.report_plan import draw_of, fold, scope_of
from policy_service.domain.breaker import BreakerState, State
from policy_service.domain.breaker_probe import Verdict
from policy_service.domain.catalogue import Catalogue, Connection
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.ids import AuthClass, ConnectionId, Generations, ModelId, ProviderId, Target
from policy_service.domain.lockout import lock_keys
from policy_service.domain.outcome import CallKind, Origin, Outcome
from policy_service.domain.policy import Policy
from policy_service.domain.provider_cooldown import ProviderCooldownState
from policy_service.domain.state import Row, StateBook
from policy_service.settings.provider_data import builtin_providers
from tests.folding import fold_batch
from tests.vectors.world import World


def policy_of(**settings: object) -> Policy:
    stored = {name.replace("__", "."): value for name, value in settings.items()}
    return Policy(Catalogue(providers=builtin_providers(), stored_settings=stored))


POLICY = policy_of()
_NUMBERS = iter(range(1_000_000))


def target(connection: str = "c1", model: str = "", provider: str = "acme") -> Target:
    return Target(ProviderId(provider), ConnectionId(connection), ModelId(model))


def event(status: int | None, at: int = 0, *, on: Target | None = None, **fields: Any) -> OutcomeEvent:
    outcome = fields.pop("outcome", {})
    own = {
        "event_id": f"report/{next(_NUMBERS)}",
        "at": at,
        "started_at": at,
        "target": on or target(),
        "outcome": Outcome(status, auth_class=AuthClass.API_KEY, **outcome),
    }
    return OutcomeEvent(**{**own, **fields})


def book_of(*rows: Row) -> StateBook:
    return StateBook({row.key: row for row in rows})


def breaker_of(book: StateBook, connection: str = "") -> BreakerState:
    return book.get(BreakerState, "acme", connection)


def half_open(generation: int = 3, **fields: Any) -> BreakerState:
    return BreakerState(
        "acme", state=State.HALF_OPEN, generation=generation, half_open_round=generation, failure_count=12, **fields
    )


# --- attempts and repetition ------------------------------------------------------------------------------
def test_three_attempts_of_one_decision_have_three_effects() -> None:
    book = book_of()
    attempts = [
        event(503, 0, on=target("a"), event_id="d/0", decision_id="d", attempt=0),
        event(429, 1, on=target("b"), event_id="d/1", decision_id="d", attempt=1),
        event(200, 2, on=target("c"), event_id="d/2", decision_id="d", attempt=2),
    ]
    results = fold_batch(book, attempts, POLICY)
    assert results["d/0"].counted
    assert book.get(ConnectionState, "acme", "b").test_status == "unavailable"
    assert results["d/2"].is_success
    assert breaker_of(book).failure_count == 0


def test_suppressed_failure_repeated_after_the_window_is_not_counted() -> None:
    book = book_of()
    first, second = event(503, 0), event(503, 3_000, event_id="d/0")
    assert "suppressed" in fold_batch(book, [first, second], POLICY)["d/0"].causes
    again = event(503, 10_000, event_id="d/0")
    assert fold_batch(book, [again], POLICY, known={"d/0"}) == {}
    assert breaker_of(book).failure_count == 1


def test_success_without_effect_says_so() -> None:
    assert not fold(book_of(), event(200), POLICY).has_effect
    assert fold(book_of(), event(503), POLICY).has_effect


def test_success_of_unknown_start_is_statistics_only() -> None:
    book = book_of()
    fold(book, event(503, 0), POLICY)
    before = dict(book.changes)
    result = fold(book, event(200, 10, statistics_only=True), POLICY)
    assert book.changes == before
    assert result.causes == ("stale_success",)


def test_draw_depends_on_the_event_alone() -> None:
    assert draw_of(event(503, 1, event_id="x")) == draw_of(event(200, 9, event_id="x"))
    assert len({draw_of(event(503)) for _ in range(50)}) == 50


# --- generations ------------------------------------------------------------------------------------------
def test_failure_of_an_older_generation_moves_nothing_not_even_the_burst_time() -> None:
    book = book_of(BreakerState("acme", generation=3))
    result = fold(book, event(503, 0, generations=Generations(breaker=2)), POLICY)
    assert "stale_generation" in result.causes
    assert not [key for key in book.changes if key[0].startswith("breaker")]


def test_generation_ahead_of_the_row_is_counted_as_future() -> None:
    result = fold(book_of(), event(503, 0, generations=Generations(breaker=9)), POLICY)
    assert "future_generation" in result.causes
    assert not result.counted


def test_outcome_may_be_stale_for_the_breaker_and_current_for_the_connection() -> None:
    book = book_of(BreakerState("acme", generation=3))
    fold(book, event(503, 0, generations=Generations(breaker=1)), POLICY)
    assert book.get(ConnectionState, "acme", "c1").backoff_level == 1


def test_late_failure_is_named_and_still_counts() -> None:
    book = book_of()
    fold(book, event(503, 10_000, on=target("a")), POLICY)
    result = fold(book, event(503, 1_000, on=target("b")), POLICY)
    assert result.counted
    assert "late" in result.causes


# --- probes -----------------------------------------------------------------------------------------------
def probe(permit: str = "p", key: str = "acme", generation: int = 3, local: bool = False) -> ProbeRef:
    return ProbeRef(permit, key, generation, generation, local)


def taken(connection: str = "") -> World:
    world = World({"auth_class": "api_key", "state": {"state": "HALF_OPEN", "failure_count": 12}})
    assert world.admit({"connection": connection}, "p", 0).probes
    return world


@pytest.mark.parametrize("kind", [CallKind.HEALTH_CHECK, CallKind.LIVE_TEST])
def test_probe_of_any_call_kind_is_judged(kind: CallKind) -> None:
    world = taken()
    assert world.report({"status": 503, "call_kind": str(kind)}, 10, "p").verdict is Verdict.DOWN


def test_probe_is_judged_although_the_next_target_is_on_the_same_provider() -> None:
    world = taken()
    step = {"status": 503, "pool_attempt": True, "next_target_same_provider": True}
    assert world.report(step, 10, "p").verdict is Verdict.DOWN


def test_probe_answered_after_its_expiry_by_a_4xx_is_inconclusive() -> None:
    world = taken()
    assert world.report({"status": 404}, 30_000, "p").verdict is Verdict.INCONCLUSIVE
    assert world.breaker().permits == ()


def test_first_byte_before_the_expiry_makes_a_late_4xx_alive() -> None:
    world = taken()
    assert world.report({"status": 404, "first_byte_at_ms": 29_999}, 40_000, "p").verdict is Verdict.ALIVE


def test_rate_limit_that_closes_forgets_the_failures_of_the_outage_and_counts_its_own() -> None:
    world = World({"auth_class": "api_key", "enabled": True})
    for turn in range(12):
        world.report({"status": 503, "connection": f"c{turn}", "pool_attempt": True}, 0)
    world.admit({"connection": "c1"}, "p", 30_000)
    world.report({"status": 429, "pool_attempt": True}, 30_100, "p")
    entry = world.book().get(ProviderCooldownState, "acme", "")
    assert entry.failures == (30_100,)


def test_alive_verdict_of_a_void_permit_closes_nothing() -> None:
    book = book_of(half_open())
    result = fold(book, event(200, 10, probes=(probe("unknown"),)), POLICY)
    assert "void_permit" in result.causes
    assert breaker_of(book).state is State.HALF_OPEN


def test_local_probe_counts_over_the_entry_to_half_open_that_its_own_report_stores() -> None:
    opened = BreakerState("acme", state=State.OPEN, generation=2, failure_count=12, last_failure_at=0, reopen_at=30_000)
    book = book_of(opened)
    result = fold(book, event(200, 40_000, probes=(probe("l", generation=2, local=True),)), POLICY)
    assert result.verdict is Verdict.ALIVE
    assert [fact.to_state for fact in result.facts] == ["HALF_OPEN", "CLOSED"]


def test_final_report_frees_the_permits_of_targets_never_tried() -> None:
    world = taken()
    ref = world.decisions["p"].admission.probes[0]
    book = world.book()
    elsewhere = target("x", provider="other")
    fold(book, event(200, 5, on=elsewhere, probes=(ref,), final=False), world.policy)
    assert book.get(BreakerState, "acme", "").permits
    fold(book, event(200, 6, on=elsewhere, probes=(ref,)), world.policy)
    assert book.get(BreakerState, "acme", "").permits == ()


def test_closing_probe_ends_the_burst_of_its_connection() -> None:
    world = World({"auth_class": "api_key"})
    for turn in range(12):
        world.report({"status": 503, "connection": f"c{turn}"}, 0)
    world.report({"status": 503, "connection": "c1"}, 29_000)
    world.admit({"connection": "c1"}, "p", 30_000)
    world.report({"status": 200, "first_byte_at_ms": 30_500}, 30_500, "p")
    assert world.report({"status": 503, "connection": "c1"}, 30_600).counted


def test_outcome_stores_the_end_of_open_once() -> None:
    opened = BreakerState("acme", state=State.OPEN, generation=2, failure_count=12, last_failure_at=0, reopen_at=30_000)
    book = book_of(opened)
    first = fold(book, event(503, 30_000, on=target("a")), POLICY)
    second = fold(book, event(503, 30_001, on=target("b")), POLICY)
    entered = [fact for fact in (*first.facts, *second.facts) if fact.mechanism == "breaker"]
    assert [fact.to_state for fact in entered] == ["HALF_OPEN"]
    assert breaker_of(book).generation == 3


# --- order of evaluation ----------------------------------------------------------------------------------
def test_guarded_outcome_touches_no_connection() -> None:
    book = book_of()
    result = fold(book, event(499, 0), POLICY)
    assert result.guard == "abort"
    assert not book.changes


def test_outcome_that_cannot_be_read_touches_nothing() -> None:
    book = book_of()
    assert fold(book, event(None), POLICY).guard == "unreadable"
    assert not book.changes


def test_restated_status_is_what_the_breaker_and_the_facts_see() -> None:
    book = book_of()
    quota = {"message": "用户额度不足", "text": "用户额度不足"}
    result = fold(book, event(403, 0, on=target(provider="agentrouter"), outcome=quota), POLICY)
    assert result.restated is not None
    assert result.restated.status == 429
    assert {(fact.status, fact.restated_status) for fact in result.facts} == {(403, 429)}


def test_error_inside_a_200_is_not_restated() -> None:
    quota = {"message": "用户额度不足", "text": "用户额度不足", "is_error_in_success": True}
    result = fold(book_of(), event(403, 0, on=target(provider="agentrouter"), outcome=quota), POLICY)
    assert result.restated is None


def test_an_answer_whose_gateway_names_its_status_twice_is_restated() -> None:
    quota = {"message": "用户额度不足", "text": "用户额度不足", "inner_status": 403}
    result = fold(book_of(), event(403, 0, on=target(provider="agentrouter"), outcome=quota), POLICY)
    assert result.restated is not None


def test_no_model_is_locked_while_the_breaker_is_open() -> None:
    opened = BreakerState("gemini", state=State.OPEN, reopen_at=60_000, failure_count=12)
    book = book_of(opened)
    fold(book, event(429, 0, on=target(model="m", provider="gemini")), POLICY)
    held = lock_keys(POLICY.for_connection("gemini").provider, "gemini", "c1", "m")
    assert not set(held) & set(book.changes)


def test_success_of_a_probe_clears_the_provider_cooldown() -> None:
    world = World({"auth_class": "api_key", "enabled": True})
    for _ in range(15):
        world.report({"status": 503, "connection": "c1", "pool_attempt": True}, 0)
    assert world.rows[("provider_cooldown", "acme", "")].is_default is False
    world.report({"status": 200, "connection": "c1"}, 10)
    assert world.rows[("provider_cooldown", "acme", "")].is_default


def test_malformed_request_is_no_failure_of_the_provider() -> None:
    policy = policy_of(provider_cooldown__enabled=True)
    book = book_of()
    broken = {"pool_attempt": True, "message": "invalid json in request body", "text": "invalid json in request body"}
    result = fold(book, event(400, 0, outcome=broken), policy)
    assert result.classification is not None
    assert not [key for key in book.changes if key[0] == "provider_cooldown"]


# --- per-connection breaker -------------------------------------------------------------------------------
PER_CONNECTION = policy_of(breaker__per_connection=True)


def test_connection_failures_stay_off_the_provider_key() -> None:
    book = book_of()
    fold(book, event(503, 0), PER_CONNECTION)
    assert breaker_of(book, "c1").failure_count == 1
    assert breaker_of(book).failure_count == 0


def test_network_errors_count_on_the_provider_key() -> None:
    book = book_of()
    fold(book, event(502, 0, outcome={"origin": Origin.TRANSPORT}), PER_CONNECTION)
    assert breaker_of(book, "c1").failure_count == 0
    assert breaker_of(book).failure_count == 1


def test_success_feeds_both_keys() -> None:
    book = book_of(BreakerState("acme", failure_count=2), BreakerState("acme", "c1", failure_count=2))
    fold(book, event(200, 0), PER_CONNECTION)
    assert (breaker_of(book).failure_count, breaker_of(book, "c1").failure_count) == (1, 1)


def test_connection_key_goes_by_the_start_of_the_attempt() -> None:
    fenced = BreakerState("acme", "c1", generation=5, generation_since=1_000)
    old = event(503, 2_000, started_at=999, generations=Generations())
    new = event(503, 2_000, started_at=1_000, generations=Generations())
    assert not fold(book_of(fenced), old, PER_CONNECTION).counted
    assert fold(book_of(fenced), new, PER_CONNECTION).counted


def test_quorum_of_a_connection_key_is_that_one_connection() -> None:
    settings = {
        "breaker.per_connection": True,
        "breaker.quorum.enabled": True,
        "breaker.api_key.failure_threshold": 1,
    }
    book = book_of()
    fold(book, event(503), Policy(Catalogue(stored_settings=settings)))
    assert breaker_of(book, "c1").state is State.OPEN


# --- scope ------------------------------------------------------------------------------------------------
def test_scope_names_the_guard_rows_of_every_permit() -> None:
    scope = scope_of([event(200, probes=(probe(key="other::conn::k"),))], POLICY)
    assert scope.providers == {"acme", "other"}
    assert scope.connections == {("acme", "c1"), ("other", "k")}


def test_exhausted_address_locks_every_provider_of_the_set() -> None:
    scope = scope_of([event(429, on=target(provider="opencode-zen"))], POLICY)
    assert scope.providers == scope.whole_providers == POLICY.egress_providers


def test_success_is_no_network_error_wherever_it_came_from() -> None:
    assert not is_network_error(Outcome(200, origin=Origin.TRANSPORT))
    assert is_network_error(Outcome(502, code="PROXY_UNREACHABLE"))


def test_quorum_is_lowered_to_the_declared_connections() -> None:
    settings = {"breaker.quorum.enabled": True, "breaker.api_key.failure_threshold": 1}
    alone = Catalogue(connections={"c1": Connection("c1", "acme", AuthClass.API_KEY)}, stored_settings=settings)
    many = Catalogue(
        connections={f"c{n}": Connection(f"c{n}", "acme", AuthClass.API_KEY) for n in range(3)},
        stored_settings=settings,
    )
    opened, kept = book_of(), book_of()
    fold(opened, event(503), Policy(alone))
    fold(kept, event(503), Policy(many))
    assert breaker_of(opened).state is State.OPEN
    assert breaker_of(kept).state is State.CLOSED
