"""Admission over the breaker keys of a target: all or nothing, the same answer to the same request."""

from __future__ import annotations

from policy_service.application.admission_plan import (
    Admission,
    acquire_early,
    acquire_probe,
    admission_scope,
    renew_probe,
)
from policy_service.application.breaker_plan import give_back
from policy_service.domain.breaker import BreakerState, State
from policy_service.domain.breaker_probe import ProbeRequest, Refusal
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.facts import Cause, FactLog
from policy_service.domain.ids import ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.lockout import ModelLockState
from policy_service.domain.policy import Policy
from policy_service.domain.state import Row, StateBook

TARGET = Target(ProviderId("acme"), ConnectionId("c1"), ModelId("m"))
PLAIN = Policy(Catalogue())
PER_CONNECTION = Policy(Catalogue(stored_settings={"breaker.per_connection": True}))
EARLY = Policy(Catalogue(stored_settings={"early_probe.enabled": True}))
PROVIDER_KEY = BreakerState("acme", state=State.HALF_OPEN, generation=3, half_open_round=3)
CONNECTION_KEY = BreakerState("acme", "c1", state=State.HALF_OPEN, generation=3, half_open_round=3)


def book_of(*rows: Row) -> StateBook:
    return StateBook({row.key: row for row in rows})


def take(book: StateBook, policy: Policy = PLAIN, permit: str = "p", now: int = 0) -> Admission:
    profile = policy.for_connection("acme", "c1")
    return acquire_probe(book, TARGET, now, profile, ProbeRequest(permit, "r1", "d"), FactLog(Cause("a", now)))


def test_healthy_target_needs_no_permit_and_no_write() -> None:
    book = book_of()
    assert take(book) == Admission(True)
    assert not book.changes


def test_each_half_open_key_gives_its_own_permit() -> None:
    book = book_of(PROVIDER_KEY, CONNECTION_KEY)
    admission = take(book, PER_CONNECTION)
    assert [ref.breaker_key for ref in admission.probes] == ["acme", "acme::conn::c1"]
    assert admission.expires_at == 30_000


def test_permit_of_one_key_goes_back_when_the_other_refuses() -> None:
    opened = BreakerState("acme", "c1", state=State.OPEN, reopen_at=9_000)
    book = book_of(PROVIDER_KEY, opened)
    admission = take(book, PER_CONNECTION)
    assert (admission.granted, admission.reason, admission.retry_after_ms) == (False, Refusal.CIRCUIT_OPEN, 9_000)
    assert book.get(BreakerState, "acme", "").permits == ()


def test_repeated_request_gets_the_same_permit() -> None:
    book = book_of(PROVIDER_KEY)
    first, second = take(book), take(book, now=5)
    assert first.probes == second.probes
    assert len(book.get(BreakerState, "acme", "").permits) == 1


def test_acquire_stores_the_end_of_open_with_its_fact() -> None:
    book = book_of(BreakerState("acme", state=State.OPEN, reopen_at=100, generation=2))
    admission = take(book, now=100)
    assert [fact.to_state for fact in admission.facts] == ["HALF_OPEN"]
    assert admission.probes[0].generation == 3


def test_permit_given_back_twice_frees_one_slot() -> None:
    book = book_of(PROVIDER_KEY)
    ref = take(book).probes[0]
    assert give_back(book, ref)
    assert not give_back(book, ref)


def test_renewed_probe_expires_one_reset_timeout_from_now() -> None:
    book = book_of(PROVIDER_KEY)
    ref = take(book).probes[0]
    assert renew_probe(book, ref, 20_000, PLAIN) == 50_000
    give_back(book, ref)
    assert renew_probe(book, ref, 20_001, PLAIN) is None


def test_early_probe_tests_the_connection_first_and_the_lock_else() -> None:
    profile = EARLY.for_connection("acme", "c1")
    cooling = ConnectionState("acme", "c1", rate_limited_until=3_600_000, limited_since=0, test_status="unavailable")
    locked = ModelLockState("acme", "c1", "family", "m", model="m", until=3_600_000, locked_at=0, failure_count=1)
    for row in (cooling, locked):
        book = book_of(row)
        assert acquire_early(book, TARGET, 299_999, profile, "e0") is None
        assert acquire_early(book, TARGET, 300_000, profile, "e1") is not None
        assert acquire_early(book, TARGET, 300_000, profile, "e2") is None


def test_admission_locks_the_guard_of_its_provider() -> None:
    assert admission_scope(TARGET).providers == {"acme"}
    assert admission_scope(TARGET).connections == {("acme", "c1")}
