"""What a policy is compiled to at its edges: patterns of provider names, classes, defaults, and rules without an id."""

from __future__ import annotations

import pytest

from policy_service.domain import setting_specs  # noqa: F401  (fills the registry)
from policy_service.domain.catalogue import Catalogue, OperatorRule, Provider, ProviderDirectory
from policy_service.domain.decision_record import Classification, DecisionRecord, Mode, Reason
from policy_service.domain.gates import KEEP_ENDED_MS, Pace
from policy_service.domain.ids import AuthClass
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import Policy
from policy_service.domain.rule_linter import would_change
from policy_service.domain.session_key import first_user_text
from policy_service.domain.settings import SettingSources


@pytest.mark.parametrize(
    ("name", "found"),
    [("xabcx", "*abc*"), ("abc", "*abc*"), ("xbcx", ""), ("xabx", ""), ("local-1", "local-*"), ("local", ""),
    ("alocal-1", "")],
)  # fmt: skip
def test_a_pattern_of_provider_names_matches_its_whole_text(name: str, found: str) -> None:
    directory = ProviderDirectory(
        {each: Provider(id=each, auth_class=AuthClass.LOCAL) for each in ("*abc*", "local-*")}
    )
    assert (directory.get(name).auth_class is AuthClass.LOCAL) is bool(found)


def test_an_operator_rule_without_an_id_is_numbered_within_its_provider_in_the_dry_run_too() -> None:
    other, mine = (OperatorRule(provider=each, status=429, match="busy", scope="connection") for each in ("x", "acme"))
    busy = parse_outcome(RawOutcome(provider="acme", status=429, body="busy"))
    changes = would_change([], [other, mine], [busy], ProviderDirectory({}))
    assert [(change.before, change.after) for change in changes] == [(None, "operator-rule-1")]
    changes = would_change([mine], [mine, mine], [busy], ProviderDirectory({}))
    assert changes == []


@pytest.mark.parametrize(
    ("auth", "reset_ms", "cap_ms"),
    [(AuthClass.NONE, 1_800_000, 120_000), (AuthClass.API_KEY, 30_000, 1_800_000)],
)
def test_a_lock_of_an_unprofiled_connection_keeps_its_count_for_half_an_hour(
    auth: AuthClass, reset_ms: int, cap_ms: int
) -> None:
    policy = Policy(Catalogue(providers={"acme": Provider(id="acme", auth_class=auth)})).for_connection("acme", "c")
    assert policy.lockout.reset_after_ms == reset_ms
    assert policy.ladder.cap_ms == cap_ms


def test_a_given_default_stands_in_for_the_registrys() -> None:
    sources = SettingSources()
    assert sources.resolve("model_lockout.enabled") is False
    assert sources.resolve("model_lockout.enabled", default=True) is True
    assert sources.resolve("model_lockout.enabled", catalogue=True, default=False) is True


def test_a_decision_claims_nothing_that_nobody_said() -> None:
    for made in (
        Classification("r", Reason.UNKNOWN, True, Mode.FIXED, 0),
        DecisionRecord(True, 0, 0, None, "unknown"),
    ):
        claims = {name: getattr(made, name) for name in made.__slots__ if name not in ("should_fallback", "rule")}
        assert [name for name, value in claims.items() if value is True] == []


def test_texts_are_read_four_levels_deep_and_no_deeper() -> None:
    text: object = "hi"
    for _ in range(4):
        text = [text]
    assert first_user_text({"prompt": text}) == "hi"
    assert first_user_text({"prompt": [text]}) == ""


def test_paces_and_ended_rows_have_their_times() -> None:
    assert (Pace().window_ms, KEEP_ENDED_MS) == (60_000, 600_000)
