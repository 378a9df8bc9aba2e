"""Matching of provider and operator rules (spec/restatement_and_rules.md sections 2 to 5). Pure.

Operator rules go first, then the catalogue in its order; the first match wins. Declaring one operator rule for a
provider shows the full text to its rules and has their scopes honoured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from policy_service.domain.catalogue import ErrorRule, HeaderCondition
from policy_service.domain.ids import DurationMs
from policy_service.domain.outcome import Outcome
from policy_service.domain.policy import ConnectionPolicy
from policy_service.domain.retry_hints import parse_resets_in

OPERATOR_RULE_LIMIT: Final = 50


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """A rule that matched. `is_honored`: the scope has effect, else it is a label."""

    id: str
    reason: str
    scope: str
    cooldown_ms: DurationMs | None
    is_honored: bool
    by_operator: bool = False


def first_match(outcome: Outcome, policy: ConnectionPolicy, text: str) -> RuleMatch | None:
    """First rule that matches, operator rules before the catalogue. `text`: the searchable text, lowered."""
    if not policy.operator_rules and not policy.provider.error_rules:
        return None
    return operator_match(outcome, policy, text) or next(_catalogue_matches(outcome, policy, text, False), None)


def operator_match(outcome: Outcome, policy: ConnectionPolicy, text: str) -> RuleMatch | None:
    """First operator rule that matches; their match is a plain substring, never a pattern."""
    for number, rule in enumerate(policy.operator_rules, start=1):
        if rule.status == outcome.status and rule.match.lower() in text:
            name = rule.id or operator_rule_id(number)
            return RuleMatch(name, rule.reason, rule.scope, rule.cooldown_ms, is_honored=True, by_operator=True)
    return None


def pre_check_match(outcome: Outcome, policy: ConnectionPolicy, text: str) -> RuleMatch | None:
    """First catalogue rule with `pre_check` that matches (classification.md step 18)."""
    return next(_catalogue_matches(outcome, policy, text, True), None) if policy.provider.error_rules else None


def operator_rule_id(number: int) -> str:
    """Name of an operator rule without an id: its place in the list of its provider, from 1."""
    return f"operator-rule-{number}"


def _catalogue_matches(
    outcome: Outcome, policy: ConnectionPolicy, text: str, pre_check_only: bool
) -> Iterator[RuleMatch]:
    for rule in policy.provider.error_rules:
        if outcome.status not in rule.statuses or (pre_check_only and not rule.pre_check):
            continue
        cooldown = parse_resets_in(text) if rule.cooldown_from_text else rule.cooldown_ms
        if _holds(rule, outcome, policy, text) and not (rule.cooldown_from_text and cooldown is None):
            honored = rule.pre_check or policy.honors_rule_scope
            yield RuleMatch(rule.id, rule.reason, rule.scope, cooldown, honored)


def _holds(rule: ErrorRule, outcome: Outcome, policy: ConnectionPolicy, text: str) -> bool:
    if rule.headers and not any(header_holds(condition, outcome.headers) for condition in rule.headers):
        return False
    if rule.codes and (outcome.code.lower() in rule.codes or outcome.type.lower() in rule.codes):
        return True
    visible = text if rule.pre_check or policy.sees_full_text else f"{outcome.code} {outcome.type}".lower()
    return texts_hold(rule, visible)


def texts_hold(rule: ErrorRule, text: str) -> bool:
    """Text conditions of a rule on what it may see; a rule without text conditions holds unless it asks for a code."""
    if not rule.body_any and not rule.body_all:
        return not rule.codes
    return (not rule.body_any or any(part in text for part in rule.body_any)) and all(
        part in text for part in rule.body_all
    )


def header_holds(condition: HeaderCondition, headers: Mapping[str, str]) -> bool:
    """True if any named header equals the value, or holds a pair `name=0` (comma list)."""
    values = (headers[name] for name in condition.names if name in headers)
    if condition.zero_pair:
        return any(_has_zero_pair(value) for value in values)
    return any(value.strip() == condition.equals for value in values)


def _has_zero_pair(value: str) -> bool:
    return any(_is_zero(pair.partition("=")[2]) for pair in value.split(",") if "=" in pair)


def _is_zero(number: str) -> bool:
    try:
        return float(number) == 0
    except ValueError:
        return False
