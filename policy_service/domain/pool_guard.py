"""Pool guard: soft exclusions never empty a pool beyond a share, and panic mode when nobody is left
(spec/guards.md section 6). Pure.

Which exclusions are in force is a function of the members alone: the oldest come first. So no replica can
overshoot, nothing has to be stored, and an exclusion that ends makes room for the oldest one waiting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Self

from policy_service.domain.ids import Instant
from policy_service.domain.profiles import PoolGuardProfile
from policy_service.domain.state import Key

MECHANISM: Final = "pool_guard"
NOT_ENFORCED: Final = "not_enforced"
OVERFLOW: Final = "exclusion_overflow"
"""Reason of the fact that an exclusion beyond the share leaves."""


@dataclass(frozen=True, slots=True)
class Member:
    """One target of a pool that is neither terminal nor disabled nor leased to someone else."""

    name: str
    until: Instant | None = None
    """End of its soft exclusion; None: not excluded."""
    since: Instant = 0
    """Start of the exclusion."""
    fixed: bool = False
    """The deadline was stated by the server, or the breaker was forced open: never overridden."""

    def is_excluded(self, now: Instant) -> bool:
        """True while the exclusion runs."""
        return self.until is not None and self.until > now


@dataclass(frozen=True, slots=True)
class PoolVerdict:
    """Names in pool order. `panic` lists members to offer although they are excluded, best first."""

    excluded: tuple[str, ...]
    not_enforced: tuple[str, ...]
    selectable: tuple[str, ...]
    panic: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PanicPermit:
    """One panic call under way."""

    id: str
    expires_at: Instant


@dataclass(frozen=True, slots=True)
class PanicState:
    """Panic calls of one pool over the fleet. The guard row is the pool's own: `pool:<name>`."""

    KIND: ClassVar[str] = "pool_panic"
    pool: str
    permits: tuple[PanicPermit, ...] = ()

    @property
    def key(self) -> Key:
        return (self.KIND, self.pool)

    @property
    def is_default(self) -> bool:
        return not self.permits

    @property
    def generation(self) -> int:
        return 1

    @classmethod
    def default(cls, key: Key) -> Self:
        return cls(key[1])

    def live(self, now: Instant) -> tuple[PanicPermit, ...]:
        """Permits that have not run out."""
        return tuple(permit for permit in self.permits if permit.expires_at > now)


def take_panic(
    state: PanicState, permit: PanicPermit, now: Instant, limit: int
) -> tuple[PanicState, PanicPermit | None]:
    """Take one of `limit` panic permits; an id that holds one gets the same again, None where all are out."""
    live = state.live(now)
    held = next((known for known in live if known.id == permit.id), None)
    if held is not None:
        return PanicState(state.pool, live), held
    if len(live) >= limit:
        return PanicState(state.pool, live), None
    return PanicState(state.pool, (*live, permit)), permit


def give_panic_back(state: PanicState, permit_id: str) -> PanicState:
    """The call is over; an unknown id changes nothing."""
    return PanicState(state.pool, tuple(permit for permit in state.permits if permit.id != permit_id))


def limit_of(members: Sequence[Member], profile: PoolGuardProfile) -> int:
    """Number of members that soft exclusions may take out of the pool at one time."""
    # The addition keeps a product such as 100 x 0.29 from being rounded down by its binary error.
    return math.floor(len(members) * profile.max_excluded_share + 1e-9)


def judge_pool(members: Sequence[Member], profile: PoolGuardProfile, now: Instant, in_flight: int = 0) -> PoolVerdict:
    """Which exclusions of a pool are in force.

    Args:
        members: in pool order, terminal, disabled and foreign-leased targets left out.
        in_flight: panic calls of this pool that are under way in the fleet.
    """
    wanted = [member for member in members if member.is_excluded(now)]
    waived = _waived(members, wanted, profile) if profile.enabled else frozenset()
    excluded = tuple(m.name for m in wanted if m.name not in waived)
    selectable = tuple(m.name for m in members if m.name not in excluded)
    panic = _panic(wanted, profile, in_flight) if profile.enabled and not selectable else ()
    return PoolVerdict(excluded, tuple(m.name for m in wanted if m.name in waived), selectable, panic)


def _waived(members: Sequence[Member], wanted: Sequence[Member], profile: PoolGuardProfile) -> frozenset[str]:
    fixed = sum(member.fixed for member in wanted)
    room = max(0, limit_of(members, profile) - fixed)
    oldest_first = sorted((m for m in wanted if not m.fixed), key=lambda m: m.since)
    return frozenset(member.name for member in oldest_first[room:])


def _panic(wanted: Sequence[Member], profile: PoolGuardProfile, in_flight: int) -> tuple[str, ...]:
    if in_flight >= profile.panic_max_in_flight:
        return ()
    offered = sorted((m for m in wanted if not m.fixed), key=lambda m: m.until or 0)
    return tuple(member.name for member in offered)
