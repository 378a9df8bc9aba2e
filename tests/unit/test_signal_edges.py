"""Matchers of text families at their very distances, and what of a text is read (spec/classification.md section 1)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from policy_service.domain import signals
from policy_service.domain.catalogue import Catalogue, Connection, Provider
from policy_service.domain.failure_kinds import failure_kind
from policy_service.domain.ids import AuthClass
from policy_service.domain.outcome import Outcome
from policy_service.domain.policy import Policy
from policy_service.domain.reading import Reading, account_text, echoes_request, lowered_text
from policy_service.domain.signals import Family, accounts, in_order, later_on_line, models, quota, requests, within

NEAR = {
    "BAN_EXTENDED": 120, "BILLING_SUSPENSION": 120, "BROWSER_BLOCK": 80, "CREDENTIAL_CODES": 16,
    "CREDENTIAL_FAILURE": 3, "CREDITS_EXTENDED": 12,
    "MODEL_PERMISSION": 60, "MODEL_UNSERVED": 80, "NIM_DEGRADED": 80, "OUTPUT_TOKENS": 24, "OVERFLOW_CERTAIN": 24,
    "PARAMETER": 80, "PERIOD_ALLOWANCE": 24, "PERIOD_QUOTA_EXTENDED": 24, "REQUEST_RESOURCE": 160,
}  # fmt: skip
CHAINS = {"MALFORMED": 80, "PARAMETER_EXTENDED": 60}
FAMILIES: dict[str, Family] = {
    name: made
    for module in (accounts, models, quota, requests)
    for name, made in vars(module).items()
    if isinstance(made, Family)
}

PLAINLY = {
    "ABORT": "request_signal_aborted",
    "ACCOUNT_ALLOWANCE": "call volume quota",
    "AMBIGUOUS_401_EXCLUDED": "access denied",
    "BAN": "account has been deactivated",
    "BAN_EXTENDED": "organization_restricted",
    "BLOCK_PAGE": "error code: 1012",
    "BROWSER_BLOCK": "turnstile required",
    "CAPACITY_TEXT": "overloaded",
    "CLIENT_UNWELCOME": "please update your client",
    "CLOUDFLARE_NO_RETRY": "browser_signature_banned",
    "CLOUDFLARE_OWNER": "owner_action_required",
    "CONTENT_POLICY": "moderation_blocked",
    "CREDENTIAL_CODES": "token_invalidated",
    "CREDENTIAL_FAILURE": "authentication_error",
    "CREDITS": "tier has been exhausted",
    "CREDITS_EXTENDED": "billing_not_active",
    "DAILY": "tpd rate limit",
    "DAY_WINDOW": "per-day",
    "FEATURE_ENTITLEMENT": "extra usage is required for",
    "FINGERPRINT": "browser_signature_banned",
    "FORBIDDEN_QUOTA_EXCEPTIONS": "quota has been exceeded",
    "FREE_TIER_ONLY": "free tier only",
    "GEO": "not available in your region",
    "GEO_EXTENDED": "not available in your country",
    "LOCAL_FAULT": "child process exited with code",
    "LONG_PERIOD": "enable overages",
    "MALFORMED": "content is empty",
    "MINUTE_WINDOW": "per minute",
    "MODEL_ENTITLEMENT": "have access to the model",
    "MODEL_LOAD_FAILED": "model failed to load",
    "MODEL_NAMED": "selected model",
    "MODEL_UNSERVED": "select a different model",
    "MODEL_UNSERVED_EXTENDED": "not a valid model",
    "MOVED": "update your base url",
    "OAUTH_INVALID": "valid authentication credential",
    "OVERFLOW": "maximum context",
    "OVERFLOW_CERTAIN": "context_length_exceeded",
    "OVERLOAD": "queue_exceeded",
    "PARAMETER": "parameter is illegal",
    "PARAMETER_EXTENDED": "missing required parameter",
    "PERIOD_QUOTA_EXTENDED": "limits will reset at",
    "PER_DAY_METRIC": "per_day",
    "PLAN_WITHOUT_ACCESS": "usage_not_included",
    "PROJECT_PROBLEM": "permission_denied",
    "PROJECT_SETUP": "accessnotconfigured",
    "QUOTA_TEXT": "quota will reset",
    "QUOTA_TEXT_EXTENDED": "usage limit exceeded",
    "RATE_TEXT": "too many requests",
    "RATE_WORDS_400": "non compliant",
    "ROUTE_NOT_AUTHORIZED": "not authorized for this route",
    "SESSION": "session limit reached",
    "SLOW_DOWN": "slow_down",
    "SUBSCRIPTION": "claude pro usage limit",
    "TERMINAL_QUOTA": "insufficient balance",
    "TOKENS_PER_DAY": "tpd rate limit",
    "TOOL_USE_FAILED": "failed to call a function",
    "TOO_LARGE_FOR_LIMIT": "the input or output tokens must be reduced",
    "UNKNOWN_PROVIDER_FOR_MODEL": "unknown provider for model",
    "WEEKLY": "reached your weekly",
}
PARTS = {
    "BAN_EXTENDED": "phrases near",
    "BILLING_SUSPENSION": "near",
    "BROWSER_BLOCK": "phrases near",
    "CLOUDFLARE_NO_RETRY": "phrases patterns",
    "CREDENTIAL_CODES": "phrases near",
    "CREDENTIAL_FAILURE": "phrases near",
    "CREDITS_EXTENDED": "phrases near",
    "FINGERPRINT": "phrases patterns",
    "LOCAL_FAULT": "phrases lines",
    "LONG_PERIOD": "phrases lines patterns",
    "MALFORMED": "phrases chains patterns",
    "MODEL_NAMED": "phrases patterns",
    "MODEL_PERMISSION": "near",
    "MODEL_UNSERVED": "phrases lines near",
    "NEVER_OFFERED": "patterns",
    "NIM_DEGRADED": "near",
    "NOT_RETRYABLE": "patterns",
    "OUTPUT_TOKENS": "phrases near",
    "OVERFLOW": "phrases lines",
    "OVERFLOW_CERTAIN": "phrases near",
    "PARAMETER": "phrases near patterns",
    "PARAMETER_EXTENDED": "phrases chains",
    "PERIOD_ALLOWANCE": "phrases near",
    "PERIOD_QUOTA_EXTENDED": "phrases near",
    "RATE_OF_MODEL": "patterns",
    "REQUEST_RESOURCE": "phrases near patterns",
    "TERMINAL_QUOTA": "phrases lines",
    "TOO_LARGE_FOR_LIMIT": "phrases patterns",
}
"""Of what a family is made beside phrases; any other has phrases alone."""


@pytest.mark.parametrize("name", PLAINLY)
def test_every_family_knows_a_plain_wording(name: str) -> None:
    assert FAMILIES[name].found_in(f"it says: {PLAINLY[name]}.")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_made_of_its_parts(name: str) -> None:
    made = FAMILIES[name]
    parts = [part for part in ("phrases", "lines", "near", "chains", "patterns") if getattr(made, part)]
    assert parts == PARTS.get(name, "phrases").split()


@pytest.mark.parametrize("name", NEAR)
def test_near_words_of_a_family_are_as_near_as_the_spec_says(name: str) -> None:
    family, most = FAMILIES[name], NEAR[name]
    bare = Family(near=family.near)
    for a, b, _ in family.near:
        for first, second in ((a, b), (b, a)):
            assert bare.found_in(f"{first}{'.' * most}{second}")
            assert not Family(near=((a, b, most),)).found_in(f"{first}{'.' * (most + 1)}{second}")
    assert {n for _, _, n in family.near} == {most}


@pytest.mark.parametrize("name", CHAINS)
def test_words_in_a_chain_are_as_near_as_the_spec_says(name: str) -> None:
    family, most = FAMILIES[name], CHAINS[name]
    for words, n in family.chains:
        assert n == most
        assert family.found_in(("." * most).join(words))


def test_no_other_family_measures_distances() -> None:
    assert {name for name, made in FAMILIES.items() if made.near} == NEAR.keys()
    assert {name for name, made in FAMILIES.items() if made.chains} == CHAINS.keys()


@pytest.mark.parametrize("name", [name for name, made in FAMILIES.items() if made.lines])
def test_words_of_one_line_are_found_in_their_order_on_one_line_alone(name: str) -> None:
    bare = Family(lines=FAMILIES[name].lines)
    for a, b in bare.lines:
        assert bare.found_in(f"{a} x {b}")
        assert Family(lines=((a, b),)).found_in(f"x\n{a}{b}\ny")
        assert not Family(lines=((a, b),)).found_in(f"{a}\n{b}")


@pytest.mark.parametrize("name", [name for name, made in FAMILIES.items() if made.phrases])
def test_every_phrase_is_found_and_stands_in_lower_case(name: str) -> None:
    family = FAMILIES[name]
    assert all(family.found_in(f"x{phrase}x") for phrase in family.phrases)
    assert all(phrase == phrase.lower() and phrase for phrase in family.phrases)


# -- the matchers --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ab", True), ("a b", True), ("ba", False), ("b a b", True), ("a\nb", False), ("a\na b", True), ("a", False),
        ("b", False), ("", False), ("x\na", False), ("a x\ny\na b\n", True), ("aa b", True),
    ],
)  # fmt: skip
def test_one_word_later_on_the_line_of_another(text: str, found: bool) -> None:
    assert later_on_line(text, "a", "b") is found


def test_a_word_does_not_follow_itself() -> None:
    assert not later_on_line("aba", "aba", "ba")
    assert later_on_line("ababa", "aba", "ba")
    assert not in_order("aba", ("aba", "ba"), 5)
    assert not within("aba", "aba", "ba", 0)


@pytest.mark.parametrize(
    ("text", "n", "found"),
    [
        ("xxyy", 0, True), ("yyxx", 0, True), ("xx.yy", 0, False), ("yy.xx", 0, False), ("xx.yy", 1, True),
        ("yy.xx", 1, True),
        ("xx...yy", 2, False), ("xx..xx.yy", 1, True), ("yy.xx...", 1, True), ("xx", 5, False), ("yy", 5, False),
        ("xxx.yy", 1, True), ("yy....xx..yy", 2, True),
    ],
)  # fmt: skip
def test_two_words_near_each_other(text: str, n: int, found: bool) -> None:
    assert within(text, "xx", "yy", n) is found


@pytest.mark.parametrize(
    ("text", "n", "found"),
    [
        ("aabbcc", 0, True), ("aa.bb.cc", 1, True), ("aa..bb.cc", 1, False), ("aa.bb..cc", 1, False),
        ("bb.aa.cc", 9, False),
        ("aa...aa.bb.cc", 1, True), ("aa.bb", 9, False), ("aaa.bb.cc", 1, True),
    ],
)  # fmt: skip
def test_words_in_order(text: str, n: int, found: bool) -> None:
    assert in_order(text, ("aa", "bb", "cc"), n) is found


def test_families_add_up() -> None:
    parts: dict[str, Any] = {
        "phrases": ("p",), "lines": (("l", "m"),), "near": (("n", "o", 1),), "chains": ((("c", "d"), 1),),
    }  # fmt: skip
    whole = Family()
    for name, value in parts.items():
        whole |= Family(**{name: value})
    assert {each.name: getattr(whole, each.name) for each in fields(Family) if each.name in parts} == parts
    assert all(whole.found_in(text) for text in ("p", "l m", "n.o", "c.d"))
    assert not whole.found_in("n..o c..d m l")


# -- what is read --------------------------------------------------------------------------------------------
HEAD, TAIL = 4_096, 2_048


def said(text: str, status: int = 400, **more: Any) -> Outcome:
    return Outcome(status, text=text, message=text, **more)


def test_of_a_long_text_the_beginning_and_the_end_are_read() -> None:
    whole = "A" * (HEAD + TAIL)
    assert lowered_text(said(whole)) == whole.lower()
    head, tail = "A" * HEAD, "B" * TAIL
    assert lowered_text(said(f"{head}C{tail}")) == f"{head}\n{tail}".lower()


QUOTING = {"status": 400, "type": "invalid_request_error"}


@pytest.mark.parametrize(
    ("status", "kind", "is_quoted"),
    [
        (400, "invalid_request_error", True), (422, "INVALID_REQUEST_ERROR", True),
        (401, "invalid_request_error", False),
        (421, "invalid_request_error", False), (423, "invalid_request_error", False),
        (399, "invalid_request_error", False),
        (400, "other", False),
    ],
)  # fmt: skip
def test_what_a_message_quotes_is_the_callers(status: int, kind: str, is_quoted: bool) -> None:
    outcome = said("bad 'insufficient credits' here", status, type=kind, code="C")
    found = account_text(outcome, lowered_text(outcome))
    assert ("insufficient credits" in found) is not is_quoted
    assert found == ("c bad   here" if is_quoted else lowered_text(outcome))


@pytest.mark.parametrize("mark", ["'", "`", '"'])
@pytest.mark.parametrize(("length", "is_quoted"), [(1, True), (200, True), (201, False)])
def test_a_quotation_has_a_length(mark: str, length: int, is_quoted: bool) -> None:
    outcome = said(f"a {mark}{'x' * length}{mark} b", type="invalid_request_error")
    assert ("x" not in account_text(outcome, "")) is is_quoted


def test_of_a_quoting_message_the_head_is_read() -> None:
    outcome = said("y" * HEAD + "z", type="invalid_request_error")
    assert account_text(outcome, "") == " " + "y" * HEAD


@pytest.mark.parametrize(
    ("status", "echoes"), [(400, True), (422, True), (399, False), (401, False), (421, False), (423, False)]
)
def test_a_refused_parameter_echoes_the_request(status: int, echoes: bool) -> None:
    for code in signals.VALIDATION_CODES:
        outcome = said("insufficient credits", status, code=code.upper())
        assert echoes_request(outcome) is echoes
        assert (account_text(outcome, "t") == "") is echoes
    assert not echoes_request(said("x", code="other"))


def reading(outcome: Outcome, auth: AuthClass = AuthClass.API_KEY, **provider: Any) -> Reading:
    entry = Provider(id="acme", auth_class=auth, **provider)
    policy = Policy(Catalogue({"acme": entry}, {"c": Connection("c", "acme")})).for_connection("acme", "c")
    return Reading(outcome, policy, 1_780_315_200_000)


@pytest.mark.parametrize(
    ("auth", "status", "text", "usable"),
    [
        (AuthClass.API_KEY, 429, "too many requests", False), (AuthClass.API_KEY, 428, "quota exceeded", True),
        (AuthClass.API_KEY, 430, "too many requests", True), (AuthClass.OAUTH, 429, "quota exceeded", True),
        (AuthClass.NONE, 429, "too many requests", True), (AuthClass.LOCAL, 429, "quota exceeded", False),
    ],
)  # fmt: skip
def test_words_of_quota_count_but_for_a_plain_429_of_a_key(
    auth: AuthClass, status: int, text: str, usable: bool
) -> None:
    found = reading(said(text, status), auth)
    assert found.is_signal_usable is usable
    assert found.is_signal_usable is usable
    assert found.is_api_key is (auth is AuthClass.API_KEY)


@pytest.mark.parametrize(("auth", "usable"), [(AuthClass.API_KEY, True), (AuthClass.LOCAL, False)])
def test_a_long_period_makes_the_words_of_a_key_count(auth: AuthClass, usable: bool) -> None:
    a, b = signals.LONG_PERIOD.lines[0]
    assert reading(said(f"{a} {b}", 429), auth).is_signal_usable is usable


def test_a_hint_is_read_once_and_a_naive_time_in_the_providers_zone() -> None:
    text = "try again at 2026-06-01 20:00:10"
    assert reading(said(text)).stated_wait_ms == 8 * 3_600_000 + 10_000
    here = reading(said(text), naive_times_offset="+08:00")
    assert here.stated_wait_ms == 10_000
    assert here.hint is here.hint
    assert here.hint is not None
    assert here.hint.wait_ms == 10_000
    assert reading(said("nothing")).hint is None


@pytest.mark.parametrize(
    ("code", "kind", "meaning"),
    [("A", "b", "one"), ("x", "B", "two"), ("x", "y", ""), ("a", "", "one"), ("", "b", "two")],
)
def test_the_catalogue_gives_codes_a_meaning(code: str, kind: str, meaning: str) -> None:
    found = reading(said("t", code=code, type=kind), code_meanings={"a": "one", "b": "two"})
    assert found.meaning == meaning
    assert reading(said("t", code=code, type=kind)).meaning == ""


STATUS_KINDS = {
    429: "quota", 401: "auth", 402: "auth", 403: "auth", 400: "model", 404: "model", 413: "model", 422: "model",
    408: "timeout", 504: "timeout", 524: "timeout",
}  # fmt: skip
REASON_KINDS = {
    "quota_exhausted": "quota", "rate_limit": "quota", "auth_error": "auth", "model_not_found": "model",
    "model_access_denied": "model", "context_overflow": "model", "content_policy": "model", "client_error": "model",
}  # fmt: skip


def test_the_kind_of_a_failure_by_reason_then_status() -> None:
    for status in (None, *range(600)):
        upstream = "upstream" if status is not None and status >= 500 else ""
        assert failure_kind(status, "server_error") == STATUS_KINDS.get(status or 0, upstream), status
        assert failure_kind(status, "rate_limit") == "quota"
    assert {reason: failure_kind(503, reason) for reason in REASON_KINDS} == REASON_KINDS
