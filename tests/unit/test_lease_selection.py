"""Leases in selection, lease contexts and lifecycle messages (spec/leases.md sections 2, 6, 7), beyond the vectors."""

from __future__ import annotations

import pytest

from policy_service.domain import lease
from policy_service.domain.catalogue import Caller
from policy_service.domain.lease import (
    EndReason,
    LeaseCall,
    LeaseResult,
    LeaseRow,
    LeaseRules,
    LeaseState,
    acquire,
    busy_until,
    visible_label,
    withdraw,
)
from policy_service.domain.lease_context import (
    AdmittedCall,
    LeaseCode,
    LeaseContext,
    LeaseRefusal,
    LifecycleCall,
    LifecycleRequest,
    PolicyRefusal,
    Refused,
    admit,
    has_context,
    owner_hash,
    parse_action,
    parse_generation,
    read_headers,
)
from policy_service.domain.lease_selection import (
    Blocked,
    Candidate,
    ClaimVerdict,
    LeaseReason,
    ManagedRequest,
    PlanKind,
    after_claim,
    blocked_by,
    claim,
    dead_end_reason,
    managed_connections,
    plan,
    rank_for_lease,
)

TOKEN = "vlo_" + "A" * 43
RULES = LeaseRules()
MANAGED = Caller("k1", "", True, frozenset({"lease:exclusive"}), ("c1", "c2"))


def _row(owner: str, connection: str, **fields: object) -> LeaseRow:
    known: dict[str, object] = {
        "id": 1,
        "owner_hash": owner,
        "api_key_id": "k1",
        "provider": "p",
        "connection_id": connection,
        "generation": 1,
        "state": LeaseState.ACTIVE,
        "ttl_ms": 120_000,
        "acquired_at": 0,
        "renewed_at": 0,
        "expires_at": 120_000,
    }
    return LeaseRow(**(known | fields))  # type: ignore[arg-type]


def _plan(
    request: ManagedRequest, pool: dict[str, Blocked], *rows: LeaseRow, now: int = 10
) -> tuple[PlanKind, tuple[str, ...]]:
    found = plan(request, [Candidate(*each) for each in pool.items()], rows, lambda _: RULES, now)
    return found.kind, found.candidates


# --- selection ---


def test_candidates_are_the_allowed_ones_that_nobody_else_holds() -> None:
    request = ManagedRequest(frozenset({"c1", "c2"}))
    pool = {"c0": Blocked.NO, "c1": Blocked.NO, "c2": Blocked.NO}
    assert _plan(request, pool, _row("b", "c1")) == (PlanKind.CHOOSE, ("c2",))


def test_exclusions_say_who_holds_what_until_when() -> None:
    pool = [Candidate("c0"), Candidate("c1"), Candidate("c2")]
    found = plan(ManagedRequest(frozenset({"c1", "c2"})), pool, [_row("b", "c1")], lambda _: LeaseRules(5_000), 10)
    assert {(each.connection, each.reason, each.until) for each in found.exclusions} == {
        ("c0", LeaseReason.NOT_ALLOWED, None),
        ("c1", LeaseReason.HELD, 125_000),
    }


def test_the_owners_own_connection_is_used_outright_and_not_excluded() -> None:
    own = _row("a", "c2")
    request = ManagedRequest(frozenset({"c1", "c2"}), own)
    found = plan(request, [Candidate("c1"), Candidate("c2")], [own], lambda _: RULES, 10)
    assert (found.kind, found.candidates, found.exclusions) == (PlanKind.USE, ("c2",), ())


def test_a_lapsed_lease_of_another_holds_nothing() -> None:
    request = ManagedRequest(frozenset({"c1"}))
    assert _plan(request, {"c1": Blocked.NO}, _row("b", "c1"), now=120_000) == (PlanKind.CHOOSE, ("c1",))


def test_a_forced_connection_out_of_the_pool_ends_no_lease() -> None:
    own = _row("a", "c1")
    request = ManagedRequest(frozenset({"c1", "c2"}), own, forced="c1")
    found = plan(request, [Candidate("c1", Blocked.COOLING), Candidate("c2")], [own], lambda _: RULES, 10)
    assert (found.kind, found.invalidate) == (PlanKind.DEAD_END, None)


@pytest.mark.parametrize(
    ("blocked", "reason"),
    [
        ([Blocked.COOLING, Blocked.COOLING], EndReason.HEALTH_OR_COOLDOWN),
        ([Blocked.TERMINAL, Blocked.EXPIRED], EndReason.AUTHORIZATION_CHANGED),
        ([Blocked.QUOTA], EndReason.QUOTA_UNAVAILABLE),
        ([Blocked.COOLING, Blocked.QUOTA], EndReason.CONNECTION_INELIGIBLE),
        ([Blocked.OTHER], EndReason.CONNECTION_INELIGIBLE),
        ([], EndReason.CONNECTION_INELIGIBLE),
    ],
)
def test_a_dead_end_is_named_for_what_all_connections_have_in_common(blocked: list[Blocked], reason: EndReason) -> None:
    assert dead_end_reason(blocked) is reason


@pytest.mark.parametrize(
    ("blocked", "code"),
    [
        ([Blocked.COOLING, Blocked.EXPIRED], LeaseCode.ELIGIBILITY_UNAVAILABLE),
        ([Blocked.COOLING, Blocked.QUOTA], LeaseCode.NO_ELIGIBLE_CONNECTION),
        ([], LeaseCode.NO_ELIGIBLE_CONNECTION),
    ],
)
def test_acquire_says_whether_waiting_would_help(blocked: list[Blocked], code: LeaseCode) -> None:
    pool = [Candidate(f"c{n}", each) for n, each in enumerate(blocked)]
    request = ManagedRequest(frozenset({"c0", "c1"}), is_acquire=True)
    found = plan(request, pool, [], lambda _: RULES, 0)
    assert (found.code, found.invalidate) == (code, None)


def test_the_mechanism_of_an_exclusion_says_how_a_lease_reads_it() -> None:
    assert blocked_by("") is Blocked.NO
    assert blocked_by("breaker", "circuit_open") is Blocked.COOLING
    assert blocked_by("terminal_state", "expired") is Blocked.EXPIRED
    assert blocked_by("terminal_state", "banned") is Blocked.TERMINAL
    assert blocked_by("credential_gate", "credential_gate") is Blocked.OTHER


def test_claiming_moves_the_lease_of_an_owner_that_holds_one() -> None:
    own = _row("a", "c1")
    call = LeaseCall("a", "k1", provider="p", connection_id="c2")
    step = claim(ManagedRequest(frozenset({"c1", "c2"}), own), [own], call, RULES, 10)
    assert (step.result, [row.state for row in step.writes]) == (
        LeaseResult.TRANSITIONED,
        [LeaseState.INVALIDATED, LeaseState.ACTIVE],
    )


def test_a_claim_ends_the_old_lease_for_ineligibility_whatever_the_call_says() -> None:
    own = _row("a", "c1")
    call = LeaseCall("a", "k1", provider="p", connection_id="c2", reason=EndReason.QUOTA_UNAVAILABLE)
    step = claim(ManagedRequest(frozenset({"c1", "c2"}), own), [own], call, RULES, 10)
    assert step.writes[0].end_reason is EndReason.CONNECTION_INELIGIBLE


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (LeaseResult.CONNECTION_BUSY, ClaimVerdict.PICK_AGAIN),
        (LeaseResult.OWNER_ALREADY_ACTIVE, ClaimVerdict.STALE),
        (LeaseResult.STALE, ClaimVerdict.STALE),
        (LeaseResult.ACQUIRED, ClaimVerdict.DISPATCH),
    ],
)
def test_what_follows_a_claim(result: LeaseResult, verdict: ClaimVerdict) -> None:
    assert after_claim(result) is verdict


def test_targets_of_the_leased_connection_are_the_only_ones_while_there_are_any() -> None:
    assert rank_for_lease(["t1", "t2", "t3"], lambda target: target != "t2") == ("t1", "t3")
    assert rank_for_lease(["t1", "t2"], lambda target: False) == ("t1", "t2")


def test_only_enabled_managed_keys_withdraw_connections() -> None:
    off = Caller("k2", "", False, MANAGED.scopes, ("c8",))
    plain = Caller("k3", "", True, frozenset(), ("c9",))
    assert managed_connections([MANAGED, off, plain]) == {"c1", "c2"}


# --- store rules ---


def test_a_newly_listed_connection_is_leased_five_seconds_after_its_listing() -> None:
    rules = LeaseRules(listed_at=1_000)
    call = LeaseCall("a", "k1", connection_id="c1")
    assert acquire([], call, rules, 5_999).free_at == 6_000
    assert acquire([], call, rules, 6_000).result is LeaseResult.ACQUIRED


def test_new_generations_start_above_the_floor_of_a_failover() -> None:
    old = _row("a", "c1", state=LeaseState.RELEASED, ended_at=5, end_reason=EndReason.OWNER_EXIT, generation=7)
    call = LeaseCall("a", "k1", connection_id="c1")
    found = acquire([old], call, LeaseRules(generation_floor=2**32), 10).lease
    assert found is not None
    assert found.generation == 2**32 + 1


def test_the_last_lease_of_a_connection_decides_its_lock_delay() -> None:
    lapsed = _row("a", "c1", state=LeaseState.EXPIRED, expires_at=100, ended_at=100, end_reason=EndReason.TTL_EXPIRED)
    left = _row("b", "c1", id=2, state=LeaseState.RELEASED, ended_at=300, end_reason=EndReason.OWNER_EXIT)
    assert busy_until([lapsed], "c1", LeaseRules(5_000), 200) == 5_100
    assert busy_until([lapsed, left], "c1", LeaseRules(5_000), 301) is None


def test_a_revoked_key_loses_all_leases_and_a_shorter_list_those_that_left_it() -> None:
    rows = [_row("a", "c1"), _row("b", "c2", id=2), _row("c", "c3", id=3, api_key_id="k2")]
    revoked = withdraw(rows, "k1", is_managed=False, allowed=("c1",), now=5)
    assert [(row.id, row.end_reason) for row in revoked] == [
        (1, EndReason.MANAGED_KEY_REVOKED),
        (2, EndReason.MANAGED_KEY_REVOKED),
    ]
    shorter = withdraw(rows, "k1", is_managed=True, allowed=("c1",), now=5)
    assert [(row.id, row.end_reason) for row in shorter] == [(2, EndReason.AUTHORIZATION_CHANGED)]


@pytest.mark.parametrize(
    ("label", "shown"), [("ada l.", None), ("ADA@example.org", None), ("Team 3", "Team 3"), ("", None)]
)
def test_a_label_that_names_the_account_is_hidden(label: str, shown: str | None) -> None:
    assert visible_label(label, is_account=True, identities=("Ada L.", "")) == shown


def test_an_operation_writes_the_expiry_it_finds_before_anything_else() -> None:
    lapsed = _row("b", "c1", expires_at=50)
    step = acquire([lapsed], LeaseCall("a", "k1", connection_id="c1"), RULES, 60)
    assert [(row.state, row.ended_at) for row in step.writes] == [(LeaseState.EXPIRED, 60), (LeaseState.ACTIVE, None)]


def test_reading_writes_nothing_and_sees_no_lapsed_lease() -> None:
    lapsed = _row("a", "c1", expires_at=50)
    found = lease.get([lapsed], LeaseCall("a", "k1", 1), 50)
    assert (found.result, found.writes) == (LeaseResult.STALE, ())


# --- contexts and messages ---


def test_canonical_and_alias_that_differ_are_no_context() -> None:
    headers = {
        "x-policy-lease-owner": TOKEN,
        "X-OmniRoute-Lease-Owner": TOKEN[:-1] + "B",
        "x-policy-lease-generation": "1",
    }
    assert read_headers(headers) == LeaseRefusal(LeaseCode.CONTEXT_INVALID, "lease.owner")


def test_an_absent_generation_is_named_before_a_malformed_owner() -> None:
    assert read_headers({"x-policy-lease-owner": "session"}) == LeaseRefusal(
        LeaseCode.CONTEXT_REQUIRED, "lease.generation"
    )


def test_a_context_holds_the_hash_and_never_the_token() -> None:
    found = read_headers({"X-Policy-Lease-Owner": TOKEN, "X-Policy-Lease-Generation": "12"})
    assert found == LeaseContext(owner_hash(TOKEN), 12)
    assert TOKEN not in repr(found)


def test_any_lease_header_is_a_context() -> None:
    assert has_context({"X-OmniRoute-Lease-Generation": ""})
    assert not has_context({"x-session-id": TOKEN})


@pytest.mark.parametrize("text", ["", "0", "01", "+1", "1 ", "1\n", "1.0", "1e3", "٣", str(2**53), "9" * 40])
def test_only_plain_numbers_are_generations(text: str) -> None:
    assert parse_generation(text) is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (None, "action"),
        ([], "action"),
        ({"action": ["acquire"]}, "action"),
        ({"action": "acquire"}, "model"),
        ({"action": "acquire", "model": "x" * 513}, "model"),
        ({"action": "acquire", "model": "m", "ttlMs": True}, "ttlMs"),
        ({"action": "acquire", "model": "m", "ttlMs": None}, "ttlMs"),
        ({"action": "acquire", "model": "m", "ttlMs": float("nan")}, "ttlMs"),
        ({"action": "acquire", "model": "m", "generation": 1}, "generation"),
        ({"action": "status"}, "generation"),
        ({"action": "status", "generation": 2**53}, "generation"),
        ({"action": "release", "generation": 1, "reason": None}, "reason"),
    ],
)
def test_a_message_at_fault_is_refused_with_its_field(body: object, field: str) -> None:
    assert parse_action(body) == LeaseRefusal(LeaseCode.ACTION_INVALID, field)


def test_a_ttl_is_never_refused_for_its_size() -> None:
    found = parse_action({"action": "acquire", "model": " m ", "ttlMs": 10**30})
    assert isinstance(found, LifecycleCall)
    assert (found.model, lease.clamp_ttl(found.ttl_ms or 0)) == ("m", 1_800_000)


def _request(**changes: object) -> LifecycleRequest:
    known: dict[str, object] = {
        "has_api_key": True,
        "caller": MANAGED,
        "body": {"action": "acquire", "model": "m"},
        "owner": TOKEN,
        "content_type": "application/json",
    }
    return LifecycleRequest(**(known | changes))  # type: ignore[arg-type]


def _code(found: AdmittedCall | Refused) -> str:
    assert not isinstance(found, AdmittedCall)
    return str(found.code)


def test_the_checks_come_in_their_order() -> None:
    """Everything is wrong at first; each step mends what the last answer named."""
    wrong: dict[str, object] = {
        "has_api_key": False,
        "caller": None,
        "content_type": "text/plain",
        "body": {},
        "owner": None,
    }
    mends: list[tuple[str, object, LeaseCode]] = [
        ("has_api_key", True, LeaseCode.AUTHENTICATION_REQUIRED),
        ("caller", Caller("u", "", True), LeaseCode.API_KEY_INVALID),
        ("content_type", "Application/JSON; charset=utf-8", LeaseCode.CONTENT_TYPE_REQUIRED),
        ("body", {"action": "acquire", "model": "m"}, LeaseCode.ACTION_INVALID),
        ("caller", Caller("u", "", True, MANAGED.scopes), LeaseCode.SCOPE_REQUIRED),
        ("caller", MANAGED, LeaseCode.KEY_CONFIGURATION_INVALID),
        ("owner", "session", LeaseCode.CONTEXT_REQUIRED),
        ("owner", TOKEN, LeaseCode.CONTEXT_INVALID),
    ]
    for field, value, code in mends:
        assert _code(admit(_request(**wrong))) == code
        wrong[field] = value
    assert isinstance(admit(_request(**wrong)), AdmittedCall)


def test_a_failing_model_lookup_comes_before_the_policy_of_the_key() -> None:
    refused = PolicyRefusal(402, "BUDGET")
    failing = admit(_request(), model_lookup_fails=lambda _: True, key_policy=lambda _caller, _model: refused)
    assert _code(failing) == LeaseCode.SERVICE_UNAVAILABLE


def test_the_policy_of_the_key_is_passed_on_unchanged_and_sees_the_model_of_an_acquire_only() -> None:
    seen: list[str | None] = []

    def policy(_: Caller, model: str | None) -> PolicyRefusal:
        seen.append(model)
        return PolicyRefusal(402, "BUDGET")

    assert admit(_request(), key_policy=policy) == PolicyRefusal(402, "BUDGET")
    admit(_request(body={"action": "renew", "generation": 1}), key_policy=policy)
    assert seen == ["m", None]


def test_messages_without_http_have_no_media_type() -> None:
    assert isinstance(admit(_request(content_type=None, is_http=False)), AdmittedCall)
