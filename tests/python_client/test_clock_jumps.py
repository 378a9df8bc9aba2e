"""A host clock that jumps moves no renewal and ends no lease.

Client and Envoy door know monotonic time only, and of the service's instants their differences.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import policy_envoy
import pytest
from policy_envoy import registry
from policy_envoy.flight import RENEWALS, from_answer

import policy_client
from policy_client import AsyncPolicyClient, Wanted, messages
from policy_client.connection import ACQUIRE_LEASE, RELEASE_LEASE, RENEW_LEASE, Method
from policy_client.core import Sources
from policy_client.leasing import granted, renewed
from policy_service.generated.policy.v1 import permit_pb2, policy_pb2, types_pb2

DAY_MS = 86_400_000
SOURCES = [
    file
    for package in (policy_client, policy_envoy)
    for file in sorted(Path(str(package.__file__)).parent.rglob("*.py"))
    if "_generated" not in file.parts
]
WALL = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime"}


def wall_clock_calls(source: str) -> Iterator[str]:
    """Calls of `time.time()` and its like."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WALL:
            whose = ast.unparse(node.func.value)
            if whose in {"time", "datetime", "datetime.datetime", "date", "datetime.date"}:
                yield f"{whose}.{node.func.attr}"


def test_neither_client_nor_door_reads_the_wall_clock() -> None:
    assert list(wall_clock_calls("import time\ntime.time()")) == ["time.time"]
    assert len(SOURCES) > 40
    assert [(file.name, call) for file in SOURCES for call in wall_clock_calls(file.read_text())] == []


def lease_at(now_ms: int) -> messages.Lease:
    """A lease of 90 s by a service whose clock says `now_ms`."""
    return messages.Lease(generation=1, renewed_at_unix_ms=now_ms, expires_at_unix_ms=now_ms + 90_000, ttl_ms=90_000)


@pytest.mark.parametrize("jump_ms", [-DAY_MS, -1, 1, DAY_MS])
def test_a_service_whose_clock_jumps_between_two_renewals_changes_no_life(jump_ms: int) -> None:
    held = granted(Wanted("gpt"), lease_at(10 * DAY_MS), asked_at=1_000)
    after = renewed(held, lease_at(10 * DAY_MS + jump_ms), asked_at=31_000)
    assert (after.renew_at, after.ends_at) == (61_000, 121_000)


class LeasesOnly:
    """A service that grants and renews; its clock is the test's."""

    def __init__(self) -> None:
        self.renewals = 0

    async def call(self, method: Method[Any, Any], request: object, timeout_ms: int, silence_ms: int = 0) -> object:
        if method is ACQUIRE_LEASE:
            return messages.AcquireLeaseResponse(lease=lease_at(10 * DAY_MS))
        if method is RENEW_LEASE:
            self.renewals += 1
            return messages.RenewLeaseResponse(lease=lease_at(9 * DAY_MS))
        assert method is RELEASE_LEASE
        return messages.ReleaseLeaseResponse()

    async def is_serving(self, timeout_ms: int) -> bool:
        return True

    async def close(self) -> None: ...


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
async def test_a_host_clock_that_jumps_neither_loses_a_lease_nor_renews_it_early(
    monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    now, rpc, wall = [5_000], LeasesOnly(), time.time
    client = AsyncPolicyClient(rpc=rpc, sources=Sources(now=lambda: now[0]))  # type: ignore[arg-type]
    async with client, client.lease(Wanted("gpt")) as lease:
        monkeypatch.setattr(time, "time", lambda: wall() + jump_s)
        assert not lease.is_lost
        now[0] += 89_999
        assert not lease.is_lost
        assert rpc.renewals == 0
        now[0] += 1
        assert lease.is_lost


def test_slots_that_envoy_holds_are_renewed_by_monotonic_time() -> None:
    permit = permit_pb2.Permit(permit_id="p", expires_at_unix_ms=10 * DAY_MS + 4_000)
    dispatch = policy_pb2.Dispatch(target=types_pb2.Target(connection="a"), permits=[permit])
    answer = policy_pb2.SelectTargetResponse(
        decision_id="d", decision_token=b"t", decided_at_unix_ms=10 * DAY_MS, dispatch=dispatch
    )
    held, flight = registry.Registry(), from_answer(answer, 77.0)
    held.hold(flight, 77.0)
    assert list(held.due(77.0 + 4_000 / RENEWALS - 1)) == []
    assert list(held.due(77.0 + 4_000 / RENEWALS)) == [flight]
