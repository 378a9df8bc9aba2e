"""Leases as operators and the service itself handle them: list, invalidate, sweep (spec/leases.md section 4)."""

from __future__ import annotations

from collections.abc import Sequence

from policy_service.application.admin import Actor
from policy_service.application.callers import Registry
from policy_service.application.errors import FieldProblem, InvalidRequestError
from policy_service.application.lease_book import LeaseBook, Swept
from policy_service.application.lease_terms import error_of, hard
from policy_service.domain.facts import Cause
from policy_service.domain.lease import EndReason, LeaseCall, LeaseResult, LeaseRow
from policy_service.domain.lease_context import LeaseCode, LeaseRefusal


class LeaseAdmin:
    """Acts of operators on leases."""

    def __init__(self, book: LeaseBook) -> None:
        self._book = book

    async def list(self, caller_id: str = "") -> Sequence[LeaseRow]:
        """Active leases by connection, of one caller or of all."""
        with hard():
            sight = await self._book.active()
        alive = (row for row in sight.rows if row.is_active(sight.now))
        found = (row for row in alive if not caller_id or row.api_key_id == caller_id)
        return sorted(found, key=lambda row: row.connection_id)

    async def invalidate(
        self, owner_hash: str, generation: int, connection: str, reason: EndReason | None, actor: Actor
    ) -> LeaseRow:
        """End the lease of an owner and generation, or the one on a connection.

        Raises:
            PolicyError: neither is named, there is no such active lease (LEASE_FENCE_STALE), or the store is away.
        """
        with hard():
            row = await self._find(owner_hash, generation, connection)
            call = LeaseCall(
                row.owner_hash, row.api_key_id, row.generation, reason=reason or EndReason.AUTHORIZATION_CHANGED
            )
            step = await self._book.invalidate(call, Cause("", 0, actor=actor.text))
        if step.result is not LeaseResult.INVALIDATED or step.lease is None:
            raise error_of(LeaseRefusal(LeaseCode.FENCE_STALE))
        return step.lease

    async def _find(self, owner_hash: str, generation: int, connection: str) -> LeaseRow:
        if not connection and not (owner_hash and generation):
            problem = "names no lease"
            remedy = "owner_hash with generation, or connection"
            raise InvalidRequestError((FieldProblem("connection", problem, remedy, "FIELD_REQUIRED"),))
        sight = await self._book.look([owner_hash] if owner_hash else (), [connection] if connection else ())
        for row in sight.rows:
            is_owner = not owner_hash or (row.owner_hash, row.generation) == (owner_hash, generation)
            if row.is_active(sight.now) and is_owner and connection in ("", row.connection_id):
                return row
        raise error_of(LeaseRefusal(LeaseCode.FENCE_STALE))


class LeaseUpkeep:
    """Ends what lapsed and what keys may no longer hold; run at the start, after a new catalogue, and periodically."""

    def __init__(self, registry: Registry, book: LeaseBook) -> None:
        self._registry = registry
        self._book = book

    async def sweep(self) -> Swept:
        """One sweep; raises StoreUnavailableError."""
        policy = self._registry.now_in_force.policy
        return await self._book.sweep(policy.catalogue.callers, policy.revision)
