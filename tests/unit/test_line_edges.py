"""The line at a gate, whole rows at the instants where time decides (spec/concurrency.md 2, fleet.md 5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policy_service.domain.gates import (
    HEARTBEAT_MS,
    OFFER_MS,
    PERMIT_TTL_MAX_MS,
    WAITER_LOST_MS,
    Gate,
    GateBook,
    Pace,
    PermitRow,
    PermitState,
)
from policy_service.domain.line import (
    Answer,
    PermitAnswer,
    PermitRequest,
    acquire,
    block,
    cancel,
    claim,
    earliest_expiry,
    hand_off,
    heartbeat,
    is_forgotten,
    needs_own_replica,
    next_change_at,
    release,
    renew,
    reset,
    settle,
)
from policy_service.domain.permits import retry_after_s

NOW = 1_000_000
ENDS = [state for state in PermitState if state not in (PermitState.WAITING, PermitState.HELD)]


def row(request: str = "a", state: PermitState = PermitState.WAITING, ticket: int = 1, **more: Any) -> PermitRow:
    gates = more.pop("gates", ("g",))
    told = {"queued_at": NOW - 100, "ttl_ms": 60_000, "gate": gates[0]} | more
    return PermitRow(f"t-{request}", request, gates=gates, ticket=ticket, state=state, **told)


def held(request: str = "a", **more: Any) -> PermitRow:
    return row(request, PermitState.HELD, **({"expires_at": NOW + 60_000, "held_at": NOW} | more))


def book(*rows: PermitRow, limit: int | None = 1, offer_ms: int = OFFER_MS, **gate: Any) -> GateBook:
    return GateBook([Gate("g", limit, **gate)], rows, offer_ms)


def ask(request: str = "new", **more: Any) -> PermitRequest:
    named: dict[str, Any] = {"request_id": request, "permit_id": f"t-{request}", "gates": ("g",), "ticket": 9}
    return PermitRequest(**(named | more))


def settled(each: PermitRow, now: int = NOW, **more: Any) -> PermitRow:
    found = book(each, **({"limit": 0} | more))
    settle(found, now)
    return found.of(each.request_id)[0]


def test_the_times_of_the_line_are_those_of_the_spec() -> None:
    assert (WAITER_LOST_MS, HEARTBEAT_MS, OFFER_MS) == (15_000, 5_000, 2_000)
    assert PERMIT_TTL_MAX_MS == 1_800_000
    asked = ask()
    assert (asked.ttl_ms, asked.timeout_ms, asked.replica, asked.max_held_ms) == (120_000, 30_000, "", None)


# -- what time does to a row ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (held(expires_at=NOW), {"state": PermitState.EXPIRED, "ended_at": NOW}), (held(expires_at=NOW + 1), {}),
        (held(expires_at=None), {}),
        (row(deadline_at=NOW), {"state": PermitState.TIMED_OUT, "ended_at": NOW}), (row(deadline_at=NOW + 1), {}),
        (row(waiter_seen_at=NOW - 15_000), {"state": PermitState.WAITER_LOST, "ended_at": NOW}),
        (row(waiter_seen_at=NOW - 14_999), {}), (row(waiter_seen_at=None), {}),
        (row(deadline_at=NOW, offered_until=NOW + 1), {"state": PermitState.TIMED_OUT, "ended_at": NOW,
         "offered_until": None}),
        (row(offered_until=NOW, granted_at=NOW - 5), {"offered_until": None, "missed_at": NOW, "granted_at": None}),
        (row(offered_until=NOW - 3, granted_at=NOW - 9), {"offered_until": None, "missed_at": NOW - 3,
         "granted_at": None}),
        (row(offered_until=NOW + 1, granted_at=NOW - 5), {}),
    ],
)  # fmt: skip
def test_time_ends_a_row_at_its_very_instant(before: PermitRow, after: dict[str, Any]) -> None:
    assert settled(before) == replace(before, **after)


@pytest.mark.parametrize("state", ENDS)
def test_an_ended_row_changes_no_more(state: PermitState) -> None:
    ended = row(state=state, ended_at=NOW - 5, expires_at=NOW - 9, deadline_at=NOW - 9, waiter_seen_at=0)
    found = book(ended)
    settle(found, NOW)
    assert found.changed == {}
    assert [each.state for each in (release(found, "a", NOW).row, cancel(found, "a", NOW).row) if each] == [state] * 2


@pytest.mark.parametrize(("age", "forgotten"), [(599_999, False), (600_000, True), (None, False)])
def test_an_ended_row_is_remembered_for_ten_minutes(age: int | None, forgotten: bool) -> None:
    ended = row(state=PermitState.RELEASED, ended_at=None if age is None else NOW - age)
    assert is_forgotten(ended, NOW) is forgotten
    if age is not None:
        answer = acquire(book(ended), ask("a"), NOW).answer
        assert answer is (Answer.HELD if forgotten else Answer.ALREADY_ENDED)


# -- taking a slot -------------------------------------------------------------------------------------------
def test_a_grant_writes_the_whole_row() -> None:
    found = acquire(book(), ask(ttl_ms=7_000, timeout_ms=5_000, replica="r1", max_held_ms=9_000), NOW)
    assert found == PermitAnswer(Answer.HELD, PermitRow(
        "t-new", "new", "g", ("g",), 9, PermitState.HELD, NOW, 7_000, "r1", NOW + 5_000, NOW, max_held_ms=9_000,
        granted_at=NOW, held_at=NOW, expires_at=NOW + 7_000,
    ))  # fmt: skip


def test_a_place_in_line_writes_the_whole_row() -> None:
    found = acquire(book(held()), ask(ttl_ms=7_000, timeout_ms=None, replica="r1"), NOW)
    assert found == PermitAnswer(
        Answer.WAITING, PermitRow("t-new", "new", "g", ("g",), 9, PermitState.WAITING, NOW, 7_000, "r1", None, NOW)
    )


@pytest.mark.parametrize(
    ("max_held_ms", "ttl_ms", "expires_in"), [(None, 7_000, 7_000), (7_000, 7_000, 7_000), (6_999, 7_000, 6_999)]
)
def test_a_grant_lives_no_longer_than_it_may(max_held_ms: int | None, ttl_ms: int, expires_in: int) -> None:
    found = acquire(book(), ask(ttl_ms=ttl_ms, max_held_ms=max_held_ms), NOW).row
    assert found is not None
    assert found.expires_at == NOW + expires_in


@pytest.mark.parametrize(
    ("timeout_ms", "answer"),
    [(1, Answer.WAITING), (0, Answer.TIMEOUT), (-1, Answer.TIMEOUT), (None, Answer.WAITING)],
)
def test_who_does_not_wait_is_told_so_at_once(timeout_ms: int | None, answer: Answer) -> None:
    taken = book(held())
    assert acquire(taken, ask(timeout_ms=timeout_ms), NOW).answer is answer
    assert (taken.of("new") == []) is (answer is Answer.TIMEOUT)


@pytest.mark.parametrize(("depth", "waiting", "full"), [(0, 3, False), (1, 0, False), (1, 1, True), (2, 1, False)])
def test_a_line_is_full_at_its_depth(depth: int, waiting: int, full: bool) -> None:
    rows = [row(f"w{n}", ticket=n, waiter_seen_at=NOW) for n in range(waiting)]
    found = acquire(book(held(), *rows, depth=depth), ask(), NOW)
    assert found == PermitAnswer(Answer.QUEUE_FULL, gate="g") if full else found.answer is Answer.WAITING


@pytest.mark.parametrize(("limit", "occupied", "free"), [(2, 1, True), (2, 2, False), (0, 0, False), (None, 9, True)])
def test_a_gate_has_as_many_slots_as_its_limit(limit: int | None, occupied: int, free: bool) -> None:
    rows = [held(f"h{n}") for n in range(occupied)]
    answer = acquire(book(*rows, limit=limit), ask(), NOW).answer
    assert answer is (Answer.HELD if free else Answer.WAITING)


def test_an_offered_slot_is_taken_by_nobody_else() -> None:
    offered = row("first", offered_until=NOW + 1, granted_at=NOW, waiter_seen_at=NOW)
    assert acquire(book(offered), ask(), NOW).answer is Answer.WAITING
    assert acquire(book(offered, limit=2), ask(), NOW).answer is Answer.HELD


@pytest.mark.parametrize(
    ("missed_at", "seen_at", "overtaken"),
    [(None, NOW, False), (NOW - 10, NOW - 11, True), (NOW - 10, NOW - 10, False), (NOW - 10, NOW - 9, False)],
)
def test_only_a_waiter_that_missed_its_offer_and_stays_silent_is_passed(
    missed_at: int | None, seen_at: int, overtaken: bool
) -> None:
    first = row("first", missed_at=missed_at, waiter_seen_at=seen_at)
    answer = acquire(book(first), ask(), NOW).answer
    assert answer is (Answer.HELD if overtaken else Answer.WAITING)


def test_a_waiter_is_silent_until_it_is_heard_of_at_or_after_its_miss() -> None:
    assert row(missed_at=1).is_silent
    assert not row(missed_at=0, waiter_seen_at=0).is_silent


# -- offers, claims, renewals --------------------------------------------------------------------------------
def test_a_free_slot_is_offered_in_ticket_order_for_its_time() -> None:
    late, early = row("late", ticket=2, waiter_seen_at=NOW), row("early", ticket=1, waiter_seen_at=NOW)
    found = book(late, early)
    assert hand_off(found, NOW) == [replace(early, granted_at=NOW, offered_until=NOW + 2_000)]
    assert found.of("late") == [late]
    assert hand_off(found, NOW) == []


def test_without_an_offer_time_the_hand_off_grants() -> None:
    waiting = row(waiter_seen_at=NOW, missed_at=NOW - 5)
    (granted,) = hand_off(book(waiting, offer_ms=0), NOW)
    assert granted == replace(
        waiting, state=PermitState.HELD, granted_at=NOW, held_at=NOW, missed_at=None, expires_at=NOW + 60_000
    )


def test_a_claim_keeps_the_instant_of_the_offer_and_starts_the_ttl() -> None:
    offered = row(offered_until=NOW + 1, granted_at=NOW - 500, waiter_seen_at=NOW - 500)
    found = claim(book(offered), "a", "r2", NOW)
    assert found == PermitAnswer(Answer.HELD, replace(
        offered, state=PermitState.HELD, replica="r2", waiter_seen_at=NOW, granted_at=NOW - 500, held_at=NOW,
        offered_until=None, expires_at=NOW + 60_000,
    ))  # fmt: skip
    assert claim(book(), "a", "r2", NOW) == PermitAnswer(Answer.UNKNOWN)


def test_a_claim_of_nothing_is_a_heartbeat() -> None:
    waiting = row(waiter_seen_at=NOW - 5)
    found = claim(book(held("h"), waiting), "a", "r2", NOW)
    assert found == PermitAnswer(Answer.WAITING, replace(waiting, replica="r2", waiter_seen_at=NOW))
    present = book(waiting)
    heartbeat(present, "a", "r3", NOW)
    assert present.of("a") == [replace(waiting, replica="r3", waiter_seen_at=NOW)]


@pytest.mark.parametrize(
    ("ttl_ms", "max_held_ms", "expires_in"),
    [(None, None, 60_000), (5, None, 5), (0, None, 0), (None, 50_100, 50_000), (None, 60_101, 60_000)],
)
def test_a_renewal_runs_from_now_within_the_longest_life(
    ttl_ms: int | None, max_held_ms: int | None, expires_in: int
) -> None:
    before = held(held_at=NOW - 100, expires_at=NOW + 1, max_held_ms=max_held_ms)
    found = renew(book(before), "a", NOW, ttl_ms)
    assert found == PermitAnswer(Answer.RENEWED, replace(before, expires_at=NOW + expires_in))


def test_only_what_is_held_is_renewed() -> None:
    assert renew(book(), "a", NOW) == PermitAnswer(Answer.UNKNOWN)
    waiting = row(waiter_seen_at=NOW)
    assert renew(book(held("h"), waiting), "a", NOW) == PermitAnswer(Answer.EXPIRED, waiting)
    assert renew(book(held(expires_at=NOW)), "a", NOW).answer is Answer.EXPIRED


def test_a_release_hands_the_slot_on_and_answers_once() -> None:
    waiting = row("w", ticket=2, waiter_seen_at=NOW)
    found = book(held(), waiting)
    assert release(found, "a", NOW) == PermitAnswer(
        Answer.RELEASED, replace(held(), state=PermitState.RELEASED, ended_at=NOW)
    )
    assert found.of("w")[0].is_offered
    assert release(found, "a", NOW + 1).answer is Answer.ALREADY_ENDED
    assert release(found, "nobody", NOW) == PermitAnswer(Answer.UNKNOWN)


def test_leaving_the_line_lets_the_next_one_in() -> None:
    first, second = row("w1", offered_until=NOW + 1, waiter_seen_at=NOW), row("w2", ticket=2, waiter_seen_at=NOW)
    found = book(first, second)
    ended = replace(first, state=PermitState.CANCELLED, ended_at=NOW, offered_until=None)
    assert cancel(found, "w1", NOW) == PermitAnswer(Answer.CANCELLED, ended)
    assert found.of("w2")[0].offered_until == NOW + 2_000


# -- several gates -------------------------------------------------------------------------------------------
def test_a_request_over_gates_has_one_row_in_each() -> None:
    both = GateBook([Gate("g", 1), Gate("h", 1)])
    answer = acquire(both, ask(gates=("g", "h")), NOW)
    assert answer.answer is Answer.HELD
    assert [each.gate for each in both.of("new")] == ["g", "h"]
    assert {replace(each, gate="") for each in both.of("new")} == {replace(both.of("new")[0], gate="")}


def test_a_request_of_a_gate_that_is_not_locked_keeps_its_place_and_is_to_be_woken() -> None:
    elsewhere = row("a", gates=("g", "x"), waiter_seen_at=NOW)
    found = book(elsewhere, row("b", ticket=2, waiter_seen_at=NOW))
    assert hand_off(found, NOW) == []
    assert needs_own_replica(found) == [elsewhere]
    assert needs_own_replica(book(replace(elsewhere, offered_until=NOW + 1))) == []
    assert needs_own_replica(book(row("b", waiter_seen_at=NOW))) == []


def test_the_row_of_an_answer_is_that_of_the_first_gate() -> None:
    def both(state: PermitState, **more: Any) -> GateBook:
        each = row("a", state, gates=("g", "h"), **more)
        return GateBook([Gate("h", 1), Gate("g", 1)], [replace(each, gate="h"), each])

    lapsed, ended = both(PermitState.HELD, expires_at=NOW), both(PermitState.RELEASED, ended_at=NOW)
    alive = both(PermitState.HELD, expires_at=NOW + 1)
    answers = [
        renew(lapsed, "a", NOW), release(ended, "a", NOW), claim(alive, "a", "r", NOW), acquire(alive, ask("a"), NOW),
        renew(alive, "a", NOW), release(alive, "a", NOW),
    ]  # fmt: skip
    assert [each.answer for each in answers] == [
        Answer.EXPIRED, Answer.ALREADY_ENDED, Answer.HELD, Answer.HELD, Answer.RENEWED, Answer.RELEASED,
    ]  # fmt: skip
    assert [each.row and each.row.gate for each in answers] == ["g"] * 6


def test_who_waits_at_two_gates_is_answered_with_the_row_of_the_first() -> None:
    found = acquire(GateBook([Gate("g", 0), Gate("h", 0)]), ask(gates=("g", "h")), NOW)
    assert (found.answer, found.row and found.row.gate) == (Answer.WAITING, "g")


def test_an_end_in_one_gate_is_carried_to_the_others() -> None:
    ended = row("a", PermitState.RESET, gates=("g", "h"), ended_at=NOW - 7)
    other = row("a", gates=("g", "h"), gate="h", waiter_seen_at=NOW, offered_until=NOW + 5)
    both = GateBook([Gate("g", 1), Gate("h", 1)], [ended, other])
    settle(both, NOW)
    assert both.of("a")[1] == replace(other, state=PermitState.RESET, ended_at=NOW - 7, offered_until=None)
    foreign = replace(other, permit_id="another")
    both = GateBook([Gate("g", 1), Gate("h", 1)], [ended, foreign])
    settle(both, NOW)
    assert both.of("a")[1].is_live


def test_whoever_waits_at_another_gate_stands_in_nobodys_way() -> None:
    rows = [row("a", gates=("g",), waiter_seen_at=NOW), held("x"), row("b", ticket=2, gates=("h",), waiter_seen_at=NOW)]
    served = hand_off(GateBook([Gate("g", 1), Gate("h", 1)], rows), NOW)
    assert [each.request_id for each in served] == ["b"]
    rows.append(row("c", ticket=0, gates=("g", "h"), waiter_seen_at=NOW))
    assert hand_off(GateBook([Gate("g", 1), Gate("h", 1)], rows), NOW) == []


# -- resets, blocks, clocks ----------------------------------------------------------------------------------
def test_a_reset_ends_the_line_and_leaves_the_holders() -> None:
    waiting = [row("w1", waiter_seen_at=NOW), row("w2", ticket=2, waiter_seen_at=NOW)]
    found = book(held(), *waiting)
    assert reset(found, "g", NOW) == waiting
    assert [each.state for each in found.rows()] == [PermitState.HELD, PermitState.RESET, PermitState.RESET]
    assert {each.ended_at for each in found.rows() if not each.is_live} == {NOW}


@pytest.mark.parametrize(("until", "blocked"), [(NOW, False), (NOW - 1, False), (NOW + 1, True)])
def test_a_block_admits_nobody_until_it_ends(until: int, blocked: bool) -> None:
    found = book()
    assert block(found, "g", until, NOW) is blocked
    assert found.gates["g"].blocked_until == (until if blocked else None)
    assert acquire(found, ask(), NOW).answer is (Answer.WAITING if blocked else Answer.HELD)
    assert acquire(found, ask("later"), NOW + 1).answer is Answer.WAITING
    assert bool(found.changed_gates) is blocked


@pytest.mark.parametrize(
    ("rows", "gate", "at"),
    [
        ([], {}, None), ([held(expires_at=NOW + 5)], {}, NOW + 5), ([held(expires_at=NOW)], {}, None),
        ([held(expires_at=NOW + 1)], {}, NOW + 1), ([row(deadline_at=NOW + 6)], {}, NOW + 6),
        ([row(offered_until=NOW + 7, deadline_at=NOW + 9)], {}, NOW + 7),
        ([row(waiter_seen_at=NOW)], {}, NOW + 15_000),
        ([row(state=PermitState.RESET, deadline_at=NOW + 6, expires_at=NOW + 6, waiter_seen_at=NOW)], {}, None),
        ([], {"blocked_until": NOW + 8}, NOW + 8), ([], {"pace": Pace(refill_at=NOW + 9)}, NOW + 9),
        ([], {"pace": Pace(gap_ms=10, last_start_at=NOW)}, NOW + 10), ([], {"pace": Pace()}, None),
        ([held(expires_at=NOW + 5), row("b", deadline_at=NOW + 3)], {"blocked_until": NOW + 4}, NOW + 3),
    ],
)  # fmt: skip
def test_the_next_change_is_the_earliest_that_time_alone_makes(
    rows: list[PermitRow], gate: dict[str, Any], at: int | None
) -> None:
    assert next_change_at(book(*rows, **gate), NOW) == at


def test_the_first_permit_to_lapse_is_told_in_whole_seconds() -> None:
    rows = [held("a", expires_at=NOW + 5_001), held("b", expires_at=NOW + 9_000), row("c", expires_at=NOW + 1)]
    assert earliest_expiry(rows) == NOW + 5_001
    assert earliest_expiry([row("c")]) is None
    assert retry_after_s(book(*rows), "g", NOW) == 6
    assert retry_after_s(book(row("c")), "g", NOW) is None


# -- pacing --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("pace", "promised", "allowed"),
    [
        (Pace(), 0, True), (Pace(), 5, True), (Pace(tokens=1), 0, True), (Pace(tokens=1), 1, False),
        (Pace(tokens=2), 1, True), (Pace(tokens=0), 0, False), (Pace(tokens=0, refill_to=1, refill_at=NOW), 0, True),
        (Pace(tokens=0, refill_to=1, refill_at=NOW + 1), 0, False), (Pace(gap_ms=10), 0, True),
        (Pace(gap_ms=10), 1, False), (Pace(gap_ms=0), 1, True), (Pace(gap_ms=1), 1, False),
        (Pace(gap_ms=10, last_start_at=NOW - 10), 0, True), (Pace(gap_ms=10, last_start_at=NOW - 9), 0, False),
    ],
)  # fmt: skip
def test_a_start_needs_a_token_and_the_end_of_the_gap(pace: Pace, promised: int, allowed: bool) -> None:
    assert pace.allows(NOW, promised) is allowed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Pace(), Pace(last_start_at=NOW)),
        (Pace(3, 5, None, 60_000), Pace(2, 5, NOW + 60_000, 60_000, last_start_at=NOW)),
        (Pace(3, 5, NOW + 1, 60_000), Pace(2, 5, NOW + 1, 60_000, last_start_at=NOW)),
        (Pace(3, 5, NOW, 60_000), Pace(4, 5, NOW + 60_000, 60_000, last_start_at=NOW)),
        (Pace(None, 5, NOW, 60_000, 7, 1, 2), Pace(None, 5, NOW, 60_000, 7, NOW, 2)),
    ],
)
def test_a_start_takes_a_token_and_opens_the_window(before: Pace, after: Pace) -> None:
    assert before.started(NOW) == after


def test_offers_are_promised_starts() -> None:
    rows = [row("a", waiter_seen_at=NOW), row("b", ticket=2, waiter_seen_at=NOW)]
    paced = GateBook([Gate("g", None, pace=Pace(tokens=1))], rows)
    assert [each.request_id for each in hand_off(paced, NOW)] == ["a"]
