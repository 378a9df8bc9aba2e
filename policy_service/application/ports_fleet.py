"""Port of the fleet's own roll: which replicas have signed lately. Implemented by the stores; read by the evidence
quorum (spec/breaker.md section 12) and by GetHealth, by nothing else.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from policy_service.domain.ids import DurationMs, Instant


class Signer(NamedTuple):
    """One life of one replica."""

    incarnation: str
    name: str
    release: str = ""
    """Version of the service."""


class Sighting(NamedTuple):
    """Newest signature of one replica, in database time."""

    signer: Signer
    seen_at: Instant
    alive_until: Instant
    """It counts as gone from here on, unless it signs again."""


class RollStore(Protocol):
    """The roll in the database."""

    async def sign(self, signer: Signer, stands_ms: DurationMs, *, timeout_ms: DurationMs) -> tuple[Sighting, ...]:
        """Sign for `stands_ms` from now, and read who else stands; the signer's own sighting comes first.

        Args:
            stands_ms: 0 signs off: the signer is gone at once.

        Raises:
            StoreUnavailableError: the store is away.
        """
        ...
