"""Fields that a step may carry: one that no runner reads would be a vector that tests something else than it says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any, Final

_STEP: Final = frozenset({"at_ms", "event", "expect", "title", "comment", "replica"})
_OUTCOME: Final = frozenset(
    {
        "status", "text", "code", "type", "name", "headers", "body", "model", "connection", "network_error", "origin",
        "failure_kind", "call_kind", "inner_status", "pool_attempt", "next_target_same_provider", "persist",
        "egress_address", "first_output_ms", "started_at_ms",
    }
)  # fmt: skip
ACCOUNT: Final = _STEP | _OUTCOME | {"concurrent", "operator_rules", "usage_counters", "expected", "ok", "permit_id"}
"""Steps of connections, terminal states and the egress lock."""
LOCKS: Final = ACCOUNT | {"reason", "base_ms", "exact_ms", "exact_source", "uncapped", "scope", "provider"}
"""Steps of model locks."""
WORLD: Final = LOCKS | {
    "as", "of", "by", "count", "each", "times", "steps", "config", "settings", "replicas", "report_again", "event_id",
    "first_byte_at_ms", "circuit_open_answer", "own_queue_timeout", "own_timeout", "token_expires_at_ms",
}  # fmt: skip
"""Steps of breakers, provider cooldowns and our additions."""
POOL: Final = _STEP | {"member", "until_ms", "source", "pool", "as", "of", "status"}
"""Steps of the pool guard."""


_SETTINGS: Final = frozenset({"provider", "auth_class", "settings", "env", "connection", "counter", "locks"})
ACCOUNT_GIVEN: Final = _SETTINGS | {
    "connections", "operator_rules", "now", "zone", "node_clock", "profile", "lookup_error", "breaker_state",
    "max_cooldown",
}  # fmt: skip
"""What a vector of connections, terminal states, model locks or the egress lock may begin with."""
WORLD_GIVEN: Final = _SETTINGS | {
    "config", "state", "stored_row", "replicas", "pool", "provider_connections", "random", "enabled", "operator_rules",
}  # fmt: skip
"""What a vector of breakers, provider cooldowns or our additions may begin with."""


def check_given(given: Mapping[str, Any], known: Set[str]) -> None:
    """Raise AssertionError for a circumstance that no runner of the kind reads."""
    unknown = sorted(set(given) - known)
    assert not unknown, f"given: no runner reads {', '.join(unknown)}"


def check_fields(step: Mapping[str, Any], known: Set[str]) -> None:
    """Raise AssertionError for a field that no runner of the kind reads."""
    unknown = sorted(set(step) - known)
    assert not unknown, f"step {step.get('event')!r}: no runner reads {', '.join(unknown)}"


# -- what an upstream answered ----------------------------------------------------------------------------------------
def header_pairs(given: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Headers as received; a list is a repeated header."""
    found = given.get("headers") or {}
    return tuple(
        (str(name), str(value))
        for name, values in found.items()
        for value in (values if isinstance(values, list) else [values])
    )


def body_text(given: Mapping[str, Any]) -> str:
    """The body as it came over the wire; a vector without one gives its text alone."""
    body = given.get("body")
    if body is None:
        return str(given.get("text") or "")
    return body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
