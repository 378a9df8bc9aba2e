"""What each row of the pipeline says, said once more: reason, mode, wait and claims (spec/classification.md)."""

from __future__ import annotations

from typing import Any

import pytest

from policy_service.domain.catalogue import Catalogue, OperatorRule, Provider
from policy_service.domain.classification import PIPELINE
from policy_service.domain.decision_record import Mode, Reason
from policy_service.domain.error_types import breaker_kind, reason_label
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import Policy
from policy_service.domain.reading import Reading
from policy_service.domain.rule_linter import STATUSES_WITH_PATH, lint
from policy_service.domain.signals import LOCAL_FAULT
from policy_service.domain.verdict import judge

HOUR = 3_600_000
DAY = 24 * HOUR
POLICY = Policy(Catalogue(providers={"acme": Provider(id="acme")})).for_connection("acme", "c")
Said = tuple[Reason, Mode, int, frozenset[str]]


def row(reason: Reason, mode: Mode = Mode.FIXED, wait_ms: int = 0, *claims: str) -> Said:
    return reason, mode, wait_ms, frozenset(claims)


STOPS, SPENT, LADDER = "no fallback", Reason.QUOTA_EXHAUSTED, Mode.LADDER
FULL = row(Reason.MODEL_CAPACITY)
SAID: dict[str, Said] = {
    "contract-violation": row(Reason.EXECUTOR_CONTRACT_VIOLATION, Mode.FIXED, 0, STOPS, "skip_provider_breaker"),
    "previous-response-binding": row(
        Reason.INVALID_PREVIOUS_RESPONSE_BINDING, Mode.FIXED, 0, STOPS, "skip_provider_breaker"
    ),
    "service-not-running": row(Reason.SERVICE_NOT_RUNNING, Mode.FIXED, 5_000, "skip_provider_breaker"),
    "ban-text": row(Reason.AUTH_ERROR, Mode.FIXED, 365 * DAY, "permanent"),
    "retired-model": row(Reason.NOT_FOUND, Mode.FIXED, DAY, "uncapped"),
    "endpoint-moved": row(Reason.NOT_FOUND, Mode.FIXED, DAY, "uncapped"),
    "billing-suspension": row(SPENT, Mode.FIXED, 120_000, "credits_exhausted", "exact_quota"),
    "quota-metric-day": row(SPENT, LADDER),
    "quota-metric-minute": row(Reason.RATE_LIMIT_EXCEEDED, LADDER),
    "quota-returns": row(SPENT, Mode.FIXED, HOUR, "uses_hint_always", "exact_quota", "returns_by_itself"),
    "credits-text": row(SPENT, Mode.FIXED, 120_000, "credits_exhausted", "exact_quota"),
    "credits-beyond": row(SPENT, Mode.FIXED, 120_000, "credits_exhausted", "exact_quota"),
    "daily-text": row(SPENT, Mode.FIXED, DAY, "daily_quota_exhausted", "exact_quota"),
    "weekly-text": row(SPENT, Mode.FIXED, DAY, "uses_hint_always", "exact_quota"),
    "subscription-text": row(SPENT, Mode.FIXED, HOUR, "uses_hint_always", "exact_quota"),
    "session-text": row(SPENT, Mode.FIXED, 5 * HOUR, "exact_quota"),
    "quota-with-reset": row(SPENT, LADDER),
    "period-quota": row(SPENT, Mode.FIXED, HOUR, "uses_hint_always", "exact_quota", "returns_by_itself"),
    "route-not-authorized": row(Reason.UNKNOWN, Mode.FIXED, 0, STOPS),
    "forbidden-rule": row(Reason.UNKNOWN, LADDER),
    "pre-check-rule": row(Reason.UNKNOWN, LADDER),
    "credential-code": row(Reason.AUTH_ERROR),
    "model-forbidden": row(Reason.AUTH_ERROR),
    "cloudflare-no-retry": row(Reason.AUTH_ERROR),
    "forbidden-key": row(Reason.AUTH_ERROR, LADDER),
    "inner-request-error": FULL,
    "throttling-code": row(Reason.RATE_LIMIT_EXCEEDED, LADDER),
    "overload-code": row(Reason.MODEL_CAPACITY, LADDER),
    "invalid-request-code": row(Reason.UNKNOWN, Mode.FIXED, 0, STOPS, "skip_provider_breaker"),
    "configured": row(Reason.RATE_LIMIT_EXCEEDED, LADDER),
    "capacity-status": row(Reason.MODEL_CAPACITY, LADDER),
    "quota-status-432": row(SPENT, Mode.FIXED, HOUR, "uses_hint_always"),
    "provider-rule-400": row(Reason.UNKNOWN, LADDER),
    "model-code": FULL,
    "parameter": FULL,
    "malformed": FULL,
    "overflow": FULL,
    "model-access": FULL,
    "nim-degraded": FULL,
    "rate-words-400": row(Reason.RATE_LIMIT_EXCEEDED, LADDER),
    "bad-request": row(Reason.UNKNOWN, Mode.FIXED, 0, STOPS),
    "any-other": row(Reason.UNKNOWN, Mode.FIXED, 5_000),
}
CLAIMS = (
    "ignore_hint", "uses_hint_always", "permanent", "credits_exhausted", "daily_quota_exhausted", "exact_quota",
    "uncapped", "skip_provider_breaker", "ambiguous_auth", "returns_by_itself",
)  # fmt: skip


def test_every_row_of_the_pipeline_says_what_the_table_says() -> None:
    reading = Reading(parse_outcome(RawOutcome(status=429, body="x")), POLICY, 0)
    said = {}
    for rule in PIPELINE:
        made = rule.then(reading, rule.id)
        claims = {name for name in CLAIMS if getattr(made, name)} | ({STOPS} if not made.should_fallback else set())
        said[made.rule] = (made.reason, made.mode, made.fixed_ms, frozenset(claims))
    assert said == SAID


def test_rows_that_read_a_text_need_one() -> None:
    texted = [rule.id for rule in PIPELINE if rule.needs_text]
    assert texted == list(SAID)[list(SAID).index("ban-text") : list(SAID).index("throttling-code")]


# -- texts and statuses --------------------------------------------------------------------------------------
def judged(status: int, text: str, **fields: Any) -> str:
    return judge(parse_outcome(RawOutcome(status=status, body=text, **fields)), POLICY, 0).rule


def test_words_of_load_mean_load_from_498_on_and_under_a_400_or_429() -> None:
    loaded = {s for s in range(400, 600) if judged(s, "server overloaded, please try later").startswith("overloaded")}
    assert loaded == {400, 429, 498, *range(500, 600)}


def test_a_busy_503_is_one_that_says_nothing_but_when() -> None:
    wait = (("retry-after", "5"),)
    assert judged(503, "", headers=wait) == "overloaded"
    assert judged(503, "", headers=()) == "server-error"
    assert judged(503, "database on fire", headers=wait) == "server-error"
    assert judged(502, "", headers=wait) == "server-error"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ('{"error": {"details": [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "59s"}], '
         '"message": "daily quota"}}', "rate_limit"),
        ("daily quota, please retry in 3599s", "rate_limit"),
        ("daily quota, please retry in 3600s", "quota_exhausted"),
        ("daily quota, resets in 5 minutes; retry later", "quota_exhausted"),
        ('{"error": {"message": "daily quota, please retry in 5s", "retry_after": 7200}}', "rate_limit"),
        ("daily quota", "quota_exhausted"),
        ("slow down", "rate_limit"),
    ],
)  # fmt: skip
def test_a_short_wait_makes_a_long_quota_a_rate_limit_for_the_breaker(body: str, kind: str) -> None:
    assert breaker_kind(parse_outcome(RawOutcome(status=429, body=body)), 0) == kind


def test_labels_by_status() -> None:
    labels: dict[str, set[int]] = {}
    for status in range(400, 600):
        labels.setdefault(str(reason_label(parse_outcome(RawOutcome(status=status)))), set()).add(status)
    assert labels.pop("unknown") == set(range(400, 500)) - {401, 402, 403, 429, 432}
    assert labels == {
        "auth_error": {401, 403}, "quota_exhausted": {402, 432}, "rate_limit_exceeded": {429},
        "model_capacity": {503, 529}, "server_error": set(range(500, 600)) - {503, 529},
    }  # fmt: skip


@pytest.mark.parametrize("word", ["enoent", "eacces", "epipe"])
def test_a_program_that_could_not_be_started_is_the_hosts_fault(word: str) -> None:
    assert LOCAL_FAULT.found_in(f"spawn claude {word}")
    assert not LOCAL_FAULT.found_in(f"{word} spawn")


# -- the linter ----------------------------------------------------------------------------------------------
def found(*rules: OperatorRule) -> list[tuple[str, str]]:
    return [(each.code, each.rule_id) for each in lint({"acme": Provider(id="acme"), "x": Provider(id="x")}, rules)]


def rule(status: int = 429, match: str = "busy as a bee", provider: str = "acme") -> OperatorRule:
    return OperatorRule(provider=provider, status=status, match=match, scope="connection")


def test_statuses_without_a_step_of_their_own_are_named() -> None:
    assert {400, 401, 402, 403, 404, 406, 408, 429, 500, 502, 503, 504} == STATUSES_WITH_PATH
    assert {s for s in range(100, 600) if not found(rule(s))} == STATUSES_WITH_PATH
    assert [found(rule(status)) for status in (99, 600)] == [[("bad_status", "operator-rule-1")]] * 2


def test_a_finding_numbers_a_rule_within_its_provider() -> None:
    assert found(rule(provider="x"), rule(), rule(match=" ")) == [("empty_match", "operator-rule-2")]


@pytest.mark.parametrize("text", ["too many requests", "rate limit reached"])
def test_a_400_is_load_only_where_its_rule_and_its_words_say_so(text: str) -> None:
    assert not judged(400, text).startswith("overloaded")
