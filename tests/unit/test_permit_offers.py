"""Hand-off with offers (spec/fleet.md section 5), gates over several locks, and what the table of permits means."""

from __future__ import annotations

import pytest

from policy_service.domain.gates import HEARTBEAT_MS, KEEP_ENDED_MS, OFFER_MS, Gate, GateBook, PermitRow, PermitState
from policy_service.domain.line import (
    Answer,
    PermitAnswer,
    PermitRequest,
    acquire,
    block,
    claim,
    needs_own_replica,
    next_change_at,
    release,
    renew,
    reset,
    settle,
)
from policy_service.domain.permits import (
    AtCap,
    OnSaturation,
    PermitCode,
    at_cap,
    block_until,
    cap_of,
    combined,
    proceeds_without_permit,
    refusal,
    retry_after_s,
)
from tests.vectors.harness import DATA, Vector, load
from tests.vectors.run_concurrency import run_with

VECTORS = [vector for vector in load(DATA / "concurrency.yaml") if vector["id"] != "conc-057"]


class Table:
    """Rows and gates as the store keeps them between transactions."""

    def __init__(self, **caps: int) -> None:
        self.gates = {key: Gate(key, cap) for key, cap in caps.items()}
        self.rows: dict[tuple[str, str], PermitRow] = {}
        self.tickets = 0

    def book(self, *keys: str) -> GateBook:
        locked = keys or tuple(self.gates)
        return GateBook([self.gates[key] for key in locked], [r for r in self.rows.values() if r.gate in locked])

    def keep(self, book: GateBook) -> None:
        self.rows |= book.changed
        self.gates |= book.changed_gates

    def acquire(self, request: str, now: int, *keys: str, timeout_ms: int = 30_000) -> PermitAnswer:
        self.tickets += 1
        gates = tuple(sorted(keys or self.gates))
        asked = PermitRequest(request, f"p-{request}", gates, self.tickets, timeout_ms=timeout_ms, replica="r1")
        book = self.book(*gates)
        answer = acquire(book, asked, now)
        self.keep(book)
        return answer

    def release(self, request: str, now: int) -> GateBook:
        book = self.book()
        release(book, request, now)
        self.keep(book)
        return book

    def claim(self, request: str, now: int, *keys: str) -> PermitAnswer:
        book = self.book(*keys)
        answer = claim(book, request, "r1", now)
        self.keep(book)
        return answer

    def settle(self, now: int, *keys: str) -> list[PermitRow]:
        book = self.book(*keys)
        served = settle(book, now)
        self.keep(book)
        return served

    def row(self, request: str) -> PermitRow:
        return next(row for row in self.rows.values() if row.request_id == request)


@pytest.fixture
def line() -> Table:
    """One slot: q1 holds it, q2 and q3 wait; q1 has just given it back."""
    table = Table(g=1)
    for now, request in enumerate(("q1", "q2", "q3")):
        table.acquire(request, now)
    table.release("q1", 100)
    return table


def test_a_freed_slot_is_offered_to_the_head_of_the_line_and_nobody_else(line: Table) -> None:
    assert line.row("q2").offered_until == 100 + OFFER_MS
    assert line.row("q3").offered_until is None
    assert line.acquire("q4", 101).answer is Answer.WAITING


def test_the_ttl_starts_at_the_claim(line: Table) -> None:
    claimed = line.claim("q2", 1_000)
    assert claimed.answer is Answer.HELD
    assert claimed.row is not None
    assert claimed.row.expires_at == 1_000 + 120_000
    assert claimed.row.granted_at == 100


def test_an_unclaimed_offer_passes_on_and_its_waiter_keeps_its_place(line: Table) -> None:
    assert [row.request_id for row in line.settle(100 + OFFER_MS)] == ["q3"]
    assert line.row("q2").state is PermitState.WAITING
    line.claim("q3", 2_200)
    assert line.claim("q2", 2_300).answer is Answer.WAITING
    line.release("q3", 2_400)
    assert line.row("q2").is_offered


def test_a_waiter_that_missed_its_offer_gets_the_next_slot_once_it_is_heard_of(line: Table) -> None:
    line.settle(2_100)
    line.claim("q3", 2_150)
    line.release("q3", 2_200)
    assert not line.row("q2").is_offered
    assert line.claim("q2", 2_300).answer is Answer.HELD


def test_a_claim_after_the_offer_ran_out_finds_the_slot_gone(line: Table) -> None:
    assert line.claim("q2", 100 + OFFER_MS).answer is Answer.WAITING
    assert line.row("q3").is_offered


def test_the_line_is_visited_again_when_the_offer_runs_out(line: Table) -> None:
    assert next_change_at(line.book(), 100) == 100 + OFFER_MS


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["id"])
def test_offers_change_no_vector_but_the_one_whose_waiter_is_dead(vector: Vector) -> None:
    """conc-057 grants to a waiter whose replica is dead; with offers the slot passes on after two seconds."""
    run_with(vector, OFFER_MS)


def test_a_request_over_two_gates_is_not_offered_by_a_replica_that_locked_one() -> None:
    table = Table(a=1, b=1)
    table.acquire("q1", 0, "a")
    table.acquire("both", 1, "a", "b")
    table.acquire("q3", 2, "b")
    book = table.book("a")
    release(book, "q1", 10)
    table.keep(book)
    assert [row.request_id for row in needs_own_replica(book)] == ["both"]
    assert table.row("q3").state is PermitState.WAITING
    assert table.claim("both", 20).answer is Answer.HELD


def test_nothing_is_held_while_a_request_waits_for_its_last_gate() -> None:
    table = Table(a=1, b=2)
    table.acquire("q1", 0, "a")
    table.acquire("both", 1, "a", "b")
    assert table.book().held("b") == 0
    assert table.acquire("q3", 2, "b").answer is Answer.WAITING, "the line of b is not empty"


def test_releasing_gives_back_all_gates_together() -> None:
    table = Table(a=1, b=1)
    table.acquire("both", 0)
    book = table.release("both", 1)
    assert [book.held(key) for key in ("a", "b")] == [0, 0]


def test_a_reset_of_one_gate_ends_the_request_at_its_other_gates() -> None:
    table = Table(a=1, b=1)
    table.acquire("q1", 0, "a")
    table.acquire("both", 1, "a", "b")
    book = table.book("a")
    reset(book, "a", 5)
    table.keep(book)
    found = table.claim("both", 6)
    assert found.answer is Answer.ALREADY_ENDED
    assert {row.state for row in table.rows.values() if row.request_id == "both"} == {PermitState.RESET}
    told = refusal(found, table.book(), 6)
    assert told is not None
    assert (told.code, told.http_status) == (PermitCode.RESET, 503)


def test_a_reset_leaves_held_permits_alone() -> None:
    table = Table(g=1)
    table.acquire("q1", 0)
    book = table.book()
    reset(book, "g", 5)
    table.keep(book)
    assert table.row("q1").state is PermitState.HELD


def test_a_blocked_gate_admits_again_at_the_end_of_the_block() -> None:
    table = Table(g=1)
    book = table.book()
    assert block(book, "g", 1_000, 0)
    table.keep(book)
    assert table.acquire("q1", 0).answer is Answer.WAITING
    assert table.settle(999) == []
    assert [row.request_id for row in table.settle(1_000)] == ["q1"]


def test_a_block_in_the_past_is_ignored() -> None:
    book = Table(g=1).book()
    assert not block(book, "g", 10, 10)
    assert book.changed_gates == {}


def test_a_repeated_acquire_after_the_end_says_how_it_ended() -> None:
    table = Table(g=1)
    table.acquire("q1", 0)
    table.release("q1", 10)
    found = table.acquire("q1", 20)
    assert found.answer is Answer.ALREADY_ENDED
    assert found.row is not None
    assert found.row.state is PermitState.RELEASED
    assert table.acquire("q1", 10 + KEEP_ENDED_MS).answer is Answer.HELD


def test_a_refusal_leaves_no_row_so_that_the_repetition_is_decided_anew() -> None:
    table = Table(g=1)
    table.acquire("q1", 0)
    assert table.acquire("q2", 1, timeout_ms=0).answer is Answer.TIMEOUT
    table.release("q1", 2)
    assert table.acquire("q2", 3, timeout_ms=0).answer is Answer.HELD


def test_a_renewal_never_brings_a_lapsed_permit_back() -> None:
    table = Table(g=1)
    table.acquire("q1", 0)
    book = table.book()
    assert renew(book, "q1", 119_999).answer is Answer.RENEWED
    assert renew(book, "q1", 119_999 + 120_000).answer is Answer.EXPIRED
    assert renew(book, "nobody", 0).answer is Answer.UNKNOWN


def test_a_waiter_calling_on_another_replica_keeps_its_ticket() -> None:
    table = Table(g=1)
    table.acquire("q1", 0)
    first = table.acquire("q2", 1).row
    again = table.acquire("q2", HEARTBEAT_MS).row
    assert first is not None
    assert again is not None
    assert (again.ticket, again.waiter_seen_at) == (first.ticket, HEARTBEAT_MS)


@pytest.mark.parametrize(
    ("raw", "cap"),
    [
        (None, None),
        (0, None),
        (-1, None),
        (0.9, None),
        (1.9, 1),
        (float("inf"), None),
        ("3", None),
        (True, None),
        (8, 8),
        (2**31 - 1, 2**31 - 1),
        (2**31, 2**31 - 1),
        (1e300, 2**31 - 1),
    ],
)
def test_a_cap_is_a_positive_whole_number_or_none(raw: object, cap: int | None) -> None:
    assert cap_of(raw) == cap


def test_of_a_gate_asked_for_twice_the_smaller_limit_counts() -> None:
    asked = combined([Gate("b", 5), Gate("a", None), Gate("b", 2), Gate("a", 7)])
    assert [(gate.key, gate.limit) for gate in asked] == [("a", 7), ("b", 2)]


@pytest.mark.parametrize(
    ("value", "until"),
    [
        (500, 1_500),
        (-1, None),
        (0, None),
        ("1970-01-01T00:00:02Z", 2_000),
        ("1970-01-01T01:00:02+01:00", 2_000),
        ("1970-01-01T00:00:00Z", None),
        ("soon", None),
    ],
)
def test_a_block_is_given_in_milliseconds_or_as_an_instant(value: object, until: int | None) -> None:
    assert block_until(value, 1_000) == until


@pytest.mark.parametrize(("left_ms", "seconds"), [(0, 1), (1, 1), (90_000, 90), (89_990, 90), (7_200_000, 3_600)])
def test_retry_after_is_the_earliest_expiry_in_whole_seconds(left_ms: int, seconds: int) -> None:
    row = PermitRow("p", "q", "g", ("g",), 1, PermitState.HELD, 0, 1, expires_at=1_000 + left_ms)
    assert retry_after_s(GateBook([Gate("g", 1)], [row]), "g", 1_000) == seconds


def test_nothing_held_means_no_retry_after() -> None:
    assert retry_after_s(Table(g=1).book(), "g", 0) is None


def test_only_quota_share_in_mode_proceed_goes_on_without_a_permit() -> None:
    full = PermitCode.QUEUE_FULL
    assert proceeds_without_permit("quota-share", OnSaturation.PROCEED, full)
    assert not proceeds_without_permit("quota-share", OnSaturation.REJECT, full)
    assert not proceeds_without_permit("", OnSaturation.PROCEED, full)
    assert not proceeds_without_permit("quota-share", OnSaturation.PROCEED, PermitCode.RESET)


@pytest.mark.parametrize(
    ("strategy", "rule"),
    [
        ("", AtCap.WAIT),
        ("quota-share", AtCap.QUOTA_SHARE),
        ("round-robin", AtCap.PASS_OVER),
        ("priority", AtCap.EXCLUDE),
    ],
)
def test_who_waits_at_a_full_gate(strategy: str, rule: AtCap) -> None:
    assert at_cap(strategy) is rule
