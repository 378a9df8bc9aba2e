"""A lease whose caller left before its answer goes back; one that anybody has heard of does not (both lease stores)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from policy_service.application.lease_book import NO_GENERATION
from policy_service.domain.lease import EndReason, LeaseResult, LeaseRow, LeaseState
from tests.contract import test_leases
from tests.contract.test_leases import NO_TERMS, Fleet, call, owner

fleet = test_leases.fleet
EVENT = "lease/o/q1"

Meanwhile = Callable[[Fleet, LeaseRow], Awaitable[object]]


async def granted(fleet: Fleet, event_id: str = EVENT) -> LeaseRow:
    """What the caller that left was granted."""
    step = await fleet.book.acquire(call("o", "c1"), NO_TERMS, event_id=event_id)
    assert (step.result, step.lease is not None) == (LeaseResult.ACQUIRED, True)
    assert step.lease is not None
    return step.lease


async def newest(fleet: Fleet) -> LeaseRow:
    sight = await fleet.book.look((owner("o"),), ())
    return max(sight.rows, key=lambda row: row.id)


async def test_what_nobody_was_told_of_is_over_at_once_and_free_for_the_next(fleet: Fleet) -> None:
    assert await fleet.book.take_back(await granted(fleet), EVENT)
    row = await newest(fleet)
    assert (row.state, row.end_reason) == (LeaseState.RELEASED, EndReason.CLIENT_CANCELLED)
    assert (await fleet.other.acquire(call("other", "c1"), NO_TERMS)).result is LeaseResult.ACQUIRED


async def test_taking_back_twice_does_it_once(fleet: Fleet) -> None:
    row = await granted(fleet)
    assert [await fleet.book.take_back(row, EVENT) for _ in range(2)] == [True, False]


async def acquired_again(fleet: Fleet, _: LeaseRow) -> None:
    assert (await fleet.other.acquire(call("o", "c1"), NO_TERMS)).result is LeaseResult.REUSED


async def asked_for_again(fleet: Fleet, _: LeaseRow) -> None:
    """An acquire of an owner that has a lease goes through the transition, which leaves the row alone."""
    assert (await fleet.other.transition(call("o", "c1", 1), NO_TERMS)).result is LeaseResult.REUSED


async def repeated(fleet: Fleet, row: LeaseRow) -> None:
    assert await fleet.other.tell(row, EVENT) is not None


async def moved(fleet: Fleet, _: LeaseRow) -> None:
    assert (await fleet.other.transition(call("o", "c2", 1), NO_TERMS)).result is LeaseResult.TRANSITIONED


async def renewed(fleet: Fleet, _: LeaseRow) -> None:
    assert (await fleet.other.renew(call("o", generation=1, ttl_ms=600_000))).result is LeaseResult.RENEWED


async def lost_and_taken_anew(fleet: Fleet, _: LeaseRow) -> None:
    await fleet.other.release(call("o", generation=1))
    assert (await fleet.other.acquire(call("o", "c1"), NO_TERMS)).result is LeaseResult.ACQUIRED


@pytest.mark.parametrize(
    "meanwhile",
    [acquired_again, asked_for_again, repeated, moved, renewed, lost_and_taken_anew],
    ids=lambda f: f.__name__,
)
async def test_a_lease_that_the_owner_has_heard_of_stays(fleet: Fleet, meanwhile: Meanwhile) -> None:
    row = await granted(fleet)
    await meanwhile(fleet, row)
    assert not await fleet.book.take_back(row, EVENT)
    assert (await newest(fleet)).state is LeaseState.ACTIVE


async def test_a_call_whose_lease_went_back_was_granted_nothing(fleet: Fleet) -> None:
    """Its repetition is decided anew, instead of being shown a lease that is over."""
    row = await granted(fleet)
    assert (await fleet.other.look((owner("o"),), (), event_id=EVENT)).granted == row.generation
    assert await fleet.book.take_back(row, EVENT)
    assert await fleet.other.tell(row, EVENT) is None
    assert (await fleet.other.look((owner("o"),), (), event_id=EVENT)).granted == NO_GENERATION


async def test_a_repetition_is_told_how_its_lease_stands_now(fleet: Fleet) -> None:
    row = await granted(fleet)
    await moved(fleet, row)
    told = await fleet.other.tell(row, EVENT)
    assert told is not None
    assert (told.connection_id, told.state) == ("c2", LeaseState.ACTIVE)


async def test_a_call_without_an_id_of_its_own_leaves_nothing_remembered(fleet: Fleet) -> None:
    assert await fleet.book.take_back(await granted(fleet, ""), "")
    assert (await fleet.other.look((owner("o"),), (), event_id="")).granted is None
