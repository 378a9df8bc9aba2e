"""Content of a decision token: what travels from a decision to its reports.

Sealing and opening are the transport's (transport/grpc/token).
"""

from __future__ import annotations

from typing import NamedTuple

from policy_service.application.events import ProbeRef
from policy_service.domain.ids import DurationMs, Generations, Instant, Target
from policy_service.domain.outcome import CallKind

NO_GENERATIONS = Generations()


class TokenTarget(NamedTuple):
    """One target of the decision with the generations of the newest committed rows."""

    target: Target
    generations: Generations = NO_GENERATIONS
    key: str = ""
    address: str = ""
    """host:port of the catalogue, for the answer; a token does not carry it."""


class PermitRef(NamedTuple):
    """A concurrency or queue permit held by the decision; freed by the final report."""

    permit_id: str
    gate: str = ""


class LeaseFence(NamedTuple):
    """Fence of a managed request (spec/leases.md section 1)."""

    owner_hash: str
    generation: int
    caller_id: str
    connection: str


class PinRef(NamedTuple):
    """Session pin that the decision saw or made; `version` 0: not stored, this replica alone holds it."""

    session_hash: str
    provider: str
    connection: str
    version: int = 0
    ttl_ms: DurationMs = 0
    """Life of the pin from its last use, as the request resolved it."""


class WaitSpent(NamedTuple):
    """What a request has already spent on waiting out cooldowns (spec/cooldown_wait.md)."""

    attempts: int = 0
    spent_ms: DurationMs = 0


NOT_WAITED = WaitSpent()


class LaneWindow(NamedTuple):
    """Wait window of the usage-wall lane (spec/usage_wall.md section 4)."""

    since: Instant
    attempts: int = 0
    next_try_at: Instant = 0


class DecisionToken(NamedTuple):
    """Content of a decision token, self-contained so that any replica can take the report.

    A tuple, because every decision builds one and every report another.
    """

    decision_id: str
    started_at: Instant
    targets: tuple[TokenTarget, ...] = ()
    """The dispatched target first, then the fallbacks; a report must name one of them."""
    request_id: str = ""
    route: str = ""
    caller_id: str = ""
    probes: tuple[ProbeRef, ...] = ()
    permits: tuple[PermitRef, ...] = ()
    reservation_id: str = ""
    lease: LeaseFence | None = None
    pin: PinRef | None = None
    waited: WaitSpent = NOT_WAITED
    lane: LaneWindow | None = None
    call_kind: CallKind = CallKind.CLIENT
    is_pool: bool = False
    """Decision of a route: its attempts are pool attempts."""
    attempts_made: int = 0
    """Attempts of the client request before this decision."""
    policy_revision: int = 0
