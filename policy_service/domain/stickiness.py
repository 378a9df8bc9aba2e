"""Route stickiness: replica-local soft cache of the target that served a conversation (spec/affinity.md section 8)."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from policy_service.domain.ids import DurationMs, Instant

TTL_MS: DurationMs = 900_000
ENTRIES_KEPT = 500
USED_AT_MOST = 0.85
"""Used share of the tighter quota window below which the headroom exceeds 15 %."""


@dataclass(frozen=True, slots=True)
class StickyStanding:
    """Connection of a sticky target as it stands. Quota windows are used shares, 0..1; None: unknown."""

    five_hour: float | None = None
    weekly: float | None = None
    is_terminal: bool = False
    is_cooling: bool = False
    is_quota_exhausted: bool = False

    @property
    def is_reusable(self) -> bool:
        """Healthy, and more than 15 % of the tighter quota window left."""
        used = max(self.five_hour or 0.0, self.weekly or 0.0)
        return used < USED_AT_MOST and not (self.is_terminal or self.is_cooling or self.is_quota_exhausted)


StickyKey = tuple[str, str, str]
"""(caller, route, first 16 hex digits of the SHA-256 of the first user text)."""


def sticky_key(caller: str, route: str, first_user_text: str, *, require_caller: bool = False) -> StickyKey | None:
    """Key of a conversation; None: nothing sticks (no text, or no caller where one is required)."""
    if not first_user_text or (require_caller and not caller):
        return None
    digest = hashlib.sha256(first_user_text.encode("utf-8", "surrogatepass")).hexdigest()
    return caller, route, digest[:16]


def is_enabled(route_opt_out: bool | None, setting_opt_out: bool) -> bool:
    """The route's `disable_session_stickiness` decides where it is set, else the setting."""
    return not (setting_opt_out if route_opt_out is None else route_opt_out)


class StickyTargets:
    """Target keys by conversation; least recently used out, 15 min from the last use."""

    __slots__ = ("_capacity", "_entries")

    def __init__(self, capacity: int = ENTRIES_KEPT) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[StickyKey, tuple[str, Instant]] = OrderedDict()

    def get(self, key: StickyKey | None, now: Instant) -> str | None:
        """Target that served the conversation last, or None. A look-up is no use: only a success extends the time."""
        found = self._entries.get(key) if key is not None else None
        if found is None or key is None:
            return None
        if found[1] <= now:
            del self._entries[key]
            return None
        self._entries.move_to_end(key)
        return found[0]

    def record(self, key: StickyKey | None, target: str, now: Instant) -> None:
        """After a success."""
        if key is None:
            return
        self._entries[key] = (target, now + TTL_MS)
        self._entries.move_to_end(key)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def failed(self, key: StickyKey | None, target: str) -> None:
        """A failing target clears the entry only if it is the one named there."""
        found = self._entries.get(key) if key is not None else None
        if found is not None and key is not None and found[0] == target:
            del self._entries[key]

    def __len__(self) -> int:
        return len(self._entries)
