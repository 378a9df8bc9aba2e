"""What ends with a report besides the outcome: permits, panic calls, a lease, the fate of a pin."""

from __future__ import annotations

import logging
from typing import NamedTuple

from policy_service.application.grants import PANIC, Grants
from policy_service.application.managed_selection import LeaseReports
from policy_service.application.messages import ReportRequest
from policy_service.application.permit_work import ids_of
from policy_service.application.permits import Permits
from policy_service.application.pin_reports import PinReports
from policy_service.application.ports import StoreUnavailableError
from policy_service.application.report_result import ReportResult
from policy_service.application.view import View
from policy_service.domain.ids import Instant, Target

log = logging.getLogger(__name__)


class LeaseEnd(NamedTuple):
    """`APPLIED` or `REFUSED` with the code of a refusal; empty where the report ends no lease."""

    result: str = ""
    code: str = ""


NO_LEASE = LeaseEnd()


class Endings:
    """Ends what a decision held."""

    def __init__(self, view: View, grants: Grants, permits: Permits, pins: PinReports, leases: LeaseReports) -> None:
        self._view = view
        self._grants = grants
        self._permits = permits
        self._pins = pins
        self._leases = leases

    def free(self, request: ReportRequest) -> None:
        """A final report frees every permit of its decision; in the background, each slot once."""
        if request.token is None or not request.final or not request.token.permits:
            return
        for permit in request.token.permits:
            if permit.gate.startswith(PANIC):
                self._grants.end_panic(permit.gate, permit.permit_id)
        ids = ids_of(request.token.permits)
        if ids and request.headers:
            self._grants.in_background(self._learn_and_release(request, ids))
        elif ids:
            self._permits.release_decision(request.token.permits)

    async def _learn_and_release(self, request: ReportRequest, ids: tuple[str, ...]) -> None:
        """Limits that the upstream states teach the queue of the permits (queue_admission.md section 5)."""
        try:
            await self._permits.learn_from(ids, request.headers, self._view.policy)
        except StoreUnavailableError:
            log.info("what the headers say about the limits of %d gates is not learnt: the store is away", len(ids))
        finally:
            self._permits.release_soon(ids)

    async def end_lease(self, request: ReportRequest) -> LeaseEnd:
        """End the lease where the report asks for it."""
        if not request.extras.end_lease:
            return NO_LEASE
        return LeaseEnd(*await self._leases.end(request))

    def pin(self, request: ReportRequest, served: Target, result: ReportResult | None, now: Instant) -> str:
        """What becomes of the session pin: `kept`, `refreshed`, `evicted`, or empty without one."""
        if request.token is None or request.token.pin is None:
            return ""
        return self._pins.reported(request, served, result, now)
