"""Leases are exact over a fleet, whatever stops, restarts, retries or sleeps (spec/leases.md section 4).

`POLICY_FLEET_HISTORIES` sets how many histories the long form lives through, `POLICY_FLEET_FIRST_HISTORY` the number
of the first of them: 500 can be had in slices, as 0 to 99, 100 to 199 and so on, each a run of a few minutes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from tests.fleet.lease_checker import (
    Checked,
    Period,
    illegal_dispatches,
    shared_ownership,
    shrinking_generations,
    stale_refusals,
    wrongly_refused,
)
from tests.fleet.lease_histories import CONNECTIONS, OWNERS, cluster, run_histories

SHORT = 25
AT_ONCE = 13
"""More of them at a time measure the machine instead of the leases."""
LONG = int(os.environ.get("POLICY_FLEET_HISTORIES", "500"))
FIRST = int(os.environ.get("POLICY_FLEET_FIRST_HISTORY", "0"))
"""Seed of the first history of the long form."""


def violations(found: Sequence[Period], checks: Sequence[Checked]) -> list[str]:
    """Everything that must not have happened."""
    return [
        *shared_ownership(found),
        *shrinking_generations(found),
        *illegal_dispatches(found, checks),
        *wrongly_refused(found, checks),
    ]


async def prove(seeds: range) -> None:
    histories = len(seeds)
    async with cluster() as fleet:
        checks = await run_histories(fleet, seeds, at_once=AT_ONCE)
        found = await fleet.stored()
        refused = stale_refusals(found, checks)
        dispatched = sum(check.was_dispatched for check in checks)
        print(
            f"histories {seeds[0]} to {seeds[-1]}: {len(found)} periods, {dispatched} dispatches, "
            f"{len(checks) - dispatched} refused ({refused} of an old generation), "
            f"{fleet.stops} stops, {fleet.restarts} restarts"
        )
    assert violations(found, checks) == []
    assert len({period.owner for period in found}) > histories * OWNERS * 0.5, "too few owners ever got a lease"
    assert len({period.connection for period in found}) > histories * CONNECTIONS * 0.8
    assert dispatched > histories
    assert refused > 0
    assert fleet.stops > 0
    assert fleet.restarts > 0


async def test_histories_have_one_owner_growing_generations_and_no_dispatch_without_a_valid_fence() -> None:
    await prove(range(SHORT))


@pytest.mark.long
@pytest.mark.timeout(3_600)
async def test_many_histories_hold_the_same() -> None:
    await prove(range(FIRST, FIRST + LONG))


async def test_skipping_the_check_shows_as_an_illegal_dispatch() -> None:
    """The control: without the fence the same sessions call providers that are no longer theirs."""
    async with cluster() as fleet:
        checks = await run_histories(fleet, range(5), at_once=5, is_careful=False, is_disturbed=False)
        found = await fleet.stored()
    assert shared_ownership(found) == []
    assert illegal_dispatches(found, checks) != []


def period(number: int, owner: str, begins: int, ends: int, generation: int = 1, state: str = "RELEASED") -> Period:
    return Period(number, owner, "c", generation, state, begins, ends, ends)


def test_the_judge_sees_two_owners_of_a_connection_at_one_instant() -> None:
    assert shared_ownership([period(1, "a", 0, 10), period(2, "b", 9, 20)]) != []
    assert shared_ownership([period(1, "a", 0, 10), period(2, "b", 10, 20)]) == []


def test_the_judge_sees_a_generation_that_did_not_grow() -> None:
    assert shrinking_generations([period(1, "a", 0, 10), period(2, "a", 11, 20)]) != []
    assert shrinking_generations([period(1, "a", 0, 10), period(2, "a", 11, 20, 2)]) == []


def test_the_judge_sees_a_dispatch_after_the_end_and_a_refusal_within() -> None:
    found = [period(1, "a", 0, 10, state="EXPIRED")]
    assert illegal_dispatches(found, [Checked("a", "c", 1, 11, "VALID")]) != []
    assert illegal_dispatches(found, [Checked("a", "c", 1, 9, "VALID")]) == []
    assert illegal_dispatches(found, [Checked("a", "c", 2, 9, "VALID")]) != []
    assert wrongly_refused(found, [Checked("a", "c", 1, 5, "STALE")]) != []
