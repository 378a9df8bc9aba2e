"""Provider and operator rules: what they see, which one wins, what the linter says of them, the dry run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policy_service.domain.catalogue import (
    Catalogue,
    ErrorRule,
    HeaderCondition,
    OperatorRule,
    Provider,
    RestatementRule,
)
from policy_service.domain.classification import classify, resolve
from policy_service.domain.decision_record import DecisionRecord
from policy_service.domain.ids import AuthClass
from policy_service.domain.outcome import Outcome
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import Policy
from policy_service.domain.rule_linter import LEVELS, STATUSES_WITH_PATH, Finding, is_accepted, lint, lint_provider
from policy_service.domain.rules import header_holds, operator_match, pre_check_match
from policy_service.settings.provider_data import builtin_providers

ZERO = HeaderCondition(("x",), "0")
BUSY = ErrorRule("busy", frozenset({429}), "quota_exhausted", "connection", body_any=("busy",))


def provider(*rules: ErrorRule, **fields: Any) -> Provider:
    return Provider("acme", auth_class=AuthClass.API_KEY, error_rules=rules, **fields)


def outcome(status: int, text: str = "", **fields: Any) -> Outcome:
    headers = tuple(fields.pop("headers", {}).items())
    return parse_outcome(RawOutcome(status=status, provider="acme", body=text, headers=headers, **fields))


def decide(entry: Provider, failure: Outcome, *operator_rules: OperatorRule) -> DecisionRecord:
    policy = Policy(Catalogue(providers={entry.id: entry}, operator_rules=operator_rules)).for_connection(entry.id)
    return resolve(classify(failure, policy, 0), 0, policy)


def operator_rule(match: str = "busy", status: int = 429, **fields: Any) -> OperatorRule:
    return OperatorRule(**{"provider": "acme", "status": status, "match": match, "scope": "connection", **fields})


# --- visibility and order -------------------------------------------------------------------------------------------
def test_a_text_rule_is_blind_until_flag_pre_check_or_an_operator_rule_opens_its_eyes() -> None:
    busy = outcome(429, "busy")
    assert decide(provider(BUSY), busy).rule_id is None
    assert decide(provider(BUSY, full_text_rules=True), busy).rule_id == "busy"
    assert decide(provider(replace(BUSY, pre_check=True)), busy).rule_id == "busy"
    assert decide(provider(BUSY), busy, operator_rule("never seen")).rule_id == "busy"


def test_a_blind_rule_still_sees_the_structured_code() -> None:
    assert decide(provider(BUSY), outcome(429, "x", code="BUSY_NOW")).rule_id == "busy"


def test_the_scope_is_a_label_until_it_is_honoured() -> None:
    busy = outcome(429, "busy")
    label = decide(provider(BUSY, full_text_rules=True), busy)
    honoured = decide(provider(BUSY, full_text_rules=True, honors_rule_scope=True), busy)
    assert (label.rule_scope, label.rule_scope_honored) == ("connection", False)
    assert (honoured.rule_scope, honoured.rule_scope_honored) == ("connection", True)


def test_operator_rules_go_before_the_catalogue_and_the_first_one_wins() -> None:
    entry = provider(replace(BUSY, cooldown_ms=1_000), full_text_rules=True)
    rules = (operator_rule("is busy", cooldown_ms=7_000), operator_rule("busy", cooldown_ms=9_000))
    assert decide(entry, outcome(429, "all is busy"), *rules).cooldown_ms == 7_000
    assert decide(entry, outcome(429, "busy"), *rules).cooldown_ms == 9_000
    assert decide(entry, outcome(429, "busy")).cooldown_ms == 1_000


def test_a_rule_cooldown_beats_the_stated_wait_and_a_rule_without_one_does_not() -> None:
    busy = outcome(429, "busy", headers={"retry-after": "60"})
    assert decide(provider(), busy, operator_rule(cooldown_ms=5_000)).cooldown_ms == 5_000
    without = decide(provider(), busy, operator_rule())
    assert (without.cooldown_ms, without.new_backoff_level, without.reason) == (60_000, 0, "quota_exhausted")


def test_a_honoured_403_rule_without_cooldown_takes_the_ladder_and_ignores_the_stated_wait() -> None:
    refused = outcome(403, "busy", headers={"retry-after": "60"})
    said = decide(provider(), refused, operator_rule(status=403))
    assert (said.cooldown_ms, said.new_backoff_level, said.rule) == (3_000, 1, "forbidden-rule")


def test_a_rule_without_a_cooldown_leaves_a_status_its_fixed_one() -> None:
    said = decide(provider(), outcome(404, "tenant is parked"), operator_rule("parked", 404))
    assert (said.rule_id, said.cooldown_ms) == ("operator-rule-1", 120_000)


@pytest.mark.parametrize("status", [401, 402, 404, 406, 408, 500, 502, 503, 504, 400, 403, 429])
def test_an_operator_rule_reaches_every_status_with_a_path(status: int) -> None:
    said = decide(provider(), outcome(status, "tenant is parked"), operator_rule("parked", status, cooldown_ms=1))
    assert (said.cooldown_ms, said.rule_scope, said.rule_scope_honored) == (1, "connection", True)


@pytest.mark.parametrize("status", [405, 409, 410, 413, 422, 501, 529])
def test_other_statuses_have_no_path(status: int) -> None:
    assert decide(provider(), outcome(status, "tenant is parked"), operator_rule("parked", status)).rule_id is None


def test_a_cooldown_from_the_text_needs_the_text() -> None:
    rule = replace(BUSY, cooldown_from_text=True, pre_check=True)
    assert decide(provider(rule), outcome(429, "busy, resets in 2 hours")).cooldown_ms == 7_200_000
    assert decide(provider(rule), outcome(429, "busy")).rule_id is None


def test_all_texts_of_body_all_must_stand_in_the_text() -> None:
    rule = replace(BUSY, body_any=(), body_all=("busy", "plan"), pre_check=True)
    assert decide(provider(rule), outcome(429, "plan is busy")).rule_id == "busy"
    assert decide(provider(rule), outcome(429, "busy")).rule_id is None


@pytest.mark.parametrize(
    ("value", "holds"), [("a=0,b=4", True), ("a=4, b=0", True), ("a=10", False), ("a=0.0", True), ("a=zero", False)]
)
def test_a_zero_pair_is_any_pair_with_zero_left(value: str, holds: bool) -> None:
    assert header_holds(HeaderCondition(("left",), zero_pair=True), {"left": value}) is holds


def test_an_equal_header_must_be_equal() -> None:
    condition = HeaderCondition(("left", "rest"), equals="0")
    assert header_holds(condition, {"rest": " 0 "})
    assert not header_holds(condition, {"rest": "10"})


def test_a_match_says_whose_rule_it_is() -> None:
    rules_of = Policy(Catalogue({"acme": provider(replace(BUSY, pre_check=True))}, operator_rules=(operator_rule(),)))
    policy, failure = rules_of.for_connection("acme"), outcome(429, "busy")
    own, shipped = operator_match(failure, policy, "busy"), pre_check_match(failure, policy, "busy")
    assert own is not None
    assert shipped is not None
    assert (own.by_operator, shipped.by_operator, shipped.id) == (True, False, "busy")


def test_a_code_that_a_rule_names_is_enough_whatever_its_texts() -> None:
    coded = provider(replace(BUSY, codes=("c1",), pre_check=True))
    policy = Policy(Catalogue({"acme": coded})).for_connection("acme")
    assert pre_check_match(outcome(429, code="C1"), policy, "idle") is not None
    assert pre_check_match(outcome(429, type="c1"), policy, "idle") is not None
    assert pre_check_match(outcome(429, code="c2"), policy, "idle") is None


# --- linter -----------------------------------------------------------------------------------------------------------
def codes(*rules: OperatorRule, providers: dict[str, Provider] | None = None) -> list[str]:
    return [finding.code for finding in lint({"acme": provider()} if providers is None else providers, rules)]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (operator_rule(), []),
        (operator_rule(" "), ["empty_match"]),
        (operator_rule(status=600), ["bad_status"]),
        (operator_rule(status=99), ["bad_status"]),
        (operator_rule(status=410), ["no_path"]),
        (operator_rule(scope="provider"), ["scope_provider"]),
        (operator_rule(status=100), ["no_path"]),
        (operator_rule(status=599), ["no_path"]),
        (operator_rule(provider="acne"), ["unknown_provider"]),
        (operator_rule("account_deactivated now"), ["taken_earlier"]),
        (operator_rule("Endpoint has moved"), ["taken_earlier"]),
        (operator_rule("the model has been retired"), ["taken_earlier"]),
        (operator_rule("weekly usage limit"), ["taken_earlier"]),
        (operator_rule("session limit reached"), ["taken_earlier"]),
        (operator_rule("insufficient credits", 400), ["taken_earlier"]),
        (operator_rule("insufficient credits", 429), []),
    ],
)
def test_the_linter_names_what_is_wrong_with_an_operator_rule(rule: OperatorRule, expected: list[str]) -> None:
    assert codes(rule) == expected


def test_one_rule_too_many_rejects_the_whole_list() -> None:
    many = [operator_rule(f"busy-{n};") for n in range(51)]
    findings = lint({"acme": provider()}, many)
    assert [finding.code for finding in findings] == ["too_many_rules"]
    assert not is_accepted(findings)
    assert is_accepted(lint({"acme": provider()}, many[:50]))


def test_a_finding_names_a_rule_without_an_id_by_its_place() -> None:
    findings = lint({"acme": provider()}, [operator_rule(""), operator_rule("b"), operator_rule("c", scope="provider")])
    assert [(each.code, each.rule_id) for each in findings if each.code != "shadowed"] == [
        ("empty_match", "operator-rule-1"), ("scope_provider", "operator-rule-3")
    ]  # fmt: skip


def test_a_rule_behind_a_wider_one_is_shadowed_also_across_spellings_of_the_provider() -> None:
    narrow = operator_rule("server busy", provider="ACME")
    assert codes(operator_rule(), narrow) == ["shadowed"]
    assert codes(narrow, operator_rule()) == []
    assert codes(operator_rule(status=500), narrow) == []


@pytest.mark.parametrize(
    ("first", "second", "is_shadowed"),
    [
        (BUSY, replace(BUSY, id="b", body_any=("very busy",)), True),
        (BUSY, replace(BUSY, id="b", body_any=("very busy", "idle")), False),
        (BUSY, replace(BUSY, id="b", body_any=(), body_all=("very busy",)), True),
        (BUSY, replace(BUSY, id="b", body_any=(), body_all=("idle",)), False),
        (replace(BUSY, statuses=frozenset({500})), replace(BUSY, id="b"), False),
        (replace(BUSY, headers=(HeaderCondition(("x",), "0"),)), replace(BUSY, id="b"), False),
        (replace(BUSY, cooldown_from_text=True), replace(BUSY, id="b"), False),
        (replace(BUSY, body_any=()), replace(BUSY, id="b", codes=("busy",)), True),
        (replace(BUSY, body_any=(), body_all=("busy",)), replace(BUSY, id="b", body_any=("idle",)), False),
        (replace(BUSY, headers=(ZERO,)), replace(BUSY, id="b", headers=(ZERO,)), True),
        (replace(BUSY, body_any=(), codes=("c",)), replace(BUSY, id="b", body_any=(), codes=("c",)), True),
        (replace(BUSY, body_any=(), codes=("c",)), replace(BUSY, id="b", body_any=(), codes=("d",)), False),
    ],
)
def test_a_catalogue_rule_is_shadowed_only_where_the_earlier_one_always_matches(
    first: ErrorRule, second: ErrorRule, is_shadowed: bool
) -> None:
    found = lint_provider(provider(first, second, full_text_rules=True, honors_rule_scope=True))
    assert ("shadowed" in [finding.code for finding in found]) is is_shadowed


def test_a_catalogue_rule_behind_an_operator_rule_is_shadowed() -> None:
    found = lint_provider(provider(replace(BUSY, body_any=("very busy",))), [operator_rule()])
    assert [finding.code for finding in found] == ["shadowed"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ["scope_not_honored", "text_not_visible"]),
        ({"pre_check": True}, []),
        ({"body_any": ()}, ["scope_not_honored"]),
        ({"body_any": (), "body_all": ("busy",), "scope": "model"}, ["scope_not_honored", "text_not_visible"]),
        ({"codes": ("busy",), "pre_check": True}, []),
        ({"codes": ("busy",)}, ["scope_not_honored"]),
        ({"scope": "provider", "pre_check": True}, ["scope_provider"]),
        ({"statuses": frozenset({429, 410}), "pre_check": True}, ["no_path"]),
        ({"statuses": frozenset({429, 600}), "pre_check": True}, ["bad_status", "no_path"]),
        ({"statuses": frozenset({100, 429, 599}), "pre_check": True}, ["no_path"]),
        ({"statuses": frozenset({99, 429}), "pre_check": True}, ["bad_status", "no_path"]),
        ({"statuses": frozenset({100, 429}), "pre_check": True}, ["no_path"]),
        ({"body_any": ("busy", "endpoint has moved"), "pre_check": True}, ["taken_earlier"]),
        ({"body_all": ("insufficient credits",), "pre_check": True}, []),
        ({"body_all": ("insufficient credits",), "statuses": frozenset({429, 500}), "pre_check": True},
         ["taken_earlier"]),
    ],
)  # fmt: skip
def test_the_linter_names_what_is_wrong_with_a_catalogue_rule(changed: dict[str, Any], expected: list[str]) -> None:
    found = lint_provider(provider(replace(BUSY, **changed)))
    assert sorted(finding.code for finding in found) == expected


def test_a_flag_or_an_operator_rule_wakes_a_catalogue_rule() -> None:
    def told(*operator_rules: OperatorRule, **flags: bool) -> set[str]:
        return {finding.code for finding in lint_provider(provider(BUSY, **flags), operator_rules)}

    assert told(full_text_rules=True) == {"scope_not_honored"}
    assert told(honors_rule_scope=True) == {"text_not_visible"}
    assert told(operator_rule("other")) == set()


def test_every_status_without_a_step_has_no_path() -> None:
    reached = [status for status in range(100, 600) if codes(operator_rule(status=status)) == []]
    assert reached == [400, 401, 402, 403, 404, 406, 408, 429, 500, 502, 503, 504]


def test_a_restatement_marker_that_means_an_empty_wallet_is_an_error() -> None:
    def with_marker(marker: str) -> list[Finding]:
        rule = RestatementRule("r", frozenset({403}), 429, (marker,))
        return lint_provider(provider(restatement=(rule,)))

    assert [finding.code for finding in with_marker("Insufficient Credits")] == ["generic_marker"]
    assert not is_accepted(with_marker("credits exhausted"))
    assert not is_accepted(with_marker("you have insufficient credits left"))
    assert not is_accepted(with_marker("credits"))
    assert with_marker("额度不足") == []


def test_the_catalogue_that_ships_has_only_the_warnings_of_its_sleeping_rules() -> None:
    findings = lint(builtin_providers())
    assert is_accepted(findings)
    assert {finding.code for finding in findings} == {"text_not_visible", "scope_not_honored"}
    blind = {finding.rule_id for finding in findings if finding.code == "text_not_visible"}
    assert blind == {"cloudflare-ai-daily-neuron-allocation", "opencode-monthly-quota-resets-in"}


def test_every_code_has_a_level_and_every_finding_a_remedy() -> None:
    rules = [operator_rule(" ", 600, scope="provider", provider="x"), operator_rule("account_deactivated", 410)]
    findings = lint({"acme": provider(BUSY)}, rules)
    assert all(finding.remedy and LEVELS[finding.code] == finding.level for finding in findings)


def test_a_rule_of_every_status_that_is_read_has_its_path() -> None:
    rule = replace(BUSY, statuses=STATUSES_WITH_PATH, pre_check=True)
    assert [finding.code for finding in lint_provider(provider(rule, full_text_rules=True), [])] == []


def test_a_catalogue_rule_is_not_shadowed_by_an_operator_rule_of_another_provider() -> None:
    rule = replace(BUSY, statuses=frozenset({429}), pre_check=True)
    providers = {"acme": provider(rule), "acne": replace(provider(), id="acne")}
    assert codes(operator_rule(provider="acne"), providers=providers) == []
    assert codes(operator_rule(), providers=providers) == ["shadowed"]
