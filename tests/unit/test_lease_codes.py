"""Answers of leases in selection, and the two forms of every code (spec/leases.md sections 6 and 7)."""

from __future__ import annotations

from policy_service.domain.lease import LeaseRow, LeaseRules, LeaseState
from policy_service.domain.lease_context import LeaseCode, LeaseRefusal
from policy_service.domain.lease_selection import (
    Blocked,
    Candidate,
    LeaseExclusion,
    LeasePlan,
    LeaseReason,
    ManagedRequest,
    PlanKind,
    plan,
)

FORMS = {
    (401, "UNAUTHENTICATED"): {"AUTHENTICATION_REQUIRED", "API_KEY_INVALID"},
    (415, "INVALID_ARGUMENT"): {"CONTENT_TYPE_REQUIRED"},
    (400, "INVALID_ARGUMENT"): {"ACTION_INVALID", "CONTEXT_REQUIRED", "CONTEXT_INVALID", "MODEL_INVALID"},
    (403, "PERMISSION_DENIED"): {"SCOPE_REQUIRED", "KEY_CONFIGURATION_INVALID"},
    (409, "FAILED_PRECONDITION"): {"REQUIRED", "FENCE_STALE", "AUTHORIZATION_MISMATCH", "CONNECTION_MISMATCH"},
    (409, "OK"): {"NO_ELIGIBLE_CONNECTION"},
    (429, "OK"): {"CAPACITY_UNAVAILABLE", "ELIGIBILITY_UNAVAILABLE"},
    (503, "UNAVAILABLE"): {"SERVICE_UNAVAILABLE"},
}
OUTSIDE = LeaseExclusion("x", LeaseReason.NOT_ALLOWED)
HELD = LeaseExclusion("c2", LeaseReason.HELD, 1_000)
OWN = LeaseRow(1, "me", "k", "p", "c1", 1, LeaseState.ACTIVE, 1_000, 0, 0, 1_000)
OTHERS = LeaseRow(2, "you", "k", "p", "c2", 1, LeaseState.ACTIVE, 1_000, 0, 0, 1_000)


def planned(request: ManagedRequest, *connections: str) -> LeasePlan:
    pool = [Candidate(each, Blocked.NO) for each in connections]
    return plan(request, pool, [OWN, OTHERS], lambda _: LeaseRules(), 10)


def test_every_code_has_its_status_in_both_protocols() -> None:
    found: dict[tuple[int, str], set[str]] = {}
    for code in LeaseCode:
        refusal = LeaseRefusal(code)
        found.setdefault((refusal.http_status, refusal.grpc), set()).add(code.name)
    assert found == FORMS


def test_every_plan_names_who_was_left_out_and_until_when() -> None:
    allowed = frozenset({"c1", "c2", "c3"})
    own = planned(ManagedRequest(allowed, OWN), "c1", "c2", "x")
    assert own == LeasePlan(PlanKind.USE, ("c1",), exclusions=(OUTSIDE, HELD))
    free = planned(ManagedRequest(allowed), "c3", "c2", "x")
    assert free == LeasePlan(PlanKind.CHOOSE, ("c3",), exclusions=(OUTSIDE, HELD))
    forced = planned(ManagedRequest(allowed, forced="x"), "c3", "x")
    assert forced == LeasePlan(PlanKind.DEAD_END, code=LeaseCode.NO_ELIGIBLE_CONNECTION, exclusions=(OUTSIDE,))
