"""Usage wall over two replicas on one Postgres: one claim over the fleet, one lane for everybody."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from policy_service.application.commit import CommitLimits
from policy_service.application.messages import ActionKind
from policy_service.application.replica import ReplicaSettings
from policy_service.storage.postgres.store import PostgresStore
from tests.replicas import running
from tests.wall import C1, SLOW, Answered, Gateway, gateway

OFFERED = b'{"juniper_tide": {"eligible": true, "arm": "reset", "available": true}}'


@asynccontextmanager
async def replica(url: str, name: str, **options: object) -> AsyncIterator[Gateway]:
    store = await PostgresStore.connect(url)
    settings = ReplicaSettings(name, commit=CommitLimits(report_ms=5_000))
    made = gateway(store, settings, None, **options)
    async with running(made.replica):
        yield made
    await store.close()


async def test_of_twenty_reports_at_once_on_two_replicas_one_opens_the_claim_and_all_are_granted(
    embedded_url: str,
) -> None:
    options = {"auto_limit_reset": True, "organization_uuid": "org-1"}
    async with replica(embedded_url, "r1", **options) as one, replica(embedded_url, "r2", **options) as two:
        reports = [
            asyncio.create_task(member.report(f"{name}-{n}", headers=member.wall_headers()))
            for n in range(10)
            for name, member in (("one", one), ("two", two))
        ]
        done, held = await asyncio.wait(reports, return_when=asyncio.FIRST_COMPLETED)
        opened = [task.result() for task in done]
        assert [each.action.kind for each in opened] == [ActionKind.CLAIM_LIMIT_RESET]
        await finish(two, opened[0])
        answers = await asyncio.gather(*held)
    assert Counter((each.action.kind, each.action.via) for each in answers) == {
        (ActionKind.RETRY_SAME, "limit-reset"): 19
    }


async def finish(elsewhere: Gateway, opened: Answered) -> None:
    """The gateway's calls are reported to whichever replica."""
    call = await elsewhere.reset_step("calls", opened, 200, OFFERED)
    assert call.action.claim is not None
    assert call.action.claim.step == "CLAIM"
    granted = await elsewhere.reset_step("calls", call, 200, b'{"result": "reset"}')
    assert granted.action.via == "limit-reset"


async def test_a_lane_accepted_on_one_replica_is_used_by_the_other_and_after_a_restart(embedded_url: str) -> None:
    async with replica(embedded_url, "r1", low_priority_mode=True) as one:
        accepted = await one.report("d1", headers=one.wall_headers())
        assert accepted.action.via == "low-priority-accepted"
    async with replica(embedded_url, "r2", low_priority_mode=True) as two:
        assert two.wall.set_headers(C1, two.now()) == SLOW
        raced = await two.report("d2", headers=two.wall_headers())
        assert raced.action.via == "lane-joined"
