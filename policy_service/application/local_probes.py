"""Probes that a replica sends without the store: one per breaker and reset timeout, marked `local`, so that an outage
of ours never prolongs one of theirs (spec/fleet.md section 3). Used by `grants` alone."""

from __future__ import annotations

from typing import NamedTuple

from policy_service.application.events import ProbeRef
from policy_service.application.messages import PermitGrant, PermitKind
from policy_service.application.view import View
from policy_service.domain.breaker import BreakerState, breaker_name
from policy_service.domain.breaker_probe import Acquired, ProbeRequest, acquire_local
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import Instant, Target
from policy_service.domain.policy import ConnectionPolicy


class LocalGrant(NamedTuple):
    """Permits that only this replica knows of, or why there are none."""

    probes: tuple[ProbeRef, ...] = ()
    permits: tuple[PermitGrant, ...] = ()
    refusal: Exclusion | None = None


class LocalProbes:
    """Remembers when each breaker was tested without the store. `granted` counts the decisions that did so."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._last_at: dict[str, Instant] = {}
        self.granted = 0

    def acquire(self, target: Target, policy: ConnectionPolicy, request: ProbeRequest, now: Instant) -> LocalGrant:
        """Permit of every breaker of `target` that demands one; all or nothing."""
        probes: list[ProbeRef] = []
        permits: list[PermitGrant] = []
        keys = ("", target.connection) if policy.breaker.per_connection and target.connection else ("",)
        for part in keys:
            name = breaker_name(target.provider, part)
            row = self._row(target.provider, part)
            result = acquire_local(row, now, policy.breaker, request, self._last_at.get(name))
            if not isinstance(result, Acquired):
                until = None if result.retry_after_ms is None else now + result.retry_after_ms
                return LocalGrant(refusal=Exclusion(target, result.reason, until, row.fact_id))
            if result.permit is not None:
                permit = result.permit
                probes.append(ProbeRef(permit.id, name, permit.generation, permit.round, local=True))
                permits.append(PermitGrant(permit.id, PermitKind.PROBE, name, permit.expires_at, is_local=True))
        self._last_at |= {probe.breaker_key: now for probe in probes}
        self.granted += bool(probes)
        return LocalGrant(tuple(probes), tuple(permits))

    def _row(self, provider: str, part: str) -> BreakerState:
        """The newest committed row: a token never carries the generation of a projection (fleet.md section 2)."""
        known = self._view.committed((BreakerState.KIND, provider, part))
        return known.row if known and isinstance(known.row, BreakerState) else BreakerState(provider, part)
