"""What the client does while the service is away: last known order of targets, fail mode, when to look again.

Pure but for two small tables that one client owns. Never used without the service: targets of requests with a lease,
and targets that a Dispatch marked `no_fail_open` (leased, managed, capped). docs/sidecar-guide.md, spec/fleet.md 6.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock
from typing import TypeAlias

from policy_client import messages
from policy_client.decision import identity

Pool: TypeAlias = tuple[object, ...]

POOLS_KEPT = 1_024


class FailMode(StrEnum):
    """What to do with requests while the service is away."""

    OPEN = "open"
    """Go to the targets that are known to be free to use, in the order that was last known."""
    CLOSED = "closed"
    """Refuse."""


@dataclass(frozen=True, slots=True)
class AwayPolicy:
    """Behaviour without the service.

    Args:
        mode: fail open or fail closed.
        trusts_candidates: with fail-open, go to the candidates of a pool that the service never spoke about, as they
            stand in the request. Leave it off where the catalogue caps or leases connections: only the service knows.
        kept_reports: reports kept for later; the oldest go first.
        kept_bytes: their size.
        silence_ms: a decision that takes longer than this, while the request could go on without it, makes the client
            ask whether the service is there; without an answer within as much again it is away. 0: the deadline
            decides.
    """

    mode: FailMode = FailMode.OPEN
    trusts_candidates: bool = False
    kept_reports: int = 1_000
    kept_bytes: int = 4_194_304
    silence_ms: int = 15


def pool_of(request: messages.SelectTargetRequest) -> Pool:
    """What tells pools apart: the route or the candidates, and who asks."""
    return request.route, request.caller_id, tuple(map(identity, request.candidates))


class KnownOrders:
    """For each pool the targets that were free to use, in the order they were last named. Safe for threads."""

    def __init__(self, limit: int = POOLS_KEPT) -> None:
        self._limit = limit
        self._pools: OrderedDict[Pool, tuple[messages.Target, ...]] = OrderedDict()
        self._lock = Lock()

    def learn(self, request: messages.SelectTargetRequest, dispatch: messages.Dispatch) -> None:
        """Remember a Dispatch: fallbacks need no grant by contract; its target does if it is marked so."""
        pool = pool_of(request)
        free = dispatch.fallbacks if dispatch.no_fail_open else (dispatch.target, *dispatch.fallbacks)
        named = {identity(each) for each in (dispatch.target, *dispatch.fallbacks)}
        with self._lock:
            older = (each for each in self._pools.get(pool, ()) if identity(each) not in named)
            self._pools[pool] = (*free, *older)
            self._pools.move_to_end(pool)
            while len(self._pools) > self._limit:
                self._pools.popitem(last=False)

    def order(self, request: messages.SelectTargetRequest) -> tuple[messages.Target, ...] | None:
        """The last known order; None for a pool that was never heard of."""
        with self._lock:
            return self._pools.get(pool_of(request))

    def unlock(self) -> None:
        """In a forked process: whoever had the lock is not there."""
        self._lock = Lock()


def local_order(
    request: messages.SelectTargetRequest, policy: AwayPolicy, known: KnownOrders
) -> tuple[messages.Target, ...]:
    """Targets that may be used without the service now; empty: refuse."""
    if policy.mode is FailMode.CLOSED or request.HasField("lease"):
        return ()
    order = known.order(request)
    if order is None:
        order = tuple(_uncapped(request)) if policy.trusts_candidates else ()
    return tuple(each for each in order if _is_allowed(request, each))


def _uncapped(request: messages.SelectTargetRequest) -> Iterator[messages.Target]:
    for each in sorted(request.candidates, key=lambda candidate: candidate.priority):
        if each.max_concurrent < 1:
            yield messages.Target(provider=each.provider, connection=each.connection, model=each.model, key=each.key)


def _is_allowed(request: messages.SelectTargetRequest, target: messages.Target) -> bool:
    forced, allowed = request.forced_connection, request.allowed_connections
    return (not forced or target.connection == forced) and (not allowed or target.connection in allowed)


class Presence:
    """Whether the service is there, as far as the last call told. Safe for threads."""

    def __init__(self, on_loss: Callable[[], None] = lambda: None) -> None:
        self._lock = Lock()
        self._on_loss = on_loss
        self.is_away = False

    def lost(self) -> None:
        """A call met the transport's silence."""
        with self._lock:
            was_away, self.is_away = self.is_away, True
            if not was_away:
                self._on_loss()

    def found(self) -> None:
        """The service answered."""
        if self.is_away:
            with self._lock:
                self.is_away = False


def look_again_ms(times: int) -> int:
    """Pause before the next look for a service that is away, after so many looks: 0 at first, a second at most."""
    return min(1_000, 50 * 2**times) if times else 0
