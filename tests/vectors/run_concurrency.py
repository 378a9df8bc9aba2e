"""Runs the vectors of spec/concurrency.md.

The vectors speak of the hand-off as a grant ("hand-off happens in the transaction that frees the slot"), so the
world hands off without the two seconds of offer of fleet.md section 5; `tests/unit/test_permit_offers.py` runs them
with offers and names the one vector that then differs.
"""

from __future__ import annotations

from policy_service.domain.gates import GRANT_AT_ONCE, Gate, GateBook, PermitRow, PermitState
from policy_service.domain.inflight import InFlight
from policy_service.domain.line import PermitRequest, acquire
from policy_service.domain.permits import block_until, cap_of, combined, refusal
from policy_service.domain.quota_share import Bucket, ShareTarget, order_targets
from tests.vectors.harness import Vector
from tests.vectors.matching import assert_expected
from tests.vectors.worlds_concurrency import PermitWorld
from tests.vectors.worlds_gates import Fields


def _target(fields: Fields) -> ShareTarget:
    buckets = (
        Bucket(each["bucket"], each.get("percent"), each.get("resets_at_ms")) for each in fields.get("saturated") or ()
    )
    weight = fields.get("weight")
    return ShareTarget(
        fields["key"],
        1.0 if weight is None else weight,
        cap_of(fields.get("cap")),
        fields.get("in_flight", 0),
        fields.get("model", ""),
        tuple(buckets),
    )


def _order(given: Fields) -> Fields:
    targets = [_target(each) for each in given["targets"]]
    deficits = given.get("deficits") or {}
    heads: list[str] = []
    found = order_targets(targets, deficits, given.get("now_ms", 0))
    for _ in range(given.get("picks", 1)):
        found = order_targets(targets, deficits, given.get("now_ms", 0))
        deficits = found.deficits
        heads.append(found.order[0].key)
        if not given.get("release_each", True):
            targets = [_one_more(each) if each.key == heads[-1] else each for each in targets]
    return {
        "order": [target.key for target in found.order],
        "heads": heads,
        "deficits": {key: round(value, 9) for key, value in found.deficits.items()},
    }


def _one_more(target: ShareTarget) -> ShareTarget:
    return ShareTarget(target.key, target.weight, target.cap, target.in_flight + 1, target.model, target.buckets)


def _in_flight(steps: list[Fields]) -> Fields:
    entries, answer = InFlight(), dict[str, object]()
    for step in steps:
        request, now = step.get("request", ""), step["at_ms"]
        if step["event"] == "reserve":
            entries.reserve("c1", request, now)
        elif step["event"] == "release":
            entries.release("c1", request)
        answer = {"in_flight": entries.count("c1", now)}
        assert_expected(step.get("expect", {}), answer, f"at {now}")
    return answer


def _occupant(gate: Gate, name: str, state: PermitState, ticket: int) -> PermitRow:
    return PermitRow(
        permit_id=name,
        request_id=name,
        gate=gate.key,
        gates=(gate.key,),
        ticket=ticket,
        state=state,
        queued_at=0,
        ttl_ms=120_000,
        deadline_at=30_000,
        waiter_seen_at=0,
        expires_at=120_000 if state is PermitState.HELD else None,
    )


def _gates(given: Fields) -> Fields:
    known, rows = dict[str, Gate](), list[PermitRow]()
    for each in given["gates"]:
        until = block_until(each["blocked_for_ms"], 0) if "blocked_for_ms" in each else None
        gate = Gate(each["key"], cap_of(each.get("limit")), each.get("queue_depth", 20), until)
        known[gate.key] = gate
        for state, count in ((PermitState.HELD, each.get("held", 0)), (PermitState.WAITING, each.get("waiting", 0))):
            rows += [_occupant(gate, f"{gate.key}/{state}/{n}", state, len(rows) + n) for n in range(count)]
    asked = combined(_asked(each, known) for each in given["ask"])
    book = GateBook(asked, [row for row in rows if row.gate in {gate.key for gate in asked}], GRANT_AT_ONCE)
    request = PermitRequest(
        "q1",
        "permit-q1",
        tuple(gate.key for gate in asked),
        ticket=10_000,
        timeout_ms=given.get("queue_timeout_ms", 30_000),
    )
    found = acquire(book, request, 0)
    told = refusal(found, book, 0)
    answer: Fields = {"result": found.answer, "held": {key: book.held(key) for key in book.gates}}
    answer["waiting"] = {key: book.waiting(key) for key in book.gates}
    return answer if told is None else answer | {"code": told.code, "http_status": told.http_status}


def _asked(each: str | Fields, known: dict[str, Gate]) -> Gate:
    if isinstance(each, str):
        return known[each]
    gate = known[each["key"]]
    return Gate(gate.key, cap_of(each.get("limit")), gate.depth, gate.blocked_until)


def run(vector: Vector) -> None:
    """Raise AssertionError where an answer differs."""
    run_with(vector, GRANT_AT_ONCE)


def run_with(vector: Vector, offer_ms: int) -> None:
    """As `run`, with slots offered for `offer_ms`."""
    given: Fields = vector["given"]
    if "targets" in given:
        answer = _order(given)
    elif "gates" in given:
        answer = _gates(given)
    elif given.get("kind") == "in_flight":
        answer = _in_flight(vector["steps"])
    else:
        answer = _permits(given, vector["steps"], offer_ms)
    assert_expected(vector["expect"], answer, "result")


def _permits(given: Fields, steps: list[Fields], offer_ms: int) -> Fields:
    world, answer = PermitWorld(given, offer_ms), dict[str, object]()
    for step in steps:
        answer = world.run(step)
        assert_expected(step.get("expect", {}), answer, f"at {world.now}")
    return answer
