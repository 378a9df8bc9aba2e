"""Edges of leases that no vector stands on: last values allowed, fields that a step carries along."""

from __future__ import annotations

import pytest

from policy_service.domain.lease import (
    GENERATION_MAX,
    NEW_ROW,
    EndReason,
    LeaseCall,
    LeaseRow,
    LeaseRules,
    LeaseState,
    acquire,
    busy_until,
    renew,
    transition,
)
from policy_service.domain.lease_context import LeaseRefusal, LifecycleCall, parse_action
from policy_service.domain.lease_selection import Blocked, Candidate, LeaseReason, ManagedRequest, PlanKind, claim, plan

RULES = LeaseRules()


def _row(owner: str = "a", connection: str = "c1", **fields: object) -> LeaseRow:
    known: dict[str, object] = {
        "id": 1,
        "owner_hash": owner,
        "api_key_id": "k1",
        "provider": "old",
        "connection_id": connection,
        "generation": 1,
        "state": LeaseState.ACTIVE,
        "ttl_ms": 120_000,
        "acquired_at": 0,
        "renewed_at": 0,
        "expires_at": 120_000,
    }
    return LeaseRow(**(known | fields))  # type: ignore[arg-type]


def test_a_lease_asked_for_again_is_renewed_now_and_takes_the_provider_of_the_call() -> None:
    again = acquire([_row()], LeaseCall("a", "k1", provider="new", connection_id="c1"), RULES, 10)
    assert again.lease is not None
    assert (again.lease.provider, again.lease.renewed_at, again.lease.expires_at) == ("new", 10, 120_010)


def test_a_renewal_says_when_it_was_made() -> None:
    step = renew([_row()], LeaseCall("a", "k1", generation=1, connection_id="c1"), 10)
    assert step.lease is not None
    assert (step.lease.renewed_at, step.lease.expires_at) == (10, 120_010)


def test_a_lease_that_is_not_stored_yet_holds_its_connection_beside_an_older_row() -> None:
    ended = _row("b", id=7, state=LeaseState.RELEASED, ended_at=5)
    assert busy_until([ended, _row(id=NEW_ROW)], "c1", RULES, 10) == 120_000
    assert NEW_ROW == 0


def test_the_lease_left_behind_by_a_claim_says_that_its_connection_was_ineligible() -> None:
    own = _row()
    step = claim(
        ManagedRequest(frozenset({"c1", "c2"}), own), [own], LeaseCall("a", "k1", connection_id="c2"), RULES, 9
    )
    assert [row.end_reason for row in step.writes] == [EndReason.CONNECTION_INELIGIBLE, None]


def test_without_capacity_the_answer_names_who_is_held_until_when() -> None:
    found = plan(ManagedRequest(frozenset({"c1"})), [Candidate("c1")], [_row("b")], lambda _: RULES, 10)
    assert found.kind is PlanKind.CAPACITY
    assert [(each.connection, each.reason, each.until) for each in found.exclusions] == [
        ("c1", LeaseReason.HELD, 120_000)
    ]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"action": "acquire", "model": "m" * 512}, ""),
        ({"action": "acquire", "model": "m" * 513}, "model"),
        ({"action": "renew", "generation": GENERATION_MAX}, ""),
        ({"action": "renew", "generation": GENERATION_MAX + 1}, "generation"),
    ],
)
def test_the_largest_value_of_a_field_is_taken_and_the_next_refused(body: dict[str, object], field: str) -> None:
    found = parse_action(body)
    assert isinstance(found, LeaseRefusal if field else LifecycleCall)
    assert getattr(found, "field", "") == field


def test_a_lease_that_moves_ends_for_the_reason_that_was_told() -> None:
    call = LeaseCall("a", "k1", generation=1, connection_id="c2", reason=EndReason.QUOTA_UNAVAILABLE)
    assert [row.end_reason for row in transition([_row()], call, RULES, 9).writes] == [
        EndReason.QUOTA_UNAVAILABLE,
        None,
    ]


def test_at_a_dead_end_the_answer_names_what_the_caller_may_not_use() -> None:
    pool = [Candidate("c0"), Candidate("c1", Blocked.COOLING)]
    found = plan(ManagedRequest(frozenset({"c1"})), pool, [], lambda _: RULES, 10)
    assert found.kind is PlanKind.DEAD_END
    assert [(each.connection, each.reason) for each in found.exclusions] == [("c0", LeaseReason.NOT_ALLOWED)]
