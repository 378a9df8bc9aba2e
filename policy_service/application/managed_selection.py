"""Leases in SelectTarget and ReportOutcome: fence first, plan, claim; and the wish to end a lease (leases.md 7, 8).

`SelectTarget` judges the ordinary gates and orders by its strategy; here is what a lease adds. Calls of callers that
are not managed cost nothing but a look at the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from policy_service.application.callers import Registry
from policy_service.application.lease_book import LeaseBook, LeaseTerms
from policy_service.application.lease_terms import Offer, candidates, error_of, hard, narrowed, terms_of, text_of
from policy_service.application.messages import LeaseContext, Reject, ReportRequest, SelectRequest
from policy_service.application.messages.token import LeaseFence
from policy_service.application.ports import StoreUnavailableError
from policy_service.domain.catalogue import Caller
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.facts import Cause
from policy_service.domain.ids import ConnectionId, Instant, ModelId, ProviderId, Target
from policy_service.domain.lease import EndReason, LeaseCall, LeaseResult, LeaseRow
from policy_service.domain.lease_context import (
    Capacity,
    LeaseCode,
    LeaseRefusal,
    capacity_retry_s,
    fence_refusal,
    is_managed,
    standing_refusal,
)
from policy_service.domain.lease_context import LeaseContext as Fenced
from policy_service.domain.lease_selection import (
    ClaimVerdict,
    LeasePlan,
    ManagedRequest,
    PlanKind,
    after_claim,
    fence_first,
    judge_report,
    plan,
    rank_for_lease,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Claimed:
    """A connection that the owner holds now, with the fence that goes into the token."""

    fence: LeaseFence
    at: Instant
    """Database time of the check; the decision starts here."""
    transitioned: bool = False


@dataclass(slots=True)
class ManagedRun:
    """One managed selection after its fence: what it may choose from, and what stood in the way."""

    caller: Caller
    own: LeaseRow
    planned: LeasePlan
    at: Instant
    request_id: str = ""
    free_at: list[Instant] = field(default_factory=list)
    """When connections that were taken in between become free."""
    is_gated: bool = False
    """A gate (cap, queue, breaker) refused a candidate: that is no reason to end the lease."""

    @property
    def has_candidates(self) -> bool:
        """False: no capacity, or a dead end; the owner's lease is invalidated already."""
        return self.planned.kind in (PlanKind.USE, PlanKind.CHOOSE)

    def rank(self, order: Sequence[T], connection_of: Callable[[T], str]) -> list[T]:
        """What may serve, of targets that passed the gates in the strategy's order: those on the leased connection,
        and only where there are none, those on the other candidates."""
        allowed = frozenset(self.planned.candidates)
        mine = [each for each in order if connection_of(each) in allowed]
        return list(rank_for_lease(mine, lambda each: connection_of(each) == self.own.connection_id))

    def exclusions(self, offers: Iterable[Offer]) -> tuple[Exclusion, ...]:
        """What leases take away, as exclusion records of the targets concerned."""
        targets: dict[str, Target] = {}
        for target, _ in offers:
            targets.setdefault(target.connection, target)
        return tuple(
            Exclusion(_target_of(targets, each.connection), each.reason.value, each.until)
            for each in self.planned.exclusions
        )


def _target_of(targets: dict[str, Target], connection: str) -> Target:
    return targets.get(connection) or Target(ProviderId(""), ConnectionId(connection), ModelId(""))


class ManagedSelection:
    """The lease part of SelectTarget.

    Args:
        registry: callers of the policy in force.
        book: lease operations; their budget is the longest wait for the store.
    """

    def __init__(self, registry: Registry, book: LeaseBook) -> None:
        self.registry = registry
        self._book = book

    @property
    def hidden(self) -> frozenset[str]:
        """Connections that only managed callers see (reason `lease_hidden`); from the policy, without the store."""
        return self.registry.now_in_force.managed

    def concerns(self, request: SelectRequest) -> bool:
        """True for managed callers, and for calls that carry a lease context."""
        return request.lease is not None or (bool(self.hidden) and is_managed(self._caller(request)))

    def fence(self, request: SelectRequest) -> tuple[Caller, Fenced]:
        """Caller and context of a request that `concerns` leases; nothing is read from the store.

        Raises:
            PolicyError: the caller may not use leases, or the context cannot be read (section 2).
        """
        caller = self._caller(request)
        refused = _caller_refusal(request, caller) or standing_refusal(caller)
        if refused is not None or caller is None:
            raise error_of(refused or LeaseRefusal(LeaseCode.API_KEY_INVALID))
        context = _context(request.lease)
        if isinstance(context, LeaseRefusal):
            raise error_of(context)
        return caller, context

    async def begin(self, request: SelectRequest, offers: Sequence[Offer]) -> ManagedRun:
        """Fence and plan in one read; at a dead end or without capacity the lease is invalidated.

        Args:
            offers: every target of the request with the judgement of the ordinary filters, in their order.

        Raises:
            PolicyError: the fence does not hold, or the store is away.
        """
        caller, context = self.fence(request)
        pool = candidates(offers)
        with hard():
            sight = await self._book.settled(context.owner_hash, [c.connection for c in pool], context.generation)
            own = fence_first(sight.rows, context, caller.id, request.forced_connection, sight.now)
            if isinstance(own, LeaseRefusal):
                raise error_of(own)
            managed = ManagedRequest(
                narrowed(caller, request.allowed_connections), own, forced=request.forced_connection
            )
            planned = plan(
                managed, pool, sight.rows, lambda name: self._book.rules(sight, self._delay(name)), sight.now
            )
            if planned.invalidate is not None:
                await self._invalidate(own, planned.invalidate, request.request_id)
        return ManagedRun(caller, own, planned, sight.now, request.request_id)

    async def claim(self, run: ManagedRun, target: Target) -> Claimed | None:
        """Take the picked target's connection; None: pick again, without that connection.

        Raises:
            PolicyError: the lease ended meanwhile (LEASE_FENCE_STALE), or the store is away.
        """
        own = run.own
        fence = LeaseFence(own.owner_hash, own.generation, run.caller.id, target.connection)
        if target.connection == own.connection_id:
            return Claimed(fence, run.at)
        call = LeaseCall(
            own.owner_hash,
            run.caller.id,
            own.generation,
            target.provider,
            target.connection,
            reason=EndReason.CONNECTION_INELIGIBLE,
        )
        cause = Cause("", 0, request_id=run.request_id)
        with hard():
            step = await self._book.transition(call, terms_of(self.registry, target.connection), cause)
        verdict = after_claim(step.result)
        if verdict is ClaimVerdict.STALE:
            raise error_of(LeaseRefusal(LeaseCode.FENCE_STALE))
        if step.lease is None:
            run.free_at += [] if step.free_at is None else [step.free_at]
            return None
        return Claimed(fence, step.lease.acquired_at, step.result is LeaseResult.TRANSITIONED)

    async def refuse(self, run: ManagedRun, pool_size: int) -> Reject | None:
        """The capacity answer where others hold everything; None: a dead end, answered like any other request.

        A run whose candidates were all taken in between loses its lease here; one that a gate refused keeps it.
        """
        capacity = run.planned.capacity
        if capacity is None and run.has_candidates and not run.is_gated:
            with hard():
                await self._invalidate(run.own, EndReason.CONNECTION_INELIGIBLE, run.request_id)
            capacity = Capacity(len(run.planned.candidates), capacity_retry_s(min(run.free_at, default=None), run.at))
        return None if capacity is None else _capacity_reject(capacity, pool_size)

    # -- steps ---------------------------------------------------------------------------------------
    def _caller(self, request: SelectRequest) -> Caller | None:
        return self.registry.now_in_force.find(request.caller_id, request.caller_key_sha256)

    def _delay(self, connection: str) -> LeaseTerms:
        """The pause of a fresh listing is the claim's to check, which reads the time of the listing."""
        return LeaseTerms(terms_of(self.registry, connection).lock_delay_ms)

    async def _invalidate(self, own: LeaseRow, reason: EndReason, request_id: str) -> None:
        call = LeaseCall(own.owner_hash, own.api_key_id, own.generation, reason=reason)
        await self._book.invalidate(call, Cause("", 0, request_id=request_id))


def _caller_refusal(request: SelectRequest, caller: Caller | None) -> LeaseRefusal | None:
    if not (request.caller_id or request.caller_key_sha256):
        return LeaseRefusal(LeaseCode.AUTHENTICATION_REQUIRED)
    return None if caller is not None and caller.enabled else LeaseRefusal(LeaseCode.API_KEY_INVALID)


def _context(given: LeaseContext | None) -> Fenced | LeaseRefusal:
    """The context in the order of section 2: what is absent before what is malformed."""
    if given is None or given.problem == LeaseCode.CONTEXT_REQUIRED:
        return LeaseRefusal(LeaseCode.CONTEXT_REQUIRED, "lease.owner")
    if given.generation is None:
        return LeaseRefusal(LeaseCode.CONTEXT_REQUIRED, "lease.generation")
    if given.problem:
        return LeaseRefusal(LeaseCode.CONTEXT_INVALID, "lease")
    return Fenced(given.owner_hash, given.generation)


def _capacity_reject(capacity: Capacity, pool_size: int) -> Reject:
    code = LeaseCode.CAPACITY_UNAVAILABLE
    return Reject(
        LeaseRefusal(code).http_status,
        code.value,
        "lease_error",
        code.value,
        "wait",
        text_of(code),
        capacity.retry_after_s,
        pool_size=pool_size,
        eligible_count=capacity.eligible_count,
        free_count=capacity.free_count,
    )


class LeaseReports:
    """The lease part of ReportOutcome. Whatever it says, the upstream evidence counts (section 8)."""

    def __init__(self, book: LeaseBook) -> None:
        self._book = book

    async def end(self, request: ReportRequest) -> tuple[str, str]:
        """(`APPLIED` or `REFUSED`, code of a refusal); two empty texts where the report does not ask to end a lease."""
        if not request.extras.end_lease:
            return "", ""
        call = _fence_call(request)
        if isinstance(call, LeaseRefusal):
            return "REFUSED", call.code.value
        try:
            check = await self._book.release_fenced(call, Cause("", 0, request_id=request.request_id))
        except StoreUnavailableError:
            return "REFUSED", LeaseCode.SERVICE_UNAVAILABLE.value
        refused = fence_refusal(check.verdict)
        return judge_report(check.verdict).value, refused.code.value if refused else ""


def _fence_call(request: ReportRequest) -> LeaseCall | LeaseRefusal:
    """The explicit fence, else the token's; the connection is the one that was called."""
    reason = EndReason(request.extras.end_lease)
    token = request.token
    connection = request.target.connection
    caller = request.caller_id or (token.caller_id if token else "")
    if request.extras.lease is not None:
        context = _context(request.extras.lease)
        if isinstance(context, LeaseRefusal):
            return context
        return LeaseCall(context.owner_hash, caller, context.generation, "", connection, reason=reason)
    if token is None or token.lease is None:
        return LeaseRefusal(LeaseCode.CONTEXT_REQUIRED, "lease")
    held = token.lease
    return LeaseCall(held.owner_hash, held.caller_id, held.generation, "", connection, reason=reason)
