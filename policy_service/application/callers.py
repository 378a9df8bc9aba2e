"""The caller registry of the policy in force: who a key is, and what managed keys list (spec/leases.md section 1)."""

from __future__ import annotations

from policy_service.application.view import View
from policy_service.domain.catalogue import Caller
from policy_service.domain.lease_selection import managed_connections
from policy_service.domain.policy import Policy


class Callers:
    """Callers of one policy revision, by id and by key."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        found = tuple(policy.catalogue.callers.values())
        self._by_id = {caller.id: caller for caller in found}
        self._by_key = {caller.key_sha256: caller for caller in found if caller.key_sha256}
        self.managed = managed_connections(found)
        """Connections that at least one managed key lists; nobody else is routed to them."""
        self.any_limited = any(caller.allowed_connections for caller in found)
        """Some caller has a list of connections."""

    def find(self, caller_id: str, key_sha256: str) -> Caller | None:
        """The caller by id, by the SHA-256 of its key, or by both where they agree; None: unknown."""
        if caller_id and key_sha256:
            caller = self._by_id.get(caller_id)
            return caller if caller is not None and caller.key_sha256 == key_sha256 else None
        return self._by_id.get(caller_id) if caller_id else self._by_key.get(key_sha256)


class Registry:
    """Callers of the policy that a view has, and since which revision each managed connection has been listed.

    A revision that this replica did not follow in turn counts as the first one: its predecessor may have left a
    connection out, and then other replicas may still offer it to everybody. Revision 0 is not of the store; others
    know nothing of it.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._callers = Callers(view.policy)
        self._listed_in = dict.fromkeys(self._callers.managed, view.policy.revision)

    @property
    def now_in_force(self) -> Callers:
        """Callers of the policy in force."""
        if self._callers.policy is not self._view.policy:
            self._follow(Callers(self._view.policy))
        return self._callers

    def listed_in(self, connection: str) -> int:
        """Catalogue revision since which a managed key lists the connection; 0: not of the store."""
        self.now_in_force  # noqa: B018  (follows the policy first)
        return self._listed_in.get(connection, 0)

    def _follow(self, callers: Callers) -> None:
        before, after = self._callers.policy.revision, callers.policy.revision
        is_in_turn = after == before or 0 < before == after - 1
        kept = self._listed_in if is_in_turn else {}
        self._listed_in = {name: kept.get(name, after) for name in callers.managed}
        self._callers = callers
