"""Permits: freed when the call is over, however it ends, not before; renewed while it lasts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from policy_service.cli.conformance.checks.findings import Finding, absent, check, holds
from policy_service.cli.conformance.checks.views import dispatched, freeing, place
from policy_service.cli.conformance.record import RENEW, PolicyCall, Record


@check
def frees_permits(record: Record, given: Mapping[str, Any]) -> Finding:
    """Permits of a decision are freed once its call is over, within `within_ms`, and not before."""
    held = [call for call in dispatched(record) if call.answer.dispatch.permits]
    if not held:
        return absent("no permit was granted")
    which = record.decisions.index(held[0].answer)
    freed = [call for call in freeing(record) if _is_about(record, call, which)]
    if not freed:
        return holds(False, "a final report or ReleasePermit for the permit", "neither; it blocks its slot for the TTL")
    return _in_time(record, freed[0], given.get("within_ms", 1_500))


def _is_about(record: Record, call: PolicyCall, which: int) -> bool:
    if place(record, call.request) == which:
        return True
    held = {permit.permit_id for permit in record.decisions[which].dispatch.permits}
    return bool(held & set(getattr(call.request, "permit_ids", ())))


def _in_time(record: Record, freed: PolicyCall, within_ms: int) -> Finding:
    over = max((call.ended_at for call in record.upstream), default=record.clients[0].at)
    earliest = max((call.answered_at for call in record.upstream), default=0.0)
    expected = f"freed within {within_ms} ms of the end of the call, not before"
    fits = earliest <= freed.at <= over + within_ms / 1000
    return holds(fits, expected, f"{(freed.at - over) * 1000:.0f} ms after the end")


@check
def frees_once(record: Record, _: Mapping[str, Any]) -> Finding:
    """One call frees the permits of a decision."""
    freed = freeing(record)
    if not freed:
        return absent("no permit was freed")
    return holds(len(freed) <= len(dispatched(record)), "freed by one call", ", ".join(call.method for call in freed))


@check
def renews_permits(record: Record, given: Mapping[str, Any]) -> Finding:
    """RenewPermit comes before the permit would end, and again while the call goes on."""
    if not record.upstream:
        return absent("no upstream was called")
    renewals = [call.at for call in record.of(RENEW)]
    steps = [dispatched(record)[0].ended_at, *renewals, record.upstream[-1].ended_at]
    longest = max(after - before for before, after in pairwise(steps))
    expected = f"RenewPermit at least every {given['ttl_ms']} ms while the call goes on"
    return holds(
        longest * 1000 <= given["ttl_ms"], expected, f"{len(renewals)} renewals, longest gap {longest * 1000:.0f} ms"
    )
