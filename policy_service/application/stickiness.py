"""Route stickiness of one replica: a conversation stays on the target of a route that served it last
(spec/affinity.md section 8).

A soft cache, not a pin: nothing is stored, nothing is shared, and whatever is missing counts as no entry. The text of
a conversation is known to the selection only, so that its key is kept by decision until the report.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from policy_service.application.messages import SelectRequest
from policy_service.application.view import View
from policy_service.domain import cooldown
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.ids import Instant, Target
from policy_service.domain.session_key import first_user_text
from policy_service.domain.stickiness import StickyKey, StickyStanding, StickyTargets, is_enabled, sticky_key

DECISIONS_KEPT = 4_096
OPT_OUT = "disable_session_stickiness"


class RouteStickiness:
    """The cache with what it needs of the view. Not thread-safe.

    Args:
        quota: what is known of a connection's quota; only its quota fields are read. None: nothing is known.
    """

    def __init__(self, view: View, quota: Callable[[Target], StickyStanding] | None = None) -> None:
        self._view = view
        self._quota = quota
        self._targets = StickyTargets()
        self._decisions: OrderedDict[str, StickyKey] = OrderedDict()

    def key(self, request: SelectRequest, options: Mapping[str, object]) -> StickyKey | None:
        """Key of a request for a route; None: nothing sticks. `options` are the route's."""
        text = request.session.first_user_text
        if not request.route or not text:
            return None
        own, setting = options.get(OPT_OUT), self._view.policy.setting
        if not is_enabled(own if isinstance(own, bool) else None, bool(setting("affinity.disable_route_stickiness"))):
            return None
        return sticky_key(
            request.caller_id,
            request.route,
            first_user_text({"input": text}),
            require_caller=bool(setting("affinity.require_caller")),
        )

    def prefer(
        self, key: StickyKey | None, order: Sequence[int], targets: Sequence[Target], now: Instant
    ) -> int | None:
        """Position to put first; None: the strategy's order stands.

        Args:
            order: eligible positions.
            targets: by position.
        """
        name = self._targets.get(key, now)
        if name is None:
            return None
        position = next((each for each in order if _name(targets[each]) == name), None)
        if position is None or not self._standing(targets[position], now).is_reusable:
            return None
        return position

    def _standing(self, target: Target, now: Instant) -> StickyStanding:
        known = self._quota(target) if self._quota is not None else StickyStanding()
        rows = self._view.provider_rows(target.provider) or {}
        row = rows.get((ConnectionState.KIND, target.provider, target.connection))
        if not isinstance(row, ConnectionState):
            return known
        return replace(known, is_terminal=row.is_terminal, is_cooling=cooldown.is_cooling(row, now))

    def dispatched(self, decision_id: str, key: StickyKey | None) -> None:
        """The decision was handed out."""
        if key is None:
            return
        self._decisions[decision_id] = key
        while len(self._decisions) > DECISIONS_KEPT:
            self._decisions.popitem(last=False)

    def reported(self, decision_id: str, target: Target, now: Instant, *, is_success: bool) -> None:
        """An attempt of the decision ended."""
        key = self._decisions.get(decision_id)
        if key is None:
            return
        if is_success:
            self._targets.record(key, _name(target), now)
        else:
            self._targets.failed(key, _name(target))


def _name(target: Target) -> str:
    return "/".join(target)
