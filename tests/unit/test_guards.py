"""Outcomes that punish nobody: the guards of connections and the tests of the breaker, by name."""

from __future__ import annotations

from typing import Any

import pytest

from policy_service.domain import guards
from policy_service.domain.catalogue import Catalogue, Connection
from policy_service.domain.classification import classify
from policy_service.domain.outcome import CallKind, Origin, Outcome
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import ConnectionPolicy, Policy
from policy_service.settings.provider_data import builtin_providers


def policy_of(provider: str = "openai", connection: Connection | None = None) -> ConnectionPolicy:
    """What applies to a connection of a built-in provider."""
    connections = {connection.id: connection} if connection else {}
    policy = Policy(Catalogue(providers=builtin_providers(), connections=connections))
    return policy.for_connection(provider, connection.id if connection else "")


def outcome(status: int | None, text: str = "", **fields: Any) -> Outcome:
    """A parsed failure."""
    headers = tuple(fields.pop("headers", {}).items())
    return parse_outcome(RawOutcome(status=status, body=text, headers=headers, **fields))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"status": 499}, "abort"),
        ({"status": 502, "code": "ABORT_ERR"}, "abort"),
        ({"status": 502, "network_error": "AbortError: client disconnected"}, "abort"),
        ({"status": 500, "code": "ENOENT"}, "local-fault"),
        ({"status": 500, "code": "plugin_block"}, "local-fault"),
        ({"status": 503, "code": "RATE_LIMIT_QUEUE_FULL"}, "own-limiter"),
        ({"status": 504, "own_timeout": True}, "own-timeout"),
        ({"status": 429, "code": "token_limit_exceeded"}, "own-key-policy"),
        ({"status": 400, "code": "context_window_exceeded"}, "input-bound"),
        ({"status": 500, "type": "invalid_request_error"}, "request-scoped"),
        ({"status": 401, "type": "invalid_request_error"}, ""),
        ({"status": 429}, ""),
    ],
)
def test_guards_set_aside_what_no_connection_did(fields: dict[str, Any], name: str) -> None:
    assert guards.local_guard(parse_outcome(RawOutcome(**fields)), policy_of()) == name


def test_a_401_with_a_spare_key_is_forgiven() -> None:
    spare = policy_of("openai", Connection("c1", "openai", spare_keys=True))
    assert guards.local_guard(outcome(401), spare) == "spare-key"
    assert guards.guard_allows_fallback("spare-key")


def test_a_broken_pipe_of_a_connection_is_the_network_and_of_a_child_process_the_host() -> None:
    assert not guards.is_local_fault(parse_outcome(RawOutcome(network_error="write EPIPE")))
    assert guards.is_local_fault(outcome(500, "", code="EPIPE"))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"status": 529}, "status"),
        ({"status": 503, "call_kind": CallKind.HEALTH_CHECK}, "health-check"),
        ({"status": 502, "body": "operation was aborted"}, "abort"),
        ({"status": 502, "body": "operation was aborted", "origin": Origin.UPSTREAM}, ""),
        ({"status": 502, "body": "spawn x ENOENT"}, "local-fault"),
        ({"status": 502, "body": "Overloaded"}, "overload"),
        ({"status": 502, "inner_status": 529}, "overload"),
        ({"status": 500, "code": "heap_pressure"}, "request-scoped"),
        ({"status": 504, "code": "STREAM_READINESS_TIMEOUT"}, "stream-readiness"),
        ({"status": 503, "pool_attempt": True, "next_target_same_provider": True}, "same-provider-next"),
        (
            {
                "status": 502,
                "code": "proxy_unreachable",
                "pool_attempt": True,
                "next_target_same_provider": True,
            },
            "",
        ),
        ({"status": 503, "circuit_open_answer": True}, "own-circuit-open"),
        ({"status": 503, "own_queue_timeout": True}, "own-queue-timeout"),
        ({"status": 408}, ""),
    ],
)
def test_the_first_failing_breaker_test_is_named(fields: dict[str, Any], name: str) -> None:
    assert guards.breaker_exclusion(parse_outcome(RawOutcome(**fields)), None) == name


def test_a_skip_flag_keeps_an_outcome_from_the_breaker() -> None:
    said = classify(outcome(503, headers={"x-omni-fallback-hint": "connection_cooldown"}), policy_of(), 0)
    assert guards.breaker_exclusion(outcome(503), said) == "skip-flag"
