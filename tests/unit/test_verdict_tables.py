"""The tables behind verdicts, said once more in numbers: statuses, rows that stop, distances between words."""

from __future__ import annotations

from typing import Any

import pytest

from policy_service.application.classify import classify_record
from policy_service.domain import signals
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.classification import classify
from policy_service.domain.decision_record import Mode
from policy_service.domain.decision_record import Reason as Cause
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import Policy
from policy_service.domain.verdict import ROWS

POLICY = Policy(Catalogue())
NAMED = {400, 401, 402, 403, 408, 409, 411, 413, 414, 415, 416, 417, 420, 422, 424, 429, 431, 432, 451, 499}


def statuses(rule: str) -> set[int]:
    """Statuses whose bare answer gets its verdict by that row."""
    return {status for status in range(100, 600) if verdict(status)["rule"] == rule}


def verdict(status: int) -> dict[str, Any]:
    return classify_record({"provider": "acme", "status": status, "body": ""}, POLICY, 0)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("abort", {499}),
        ("bad-request", {400, 409, 411, 414, 415, 416, 417, 422, 431}),
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
