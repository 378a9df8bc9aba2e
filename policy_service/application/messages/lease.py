"""Lifecycle calls of leases, as values. Owner tokens end at the edge: only hashes come here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.lease import Fence, LeaseRow
from policy_service.domain.lease_context import LeaseRefusal


@dataclass(frozen=True, slots=True)
class LeaseMessage:
    """One lifecycle call as it arrives."""

    body: Mapping[str, object]
    """Action and fields as in the HTTP form (spec/leases.md section 6)."""
    owner: str | LeaseRefusal
    """Owner hash, or what is wrong with the owner token."""
    caller_id: str = ""
    caller_key_sha256: str = ""
    request_id: str = ""
    is_retry_safe: bool = False
    """True: the caller chose the request id, and a repetition gets the same grant."""
    allowed_connections: tuple[str, ...] = ()
    """Narrows the caller's list; empty: no narrowing."""
    is_http: bool = False
    content_type: str | None = None


@dataclass(frozen=True, slots=True)
class FenceMessage:
    """One CheckFence."""

    owner: str | LeaseRefusal
    generation: int
    connection: str
    caller_id: str = ""
    caller_key_sha256: str = ""


@dataclass(frozen=True, slots=True)
class LeaseShown:
    """A lease as its owner may see it; never with a connection id."""

    row: LeaseRow
    reused: bool = False
    provider: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class LeaseUnavailable:
    """No lease now. `free_count` of the `eligible_count` connections are free."""

    code: str
    http_status: int
    retry_after_ms: DurationMs | None = None
    eligible_count: int = 0
    free_count: int = 0
    message: str = ""
    capacity: Mapping[str, object] = field(default_factory=dict)
    """`state` and `reason` of the HTTP form, where capacity is what is missing."""


@dataclass(frozen=True, slots=True)
class FenceAnswer:
    """Result of CheckFence at database instant `at`."""

    verdict: Fence
    at: Instant
    expires_at: Instant | None = None
    """Only where the fence is valid."""
