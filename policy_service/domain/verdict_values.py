"""The verdict as a value, and what a configured rule makes of it (spec/classification.md, steps 17 to 23). Pure.

The table that finds a verdict is `verdict`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from policy_service.domain.decision_record import Classification, Reason
from policy_service.domain.ids import DurationMs

NOBODY, MODEL, CONNECTION, ACCOUNT, PROVIDER = (
    "none",
    "model_lockout",
    "connection_cooldown",
    "connection_terminal",
    "provider_failure",
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a failure means to the outside. `terminal`: `banned`, `expired`, `credits_exhausted` or None.

    `rule` is the id of what decided: a row of the table, a rule of the pipeline, or a configured rule.
    """

    scope: str
    reason: str
    fallback: bool
    retry_after_ms: DurationMs | None = None
    terminal: str | None = None
    rule: str = ""


_RULE_REASONS: Final[dict[str, str]] = {
    Reason.QUOTA_EXHAUSTED: "quota_exhausted",
    Reason.RATE_LIMIT_EXCEEDED: "rate_limit",
    Reason.MODEL_CAPACITY: "overloaded",
    Reason.SERVER_ERROR: "server_error",
    Reason.AUTH_ERROR: "auth_error",
    Reason.NOT_FOUND: "model_not_found",
}
"""Reason of a configured rule -> reason of the verdict; `unknown` leaves the table's."""
_FINER: Final[dict[str, frozenset[str]]] = {
    Reason.AUTH_ERROR: frozenset({"model_access_denied", "client_blocked", "region_blocked"}),
    Reason.NOT_FOUND: frozenset({"model_access_denied"}),
    Reason.QUOTA_EXHAUSTED: frozenset({"rate_limit"}),
}
"""Reasons of the table that say more exactly what a catalogue rule means by its own, and therefore stay."""
_RULE_SCOPES: Final = {"model": MODEL, "connection": CONNECTION}


def told_by_rule(found: Classification, scope: str, reason: str, wait: DurationMs | None) -> Verdict:
    """Verdict on an answer that a rule matches.

    Args:
        scope, reason: what the table would say without the rule.
        wait: wait that the answer states, ms.
    """
    by_rule = _by_operator if found.rule_by_operator else _by_catalogue
    return by_rule(found, scope, reason, wait)


def _by_operator(found: Classification, _: str, reason: str, wait: DurationMs | None) -> Verdict:
    """What the operator says of an answer stands before what this table would make of it."""
    scope = MODEL if found.rule_scope == "model" else CONNECTION
    return Verdict(scope, _RULE_REASONS.get(found.reason, reason), True, wait, None, found.rule_id or found.rule)


def _by_catalogue(found: Classification, scope: str, reason: str, wait: DurationMs | None) -> Verdict:
    """What the provider's own entry says of an answer: its reason, unless this table has the same one finer; its scope
    where that has effect. An answer that a rule takes for the account's is no fault of the request."""
    honored = _RULE_SCOPES.get(found.rule_scope or "") if found.rule_scope_honored else None
    told = reason if reason in _FINER.get(found.reason, ()) else _RULE_REASONS.get(found.reason, reason)
    ours = CONNECTION if scope == NOBODY else scope
    return Verdict(honored or ours, told, True, wait, None, found.rule_id or found.rule)
