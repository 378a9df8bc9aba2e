"""What the lease use cases share: connections on offer, the numbers of each, refusals as errors (leases.md 6.3, 7)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from policy_service.application.callers import Registry
from policy_service.application.errors import (
    FenceError,
    FieldProblem,
    ForbiddenError,
    InvalidRequestError,
    PolicyError,
    StoreLostError,
    UnauthenticatedError,
)
from policy_service.application.lease_book import LeaseTerms
from policy_service.application.ports import StoreUnavailableError
from policy_service.domain.catalogue import Caller
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import DurationMs, Target
from policy_service.domain.lease_context import LeaseCode, LeaseRefusal, PolicyRefusal, Refused
from policy_service.domain.lease_selection import Blocked, Candidate, blocked_by

RETRY_AFTER_MS: DurationMs = 1_000
"""When to ask again while the store is away."""

_TEXTS = {
    LeaseCode.AUTHENTICATION_REQUIRED: "leases need the caller's API key",
    LeaseCode.API_KEY_INVALID: "the API key is unknown or disabled",
    LeaseCode.ACTION_INVALID: "the call does not match its form",
    LeaseCode.SCOPE_REQUIRED: "the API key lacks the scope lease:exclusive",
    LeaseCode.KEY_CONFIGURATION_INVALID: "the API key lists no connections",
    LeaseCode.CONTEXT_REQUIRED: "missing; a request of a managed key carries its lease",
    LeaseCode.CONTEXT_INVALID: "not an owner token with its generation",
    LeaseCode.MODEL_INVALID: "no provider serves the model",
    LeaseCode.REQUIRED: "the owner has no active lease",
    LeaseCode.FENCE_STALE: "the generation is not that of an active lease",
    LeaseCode.AUTHORIZATION_MISMATCH: "the lease belongs to another API key",
    LeaseCode.CONNECTION_MISMATCH: "the lease is on another connection",
    LeaseCode.NO_ELIGIBLE_CONNECTION: "no allowed connection serves the model",
    LeaseCode.CAPACITY_UNAVAILABLE: "every eligible connection is held by others",
    LeaseCode.ELIGIBILITY_UNAVAILABLE: "every allowed connection is cooling down or expired",
    LeaseCode.SERVICE_UNAVAILABLE: "leases cannot be judged now",
}


class Offer(NamedTuple):
    """A connection that could serve, with the exclusion of the ordinary filters where there is one."""

    target: Target
    exclusion: Exclusion | None = None


class Offers(Protocol):
    """Connections for a model in the order of preference; None where no provider serves it.

    Raises:
        Exception: the look-up itself failed.
    """

    def __call__(self, caller: Caller, model: str, allowed: frozenset[str]) -> Sequence[Offer] | None: ...


def text_of(code: LeaseCode) -> str:
    """A code in words."""
    return _TEXTS.get(code, code.value)


def error_of(refusal: Refused) -> PolicyError:
    """A refusal as the error that leaves the service; the textual code is its reason."""
    if isinstance(refusal, PolicyRefusal):
        return ForbiddenError(refusal.message or refusal.code, metadata={"code": refusal.code})
    code, text = refusal.code.value, text_of(refusal.code)
    metadata = {"http_status": str(refusal.http_status)}
    if refusal.grpc == "INVALID_ARGUMENT":
        error = InvalidRequestError((FieldProblem(refusal.field or "model", text, reason=code),), reason=code)
        error.metadata = metadata
        return error
    if refusal.grpc == "UNAVAILABLE":
        metadata["cause"] = "STORE_UNAVAILABLE"
        return StoreLostError(text, reason=code, retry_after_ms=RETRY_AFTER_MS, metadata=metadata)
    return _PLAIN[refusal.grpc](text, reason=code, metadata=metadata)


_PLAIN: dict[str, type[UnauthenticatedError | ForbiddenError | FenceError]] = {
    "UNAUTHENTICATED": UnauthenticatedError,
    "PERMISSION_DENIED": ForbiddenError,
    "FAILED_PRECONDITION": FenceError,
}


@contextmanager
def hard() -> Iterator[None]:
    """Within it a lost store is a typed refusal: leases are never guessed."""
    try:
        yield
    except StoreUnavailableError:
        raise error_of(LeaseRefusal(LeaseCode.SERVICE_UNAVAILABLE)) from None


def candidates(offers: Iterable[Offer]) -> tuple[Candidate, ...]:
    """One candidate a connection, in order; eligible if any of its targets is."""
    found: dict[str, Blocked] = {}
    for target, exclusion in offers:
        blocked = blocked_by(exclusion.spec.mechanism, exclusion.reason) if exclusion else Blocked.NO
        if not blocked or target.connection not in found:
            found[target.connection] = blocked
    return tuple(Candidate(connection, blocked) for connection, blocked in found.items())


def terms_of(registry: Registry, connection: str) -> LeaseTerms:
    """Numbers of one connection under the policy in force."""
    policy = registry.now_in_force.policy
    declared = policy.catalogue.connections.get(connection)
    return LeaseTerms(int(policy.setting("lease.lock_delay_ms", declared)), registry.listed_in(connection))


def narrowed(caller: Caller, asked: Iterable[str]) -> frozenset[str]:
    """The caller's connections, narrowed by what the request names; never widened."""
    own, wanted = frozenset(caller.allowed_connections), frozenset(asked)
    return own & wanted if wanted else own
