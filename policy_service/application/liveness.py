"""Which replicas are alive. Each signs the fleet's roll every few seconds and reads who else stands on it.

Healthy traffic pays nothing for it, and no decision waits for it. Only the evidence quorum (spec/breaker.md section 12)
and GetHealth look at it: a replica that starts, stops or dies changes nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from policy_service.application.ports import StoreUnavailableError
from policy_service.application.ports_fleet import RollStore, Sighting, Signer
from policy_service.domain.ids import DurationMs, Instant

log = logging.getLogger(__name__)

SIGN_EVERY_MS: Final = 2_000
STANDS_FOR: Final = 5
"""Rounds for which a signature stands: a killed replica is gone after so many, one lost statement costs nothing."""
SIGN_MS: Final = 1_000
SIGN_OFF_MS: Final = 500


class Liveness:
    """The roll as this replica saw it last.

    Args:
        signer: this replica.
        every_ms: time between two signatures.
    """

    def __init__(self, store: RollStore, signer: Signer, *, every_ms: DurationMs = SIGN_EVERY_MS) -> None:
        self._store = store
        self._signer = signer
        self._every_ms = every_ms
        self._task: asyncio.Task[None] | None = None
        self._first_at: Instant | None = None
        """Database time of the first signature."""
        self.has_namesake = False
        """Another living process has this one's name."""
        self.sightings: tuple[Sighting, ...] = ()
        """Replicas alive, this one first; as read last while the store is away, and empty before the first reading."""

    def count(self) -> int | None:
        """Replicas alive; None while nothing is known."""
        return len(self.sightings) or None

    async def start(self) -> None:
        """Sign once, then in the background."""
        await self.sign()
        self._task = asyncio.create_task(self._loop(), name="roll")

    async def stop(self) -> None:
        """Sign off, so that the others need not wait until the signature has run out."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._sign(0, SIGN_OFF_MS)

    async def sign(self) -> None:
        """Sign now and take over who stands; a failure leaves what is known."""
        found = await self._sign(self._every_ms * STANDS_FOR, SIGN_MS)
        if found:
            self._look_for_namesakes(found)
        self.sightings = _by_name(found) or self.sightings

    def _look_for_namesakes(self, found: tuple[Sighting, ...]) -> None:
        """Who has this replica's name and has signed since its own first signature is no former life of it."""
        first_at = self._first_at = self._first_at or found[0].seen_at
        others = (each for each in found[1:] if each.signer.name == self._signer.name)
        has_namesake = any(each.seen_at > first_at for each in others)
        if has_namesake and not self.has_namesake:
            log.warning(
                "another living replica is called %r too: facts and the evidence quorum take both for one; "
                "give each a name of its own (--replica, or `replica` in the configuration)",
                self._signer.name,
            )
        self.has_namesake = has_namesake

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(self._every_ms / 1000)
            await self.sign()

    async def _sign(self, stands_ms: DurationMs, timeout_ms: DurationMs) -> tuple[Sighting, ...]:
        try:
            return await self._store.sign(self._signer, stands_ms, timeout_ms=timeout_ms)
        except StoreUnavailableError as error:
            log.info("the roll waits for the store: %s", error)
        except Exception:
            log.exception("the roll could not be signed")
        return ()


def _by_name(sightings: tuple[Sighting, ...]) -> tuple[Sighting, ...]:
    """The newest of each name, as evidence has replicas: one that was killed and started again is one."""
    newest = {each.signer.name: each for each in sorted(sightings, key=lambda each: each.seen_at)}
    names = dict.fromkeys(each.signer.name for each in sightings)
    return tuple(newest[name] for name in names)
