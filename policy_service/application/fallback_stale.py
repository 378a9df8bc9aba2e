"""Fallbacks that went stale between the answer that named them and the call (spec/fleet.md section 1).

A fallback needs no grant when the answer is made. What the fleet learns afterwards, and before the gateway moves on to
it, would have left it out: that is bounded by the view's age and counted, not prevented.
"""

from __future__ import annotations

from policy_service.application.messages import ReportRequest, TokenTarget
from policy_service.application.view import View
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.eligibility import check_target
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import Instant

FALLBACK_STALE = "fallback_stale"


def is_fallback_stale(request: ReportRequest, served: TokenTarget, view: View, started_at: Instant) -> bool:
    """Was the served target a fallback that a selection at the start of the attempt would have left out?

    Args:
        served: target of the attempt as the token names it.
        started_at: start of the attempt, database time.
    """
    targets = request.token.targets if request.token else ()
    if not targets or served.target == targets[0].target or view.provider_rows(served.target.provider) is None:
        return False
    target, policy = served.target, view.policy
    gate = check_target(
        view.provider_rows(target.provider) or {},
        target,
        policy.for_connection(target.provider, target.connection),
        started_at,
        is_disabled=target.connection in policy.disabled_connections,
    )
    if gate.exclusion is None:
        return gate.needs_grant
    since = _since(gate.exclusion, view)
    return since is not None and since <= started_at


def _since(exclusion: Exclusion, view: View) -> Instant | None:
    """When the exclusion began; of a terminal state the instant of its evidence."""
    if exclusion.since is not None:
        return exclusion.since
    provider, connection, _ = exclusion.target
    row = view.rows.get((ConnectionState.KIND, provider, connection))
    return row.last_error_at if isinstance(row, ConnectionState) else None
