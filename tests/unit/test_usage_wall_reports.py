"""Reports at the usage wall over the reference store: interception, one lane and one claim for the whole fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from policy_service.application import report_result
from policy_service.application.errors import InvalidRequestError
from policy_service.application.messages import ActionKind, LimitResetReport
from policy_service.application.report_result import fold_report
from policy_service.application.upkeep_plan import sweep
from policy_service.application.usage_wall import claim_report
from policy_service.domain.catalogue import Connection
from policy_service.domain.ids import AuthClass, ProviderId
from policy_service.domain.policy import Policy
from policy_service.domain.state import StateBook
from policy_service.domain.usage_wall_state import Lane, surplus
from policy_service.storage import event_codec
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, quick_settings, running
from tests.wall import C1, ORDINARY, SLOW, Gateway, catalogue, gateway, unified

OFFERED = b'{"juniper_tide": {"eligible": true, "arm": "reset", "available": true}}'
NOT_OFFERED = b'{"juniper_tide": {"eligible": false}}'

ACCOUNT = Connection("c1", "claude", AuthClass.OAUTH, low_priority_mode=True)


class Fleet:
    """Replicas on one memory database, started on demand."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.time = FakeTime(1_800_000_000_000)
        self.database = MemoryDatabase(clock=self.time.database)
        self._stack = stack

    async def member(self, name: str = "r1", **options: Any) -> Gateway:
        made = gateway(MemoryStore(self.database), quick_settings(name), self.time, **options)
        await self._stack.enter_async_context(running(made.replica))
        return made

    def stored(self) -> Lane:
        found = self.database.rows.get((Lane.KIND, "claude", "c1"))
        assert found is not None
        assert isinstance(found.row, Lane)
        return found.row


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(stack)


async def test_an_accepted_offer_repeats_on_the_same_account_and_cools_nothing(fleet: Fleet) -> None:
    one = await fleet.member(low_priority_mode=True)
    answer = await one.report("d1", headers=one.wall_headers())
    assert (answer.action.kind, answer.action.via, answer.action.set_headers) == (
        ActionKind.RETRY_SAME,
        "low-priority-accepted",
        SLOW,
    )
    assert {key[0] for key in fleet.database.rows} == {"usage_wall"}
    assert {fact.mechanism for fact in fleet.database.facts.values()} == {"usage_wall"}
    assert (answer.durable, answer.result.reason, answer.result.fallback) == (True, "usage_wall", False)


async def test_without_an_option_a_wall_429_is_handled_as_any_other(fleet: Fleet) -> None:
    one = await fleet.member()
    answer = await one.report("d1", headers=one.wall_headers())
    assert (answer.action, answer.result.wall) == (ORDINARY, None)
    assert ("connection", "claude", "c1") in fleet.database.rows


async def test_only_a_declared_oauth_subscription_of_a_provider_with_a_wall_is_concerned(fleet: Fleet) -> None:
    one = await fleet.member(low_priority_mode=True)
    assert one.wall.concerns(C1)
    for other in (replace(ACCOUNT, auth_class=AuthClass.API_KEY), replace(ACCOUNT, provider="codex")):
        one.replica.view.set_policy(Policy(replace(catalogue(), connections={"c1": other})))
        assert not one.wall.concerns(C1._replace(provider=ProviderId(other.provider)))


async def test_every_replica_sends_the_slow_header_while_the_lane_is_active(fleet: Fleet) -> None:
    one, two = await fleet.member(low_priority_mode=True), await fleet.member("r2", low_priority_mode=True)
    assert two.wall.set_headers(C1, two.now()) == ()
    await one.report("d1", headers=one.wall_headers())
    await two.catch_up()
    assert two.wall.set_headers(C1, two.now()) == SLOW
    fleet.time.ms += 3_660_000
    assert two.wall.set_headers(C1, two.now()) == ()


async def test_a_lane_counts_each_report_once_whichever_replica_hears_it_again(fleet: Fleet) -> None:
    one, two = await fleet.member(low_priority_mode=True), await fleet.member("r2", low_priority_mode=True)
    await one.report("d1", headers=one.wall_headers())
    await two.catch_up()
    served = unified(slow_status="active")
    for member in (one, one, two):
        answer = await member.report("d2", 200, headers=served, sent_slow=True)
        assert answer.action == ORDINARY
    assert fleet.stored().requests_served == 1


async def test_the_wait_window_of_a_request_goes_on_at_another_replica(fleet: Fleet) -> None:
    one, two = await fleet.member(low_priority_mode=True), await fleet.member("r2", low_priority_mode=True)
    await one.report("d1", headers=one.wall_headers())
    await two.catch_up()
    busy = unified(slow_status="slot_busy", slow_max_wait="60")
    first = await one.report("d1", attempt=1, headers=busy, sent_slow=True)
    assert (first.action.via, 14_000 <= first.action.delay_ms <= 26_000) == ("slot-busy", True)
    fleet.time.ms += 59_000
    second = await two.report("d1", attempt=2, headers=busy, sent_slow=True)
    assert second.action.delay_ms == 1_000, "what is left of the first wait's minute"
    assert second.result.wall is not None
    assert second.result.wall.window is not None
    assert second.result.wall.window[1] == 2


async def test_the_end_of_a_lane_is_said_and_the_response_is_judged(fleet: Fleet) -> None:
    one = await fleet.member(low_priority_mode=True)
    await one.report("d1", headers=one.wall_headers())
    ended = await one.report("d2", headers=unified(slow_status="weekly_limit"), sent_slow=True)
    assert (ended.action.kind, ended.action.reason) == (ORDINARY.kind, "weekly")
    assert ("connection", "claude", "c1") in fleet.database.rows
    assert ended.result.effects[0].to_state == "idle"
    assert not one.lane().resets_at_s


async def test_one_claim_is_opened_and_the_others_share_its_verdict(fleet: Fleet) -> None:
    members = [await fleet.member(f"r{n}", auto_limit_reset=True) for n in range(3)]
    one = members[0]
    first = await one.report("d0", headers=one.wall_headers())
    assert (first.action.kind, first.action.claim and first.action.claim.step) == (
        ActionKind.CLAIM_LIMIT_RESET,
        "STATUS",
    )
    held = [asyncio.create_task(each.report(f"d{n}", headers=each.wall_headers())) for n, each in enumerate(members, 1)]
    await _until(lambda: len(fleet.database.answers) == 4)
    asked = await one.reset_step("d0", first, 200, OFFERED)
    assert asked.action.claim is not None
    assert asked.action.claim.step == "ORGANIZATION"
    claim = LimitResetReport(asked.action.claim.claim_id, "ORGANIZATION", organization_uuid="org-1")
    call = await one.report("d0", limit_reset=claim, headers=one.wall_headers())
    assert call.action.claim is not None
    assert call.action.claim.url.endswith("/organizations/org-1/reset_rate_limits")
    assert call.action.claim.body == b'{"program": "juniper_tide"}'
    assert not any(task.done() for task in held)
    granted = await one.reset_step("d0", call, 200, b'{"result": "reset"}')
    answers = [granted, *await asyncio.gather(*held)]
    assert [(a.action.kind, a.action.via, a.action.set_headers) for a in answers] == [
        (ActionKind.RETRY_SAME, "limit-reset", ())
    ] * 4
    assert {key[0] for key in fleet.database.rows} == {"usage_wall"}


async def test_a_held_report_is_judged_once_when_the_reset_is_refused(fleet: Fleet) -> None:
    one, two = await fleet.member(auto_limit_reset=True), await fleet.member("r2", auto_limit_reset=True)
    first = await one.report("d1", headers=one.wall_headers())
    held = asyncio.create_task(two.report("d2", headers=two.wall_headers()))
    await _until(lambda: len(fleet.database.answers) == 2)
    assert ("connection", "claude", "c1") not in fleet.database.rows
    refused = await one.reset_step("d1", first, 200, NOT_OFFERED)
    assert refused.action == ORDINARY
    waited = await held
    assert waited.action == ORDINARY
    assert waited.result.reason != "usage_wall"
    again = await two.report("d2", headers=two.wall_headers())
    assert again.result.effects == waited.result.effects
    assert fleet.stored().claim is not None
    assert fleet.stored().not_before == one.now() + 604_800_000


async def test_a_hold_ends_before_the_budget_of_its_request_does(fleet: Fleet) -> None:
    one = await fleet.member(auto_limit_reset=True, low_priority_mode=True)
    await one.report("d1", headers=one.wall_headers())
    held = await one.report("d2", headers=one.wall_headers(), remaining_budget_ms=5_030)
    assert held.action.via == "low-priority-accepted"


async def test_a_claim_that_nobody_finished_ends_by_itself(fleet: Fleet) -> None:
    one = await fleet.member(auto_limit_reset=True)
    await one.report("d1", headers=one.wall_headers())
    fleet.time.ms += 40_000
    later = await one.report("d2", headers=one.wall_headers())
    assert later.action == ORDINARY
    claim = fleet.stored().claim
    assert claim is not None
    assert (claim.verdict, fleet.stored().not_before) == ("error", fleet.time.ms + 900_000)


async def test_without_the_store_an_offer_is_accepted_here_and_no_claim_is_opened(fleet: Fleet) -> None:
    one = await fleet.member(auto_limit_reset=True, low_priority_mode=True)
    one.replica.commit._failures_in_row = 3
    one.replica.store.is_away = True  # type: ignore[attr-defined]
    answer = await one.report("d1", headers=one.wall_headers())
    assert (answer.action.via, answer.durable) == ("low-priority-accepted", False)
    assert one.wall.set_headers(C1, one.now()) == SLOW
    one.replica.store.is_away = False  # type: ignore[attr-defined]
    await _until(lambda: bool(fleet.database.rows))
    assert (fleet.stored().resets_at_s is not None, fleet.stored().claim) == (True, None)


async def test_neither_a_projection_nor_a_late_commit_opens_a_claim(fleet: Fleet) -> None:
    one = await fleet.member(auto_limit_reset=True)
    event, _ = await one.event("d1", 429, headers=one.wall_headers())
    assert event.wall is not None
    for moment, expected in ((None, "HOLD"), (event.wall.claim_until + 1, "HOLD"), (event.at, "CLAIM_LIMIT_RESET")):
        book = StateBook()
        result = fold_report(book, event, one.replica.view.policy, moment)
        assert result.wall is not None
        assert (result.wall.action, bool(book.changes)) == (expected, expected != "HOLD")


async def test_what_the_wall_said_survives_storing_and_spooling(fleet: Fleet) -> None:
    one = await fleet.member(auto_limit_reset=True, low_priority_mode=True)
    event, _ = await one.event("d1", 429, headers=one.wall_headers())
    assert event_codec.decode(event_codec.encode(event)) == event
    for moment in (None, event.at):
        result = replace(fold_report(StateBook(), event, one.replica.view.policy, moment), facts=())
        assert report_result.decode(report_result.encode(result)) == result


def test_an_unknown_step_is_a_bad_call_and_an_unreadable_body_an_empty_one() -> None:
    with pytest.raises(InvalidRequestError):
        claim_report(LimitResetReport("c", "status"))
    read = claim_report(LimitResetReport("c", "STATUS", 200, b"\xff[["))
    assert (read.body, read.transport_error) == ({}, False)
    assert claim_report(LimitResetReport("c", "CLAIM")).transport_error


async def _until(condition: Any) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come to hold")


async def test_rows_beyond_the_limit_go_the_least_recently_touched_first_and_never_a_fresh_one(fleet: Fleet) -> None:
    now = fleet.time.ms
    rows = [Lane("claude", f"c{n}", requests_served=1, touched_at=now - 200_000 + n * 1_000) for n in range(5)]
    assert [row.connection for row in surplus(reversed(rows), 3)] == ["c0", "c1"]
    fresh = replace(rows[0], touched_at=now)
    book = StateBook({row.key: row for row in (fresh, *rows[1:])})
    sweep(book, now - 60_000, Policy(catalogue()), {fresh.key, rows[1].key})
    assert set(book.changes) == {rows[1].key}
