"""Outcomes that must not punish a connection or a breaker (spec/guards.md section 1, breaker.md section 4). Pure.

Each guard is a named predicate; two ordered tables say which of them end the evaluation of a connection and which
keep the breaker from counting. No guard reads any state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from policy_service.domain import signals
from policy_service.domain.outcome import CallKind, Origin, Outcome
from policy_service.domain.policy import ConnectionPolicy
from policy_service.domain.reading import lowered_text

COUNTED_STATUSES: Final = frozenset({408, 500, 502, 503, 504})
REQUEST_SCOPED_CODES: Final = frozenset(
    {
        "context_length_exceeded",
        "context_window_exceeded",
        "upstream_empty_response",
        "upstream_response_failed",
        "combo_target_timeout",
        "rate_limit_queue_timeout",
        "rate_limit_queue_full",
        "rate_limit_queue_wedged",
        "rate_limit_execution_timeout",
        "token_limit_exceeded",
        "executor_contract_violation",
        "resource_pressure",
        "heap_pressure",
        "freetiererror",
    }
)
REQUEST_SCOPED_TYPES: Final = frozenset(
    {
        "invalid_request_error",
        "context_length_exceeded",
        "local_queue_capacity",
        "freetiererror",
        "exceed_context_size_error",
    }
)
_TYPES_AND_CODES: Final = REQUEST_SCOPED_TYPES & REQUEST_SCOPED_CODES
INPUT_BOUND_CODES: Final = frozenset({"context_length_exceeded", "context_window_exceeded"})
OWN_LIMITER_CODES: Final = frozenset(
    {
        "rate_limit_queue_timeout",
        "rate_limit_queue_full",
        "rate_limit_queue_wedged",
        "rate_limit_execution_timeout",
        "local_queue_capacity",
    }
)
_ABORT_CODES: Final = frozenset({"und_err_aborted", "abort_err", "client_disconnected"})
_LOCAL_CODES: Final = frozenset({"enoent", "eacces", "epipe", "err_child_process_stdio_maxbuffer"})
_BUDGET_CODES: Final = frozenset({"budget_exceeded", "budget_limit_exceeded", "key_budget_exceeded"})
_GATEWAY_FAULT_CODES: Final = frozenset({"plugin_block", "translation_failed", "translation_error"})
_MESSAGE_HEAD: Final = 8_192


class SkipsBreaker(Protocol):
    """What test 7 reads of a classification or a decision record."""

    @property
    def skip_provider_breaker(self) -> bool:
        """The breaker ignores this outcome."""
        ...


# --- predicates ------------------------------------------------------------------------------------------------
def is_abort(outcome: Outcome) -> bool:
    """The caller left (test 2). The text is not believed where the upstream itself said it."""
    if outcome.status == 499 or outcome.name.lower() == "aborterror" or outcome.origin is Origin.CLIENT:
        return True
    if outcome.code.lower() in _ABORT_CODES:
        return True
    return outcome.origin is not Origin.UPSTREAM and signals.ABORT.found_in(_said(outcome))


def is_local_fault(outcome: Outcome) -> bool:
    """A fault of the host that runs the gateway (test 3). A broken pipe of a connection is the network's."""
    if outcome.code.lower() in _LOCAL_CODES:
        return not outcome.network_error and outcome.origin is not Origin.TRANSPORT
    return outcome.origin is not Origin.UPSTREAM and signals.LOCAL_FAULT.found_in(_said(outcome))


def is_gateway_fault(outcome: Outcome) -> bool:
    """A local fault for connections: test 3, a plugin's refusal or a failed translation."""
    return is_local_fault(outcome) or outcome.code.lower() in _GATEWAY_FAULT_CODES


def is_overload(outcome: Outcome) -> bool:
    """Status 529 anywhere, or the word in the message (test 4)."""
    if outcome.status == 529 or outcome.inner_status == 529:
        return True
    named = f"{outcome.type} {outcome.code} {outcome.message[:_MESSAGE_HEAD]}".lower()
    return "overloaded" in (named if outcome.message else f"{named} {lowered_text(outcome)}")


def is_request_scoped(outcome: Outcome) -> bool:
    """About this one request, by code or type (test 5)."""
    return outcome.code.lower() in REQUEST_SCOPED_CODES or outcome.type.lower() in REQUEST_SCOPED_TYPES


def is_stream_readiness_timeout(outcome: Outcome) -> bool:
    """The gateway gave up waiting for a stream to begin (test 6)."""
    return outcome.code.lower() == "stream_readiness_timeout"


def is_walk_on_same_provider(outcome: Outcome) -> bool:
    """One request that walks several accounts of a provider counts once, for its last target (test 8)."""
    walks = outcome.pool_attempt and outcome.next_target_same_provider
    return walks and outcome.code.lower() != "proxy_unreachable"


def is_own_limiter(outcome: Outcome) -> bool:
    """An answer of the gateway's own queue."""
    if outcome.own_queue_timeout:
        return True
    return outcome.code.lower() in OWN_LIMITER_CODES or outcome.type.lower() in OWN_LIMITER_CODES


def is_own_key_policy(outcome: Outcome) -> bool:
    """A limit that the gateway sets for its own callers: tokens of a key, or its budget."""
    code = outcome.code.lower()
    if outcome.origin is Origin.GATEWAY and code in _BUDGET_CODES:
        return True
    return outcome.status == 429 and code == "token_limit_exceeded"


def is_request_resource(outcome: Outcome) -> bool:
    """A 404 about a file, item, response, upload or vector store of the caller; beats a `model_not_found`."""
    if outcome.status != 404:
        return False
    return signals.REQUEST_RESOURCE.found_in(lowered_text(outcome))


def is_input_bound(outcome: Outcome) -> bool:
    """The same model on another account would refuse the same input."""
    return outcome.code.lower() in INPUT_BOUND_CODES or outcome.type.lower() in INPUT_BOUND_CODES


FREE_TIER_REMOVED: Final = "free-tier-removed"


def is_free_tier_removed(outcome: Outcome, policy: ConnectionPolicy) -> bool:
    """The model left the free tier of a provider in free billing mode; it is removed, nothing cools."""
    if not policy.provider.free_tier_billing or outcome.status not in (400, 403):
        return False
    return signals.FREE_TIER_ONLY.found_in(lowered_text(outcome))


def _is_penalty_free_request(outcome: Outcome) -> bool:
    """Codes count under every status; of the types those that providers use for dead keys and empty wallets as well
    only where no account can be meant."""
    kind = outcome.type.lower()
    if outcome.code.lower() in REQUEST_SCOPED_CODES or kind in _TYPES_AND_CODES:
        return True
    status = outcome.status or 0
    is_typed = kind in REQUEST_SCOPED_TYPES and (status >= 500 or status == 408)
    return is_typed and not signals.CREDENTIAL_CODES.found_in(outcome.code.lower())


def _is_spare_key(outcome: Outcome, policy: ConnectionPolicy) -> bool:
    return outcome.status == 401 and policy.connection.spare_keys


def _said(outcome: Outcome) -> str:
    return lowered_text(outcome) or outcome.message.lower()


# --- tables ------------------------------------------------------------------------------------------------------
Guard = tuple[str, Callable[[Outcome, ConnectionPolicy], bool], bool]
"""Name, predicate, and whether another account may still be tried."""

LOCAL_GUARDS: Final[tuple[Guard, ...]] = (
    ("abort", lambda o, _: is_abort(o), False),
    ("own-key-policy", lambda o, _: is_own_key_policy(o), False),
    ("own-limiter", lambda o, _: is_own_limiter(o), False),
    ("own-circuit-open", lambda o, _: o.circuit_open_answer, True),
    ("own-timeout", lambda o, _: o.own_timeout, True),
    ("local-fault", lambda o, _: is_gateway_fault(o), False),
    ("spare-key", _is_spare_key, True),
    ("request-resource", lambda o, _: is_request_resource(o), False),
    (FREE_TIER_REMOVED, is_free_tier_removed, True),
    ("input-bound", lambda o, _: is_input_bound(o), True),
    ("request-scoped", lambda o, _: _is_penalty_free_request(o), True),
)
_FALLBACK: Final = {name: may for name, _, may in LOCAL_GUARDS}

BreakerTest = tuple[str, Callable[[Outcome, SkipsBreaker | None], bool]]

BREAKER_TESTS: Final[tuple[BreakerTest, ...]] = (
    ("status", lambda o, _: o.status not in COUNTED_STATUSES),
    ("health-check", lambda o, _: o.call_kind is not CallKind.CLIENT),
    ("abort", lambda o, _: is_abort(o)),
    ("local-fault", lambda o, _: is_local_fault(o)),
    ("overload", lambda o, _: is_overload(o)),
    ("request-scoped", lambda o, _: is_request_scoped(o)),
    ("stream-readiness", lambda o, _: is_stream_readiness_timeout(o)),
    ("skip-flag", lambda _, c: c is not None and c.skip_provider_breaker),
    ("same-provider-next", lambda o, _: is_walk_on_same_provider(o)),
    ("own-circuit-open", lambda o, _: o.circuit_open_answer),
    ("own-queue-timeout", lambda o, _: o.own_queue_timeout),
)


def local_guard(outcome: Outcome, policy: ConnectionPolicy) -> str:
    """Name of the guard that ends the evaluation for connection, provider cooldown and model lock; empty: none."""
    return next((name for name, holds, _ in LOCAL_GUARDS if holds(outcome, policy)), "")


def guard_allows_fallback(guard: str) -> bool:
    """True if another account may be tried after an outcome that `guard` set aside."""
    return _FALLBACK[guard]


def breaker_exclusion(outcome: Outcome, classification: SkipsBreaker | None) -> str:
    """Name of the first failing test of breaker.md section 4; empty where the outcome counts."""
    return next((name for name, fails in BREAKER_TESTS if fails(outcome, classification)), "")
