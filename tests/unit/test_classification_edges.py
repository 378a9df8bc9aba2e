"""Conditions of the pipeline over every status; a verdict becomes a duration (spec/classification.md 2 to 6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from policy_service.domain import classification_conditions as on
from policy_service.domain import signals
from policy_service.domain.catalogue import Catalogue, Connection, ErrorRule, Provider
from policy_service.domain.classification import classify, resolve, rotation_blocks
from policy_service.domain.decision_record import Classification, DecisionRecord, Hint, Mode, Reason
from policy_service.domain.error_types import reason_label
from policy_service.domain.ids import AuthClass, HintSource
from policy_service.domain.outcome import Outcome, UsageCounters
from policy_service.domain.policy import ConnectionPolicy, Policy
from policy_service.domain.profiles import RotationProfile
from policy_service.domain.reading import Reading

NOW = 1_780_315_200_000  # 2026-06-01 12:00 UTC
DAY, HOUR = 86_400_000, 3_600_000
STATUSES = range(399, 601)


def policy(auth: AuthClass = AuthClass.API_KEY, own: dict[str, Any] | None = None, **provider: Any) -> ConnectionPolicy:
    entry = Provider(id="acme", auth_class=auth, **provider)
    return Policy(Catalogue({"acme": entry}, {"c": Connection("c", "acme", **(own or {}))})).for_connection("acme", "c")


def reading(text: str = "x", status: int | None = 400, using: ConnectionPolicy | None = None, **more: Any) -> Reading:
    return Reading(Outcome(status, text=text, message=text, **more), using or policy(), NOW)


def holds_at(condition: Callable[[Reading], bool], text: str = "x", **more: Any) -> set[int]:
    return {status for status in STATUSES if condition(reading(text, status, **more))}


def name_of(value: object) -> str | None:
    """Test id of a condition: the same whether it is bound to statuses or not."""
    return getattr(getattr(value, "claim", None), "__name__", None)


def word(family: signals.Family) -> str:
    """A wording of a family."""
    if family.phrases:
        return family.phrases[0]
    return " ".join(family.lines[0] if family.lines else family.near[0][:2] if family.near else family.chains[0][0])


ALL = set(STATUSES)
FALLBACK_HINT = {"x-omni-fallback-hint": " Connection_Cooldown "}


@pytest.mark.parametrize(
    ("condition", "text", "more", "statuses"),
    [
        (on.is_contract_violation, "x", {"code": "EXECUTOR_CONTRACT_VIOLATION"}, ALL),
        (on.is_foreign_binding, "previous_response_id does not belong to you", {}, {409}),
        (on.is_foreign_binding, "x", {"code": "invalid_previous_response_binding"}, ALL),
        (on.is_not_running, "x", {"headers": FALLBACK_HINT}, {503}),
        (on.is_not_running, "x", {"headers": {"x-omni-fallback-hint": "other"}}, set()),
        (on.is_retired_model, "x", {"code": "model_decommissioned"}, ALL),
        (on.is_retired_model, "the model m has been retired", {}, {404, 410}),
        (on.returns_by_itself, "limit used; resets in 5 hours", {}, {402, 403}),
        (on.returns_by_itself, "limit used; try again in 5 hours", {}, set()),
        (on.is_route_refused, word(signals.ROUTE_NOT_AUTHORIZED), {}, {403}),
        (on.is_key_403, "x", {}, {403}),
        (on.is_key_403, word(signals.FORBIDDEN_QUOTA_EXCEPTIONS), {}, set()),
        (on.is_cloudflare_refusal, word(signals.CLOUDFLARE_NO_RETRY), {}, {403}),
        (on.is_model_forbidden, word(signals.MODEL_ENTITLEMENT), {}, {403}),
        (on.is_model_forbidden, "x", {"code": "model_not_found"}, {403}),
        (on.is_model_forbidden, "x", {"type": "model_not_found"}, {403}),
        (on.is_credential_refusal, word(signals.CREDENTIAL_CODES), {}, {400, 403}),
        (on.is_credential_refusal, "x", {"type": word(signals.CREDENTIAL_CODES)}, {400, 403}),
        (on.is_credential_refusal, "x", {}, set()),
        (on.is_throttled, "x", {"code": sorted(signals.THROTTLING_CODES)[0]}, {400}),
        (on.is_throttled, "x", {"type": sorted(signals.THROTTLING_CODES)[0]}, {400}),
        (on.is_inner_request_error, word(signals.OVERFLOW_CERTAIN), {}, set(range(500, 601))),
        (on.is_period_quota, "x", {"code": "quota_exceeded"}, {400, 401, 402, 403}),
        (on.is_period_quota, "x", {"type": "quota_exceeded"}, {400, 401, 402, 403}),
        (on.is_period_quota, word(signals.PERIOD_QUOTA_EXTENDED), {}, {400, 401, 402, 403}),
        (on.is_about_this_request, word(signals.OVERFLOW_CERTAIN), {}, {400, 422}),
        (on.is_bad_request_status, "x", {}, {400, 422}),
        (on.is_structured_model, "x", {"code": "model_not_found"}, {400, 422}),
        (on.is_structured_model, "x", {"type": "not_found_error"}, {400, 422}),
        (on.is_structured_model, "of a model", {"type": "permission_error"}, {400, 422}),
        (on.is_structured_model, "of a file", {"type": "permission_error"}, set()),
        (on.is_structured_model, "of a model", {"type": "other"}, set()),
        (on.says(signals.MALFORMED), word(signals.MALFORMED), {}, {400, 422}),
        (on.says_of_account(signals.RATE_WORDS_400), word(signals.RATE_WORDS_400), {}, {400, 422}),
        (on.is_model_access, word(signals.MODEL_UNSERVED_EXTENDED), {}, {400, 422}),
        (on.is_model_access, "access denied to this model", {}, {400, 422}),
        (on.is_model_access, "access denied to this file", {}, set()),
        (on.is_model_access, f"access denied to this model: {word(signals.CREDENTIAL_FAILURE)}", {}, set()),
    ],
    ids=name_of,
)  # fmt: skip
def test_a_condition_holds_under_its_statuses_alone(
    condition: Callable[[Reading], bool], text: str, more: dict[str, Any], statuses: set[int]
) -> None:
    assert holds_at(condition, text, **more) == statuses


@pytest.mark.parametrize(
    ("meaning", "condition", "statuses"),
    [
        ("banned", on.is_ban, ALL), ("credits", on.is_credits_beyond, ALL), ("period_quota", on.is_period_quota, ALL),
        ("entitlement", on.is_model_forbidden, {403}), ("credential", on.is_credential_refusal, ALL),
        ("rate_limit", on.is_throttled, ALL - {429}), ("overloaded", on.is_overload_code, ALL - {429}),
    ],
)  # fmt: skip
def test_a_meaning_of_the_catalogue_holds_under_its_statuses(
    meaning: str, condition: Callable[[Reading], bool], statuses: set[int]
) -> None:
    using = policy(code_meanings={"k": meaning})
    assert holds_at(condition, code="k", using=using) == statuses
    assert holds_at(condition, code="other", using=using) == set()


@pytest.mark.parametrize("auth", [AuthClass.OAUTH, AuthClass.LOCAL, AuthClass.NONE])
def test_only_a_key_is_forbidden_as_a_key(auth: AuthClass) -> None:
    assert holds_at(on.is_key_403, using=policy(auth)) == set()


def test_a_rule_is_asked_before_the_limit_under_a_429_alone() -> None:
    rule = ErrorRule("r", frozenset({428, 429, 430}), "quota_exhausted", "connection", pre_check=True)
    assert holds_at(on.is_429_pre_check, using=policy(error_rules=(rule,))) == {429}


def test_a_rule_of_a_403_needs_a_match_and_a_scope_that_is_honoured() -> None:
    rules = (ErrorRule("r", frozenset({403, 404}), "quota_exhausted", "connection", codes=("k",)),)
    for honours, code, statuses in ((True, "k", {403}), (False, "k", set()), (True, "other", set())):
        using = policy(error_rules=rules, honors_rule_scope=honours)
        assert holds_at(on.is_403_rule, code=code, using=using) == statuses


def test_a_request_that_is_too_long_says_nothing_of_rates_and_capacity() -> None:
    assert on.configured_row(reading(f"{word(signals.OVERFLOW_CERTAIN)}, too many requests")) is None
    assert on.configured_row(reading("too many requests")) is not None


def test_a_fixed_verdict_keeps_the_wait_that_was_stated() -> None:
    known = classify(Outcome(413, headers={"retry-after": "7"}), policy(), 0)
    fixed = classify(Outcome(400, headers={"retry-after": "7"}), policy(), 0)
    assert [(each.mode, each.hint and each.hint.wait_ms) for each in (known, fixed)] == [
        (Mode.LADDER, 7_000), (Mode.FIXED, 7_000)
    ]  # fmt: skip


def test_the_label_of_a_failure_is_that_of_its_text_before_that_of_its_status() -> None:
    assert reason_label(Outcome(500, text="too many requests")) == Reason.RATE_LIMIT_EXCEEDED
    assert reason_label(Outcome(500)) == Reason.SERVER_ERROR


def test_configured_statuses_have_their_row() -> None:
    ladder, none = Mode.LADDER, (None, None, None)
    expected = {
        401: (Reason.AUTH_ERROR, Mode.FIXED, 0), 402: (Reason.QUOTA_EXHAUSTED, Mode.FIXED, 0),
        403: (Reason.QUOTA_EXHAUSTED, Mode.FIXED, 0), 404: (Reason.UNKNOWN, Mode.FIXED, 120_000),
        429: (Reason.RATE_LIMIT_EXCEEDED, ladder, 0),
        **dict.fromkeys((406, 408, 500, 502, 503, 504), (Reason.SERVER_ERROR, ladder, 0)),
    }  # fmt: skip
    for status in STATUSES:
        assert (on.configured_row(reading("x", status)) or none) == expected.get(status, none), status
    assert on.configured_row(reading("x", None)) is None


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("no credentials", (Reason.AUTH_ERROR, Mode.FIXED, 120_000)),
        ("request not allowed", (Reason.RATE_LIMIT_EXCEEDED, Mode.FIXED, 5_000)),
        ("improperly formed request", (Reason.MODEL_CAPACITY, Mode.FIXED, 0)),
        (word(signals.RATE_TEXT), (Reason.RATE_LIMIT_EXCEEDED, Mode.LADDER, 0)),
        (word(signals.QUOTA_TEXT), (Reason.QUOTA_EXHAUSTED, Mode.LADDER, 0)),
        (word(signals.CAPACITY_TEXT), (Reason.MODEL_CAPACITY, Mode.LADDER, 0)),
    ],
)
def test_configured_texts_have_their_row_whatever_the_status(text: str, row: tuple[Reason, Mode, int]) -> None:
    for status in (400, 418, 500):
        assert on.configured_row(reading(text, status)) == row
    assert on.configured_row(reading(text, 429)) == (Reason.RATE_LIMIT_EXCEEDED, Mode.LADDER, 0)
    assert on.text_reason(text) is row[0]
    assert on.text_reason("nothing of that") is None


@pytest.mark.parametrize(
    ("host", "text", "usage", "model", "status", "window"),
    [
        ("acme.example", "acme.example per_day x", None, "m", 429, "day"),
        ("acme.example", "acme.example token_count", None, "m", 429, "minute"),
        ("acme.example", "acme.example token_count", None, "", 429, ""),
        ("acme.example", "acme.example x_requests", None, "m", 429, "minute"),
        ("acme.example", "token_count", None, "m", 429, ""), ("acme.example", "acme.example", None, "m", 429, ""),
        (None, "acme.example token_count", UsageCounters(day=True), "m", 429, ""),
        ("acme.example", "x", UsageCounters(day=True, minute=True), "m", 429, "day"),
        ("acme.example", "x", UsageCounters(minute=True), "m", 429, "minute"),
        ("acme.example", "x", UsageCounters(token=True), "m", 429, "minute"),
        ("acme.example", "x", UsageCounters(), "m", 429, ""),
        ("acme.example", "x", UsageCounters(day=True), "", 429, ""),
        ("acme.example", "x", UsageCounters(day=True), "m", 428, ""),
        ("acme.example", "x", UsageCounters(day=True), "m", 430, ""),
    ],
)  # fmt: skip
def test_the_window_that_is_spent(
    host: str | None, text: str, usage: UsageCounters | None, model: str, status: int, window: str
) -> None:
    day = word(signals.PER_DAY_METRIC)
    using = policy(quota_metrics_host=host)
    assert on.metric(reading(text.replace("per_day", day), status, using, usage=usage, model=model)) == window


def test_an_answer_alone_was_one_to_a_model() -> None:
    using = policy(quota_metrics_host="acme.example")
    assert on.metric(reading("acme.example token_count", 429, using, is_model_untold=True)) == "minute"


def test_an_operators_own_ban_texts_are_believed_but_blank_ones_are_not() -> None:
    assert on.is_ban_text("you are out", ("OUT",))
    assert not on.is_ban_text("you are out", (" ", ""))
    assert on.is_ban_text(word(signals.BAN))
    assert on.is_ban_text(word(signals.BAN_EXTENDED))


# -- rotation ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("enabled", "status", "failures", "switched", "threshold", "blocks"),
    [
        (False, 429, 0, True, 2, False), (True, None, 0, True, 2, False), (True, 418, 0, True, 2, False),
        (True, 429, 1, True, 2, True), (True, 429, 2, True, 2, False), (True, 429, 9, False, 2, True),
        (True, 429, 0, True, None, True), (True, 429, 1, True, None, False),
    ],
)  # fmt: skip
def test_the_rotation_gate(
    enabled: bool, status: int | None, failures: int, switched: bool, threshold: int | None, blocks: bool
) -> None:
    gate = RotationProfile(
        enabled=enabled, on_status={429: switched}, threshold={} if threshold is None else {429: threshold}
    )
    assert rotation_blocks(replace(policy(), rotation=gate), status, failures) is blocks


# -- durations -----------------------------------------------------------------------------------------------
HINT = Hint(7_000, HintSource.HEADER, NOW + 7_000)
BASE = replace(policy().ladder, base_cooldown_ms=3_000, max_backoff_steps=15, honor_upstream_hints=True, cap_ms=DAY)


def resolved(level: int = 2, honors: bool = True, override: int = 0, **found: Any) -> tuple[Any, ...]:
    using = policy()
    using = replace(
        using,
        ladder=replace(BASE, honor_upstream_hints=honors),
        rotation=replace(using.rotation, rate_limit_reset_ms=override),
    )
    made = resolve(Classification("r", **({"reason": Reason.UNKNOWN} | found)), level, using)
    return (
        made.cooldown_ms,
        made.base_cooldown_ms,
        made.new_backoff_level,
        made.used_upstream_retry_hint,
        made.retry_hint_source,
    )


LADDER = {"mode": Mode.LADDER}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"fixed_ms": 5}, (5, 5, None, False, None)),
        ({"fixed_ms": 5, "new_level": 0}, (5, 5, 0, False, None)),
        ({"fixed_ms": 5, "hint": HINT}, (5, 5, None, False, None)),
        ({"fixed_ms": 5, "hint": HINT, "uses_hint_always": True}, (7_000, 7_000, None, True, HintSource.HEADER)),
        ({"fixed_ms": 5, "uses_hint_always": True}, (5, 5, None, False, None)),
        ({"fixed_ms": 5, "hint": HINT, "quota_reset_hint_ms": 7_000}, (5, 5, None, False, HintSource.HEADER)),
        ({"fixed_ms": 5, "hint": HINT, "quota_reset_hint_ms": 7_001}, (5, 5, None, False, None)),
        ({"configured_cooldown_ms": 9, "hint": HINT, **LADDER}, (9, 9, None, False, None)),
        ({"configured_cooldown_ms": 0, "fixed_ms": 5}, (0, 0, None, False, None)),
        ({"hint": HINT, **LADDER}, (7_000, 3_000, 0, True, HintSource.HEADER)),
        ({"hint": HINT, "honors": False, **LADDER}, (12_000, 3_000, 3, False, None)),
        ({"hint": HINT, "ignore_hint": True, **LADDER}, (12_000, 3_000, 3, False, None)),
        (LADDER, (12_000, 3_000, 3, False, None)),
        ({**LADDER, "override": 1, "reason": Reason.RATE_LIMIT_EXCEEDED}, (1, 3_000, None, False, None)),
        ({**LADDER, "override": 1}, (12_000, 3_000, 3, False, None)),
        ({**LADDER, "override": 0, "reason": Reason.RATE_LIMIT_EXCEEDED}, (12_000, 3_000, 3, False, None)),
        ({**LADDER, "override": 1, "reason": Reason.RATE_LIMIT_EXCEEDED, "hint": HINT},
         (7_000, 3_000, 0, True, HintSource.HEADER)),
    ],
)  # fmt: skip
def test_a_verdict_becomes_a_duration(asked: dict[str, Any], said: tuple[Any, ...]) -> None:
    assert resolved(**asked) == said


CARRIED = (
    "permanent", "credits_exhausted", "daily_quota_exhausted", "rule_scope_honored", "exact_quota", "uncapped",
    "skip_provider_breaker", "ambiguous_auth", "returns_by_itself",
)  # fmt: skip


@pytest.mark.parametrize("name", CARRIED)
def test_every_claim_of_a_verdict_is_in_the_record(name: str) -> None:
    for value in (True, False):
        claim: dict[str, Any] = {name: value}
        made = resolve(Classification("r", Reason.UNKNOWN, **claim), 0, policy())
        assert [each for each in CARRIED if getattr(made, each)] == ([name] if value else [])


def test_the_words_of_a_verdict_are_in_the_record() -> None:
    found = Classification(
        "r", Reason.AUTH_ERROR, False, fixed_ms=1, rule_id="id", rule_scope="model", quota_reset_hint_ms=4,
        configured_cooldown_ms=5,
    )  # fmt: skip
    made = resolve(found, 0, policy())
    assert isinstance(made, DecisionRecord)
    assert (made.should_fallback, made.reason, made.rule, made.rule_id, made.rule_scope) == (
        False, Reason.AUTH_ERROR, "r", "id", "model",
    )  # fmt: skip
    assert (made.quota_reset_hint_ms, made.configured_cooldown_ms) == (4, 5)
