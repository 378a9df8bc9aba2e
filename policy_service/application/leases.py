"""The public lifecycle of leases: acquire, renew, release, status, and the fence check (spec/leases.md sections 6, 8).

An acquire goes through selection like an inference request; the connections on offer are the selection's to name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from policy_service.application.callers import Registry
from policy_service.application.giving_back import GivingBack
from policy_service.application.lease_book import LeaseBook, LeaseTerms
from policy_service.application.lease_terms import (
    Offer,
    Offers,
    candidates,
    error_of,
    hard,
    narrowed,
    terms_of,
    text_of,
)
from policy_service.application.messages.lease import (
    FenceAnswer,
    FenceMessage,
    LeaseMessage,
    LeaseShown,
    LeaseUnavailable,
)
from policy_service.application.ports_leases import LeaseSight
from policy_service.domain.catalogue import Caller
from policy_service.domain.facts import Cause
from policy_service.domain.ids import AuthClass, Instant
from policy_service.domain.lease import (
    TTL_DEFAULT_MS,
    Fence,
    LeaseCall,
    LeaseResult,
    LeaseRow,
    LeaseRules,
    LeaseStep,
    active_of_owner,
    clamp_ttl,
    visible_label,
)
from policy_service.domain.lease_context import (
    AdmittedCall,
    Capacity,
    LeaseCode,
    LeaseRefusal,
    LifecycleRequest,
    admit,
    capacity_retry_s,
    standing_refusal,
)
from policy_service.domain.lease_selection import (
    ClaimVerdict,
    LeasePlan,
    ManagedRequest,
    after_claim,
    plan,
)
from policy_service.domain.policy import ConnectionPolicy

log = logging.getLogger(__name__)

_UNAVAILABLE = LeaseRefusal(LeaseCode.SERVICE_UNAVAILABLE)


@dataclass(slots=True)
class _Asked:
    """One acquire under way; the offers are looked up once, at the step of the order of checks where that belongs."""

    message: LeaseMessage
    offers: Sequence[Offer] | None = None


class Leases:
    """The use cases.

    Args:
        offers: connections for a model, judged by the ordinary filters, in the order of the account strategy.
        giving_back: takes the leases whose callers have left.
    """

    def __init__(self, registry: Registry, book: LeaseBook, offers: Offers, giving_back: GivingBack) -> None:
        self._registry = registry
        self._book = book
        self._offers = offers
        self._giving_back = giving_back

    async def acquire(self, message: LeaseMessage) -> LeaseShown | LeaseUnavailable:
        """A lease on the best free connection, or the owner's own; raises PolicyError by section 6.1.

        A caller that is cancelled before its answer holds no lease by this call.
        """
        asked = _Asked(message)
        admitted = self._admit(message, asked)
        if not asked.offers:
            raise error_of(LeaseRefusal(LeaseCode.MODEL_INVALID, "model"))
        with hard():
            return await self._select(admitted, asked.offers, message)

    async def renew(self, message: LeaseMessage) -> LeaseShown:
        """Extend to now + TTL."""
        with hard():
            return _shown(await self._book.renew(self._lifecycle_call(message)))

    async def release(self, message: LeaseMessage) -> LeaseShown:
        """End; idempotent."""
        with hard():
            return _shown(await self._book.release(self._lifecycle_call(message), _cause(message)))

    async def get(self, message: LeaseMessage) -> LeaseShown:
        """The active lease with the provider's name and, where it tells nothing private, the connection's label."""
        with hard():
            step = await self._book.get(self._lifecycle_call(message))
        row = _shown(step).row
        policy = self._registry.now_in_force.policy.for_connection(row.provider, row.connection_id)
        return LeaseShown(row, provider=policy.provider.display_name or row.provider, label=_label(policy))

    async def check_fence(self, message: FenceMessage) -> FenceAnswer:
        """The last word before a dispatch. A fence that does not hold is an answer, a bad caller an error."""
        caller = self._registry.now_in_force.find(message.caller_id, message.caller_key_sha256)
        refused: LeaseRefusal | None = None
        if not (message.caller_id or message.caller_key_sha256):
            refused = LeaseRefusal(LeaseCode.AUTHENTICATION_REQUIRED)
        elif caller is None or not caller.enabled:
            refused = LeaseRefusal(LeaseCode.API_KEY_INVALID)
        refused = refused or standing_refusal(caller) or _owner_problem(message)
        if refused is not None or caller is None:
            raise error_of(refused or _UNAVAILABLE)
        call = LeaseCall(str(message.owner), caller.id, message.generation, connection_id=message.connection)
        with hard():
            check = await self._book.fence(call)
        is_valid = check.verdict is Fence.VALID and check.lease is not None
        return FenceAnswer(check.verdict, check.at, check.lease.expires_at if is_valid and check.lease else None)

    # -- steps ---------------------------------------------------------------------------------------
    def _admit(self, message: LeaseMessage, asked: _Asked | None = None) -> AdmittedCall:
        callers = self._registry.now_in_force
        caller = callers.find(message.caller_id, message.caller_key_sha256)

        def lookup_fails(model: str) -> bool:
            return asked is not None and caller is not None and not self._look_up(asked, caller, model)

        has_key = bool(message.caller_id or message.caller_key_sha256)
        request = LifecycleRequest(
            has_key, caller, message.body, None, message.content_type, message.is_http, message.owner
        )
        admitted = admit(request, model_lookup_fails=lookup_fails)
        if not isinstance(admitted, AdmittedCall):
            raise error_of(admitted)
        return admitted

    def _look_up(self, asked: _Asked, caller: Caller, model: str) -> bool:
        """Fetch the offers; False where the look-up ended in an error."""
        try:
            asked.offers = self._offers(caller, model, narrowed(caller, asked.message.allowed_connections))
        except Exception:
            log.exception("connections for a lease cannot be looked up")
            return False
        return True

    def _lifecycle_call(self, message: LeaseMessage) -> LeaseCall:
        admitted = self._admit(message)
        call = admitted.call
        return LeaseCall(
            admitted.owner_hash, admitted.caller.id, call.generation, ttl_ms=call.ttl_ms, reason=call.reason
        )

    async def _select(
        self, admitted: AdmittedCall, offers: Sequence[Offer], message: LeaseMessage
    ) -> LeaseShown | LeaseUnavailable:
        allowed = narrowed(admitted.caller, message.allowed_connections)
        pool = candidates(offers)
        known = [each.connection for each in pool if each.connection in allowed]
        event_id = _event_id(admitted, message)
        sight = await self._book.look((admitted.owner_hash,), known, event_id=event_id)
        earlier = _earlier_grant(sight, admitted)
        if earlier is not None:
            present = await self._book.tell(earlier, event_id)
            if present is not None:
                return LeaseShown(present, reused=True)
            sight = await self._book.look((admitted.owner_hash,), known)
        own = active_of_owner(sight.rows, admitted.owner_hash, sight.now)
        if own is not None and own.api_key_id != admitted.caller.id:
            raise error_of(LeaseRefusal(LeaseCode.FENCE_STALE))
        request = ManagedRequest(allowed, own, is_acquire=True)
        planned = plan(request, pool, sight.rows, lambda name: self._rules(sight, name), sight.now)
        if planned.code is not None:
            return _unavailable(planned, offers, sight.now)
        providers: dict[str, str] = {target.connection: target.provider for target, _ in offers}
        return await self._claim(admitted, planned, own, providers, message)

    def _rules(self, sight: LeaseSight, connection: str) -> LeaseRules:
        """The listing pause is the claim's to check, which reads the time of the listing."""
        return self._book.rules(sight, LeaseTerms(terms_of(self._registry, connection).lock_delay_ms))

    async def _claim(
        self,
        admitted: AdmittedCall,
        planned: LeasePlan,
        own: LeaseRow | None,
        providers: dict[str, str],
        message: LeaseMessage,
    ) -> LeaseShown | LeaseUnavailable:
        """Take the first of the candidates that is still free."""
        free_at: list[Instant] = []
        for connection in planned.candidates:
            call = LeaseCall(
                admitted.owner_hash,
                admitted.caller.id,
                own.generation if own else 0,
                providers[connection],
                connection,
                None if own else admitted.call.ttl_ms,
            )
            operation = self._book.transition if own else self._book.acquire
            terms, event_id = terms_of(self._registry, connection), _event_id(admitted, message)
            step = await self._to_its_end(operation(call, terms, _cause(message), event_id), call, event_id)
            verdict = after_claim(step.result)
            if verdict is ClaimVerdict.DISPATCH and step.lease is not None:
                return LeaseShown(step.lease, step.result is LeaseResult.REUSED)
            if verdict is ClaimVerdict.STALE:
                raise error_of(LeaseRefusal(LeaseCode.FENCE_STALE))
            free_at += [] if step.free_at is None else [step.free_at]
        return await self._all_taken(free_at, len(planned.candidates))

    async def _to_its_end(self, claim: Coroutine[Any, Any, LeaseStep], call: LeaseCall, event_id: str) -> LeaseStep:
        """The transaction goes on without a caller that has left; what it grants goes back."""
        claiming = asyncio.ensure_future(claim)

        async def attempt() -> bool:
            await asyncio.wait({claiming})
            if claiming.exception() is None:
                step = claiming.result()
                if step.result is LeaseResult.ACQUIRED and step.lease is not None:
                    await self._book.take_back(step.lease, event_id)
            return True

        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            self._giving_back.insist(attempt, clamp_ttl(call.ttl_ms or TTL_DEFAULT_MS), "a lease")
            raise

    async def _all_taken(self, free_at: Sequence[Instant], eligible: int) -> LeaseUnavailable:
        sight = await self._book.look((), ())
        return capacity_answer(Capacity(eligible, capacity_retry_s(min(free_at, default=None), sight.now)))


def _label(policy: ConnectionPolicy) -> str:
    """A connection's label as its owner may see it; empty where it is hidden."""
    declared, is_account = policy.connection, policy.auth_class is AuthClass.OAUTH
    return visible_label(declared.label, is_account=is_account, identities=declared.account_names) or ""


def _owner_problem(message: FenceMessage) -> LeaseRefusal | None:
    if isinstance(message.owner, LeaseRefusal):
        return message.owner
    return None if message.generation else LeaseRefusal(LeaseCode.CONTEXT_REQUIRED, "lease.generation")


def _cause(message: LeaseMessage) -> Cause:
    return Cause("", 0, request_id=message.request_id)


def _event_id(admitted: AdmittedCall, message: LeaseMessage) -> str:
    """Idempotency key of an acquire; empty where the caller chose none."""
    return f"lease/{admitted.owner_hash}/{message.request_id}" if message.is_retry_safe else ""


def _earlier_grant(sight: LeaseSight, admitted: AdmittedCall) -> LeaseRow | None:
    """Present state of the lease that this very call was granted before (fleet.md section 1)."""
    named = (admitted.owner_hash, sight.granted, admitted.caller.id)
    rows = (row for row in sight.rows if (row.owner_hash, row.generation, row.api_key_id) == named)
    return max(rows, key=lambda row: row.id, default=None)


def _shown(step: LeaseStep) -> LeaseShown:
    if step.lease is None:
        raise error_of(LeaseRefusal(LeaseCode.FENCE_STALE))
    return LeaseShown(step.lease)


def capacity_answer(capacity: Capacity) -> LeaseUnavailable:
    """WAITING_FOR_CAPACITY as an answer (section 6.2)."""
    refusal = LeaseRefusal(LeaseCode.CAPACITY_UNAVAILABLE)
    return LeaseUnavailable(
        refusal.code.value,
        refusal.http_status,
        capacity.retry_after_s * 1_000,
        capacity.eligible_count,
        capacity.free_count,
        text_of(refusal.code),
        {"state": capacity.state, "reason": capacity.reason},
    )


def _unavailable(planned: LeasePlan, offers: Sequence[Offer], now: Instant) -> LeaseUnavailable:
    if planned.capacity is not None:
        return capacity_answer(planned.capacity)
    refusal = LeaseRefusal(planned.code or LeaseCode.NO_ELIGIBLE_CONNECTION)
    ends = [each.exclusion.until for each in offers if each.exclusion and each.exclusion.until is not None]
    waits = refusal.code is LeaseCode.ELIGIBILITY_UNAVAILABLE and ends
    return LeaseUnavailable(
        refusal.code.value,
        refusal.http_status,
        capacity_retry_s(min(ends), now) * 1_000 if waits else None,
        message=text_of(refusal.code),
    )
