"""What a first byte says of a probe, on whole rows (spec/fleet.md section 3)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policy_service.application.early_verdict import first_byte_unit, probes_of
from policy_service.application.events import ProbeRef
from policy_service.domain.breaker import BreakerState, Override, ProbePermit, State
from policy_service.domain.breaker_burst import BurstState
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.facts import Cause, Fact
from policy_service.domain.ids import Target
from policy_service.domain.policy import Policy
from policy_service.domain.state import Row, StateBook
from tests.replicas import target

NOW = 1_000_000
SERVED = target("a")
PERMIT = ProbePermit("p", 7, 7, "r1", "d", NOW - 5_000, NOW + 5_000)
PROBING = BreakerState(
    "openai", state=State.HALF_OPEN, generation=7, half_open_round=7, failure_count=12, permits=(PERMIT,)
)
REF = ProbeRef("p", "openai", 7, 7)
CAUSE = Cause("d/0/first-byte", NOW, replica="r1", decision_id="d", request_id="q")


def judged(
    *rows: Row,
    probes: tuple[ProbeRef, ...] = (REF,),
    settings: dict[str, object] | None = None,
    served: Target = SERVED,
) -> tuple[StateBook, int, tuple[Fact, ...]]:
    """The book after the unit, how many probes had a say, and the facts."""
    book = StateBook({row.key: row for row in rows})
    policy = Policy(Catalogue(stored_settings=settings or {}))
    result = first_byte_unit(probes, served, CAUSE, policy).run(book, NOW + 1, {})
    return book, result.value, tuple(result.facts)


def test_the_breaker_closes_with_one_fact_and_the_permit_is_used_up() -> None:
    book, counted, facts = judged(PROBING)
    row = book.get(BreakerState, "openai", "")

    assert (row.state, row.permits, row.failure_count, counted) == (State.CLOSED, (), 0, 1)
    assert [
        (f.id, f.at, f.from_state, f.to_state, f.reason, f.decision_id, f.request_id, f.replica) for f in facts
    ] == [("d/0/first-byte.0", NOW, "HALF_OPEN", "CLOSED", "probe_alive", "d", "q", "r1")]
    assert judged(row)[1:] == (0, ())


def test_where_several_must_be_alive_the_slot_is_free_and_one_counts() -> None:
    book, counted, facts = judged(PROBING, settings={"breaker.successes_to_close": 2})
    row = book.get(BreakerState, "openai", "")

    assert (row.state, row.permits, row.half_open_alive, counted, facts) == (State.HALF_OPEN, (), 1, 1, ())


@pytest.mark.parametrize(
    "row",
    [
        replace(PROBING, permits=()),
        replace(PROBING, state=State.OPEN, reopen_at=NOW + 60_000),
        replace(PROBING, override=Override.FORCE_OPEN),
        BreakerState("openai", generation=8),
    ],
    ids=["void", "opened again", "forced open", "closed"],
)
def test_a_permit_without_a_say_changes_nothing(row: BreakerState) -> None:
    book, counted, facts = judged(row)

    assert (book.changes, counted, facts) == ({}, 0, ())


def test_the_burst_of_the_connection_ends_with_the_close_alone() -> None:
    burst, other = BurstState("openai", "a", NOW - 10), BurstState("openai", "b", NOW - 10)
    closed = judged(PROBING, burst, other)[0]
    half = judged(PROBING, burst, settings={"breaker.successes_to_close": 2})[0]

    assert closed.get(BurstState, "openai", "a").last_at is None
    assert closed.get(BurstState, "openai", "b") == other
    assert half.get(BurstState, "openai", "a") == burst


def test_the_breaker_of_the_connection_is_judged_too() -> None:
    own = replace(PROBING, connection="a", permits=(replace(PERMIT, id="c"),))
    probes = (REF, ProbeRef("c", "openai::conn::a", 7, 7))
    book, counted, facts = judged(PROBING, own, probes=probes)

    assert [book.get(BreakerState, "openai", part).state for part in ("", "a")] == [State.CLOSED, State.CLOSED]
    assert (counted, len(facts)) == (2, 2)


def test_a_first_byte_speaks_for_probes_of_the_served_target_that_the_store_knows() -> None:
    others = (
        ProbeRef("l", "openai", 7, local=True),
        ProbeRef("b", "openai::conn::b", 7),
        ProbeRef("g", "groq", 7),
    )
    own = ProbeRef("c", "openai::conn::a", 7)

    assert probes_of((*others, REF, own), SERVED) == (REF, own)
    assert probes_of((REF, own), target("")) == (REF,)


def test_the_unit_locks_the_provider_and_reads_the_connection() -> None:
    policy = Policy(Catalogue())
    scope, bare = (first_byte_unit((REF,), served, CAUSE, policy).scope for served in (SERVED, target("")))

    assert (set(scope.providers), set(scope.connections)) == ({"openai"}, {("openai", "a")})
    assert (set(bare.providers), set(bare.connections)) == ({"openai"}, set())
