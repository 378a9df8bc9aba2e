"""Rows and values of the usage wall (spec/usage_wall.md sections 3 to 5), shared by the lane and the limit reset."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar, Self

from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.state import Key

DEFAULT_RETRY_AFTER_MS: DurationMs = 20_000
DEFAULT_MAX_WAIT_MS: DurationMs = 20 * 60_000
RESET_GRACE_MS: DurationMs = 60_000
ROLLOVER_TOLERANCE_S = 60
COOL_OFF_MS: DurationMs = 600_000
ROWS_KEPT = 10_000


class ClaimStep(StrEnum):
    """Steps of a limit reset."""

    STATUS = "STATUS"
    ORGANIZATION = "ORGANIZATION"
    CLAIM = "CLAIM"


@dataclass(frozen=True, slots=True)
class LimitResetClaim:
    """The claim of a connection: one over the fleet while open. `granted` None: open."""

    claim_id: str
    step: ClaimStep
    opened_at: Instant
    deadline_at: Instant
    organization: str = ""
    granted: bool | None = None
    verdict: str = ""
    offer: Mapping[str, str] = field(default_factory=dict)
    """Headers of the wall 429 that opened it: what the lane would accept if the reset is not granted."""

    def is_open(self, now: Instant) -> bool:
        """Without a verdict and before its deadline."""
        return self.granted is None and now < self.deadline_at


@dataclass(frozen=True, slots=True)
class Lane:
    """Everything remembered of one connection: lane, budget, cool-off, limit reset. `resets_at_s` None: idle."""

    KIND: ClassVar[str] = "usage_wall"
    provider: str
    connection: str
    resets_at_s: int | None = None
    accepted_at: Instant | None = None
    retry_after_ms: DurationMs = DEFAULT_RETRY_AFTER_MS
    max_wait_ms: DurationMs = DEFAULT_MAX_WAIT_MS
    requests_served: int = 0
    requests_served_standard: int = 0
    budget_utilization: float | None = None
    budget_spent_until: Instant | None = None
    cooling_off_until: Instant | None = None
    granted_at: Instant | None = None
    not_before: Instant | None = None
    claim: LimitResetClaim | None = None
    """The open claim, or the last one with its verdict."""
    touched_at: Instant = 0
    """Newest report that changed the row."""

    @property
    def key(self) -> Key:
        return (self.KIND, self.provider, self.connection)

    @property
    def is_default(self) -> bool:
        return replace(self, touched_at=0) == Lane(self.provider, self.connection)

    @property
    def generation(self) -> int:
        return 1

    @classmethod
    def default(cls, key: Key) -> Self:
        return cls(key[1], key[2])


def surplus(lanes: Iterable[Lane], limit: int = ROWS_KEPT) -> list[Lane]:
    """Rows to drop so that at most `limit` stay: the least recently touched."""
    oldest_first = sorted(lanes, key=lambda lane: (lane.touched_at, lane.key))
    return oldest_first[: max(0, len(oldest_first) - limit)]


def is_lane_active(lane: Lane, now: Instant) -> bool:
    """Accepted, and not yet at the announced reset + 60 s."""
    return lane.resets_at_s is not None and now < lane.resets_at_s * 1_000 + RESET_GRACE_MS


@dataclass(frozen=True, slots=True)
class WaitWindow:
    """Waiting of one request in the lane; travels in its decision token."""

    since: Instant
    attempts: int = 0
    next_try_at: Instant | None = None


@dataclass(frozen=True, slots=True)
class WallOptions:
    """Switches of one connection."""

    low_priority_mode: bool = False
    auto_limit_reset: bool = False


@dataclass(frozen=True, slots=True)
class WallResponse:
    """The final response of one attempt. `headers` by suffix, lower case; `draw` from the injected source, 0..1."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    sent_slow: bool = False
    remaining_budget_ms: DurationMs | None = None
    """Rest of the request's start timeout; None: no timeout."""
    draw: float = 0.5

    def text(self, suffix: str) -> str:
        """Header value in lower case, "" where absent."""
        return self.headers.get(suffix, "").strip().lower()

    def has(self, suffix: str) -> bool:
        """True if the header is there and not blank."""
        return bool(self.text(suffix))

    def number(self, suffix: str) -> float | None:
        """Finite number >= 0, else None."""
        try:
            value = float(self.text(suffix))
        except ValueError:
            return None
        return value if math.isfinite(value) and value >= 0 else None

    @property
    def is_overage_in_use(self) -> bool:
        """Paid overage is being used."""
        return self.text("overage-in-use") == "true"


class Action(StrEnum):
    """Actions of section 5. HOLD never reaches a gateway: the service keeps the report until the claim's verdict."""

    RETRY_SAME = "RETRY_SAME"
    CLAIM_LIMIT_RESET = "CLAIM_LIMIT_RESET"
    ENDED = "ENDED"
    NONE = "NONE"
    HOLD = "HOLD"


class Via(StrEnum):
    """Why the gateway repeats on the same connection."""

    LOW_PRIORITY_ACCEPTED = "low-priority-accepted"
    LANE_JOINED = "lane-joined"
    SLOT_BUSY = "slot-busy"
    CAPACITY_BUSY = "capacity-busy"
    LIMIT_RESET = "limit-reset"


class LaneEnd(StrEnum):
    """Why a lane is over."""

    EXTRA_USAGE = "extra_usage"
    WEEKLY = "weekly"
    BUDGET = "budget"
    OFF = "off"
    INELIGIBLE = "ineligible"
    WALL = "wall"
    RESET = "reset"
    MAX_WAIT = "max_wait"


@dataclass(frozen=True, slots=True)
class ClaimCall:
    """A call that the gateway performs with the connection's credential. ORGANIZATION names no call: its own means."""

    claim_id: str
    step: ClaimStep
    method: str
    url: str
    timeout_ms: DurationMs
    body: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class WallAction:
    """What the gateway does next."""

    action: Action
    delay_ms: DurationMs = 0
    via: Via | None = None
    set_headers: Mapping[str, str] = field(default_factory=dict)
    reason: LaneEnd | None = None
    call: ClaimCall | None = None
    hold_until: Instant | None = None

    @property
    def intercepts(self) -> bool:
        """True if the response never reaches classification: nothing cools, nothing rotates."""
        return self.action in (Action.RETRY_SAME, Action.CLAIM_LIMIT_RESET, Action.HOLD)
