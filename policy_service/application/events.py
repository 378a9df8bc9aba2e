"""The event: one reported attempt in the form in which it is queued, spooled, folded and committed.

Self-contained and serialisable; the fold (`report_plan`) needs nothing else but the policy and the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from policy_service.domain.ids import DurationMs, Generations, Instant, Target
from policy_service.domain.limit_reset import ClaimReport
from policy_service.domain.outcome import Outcome
from policy_service.domain.usage_wall_state import WaitWindow
from policy_service.domain.verdict import Verdict


@dataclass(frozen=True, slots=True)
class ProbeRef:
    """Probe permit that the decision held."""

    permit_id: str
    breaker_key: str
    generation: int
    """Generation of the key when the permit was granted."""
    round: int = 0
    """HALF_OPEN round (generation at entry) in which it was granted (fleet.md section 3)."""
    local: bool = False
    """Granted without the store."""


@dataclass(frozen=True, slots=True)
class WallCase:
    """What the usage wall reads of a report on a connection that it concerns (spec/usage_wall.md section 4)."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    """Unified headers by suffix."""
    sent_slow: bool = False
    remaining_budget_ms: DurationMs | None = None
    draw: float = 0.5
    window: WaitWindow | None = None
    """Wait window of the request so far."""
    claim_id: str = ""
    """Name of a claim that this report may open."""
    claim_until: Instant = 0
    """Last instant at which a transaction may open it: later its reporter has been answered. 0: not at all."""
    claim: ClaimReport | None = None
    """Result of a call of a claim."""
    resumes: str | None = None
    """Claim whose verdict this report was held for; empty: a claim that could not be opened in time."""


@dataclass(frozen=True, slots=True)
class OutcomeEvent:
    """One outcome with everything that order-proof folding needs (spec/fleet.md sections 1 and 2)."""

    event_id: str
    """Idempotency key: `<decision id>/<attempt>` or `report/<report id>`."""
    at: Instant
    """Database time of arrival; transitions use it."""
    target: Target
    """Served target, provider canonical."""
    outcome: Outcome
    started_at: Instant
    """Start of the attempt: decision start + offset, never later than `at`."""
    first_byte_at: Instant | None = None
    """First response byte; the end of the call if not streamed; None where neither is reported."""
    generations: Generations | None = None
    """None (a report without a token): the current ones."""
    probes: tuple[ProbeRef, ...] = ()
    """Breaker permits of the served target; with `final` also those of targets that were never tried."""
    early_probe: str = ""
    """Early-probe permit that the decision held for the served target (spec/guards.md section 7)."""
    replica: str = ""
    decision_id: str = ""
    request_id: str = ""
    attempt: int = 0
    final: bool = True
    statistics_only: bool = False
    """A tokenless success without elapsed time (fleet.md section 1)."""
    verdict: Verdict | None = None
    """Public verdict on a failure, judged once at arrival; it depends on the outcome alone."""
    wall: WallCase | None = None
    """Set where the usage wall concerns the connection; then it is asked before anything is classified."""

    @property
    def response_at(self) -> Instant:
        """Instant by which a success is judged stale for the breaker (fleet.md section 3)."""
        return self.started_at if self.first_byte_at is None else self.first_byte_at

    @property
    def bears_permit(self) -> bool:
        """Does the report end a probe? Only the locked rows say whether its permit still has a say."""
        return bool(self.probes or self.early_probe)


def fold_order(event: OutcomeEvent) -> tuple[Instant, str]:
    """Order of events within one transaction (fleet.md section 2)."""
    return event.at, event.event_id
