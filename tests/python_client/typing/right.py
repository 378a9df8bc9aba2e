"""Types that users of the client rely on; checked by mypy, never run."""

from __future__ import annotations

from typing import assert_type

import httpx
import httpx2

import policy_client.httpx
import policy_client.httpx2
from policy_client import (
    Answer,
    AsyncLease,
    AsyncPolicyClient,
    Attempt,
    Lease,
    PolicyClient,
    Result,
    Wanted,
    answered,
    messages,
    pool,
    streaming,
)
from policy_client.connection import CHECK_FENCE, SELECT
from policy_client.testing import ScriptedPolicy
from policy_client.upstreams import Door, Upstream


async def later(attempt: Attempt) -> Answer[bytes]:
    assert_type(attempt.target, messages.Target)
    assert_type(attempt.headers, tuple[tuple[str, str], ...])
    return answered(b"body", 200)


def now(attempt: Attempt) -> Answer[list[str]]:
    return streaming(["a"])


async def asynchronous(client: AsyncPolicyClient) -> None:
    assert_type(await client.run(pool("p/c/m"), later), Result[bytes])
    assert_type((await client.run(pool("p/c/m"), later)).value, bytes)
    assert_type(await client.select(pool("p/c/m")), messages.SelectTargetResponse)
    assert_type(await client.call(CHECK_FENCE, messages.CheckFenceRequest()), messages.CheckFenceResponse)
    async with client.lease(Wanted("m")) as lease:
        assert_type(lease, AsyncLease)
        assert_type(lease.context, messages.LeaseContext)


def synchronous(client: PolicyClient) -> None:
    assert_type(client.run(pool("p/c/m"), now), Result[list[str]])
    assert_type(client.call(SELECT, pool("p/c/m")), messages.SelectTargetResponse)
    with client.lease(Wanted("m")) as lease:
        assert_type(lease, Lease)


def transports(blocking: PolicyClient, asyncio: AsyncPolicyClient) -> None:
    door = Door({"c": Upstream("http://127.0.0.1/v1")}, pool("p/c/m"))
    by_function = Door(lambda target: Upstream(target.address), lambda sent: messages.route(sent.model))
    assert_type(policy_client.httpx.client(blocking, door), httpx.Client)
    assert_type(policy_client.httpx2.async_client(asyncio, by_function), httpx2.AsyncClient)


def fakes(policy: ScriptedPolicy) -> None:
    assert_type(policy.will_dispatch("p/c/m").will_reject(503), ScriptedPolicy)
    assert_type(policy.client(), PolicyClient)
    assert_type(policy.async_client(), AsyncPolicyClient)
    assert_type(policy.reports, list[messages.ReportOutcomeRequest])
