"""The tables behind verdicts, said once more in numbers: statuses, rows that stop, distances between words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policy_service.application.classify import classify_record
from policy_service.domain import signals
from policy_service.domain.catalogue import Catalogue, Provider
from policy_service.domain.classification import classify
from policy_service.domain.decision_record import Mode
from policy_service.domain.decision_record import Reason as Cause
from policy_service.domain.error_types import error_type_of
from policy_service.domain.ids import AuthClass
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import Policy
from policy_service.domain.reading import Reading
from policy_service.domain.verdict import ROWS

POLICY = Policy(Catalogue())
NAMED = {400, 401, 402, 403, 408, 413, 420, 422, 424, 429, 432, 451, 499}


def statuses(rule: str) -> set[int]:
    """Statuses whose bare answer gets its verdict by that row."""
    return {status for status in range(100, 600) if verdict(status)["rule"] == rule}


def verdict(status: int) -> dict[str, Any]:
    return classify_record({"provider": "acme", "status": status, "body": ""}, POLICY, 0)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("abort", {499}),
        ("bad-request", {400, 422}),
        ("dead-credential", {401}),
        ("context-overflow", {413}),
        ("region", {451}),
        ("forbidden", {403}),
        ("quota-status-432", {432}),
        ("overloaded", {529}),
        ("server-error", {408, 424, *range(500, 600)} - {529}),
        ("empty-answer", set(range(200, 300))),
        ("other", {*range(100, 499)} - NAMED - {*range(200, 300)}),
    ],
)
def test_a_status_without_a_word_is_judged_by_one_row(rule: str, expected: set[int]) -> None:
    assert statuses(rule) == expected


LONG, LARGE = "this model's maximum context length is 8192", "max_tokens is too large"
UNWELCOME = "this key is only authorized for use with claude code"


@pytest.mark.parametrize(
    ("status", "error", "rule"),
    [
        (400, {"message": LONG, "code": "model_not_found"}, "context-overflow"),
        (422, {"message": LONG, "code": "model_not_found"}, "context-overflow"),
        (400, {"message": LARGE}, "output-too-long"), (422, {"message": LARGE}, "output-too-long"),
        (400, {"message": UNWELCOME}, "client-unwelcome"), (401, {"message": UNWELCOME}, "client-unwelcome"),
        (403, {"message": UNWELCOME}, "client-unwelcome"), (404, {"message": UNWELCOME}, "other"),
        (401, {"message": "model m is not supported"}, "unserved-model"),
        (500, {"message": "x", "code": "model_not_found"}, "unserved-model"),
        (503, {"message": "x", "code": "model_not_found"}, "unserved-model"),
        (400, {"message": "model m is not supported", "code": "invalid_value"}, "unserved-model"),
        (429, {"message": "overloaded"}, "overloaded"), (503, {"message": "overloaded, 5 per minute"}, "overloaded"),
        (429, {"message": "overloaded, 5 per minute"}, "configured"), (498, {"message": "slow down"}, "overloaded"),
        (497, {"message": "slow down"}, "other"),
        (500, {"message": "x", "code": "invalid_api_key"}, "upstream-key"),
        (400, {"message": "tool_use_failed"}, "tool-use-failed"),
        (401, {"message": "tool_use_failed"}, "dead-credential"),
        (403, {"message": "x", "code": "model_not_found"}, "refused-model"),
        (429, {"message": "limit 10, used 0, requested 20"}, "oversized-for-limit"),
        (429, {"message": "limit: 0"}, "never-offered"), (428, {"message": "limit: 0"}, "other"),
    ],
)  # fmt: skip
def test_an_error_is_judged_by_its_row(status: int, error: dict[str, str], rule: str) -> None:
    told = classify_record({"provider": "acme", "status": status, "body": json.dumps({"error": error})}, POLICY, 0)
    assert told["rule"] == rule


GATE, MANY = Provider("gate", credits_text_is_terminal=False), Provider("many", per_model_quota=True)
GATES = Policy(Catalogue({"gate": GATE, "many": MANY}))


@pytest.mark.parametrize(
    ("provider", "status", "message", "rule"),
    [("gate", 403, "insufficient credits", "credits-text"), ("many", 402, "x", "configured")],
)
def test_payment_that_leaves_other_models_open_is_a_share_of_the_model_or_of_the_connection(
    provider: str, status: int, message: str, rule: str
) -> None:
    asked = {"provider": provider, "status": status, "body": json.dumps({"error": {"message": message}})}
    told = [classify_record({**asked, "model": model}, GATES, 0) for model in ("m", "")]
    assert [(each["scope"], each["reason"], each["rule"]) for each in told] == [
        ("model_lockout", "quota_exhausted", rule), ("connection_cooldown", "quota_exhausted", rule)
    ]  # fmt: skip


def test_payment_asked_for_without_a_word_empties_the_wallet() -> None:
    told = classify_record({"provider": "acme", "status": 402, "body": ""}, POLICY, 0)
    assert (told["scope"], told["terminal"]) == ("connection_terminal", "credits_exhausted")


def test_a_wallet_that_models_share_is_emptied_by_a_402_alone() -> None:
    wallet = Provider("w", per_model_quota=True, shared_wallet_402=True)
    policy = Policy(Catalogue({"w": wallet}))
    told = [classify_record({"provider": "w", "status": s, "body": "", "model": "m"}, policy, 0) for s in (402, 403)]
    assert [each["terminal"] for each in told] == ["credits_exhausted", "banned"]


@pytest.mark.parametrize(
    ("name", "reason"), [("x-a", "rate_limit"), ("anthropic-ratelimit-unified-5h-status", "quota_exhausted")]
)
def test_a_window_is_rejected_by_its_own_header(name: str, reason: str) -> None:
    asked = {"provider": "acme", "status": 429, "body": "", "headers": {name: "rejected"}}
    assert classify_record(asked, POLICY, 0)["reason"] == reason


@pytest.mark.parametrize(("wait_ms", "reason"), [(3_599_999, "rate_limit"), (3_600_000, "quota_exhausted")])
def test_words_of_a_day_count_beside_a_wait_of_an_hour(wait_ms: int, reason: str) -> None:
    body = json.dumps({"error": {"message": "tokens per day", "retry_after_ms": wait_ms}})
    assert classify_record({"provider": "acme", "status": 429, "body": body}, POLICY, 0)["reason"] == reason


@pytest.mark.parametrize(("status", "fallback"), [(400, True), (500, False), (503, False)])
def test_what_is_about_one_request_is_tried_elsewhere_unless_the_service_failed(status: int, fallback: bool) -> None:
    body = json.dumps({"error": {"message": "x", "code": "heap_pressure"}})
    told = classify_record({"provider": "acme", "status": status, "body": body}, POLICY, 0)
    assert (told["rule"], told["fallback"]) == ("request-scoped", fallback)


@pytest.mark.parametrize(("wait_ms", "reason"), [(86_399_999, "rate_limit"), (86_400_000, "quota_exhausted")])
def test_a_wait_of_a_day_is_an_allowance_of_a_period(wait_ms: int, reason: str) -> None:
    body = json.dumps({"error": {"message": "x", "retry_after_ms": wait_ms}})
    assert classify_record({"provider": "acme", "status": 429, "body": body}, POLICY, 0)["reason"] == reason


def test_rows_after_which_no_other_account_is_tried() -> None:
    assert [row.id for row in ROWS if not row.fallback] == [
        "abort", "own-key-policy", "local-fault", "request-resource", "content-policy", "by-guard", "request-scoped",
        "bad-request",
    ]  # fmt: skip


def test_rows_to_which_a_stated_wait_means_nothing() -> None:
    assert [row.id for row in ROWS if not row.states_wait] == [
        "abort", "input-bound", "content-policy", "oversized-for-limit", "output-too-long", "context-overflow",
        "tool-use-failed", "retired-model", "never-offered", "bad-request",
    ]  # fmt: skip


def test_rows_that_end_an_account() -> None:
    assert {row.id: row.terminal for row in ROWS if row.terminal} == {
        "by-ban": "banned", "by-wallet": "credits_exhausted", "dead-credential": "expired",
        "by-dead-account": "banned", "forbidden": "banned",
    }  # fmt: skip


CLASSES = {
    (Mode.FIXED, Cause.UNKNOWN, "bad-request"): {400, 422},
    (Mode.FIXED, Cause.AUTH_ERROR, "configured"): {401},
    (Mode.FIXED, Cause.QUOTA_EXHAUSTED, "configured"): {402, 403},
    (Mode.FIXED, Cause.UNKNOWN, "configured"): {404},
    (Mode.LADDER, Cause.SERVER_ERROR, "configured"): {406, 408, 500, 502, 503, 504},
    (Mode.LADDER, Cause.MODEL_CAPACITY, "capacity-status"): {413, 529},
    (Mode.LADDER, Cause.RATE_LIMIT_EXCEEDED, "configured"): {429},
    (Mode.FIXED, Cause.QUOTA_EXHAUSTED, "quota-status-432"): {432},
}


def test_a_status_without_a_word_has_one_class() -> None:
    found: dict[tuple[Mode, Cause, str], set[int]] = {}
    for status in range(400, 600):
        known = classify(parse_outcome(RawOutcome(status=status)), POLICY.for_connection("acme", "c"), 0)
        found.setdefault((known.mode, Cause(known.reason), known.rule), set()).add(status)
    others = found.pop((Mode.FIXED, Cause.UNKNOWN, "any-other"))
    assert found == CLASSES
    assert others == set(range(400, 600)).difference(*CLASSES.values())


@pytest.mark.parametrize(
    ("family", "first", "second", "most"),
    [
        (signals.BAN_EXTENDED, "consumer '", "has been suspended", 120),
        (signals.BILLING_SUSPENSION, "suspended", "spending limit", 120),
        (signals.BILLING_SUSPENSION, "suspended", "billing", 120),
        (signals.BILLING_SUSPENSION, "suspended", "invoice", 120),
        (signals.BILLING_SUSPENSION, "suspended", "payment", 120),
        (signals.BROWSER_BLOCK, "sentinel", "blocked", 80),
        (signals.CREDITS_EXTENDED, "run out of", "credits", 12),
        (signals.CREDITS_EXTENDED, "ran out of", "credits", 12),
        (signals.MODEL_PERMISSION, "access", "model", 60),
        (signals.MODEL_PERMISSION, "permission", "model", 60),
        (signals.MODEL_UNSERVED, "unsupported", "model", 80),
        (signals.NIM_DEGRADED, "function", "degraded", 80),
        (signals.OVERFLOW_CERTAIN, "input length", "exceeds the maximum length", 24),
        (signals.OVERFLOW_CERTAIN, "input token count", "exceeds the maximum", 24),
        (signals.OVERFLOW_CERTAIN, "expected maxlength", "actual", 24),
        (signals.OVERFLOW_CERTAIN, "prompt token count", "exceeds the limit", 24),
        (signals.PARAMETER, "max_tokens", "illegal", 80),
        (signals.PARAMETER, "max_tokens", "must be", 80),
        (signals.PARAMETER, "max_tokens", "range", 80),
        (signals.REQUEST_RESOURCE, "vector store", "not found", 160),
        (signals.REQUEST_RESOURCE, "upload", "does not exist", 160),
        (signals.CREDENTIAL_FAILURE, "api key", "invalid", 3),
    ],
)
def test_two_words_mean_something_up_to_a_distance(family: signals.Family, first: str, second: str, most: int) -> None:
    assert family.found_in(first + "." * most + second)
    assert family.found_in(second + "." * most + first)
    assert not family.found_in(first + "." * (most + 1) + second)
    assert not family.found_in(second + "." * (most + 1) + first)


@pytest.mark.parametrize(
    ("family", "words", "most"),
    [
        (signals.MALFORMED, ("invalid", "message", "format"), 80),
        (signals.PARAMETER_EXTENDED, ("key", "not permitted"), 60),
        (signals.PARAMETER_EXTENDED, ("property", "not allowed"), 60),
        (signals.PARAMETER_EXTENDED, ("field", "not_permitted"), 60),
    ],
)
def test_words_in_order_mean_something_up_to_a_distance(
    family: signals.Family, words: tuple[str, ...], most: int
) -> None:
    assert family.found_in(("." * most).join(words))
    assert not family.found_in(("." * (most + 1)).join(words))
    assert not family.found_in(("." * most).join(reversed(words)))


def test_every_distance_of_a_family_is_the_same() -> None:
    families = {name: getattr(signals, name) for name in signals.__all__}
    distances = {
        name: {near[2] for near in family.near} | {chain[1] for chain in family.chains}
        for name, family in families.items()
        if isinstance(family, signals.Family) and (family.near or family.chains)
    }
    assert all(len(each) == 1 for each in distances.values()), distances


# -- the matcher ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "holds"),
    [("ab", True), ("a b", True), ("a\nb", False), ("ba", False), ("b a\na b", True), ("a a b", True), ("a\n", False)],
)
def test_a_line_is_searched_behind_its_first_word(text: str, holds: bool) -> None:
    assert signals.later_on_line(text, "a", "b") is holds


def test_words_do_not_overlap_each_other() -> None:
    assert not signals.later_on_line("abab"[:3], "ab", "ba")
    assert not signals.within("aba", "ab", "ba", 5)
    assert signals.within("abba", "ab", "ba", 0)
    assert signals.within("baab", "ab", "ba", 0)
    assert signals.within("ab....ab.ba", "ab", "ba", 1)
    assert signals.within("b.....a.b", "a", "b", 1)
    assert not signals.in_order("aba", ("ab", "ba"), 5)
    assert signals.in_order("ab.....ab.ba", ("ab", "ba"), 1)
    assert not signals.in_order("ab", ("ab", "cd"), 1)


def test_a_mark_of_retirement_may_begin_the_text() -> None:
    assert signals.is_retired("no longer available: the model m")
    assert not signals.is_retired("no longer available. the model m is")


@pytest.mark.parametrize(("gap", "found"), [(395, True), (396, False)])
def test_a_sentence_reaches_400_characters_before_and_behind_the_mark(gap: int, found: bool) -> None:
    mark = "has been retired"
    assert signals.is_retired("model" + "x" * gap + mark) is found
    assert signals.is_retired(mark + "x" * (gap - len(mark)) + "model") is found


def test_a_spent_allowance_has_its_type_under_each_status_of_an_account() -> None:
    policy = POLICY.for_connection("acme", "c")
    for status in (400, 401, 402, 403):
        outcome = parse_outcome(RawOutcome(status=status, message="insufficient credits"))
        assert error_type_of(Reading(outcome, policy, 0)) == "quota_exhausted", status


@pytest.mark.parametrize(
    ("status", "message", "auth", "kind"),
    [
        (500, "x", None, "server_error"), (499, "x", None, ""), (400, UNWELCOME, None, "fingerprint_rejection"),
        (401, UNWELCOME, None, "fingerprint_rejection"), (403, UNWELCOME, None, "fingerprint_rejection"),
        (429, "x", AuthClass.OAUTH, "rate_limited"), (429, "daily quota exceeded", AuthClass.API_KEY, "rate_limited"),
        (429, "daily quota exceeded", AuthClass.OAUTH, "quota_exhausted"),
    ],
)  # fmt: skip
def test_the_type_of_an_error_by_status_and_wording(
    status: int, message: str, auth: AuthClass | None, kind: str
) -> None:
    reading = Reading(
        parse_outcome(RawOutcome(status=status, message=message)), POLICY.for_connection("a", "", auth), 0
    )
    assert error_type_of(reading) == kind
