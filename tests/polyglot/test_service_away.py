"""The policy service is away: the last known order is followed, never where that is forbidden; then it recovers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy_service.generated.policy.v1 import admin_pb2
from tests.fleet.fleet import Replica
from tests.polyglot.doors import Gateway, policy_at, running
from tests.polyglot.upstreams import Behaviour, Upstreams
from tests.polyglot.world import AGENT_KEY, behaving, behaviour, catalogue, routed, stubs, until, written

SELECT_MS = 1_000
NOTICED_WITHIN_S = 4.0
"""SELECT_MS, and what a busy machine adds."""
BACK_WITHIN_S = 45
"""Far below the two minutes after which the slot would end by itself; a busy machine once took more than 20."""
ROUTES = {"chat": ["main", "spare"], "narrow": ["capped"]}


@dataclass(frozen=True, slots=True)
class Beside:
    """A gateway and its replica, which a test may end."""

    gateway: Gateway
    replica: Replica
    upstreams: Upstreams

    async def status(self, route: str, **headers: str) -> int:
        """Status of one request."""
        return (await self.gateway.send(**headers)(route, False)).status

    @property
    def called(self) -> list[str]:
        """Connections called so far."""
        return [call.connection for call in self.upstreams.calls]


@asynccontextmanager
async def beside(command: Sequence[str], place: Path, database_url: str, fail_mode: str) -> AsyncIterator[Beside]:
    """A replica as a process, and a gateway that has asked it once for each route."""
    async with behaving("main", "spare", "capped") as upstreams:
        file = written(place, catalogue(upstreams, ROUTES, capped={"max_concurrent": 5}))
        flags = ("--database-url", database_url.replace("+asyncpg", ""), "--catalogue", str(file))
        replica = Replica("beside", place, flags)
        replica.launch()
        await replica.ready()
        settings: dict[str, Any] = {
            "policy": policy_at(replica.address, select_timeout_ms=SELECT_MS, report_timeout_ms=SELECT_MS),
            "upstreams": routed(file, upstreams),
            "fail_mode": fail_mode,
        }
        try:
            async with running(command, place, settings) as gateway:
                here = Beside(gateway, replica, upstreams)
                for route in ROUTES:
                    await until(lambda route=route: _is_served(here, route), 20)  # type: ignore[misc]
                upstreams.calls.clear()
                yield here
        finally:
            await replica.close()


async def _is_served(here: Beside, route: str) -> bool:
    return await here.status(route) == 200


async def test_fail_open_follows_the_last_known_order_and_leaves_out_what_is_capped_or_leased(
    command: Sequence[str], tmp_path: Path, embedded_url: str
) -> None:
    async with beside(command, tmp_path, embedded_url, "open") as here:
        here.replica.running.kill()
        began = time.monotonic()
        assert await here.status("chat") == 200
        first = time.monotonic() - began
        here.upstreams.script("main", behaviour("overloaded"))
        assert await here.status("chat") == 200
        assert here.called == ["main", "main", "spare"]
        assert await here.status("narrow") == 503
        fence = {"x_policy_lease_owner": "vlo_" + "a" * 43, "x_policy_lease_generation": "1"}
        assert await here.status("chat", authorization=f"Bearer {AGENT_KEY}", **fence) == 503
        assert await here.status("never-asked-for") == 503
        assert here.called == ["main", "main", "spare"]
    assert first < NOTICED_WITHIN_S


async def test_fail_closed_sends_nothing(command: Sequence[str], tmp_path: Path, embedded_url: str) -> None:
    async with beside(command, tmp_path, embedded_url, "closed") as here:
        here.replica.running.kill()
        answer = await here.gateway.send()("chat", False)
    assert (answer.status, answer.retry_after, here.called) == (503, "1", [])


async def test_a_service_that_hangs_is_as_good_as_away(
    command: Sequence[str], tmp_path: Path, embedded_url: str
) -> None:
    async with beside(command, tmp_path, embedded_url, "open") as here:
        os.kill(here.replica.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert await here.status("chat") == 200
            assert time.monotonic() - began < NOTICED_WITHIN_S
        finally:
            os.kill(here.replica.pid, signal.SIGCONT)
    assert here.called == ["main"]


async def test_a_service_that_is_back_is_asked_again_and_hears_what_it_missed(
    command: Sequence[str], tmp_path: Path, embedded_url: str
) -> None:
    """A capped account is served by decision only, and its slot comes back by report only: its TTL is two minutes."""
    async with beside(command, tmp_path, embedded_url, "open") as here:
        here.upstreams.script("capped", Behaviour(json={"object": "chat.completion"}, delay_s=1.5))
        under_way = asyncio.create_task(here.status("narrow"))
        await until(lambda: _is_called(here), 10)
        here.replica.running.kill()
        assert await under_way == 200
        here.replica.launch()
        await here.replica.ready()
        await until(lambda: _is_served(here, "narrow"), BACK_WITHIN_S)
        await until(lambda: _none_held(here), BACK_WITHIN_S)


async def _is_called(here: Beside) -> bool:
    return here.called != []


async def _none_held(here: Beside) -> bool:
    async with stubs(here.replica.address) as (_, admin):
        gates = await admin.ListGates(admin_pb2.ListGatesRequest(), timeout=5)
    return not any(gate.held for gate in gates.gates)
