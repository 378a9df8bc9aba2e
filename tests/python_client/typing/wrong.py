"""Mistakes that the types must catch: each marked line has exactly the error named. Checked by mypy, never run."""

from __future__ import annotations

from policy_client import Answer, AsyncPolicyClient, Attempt, AwayPolicy, PolicyClient, Wanted, answered, pool
from policy_client.connection import RENEW_LEASE, SELECT
from policy_client.upstreams import Door, Upstream


async def later(attempt: Attempt) -> Answer[bytes]:
    attempt.number = 3  # error: misc
    return answered(b"", 200)


def now(attempt: Attempt) -> Answer[bytes]:
    return answered(b"", "200")  # error: arg-type


def returns_nothing(attempt: Attempt) -> None: ...


async def asynchronous(client: AsyncPolicyClient) -> None:
    await client.run(pool("p/c/m"), now)  # error: arg-type
    await client.run("p/c/m", later)  # error: arg-type
    text: str = (await client.run(pool("p/c/m"), later)).value  # error: assignment
    await client.call(RENEW_LEASE, pool(text))  # error: misc
    with client.lease(Wanted("m")):  # error: attr-defined
        pass


def synchronous(client: PolicyClient) -> None:
    client.run(pool("p/c/m"), returns_nothing)  # error: arg-type
    client.call(SELECT, b"")  # error: misc
    Wanted(caller_id="a")  # error: call-arg
    AwayPolicy("open")  # error: arg-type
    Door({"c": "http://127.0.0.1"})  # error: dict-item
    Upstream(base_url=1)  # error: arg-type
