"""Leases: the client's fence reaches every decision, and nothing is sent with a fence that does not hold."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from policy_service.cli.conformance.checks.findings import Finding, absent, check, holds, none_of
from policy_service.cli.conformance.checks.views import dispatched, fenced, heard, selects
from policy_service.cli.conformance.record import Record


@check
def passes_the_lease(record: Record, given: Mapping[str, Any]) -> Finding:
    """Every SelectTarget of the request carries owner and generation."""
    asked = selects(record)
    if not asked:
        return absent("SelectTarget was not called")
    wanted = (given["owner"], given["generation"])
    wrong = [
        str(bool(c.request.lease.owner)) for c in asked if (c.request.lease.owner, c.request.lease.generation) != wanted
    ]
    return none_of(wrong, f"lease with the owner of the client and generation {given['generation']}", asked)


@check
def checks_the_fence(record: Record, _: Mapping[str, Any]) -> Finding:
    """Before each call that no fresh SelectTarget covers, the fence was found valid after the call before it."""
    if len(record.upstream) < 2:
        return absent("there was no second call")
    pairs = pairwise(record.upstream)
    wrong = [f"{after.connection} called" for before, after in pairs if not fenced(record, before.ended_at, after.at)]
    return none_of(
        wrong, "CheckFence answered VALID, or SelectTarget asked anew, before each further call", record.upstream
    )


@check
def dispatches_without_fence_nothing(record: Record, given: Mapping[str, Any]) -> Finding:
    """With a fence that is stale nothing is sent any more."""
    if not dispatched(record) and given["calls"]:
        return absent("no Dispatch was answered")
    return holds(heard(record) == given["calls"], f"calls: {given['calls']}", f"{heard(record)}")
