"""Each guard as a claim about one field: what it believes, from whom, under which status (spec/guards.md section 1)."""

from __future__ import annotations

from typing import Any

import pytest

from policy_service.domain import guards
from policy_service.domain.catalogue import Catalogue, Connection, Provider
from policy_service.domain.outcome import CallKind, Origin, Outcome
from policy_service.domain.policy import ConnectionPolicy, Policy

FREE = Provider(id="free", free_tier_billing=True)


def policy(provider: Provider = FREE, **connection: Any) -> ConnectionPolicy:
    declared = Connection("c", provider.id, **connection)
    return Policy(Catalogue({provider.id: provider}, {"c": declared})).for_connection(provider.id, "c")


def said(text: str, **more: Any) -> Outcome:
    return Outcome(more.pop("status", 502), text=text, message=text, **more)


ABORTED, LOCAL = "operation was aborted", "spawn x ENOENT"


@pytest.mark.parametrize(
    ("outcome", "aborted"),
    [
        (Outcome(499), True), (Outcome(498), False), (Outcome(500), False), (Outcome(502, name="AbortError"), True),
        (Outcome(502, name="Abort"), False), (Outcome(502, origin=Origin.CLIENT), True),
        (Outcome(502, origin=Origin.GATEWAY), False), (Outcome(502, code="UND_ERR_ABORTED"), True),
        (Outcome(502, code="client_disconnected", origin=Origin.UPSTREAM), True), (Outcome(502, code="other"), False),
        (said(ABORTED), True), (said(ABORTED, origin=Origin.TRANSPORT), True),
        (said(ABORTED, origin=Origin.UPSTREAM), False),
        (said("fine"), False), (Outcome(502, message=ABORTED.upper()), True),
    ],
)  # fmt: skip
def test_the_caller_left(outcome: Outcome, aborted: bool) -> None:
    assert guards.is_abort(outcome) is aborted


@pytest.mark.parametrize(
    ("outcome", "local"),
    [
        (Outcome(500, code="ENOENT"), True), (Outcome(500, code="eacces"), True), (Outcome(500, code="other"), False),
        (Outcome(500, code="EPIPE", network_error="write EPIPE"), False),
        (Outcome(500, code="EPIPE", origin=Origin.TRANSPORT), False),
        (Outcome(500, code="EPIPE", origin=Origin.UPSTREAM), True),
        (said(LOCAL), True), (said(LOCAL, origin=Origin.UPSTREAM), False), (said("fine"), False),
    ],
)  # fmt: skip
def test_the_host_failed(outcome: Outcome, local: bool) -> None:
    assert guards.is_local_fault(outcome) is local
    assert guards.is_gateway_fault(outcome) is local


@pytest.mark.parametrize("code", ["plugin_block", "TRANSLATION_FAILED", "translation_error"])
def test_the_gateway_failed_but_not_its_host(code: str) -> None:
    assert guards.is_gateway_fault(Outcome(500, code=code))
    assert not guards.is_local_fault(Outcome(500, code=code))


HEAD = 8_192


@pytest.mark.parametrize(
    ("outcome", "loaded"),
    [
        (Outcome(529), True), (Outcome(528), False), (Outcome(530), False), (Outcome(502, inner_status=529), True),
        (Outcome(502, inner_status=528), False), (Outcome(502, inner_status=530), False),
        (Outcome(502, type="overloaded_error"), True), (Outcome(502, code="OVERLOADED"), True),
        (Outcome(502, message="is Overloaded"), True), (Outcome(502, message="busy", text="overloaded"), False),
        (Outcome(502, text="Overloaded"), True), (Outcome(502), False),
        (Outcome(502, message="overloaded".rjust(HEAD)), True),
        (Outcome(502, message="overloaded".rjust(HEAD + 1)), False),
    ],
)  # fmt: skip
def test_the_upstream_is_overloaded(outcome: Outcome, loaded: bool) -> None:
    assert guards.is_overload(outcome) is loaded


REQUEST_CODES = (
    "context_length_exceeded", "context_window_exceeded", "upstream_empty_response", "upstream_response_failed",
    "combo_target_timeout", "rate_limit_queue_timeout", "rate_limit_queue_full", "rate_limit_queue_wedged",
    "rate_limit_execution_timeout", "token_limit_exceeded", "executor_contract_violation", "resource_pressure",
    "heap_pressure", "FreeTierError",
)  # fmt: skip
REQUEST_TYPES = (
    "invalid_request_error", "context_length_exceeded", "local_queue_capacity", "FreeTierError",
    "exceed_context_size_error",
)  # fmt: skip


@pytest.mark.parametrize("code", REQUEST_CODES)
def test_a_code_that_speaks_of_the_request_keeps_the_breaker_out(code: str) -> None:
    assert guards.is_request_scoped(Outcome(500, code=code))
    assert guards.breaker_exclusion(Outcome(500, code=code), None) == "request-scoped"


@pytest.mark.parametrize("kind", REQUEST_TYPES)
def test_a_type_that_speaks_of_the_request_keeps_the_breaker_out(kind: str) -> None:
    assert guards.is_request_scoped(Outcome(500, type=kind))
    assert not guards.is_request_scoped(Outcome(500, type="other", code="other"))


@pytest.mark.parametrize(
    ("status", "forgiven"),
    [(400, False), (401, False), (407, False), (408, True), (409, False), (499, True), (500, True), (501, True),
     (None, False)],
)  # fmt: skip
def test_a_type_forgives_only_where_no_account_can_be_meant(status: int | None, forgiven: bool) -> None:
    guard = guards.local_guard(Outcome(status, type="invalid_request_error"), policy())
    assert guard == ("abort" if status == 499 else "request-scoped" if forgiven else "")
    assert guards.local_guard(Outcome(400, code="heap_pressure"), policy()) == "request-scoped"


@pytest.mark.parametrize("status", [400, 402, 403, 429, 500])
def test_a_free_tier_error_cools_no_account_whether_its_name_stands_as_code_or_as_type(status: int) -> None:
    for outcome in (Outcome(status, code="FreeTierError"), Outcome(status, type="FreeTierError")):
        assert guards.local_guard(outcome, policy()) == "request-scoped"
    assert guards.local_guard(Outcome(429, type="heap_pressure"), policy()) == ""


@pytest.mark.parametrize(
    ("outcome", "own"),
    [
        (Outcome(429, code="token_limit_exceeded"), True), (Outcome(428, code="token_limit_exceeded"), False),
        (Outcome(430, code="token_limit_exceeded"), False), (Outcome(429, code="other"), False),
        (Outcome(400, code="BUDGET_EXCEEDED", origin=Origin.GATEWAY), True),
        (Outcome(400, code="budget_exceeded", origin=Origin.UPSTREAM), False),
        (Outcome(400, code="other", origin=Origin.GATEWAY), False),
    ],
)  # fmt: skip
def test_a_limit_of_the_gateways_own_caller(outcome: Outcome, own: bool) -> None:
    assert guards.is_own_key_policy(outcome) is own


OWN_LIMITER = (
    "rate_limit_queue_timeout", "rate_limit_queue_full", "rate_limit_queue_wedged", "rate_limit_execution_timeout",
    "local_queue_capacity",
)  # fmt: skip


@pytest.mark.parametrize("name", OWN_LIMITER)
def test_an_answer_of_the_own_queue(name: str) -> None:
    assert guards.is_own_limiter(Outcome(429, code=name.upper()))
    assert guards.is_own_limiter(Outcome(429, type=name))
    assert guards.is_own_limiter(Outcome(429, own_queue_timeout=True))
    assert not guards.is_own_limiter(Outcome(429, code="rate_limit"))


@pytest.mark.parametrize(("status", "is_resource"), [(404, True), (403, False), (405, False), (400, False)])
def test_a_resource_of_the_caller_is_missing_under_a_404_alone(status: int, is_resource: bool) -> None:
    texts = (
        "Vector store not found",
        "Item with id 'x' not found",
        "No such File object: x",
        "Response with id x not found",
    )
    assert any(guards.is_request_resource(said(text, status=status)) for text in texts) is is_resource
    assert not guards.is_request_resource(said("model not found", status=404))


@pytest.mark.parametrize(
    ("outcome", "bound"),
    [
        (Outcome(400, code="CONTEXT_LENGTH_EXCEEDED"), True), (Outcome(400, type="context_window_exceeded"), True),
        (Outcome(400, code="other", type="other"), False),
    ],
)  # fmt: skip
def test_the_same_input_is_refused_everywhere(outcome: Outcome, bound: bool) -> None:
    assert guards.is_input_bound(outcome) is bound


@pytest.mark.parametrize(
    ("status", "billing", "removed"),
    [
        (400, True, True),
        (403, True, True),
        (401, True, False),
        (402, True, False),
        (404, True, False),
        (400, False, False),
    ],
)
def test_a_model_left_the_free_tier(status: int, billing: bool, removed: bool) -> None:
    texts = ("free tier only", "not available on the free tier", "only available on free tier", "free_tier_only",
             "the use free tier only mode")  # fmt: skip
    using = policy(Provider(id="free", free_tier_billing=billing))
    assert any(guards.is_free_tier_removed(said(text, status=status), using) for text in texts) is removed


@pytest.mark.parametrize(
    ("status", "spare", "forgiven"), [(401, True, True), (401, False, False), (400, True, False), (402, True, False)]
)
def test_a_spare_key_forgives_a_401(status: int, spare: bool, forgiven: bool) -> None:
    assert guards.local_guard(Outcome(status), policy(spare_keys=spare)) == ("spare-key" if forgiven else "")


@pytest.mark.parametrize(
    ("pool", "same", "code", "walks"),
    [
        (True, True, "", True),
        (True, False, "", False),
        (False, True, "", False),
        (True, True, "PROXY_UNREACHABLE", False),
    ],
)
def test_a_walk_over_one_providers_accounts_counts_once(pool: bool, same: bool, code: str, walks: bool) -> None:
    found = Outcome(503, pool_attempt=pool, next_target_same_provider=same, code=code)
    assert guards.is_walk_on_same_provider(found) is walks


def test_the_breaker_counts_its_statuses_of_client_calls_alone() -> None:
    counted = {s for s in range(400, 600) if not guards.breaker_exclusion(Outcome(s), None)}
    assert counted == {408, 500, 502, 503, 504}
    assert guards.breaker_exclusion(Outcome(None), None) == "status"
    for kind in CallKind:
        excluded = guards.breaker_exclusion(Outcome(503, call_kind=kind), None)
        assert excluded == ("" if kind is CallKind.CLIENT else "health-check")


class Told:
    def __init__(self, skip: bool) -> None:
        self.skip_provider_breaker = skip


def test_a_flag_of_the_classification_is_obeyed() -> None:
    assert [guards.breaker_exclusion(Outcome(503), Told(skip)) for skip in (True, False)] == ["skip-flag", ""]


FALLBACK = {
    "abort": False, "own-key-policy": False, "own-limiter": False, "own-circuit-open": True, "own-timeout": True,
    "local-fault": False, "spare-key": True, "request-resource": False, "free-tier-removed": True, "input-bound": True,
    "request-scoped": True,
}  # fmt: skip


def test_each_guard_says_whether_another_account_may_be_tried() -> None:
    assert {name: guards.guard_allows_fallback(name) for name, _, _ in guards.LOCAL_GUARDS} == FALLBACK


@pytest.mark.parametrize(
    ("outcome", "guard"),
    [
        (Outcome(503, circuit_open_answer=True), "own-circuit-open"), (Outcome(504, own_timeout=True), "own-timeout"),
        (Outcome(504, own_queue_timeout=True), "own-limiter"), (Outcome(504), ""),
        (Outcome(499, own_timeout=True, circuit_open_answer=True), "abort"),
        (Outcome(503, own_timeout=True, circuit_open_answer=True), "own-circuit-open"),
    ],
)  # fmt: skip
def test_flags_of_the_gateway_are_guards_in_their_order(outcome: Outcome, guard: str) -> None:
    assert guards.local_guard(outcome, policy()) == guard
