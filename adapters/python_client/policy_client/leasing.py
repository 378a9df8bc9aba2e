"""The life of a lease as its owner sees it: when to renew, what counts as lost (docs/concepts/leases.md).

Pure: a state, events, time as an argument; the shells call AcquireLease, RenewLease and ReleaseLease. An exception is
not a loss: the service may be away for a moment. "No" is a loss, and so is the end of the TTL by our own clock.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from policy_client import messages
from policy_client.errors import FenceError, ForbiddenError, LeaseLostError, ServiceError, UnauthenticatedError

DEFAULT_TTL_MS = 120_000
SHORTEST_TTL_MS = 1_000
LONGEST_RETRY_MS = 5_000
NO = (FenceError, UnauthenticatedError, ForbiddenError)
"""Answers of the service that say that the lease is not ours."""
EXPIRED = "LEASE_EXPIRED_UNRENEWED"


def new_owner() -> str:
    """A fresh owner token: `vlo_` and 43 characters. A secret: whoever has it has the lease."""
    return f"vlo_{secrets.token_urlsafe(32)}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A lease that is asked for.

    Args:
        model: model or route it is for.
        caller_id, caller_key_sha256: who asks; one of them.
        ttl_ms: life of the lease unless renewed, 1 000 .. 1 800 000.
        allowed_connections: narrows the caller's list; empty: no narrowing.
        owner: owner token; a fresh one unless given.
    """

    model: str
    caller_id: str = ""
    caller_key_sha256: str = ""
    ttl_ms: int = DEFAULT_TTL_MS
    allowed_connections: tuple[str, ...] = ()
    owner: str = field(default_factory=new_owner, repr=False)

    def acquire(self, request_id: str) -> messages.AcquireLeaseRequest:
        """The request; repeating it is safe."""
        return messages.AcquireLeaseRequest(
            request_id=request_id,
            caller_id=self.caller_id,
            caller_key_sha256=self.caller_key_sha256,
            owner=self.owner,
            model=self.model,
            ttl_ms=self.ttl_ms,
            allowed_connections=self.allowed_connections,
        )


@dataclass(frozen=True, slots=True)
class Held:
    """A lease in hand. Instants by the client's clock; a life counts from before the call that granted it, so that ours
    never ends after the service's.
    """

    wanted: Wanted
    generation: int
    ends_at: int
    renew_at: int
    failures: int = 0
    lost: str = ""
    """Code of the loss; empty: not lost."""

    @property
    def context(self) -> messages.LeaseContext:
        """What a request of this lease carries."""
        return messages.LeaseContext(owner=self.wanted.owner, generation=self.generation)

    def renewal(self) -> messages.RenewLeaseRequest:
        """The request that extends it."""
        return messages.RenewLeaseRequest(
            caller_id=self.wanted.caller_id,
            caller_key_sha256=self.wanted.caller_key_sha256,
            lease=self.context,
            ttl_ms=self.wanted.ttl_ms,
        )

    def release(self, *, is_cancelled: bool) -> messages.ReleaseLeaseRequest:
        """The request that ends it."""
        reasons = (messages.LEASE_END_REASON_OWNER_EXIT, messages.LEASE_END_REASON_CLIENT_CANCELLED)
        return messages.ReleaseLeaseRequest(
            caller_id=self.wanted.caller_id,
            caller_key_sha256=self.wanted.caller_key_sha256,
            lease=self.context,
            reason=reasons[is_cancelled],
        )


def granted(wanted: Wanted, lease: messages.Lease, asked_at: int) -> Held:
    """The lease as granted.

    Args:
        asked_at: when the call was made.
    """
    life_ms = lease.expires_at_unix_ms - lease.renewed_at_unix_ms or lease.ttl_ms
    if lease.reused:
        # An owner that had the lease already gets it without more time: renew it at once.
        return Held(wanted, lease.generation, asked_at + SHORTEST_TTL_MS, asked_at)
    return Held(wanted, lease.generation, asked_at + life_ms, asked_at + life_ms // 3)


def renewed(held: Held, lease: messages.Lease, asked_at: int) -> Held:
    """After a renewal: a third of the life is a good rhythm (spec/leases.md section 9)."""
    life_ms = lease.expires_at_unix_ms - lease.renewed_at_unix_ms
    return replace(held, ends_at=asked_at + life_ms, renew_at=asked_at + life_ms // 3, failures=0)


def not_renewed(held: Held, error: Exception, now: int) -> Held:
    """After a renewal that failed: lost if the service said no, else soon again."""
    if isinstance(error, NO):
        return replace(held, lost=error.reason or error.code)
    pause_ms = min(LONGEST_RETRY_MS, 100 * 2**held.failures)
    stated_ms = (error.retry_after_ms or 0) if isinstance(error, ServiceError) else 0
    return ended(replace(held, renew_at=now + max(pause_ms, stated_ms), failures=held.failures + 1), now)


def ended(held: Held, now: int) -> Held:
    """Lost once its time is over unrenewed."""
    return replace(held, lost=held.lost or EXPIRED) if now >= held.ends_at else held


class InHand:
    """A lease as its owner's code sees it.

    Args:
        now: clock of the client.
    """

    def __init__(self, held: Held, now: Callable[[], int]) -> None:
        self.held = held
        self._now = now

    @property
    def is_lost(self) -> bool:
        """The service said no, or the time ran out unrenewed: dispatch nothing more."""
        return bool(ended(self.held, self._now()).lost)

    @property
    def context(self) -> messages.LeaseContext:
        """For `SelectTargetRequest.lease`.

        Raises:
            LeaseLostError: it is over.
        """
        lost = ended(self.held, self._now()).lost
        if lost:
            raise LeaseLostError(lost)
        return self.held.context

    def update(self, held: Held) -> None:
        """Take over what a renewal brought."""
        self.held = held
