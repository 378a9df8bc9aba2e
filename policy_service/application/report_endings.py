"""What ends with a report besides the outcome: permits, panic calls, a lease, the fate of a pin."""

from __future__ import annotations

import logging
from typing import NamedTuple

from policy_service.application.grants import PANIC, Grants
from policy_service.application.managed_selection import LeaseReports
from policy_service.application.messages import DecisionToken, ReportRequest
from policy_service.application.permit_gates import queue_key
from policy_service.application.permit_work import ids_of
from policy_service.application.permits import Permits
from policy_service.application.pin_reports import PinReports
from policy_service.application.ports import Clock, StoreUnavailableError
from policy_service.application.report_rates import NOTHING, rates_of
from policy_service.application.report_result import ReportResult
from policy_service.application.stickiness import RouteStickiness
from policy_service.application.view import View
from policy_service.domain.ids import Instant, ProviderId, Target
from policy_service.domain.profiles import QueueProfile
from policy_service.domain.queue_learning import RateEvidence

log = logging.getLogger(__name__)


class LeaseEnd(NamedTuple):
    """`APPLIED` or `REFUSED` with the code of a refusal; empty where the report ends no lease."""

    result: str = ""
    code: str = ""


NO_LEASE = LeaseEnd()


class Learning(NamedTuple):
    """What a limiter is taught."""

    key: str
    profile: QueueProfile
    evidence: RateEvidence


class Endings:
    """Ends what a decision held."""

    def __init__(
        self,
        view: View,
        clock: Clock,
        grants: Grants,
        permits: Permits,
        pins: PinReports,
        leases: LeaseReports,
        stickiness: RouteStickiness,
    ) -> None:
        self._view = view
        self._clock = clock
        self._grants = grants
        self._permits = permits
        self._pins = pins
        self._leases = leases
        self._stickiness = stickiness

    def free(self, request: ReportRequest) -> None:
        """A final report frees every permit of its decision; in the background, each slot once.

        Any report teaches the limiter of the served connection first (queue_admission.md section 5).
        """
        ids = self._freed(request)
        learning = self._learning(request)
        if learning is not None:
            self._grants.in_background(self._learn_and_release(learning, ids))
        else:
            self._permits.release_soon(ids)

    def _freed(self, request: ReportRequest) -> tuple[str, ...]:
        """Permits of the permit store that the report gives back; panic calls end here."""
        if request.token is None or not request.final:
            return ()
        for permit in request.token.permits:
            if permit.gate.startswith(PANIC):
                self._grants.end_panic(permit.gate, permit.permit_id)
        return ids_of(request.token.permits)

    def _learning(self, request: ReportRequest) -> Learning | None:
        """None where the connection is not paced, or the answer says nothing about its rate."""
        policy, named = self._view.policy, request.target
        provider = ProviderId(policy.canonical(named.provider))
        applies = policy.for_connection(provider, named.connection, request.auth_class)
        if applies.queue is None:
            return None
        evidence = rates_of(request, applies, self._clock.now())
        key = queue_key(applies, named._replace(provider=provider))
        return None if evidence == NOTHING else Learning(key, applies.queue, evidence)

    async def _learn_and_release(self, learning: Learning, ids: tuple[str, ...]) -> None:
        try:
            await self._permits.learn(*learning)
        except StoreUnavailableError:
            log.info("what an answer says about the limit of %s is not learnt: the store is away", learning.key)
        finally:
            self._permits.release_soon(ids)

    async def end_lease(self, request: ReportRequest) -> LeaseEnd:
        """End the lease where the report asks for it."""
        if not request.extras.end_lease:
            return NO_LEASE
        return LeaseEnd(*await self._leases.end(request))

    def heard(self, token: DecisionToken, served: Target, now: Instant) -> None:
        """A success of a decision without a pin: route stickiness hears of it."""
        self._stickiness.reported(token.decision_id, served, now, is_success=True)

    def affinity(self, request: ReportRequest, served: Target, result: ReportResult | None, now: Instant) -> str:
        """What becomes of the session pin: `kept`, `refreshed`, `evicted`, or empty without one; route stickiness hears
        of the attempt too."""
        if request.token is None:
            return ""
        is_success = result is None or result.is_success
        self._stickiness.reported(request.token.decision_id, served, now, is_success=is_success)
        if request.token.pin is None:
            return ""
        return self._pins.reported(request, served, result, now)
