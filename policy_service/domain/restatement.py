"""Restatement: corrects a misleading status before anything else looks at it (spec/restatement_and_rules.md section 1).

The rules are data of the provider; this decides which one applies. Called for failed HTTP answers only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from policy_service.domain.catalogue import Provider, RestatementRule
from policy_service.domain.ids import DurationMs

_NEVER_RESTATED = 429


@dataclass(frozen=True, slots=True)
class Restated:
    """Status and wait as the client is told; `rule_id` and `from_status` None where nothing was corrected."""

    status: int
    retry_after_ms: DurationMs | None = None
    rule_id: str | None = None
    from_status: int | None = None


def restate(
    provider: Provider, status: int, message: str, body: object | None, upstream_retry_after_ms: DurationMs | None
) -> Restated:
    """Status after correction by the first rule of the provider that fits.

    Args:
        provider: catalogue entry, looked up by lower-case id.
        status: HTTP status of a failed answer.
        message: message of the error object.
        body: parsed JSON body, or None.
        upstream_retry_after_ms: wait stated by the upstream; it beats the default of the rule.
    """
    stated = upstream_retry_after_ms if upstream_retry_after_ms and upstream_retry_after_ms > 0 else None
    rules = () if _is_exempt(status) else tuple(rule for rule in provider.restatement if status in rule.from_statuses)
    haystack = _haystack(message, body) if rules else ""
    rule = next((rule for rule in rules if _fits(rule, haystack)), None)
    if rule is None:
        return Restated(status, stated)
    return Restated(rule.to_status, stated or rule.default_retry_after_ms or None, rule.id, status)


def _is_exempt(status: int) -> bool:
    return status == _NEVER_RESTATED or 200 <= status < 300


def _haystack(message: str, body: object | None) -> str:
    """Lower-case message and body; non-ASCII characters as themselves, so that markers can be found."""
    return f"{message} {_as_json(body)}".strip().lower()


def _as_json(body: object | None) -> str:
    if body is None:
        return ""
    try:
        return json.dumps(body, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return ""


def _fits(rule: RestatementRule, haystack: str) -> bool:
    if any(marker.lower() in haystack for marker in rule.exclude_markers):
        return False
    return any(marker.lower() in haystack for marker in rule.text_markers)
