"""What a selection was granted before its target is handed out, or why it was not. A value; made by `grants` and
`probe_acquire`."""

from __future__ import annotations

from dataclasses import dataclass

from policy_service.application.events import ProbeRef
from policy_service.application.messages import PermitGrant, PermitUse
from policy_service.application.permit_work import PermitRefusal
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import DurationMs, Instant


@dataclass(frozen=True, slots=True)
class Granted:
    """Answer to one acquire: permits, or the exclusion that the refusal makes."""

    probes: tuple[ProbeRef, ...] = ()
    permits: tuple[PermitGrant, ...] = ()
    at: Instant | None = None
    """Database time of the grant: the start of the decision."""
    refusal: Exclusion | None = None
    permit_use: PermitUse = PermitUse.NOT_NEEDED
    waited_ms: DurationMs = 0
    answer: PermitRefusal | None = None
    """What the gate itself says where it refused."""
    decision_id: str = ""
    """The decision that the permits belong to: for a repeated request that of the first answer (fleet.md section 1)."""
