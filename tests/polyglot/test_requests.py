"""One client request through a gateway: cancel, permits, leases, waits, restated errors."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from policy_service.generated.policy.v1 import lease_pb2
from tests.fleet.fleet import free_port
from tests.polyglot.doors import policy_at, running
from tests.polyglot.scripted import Scripted, beside, started
from tests.polyglot.upstreams import Behaviour
from tests.polyglot.world import AGENT_KEY, AGENT_SHA256, World, behaving, behaviour, catalogue, until, world

CHUNK = '{"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "more "}}]}'
LONG_STREAM = Behaviour(events=[CHUNK] * 200, event_gap_s=0.05)
OWNER = "vlo_" + "a" * 43
AT_ONCE_S = 3.0
"""Far below the permit's TTL, which is how long a leaked permit would take; far above what a busy machine adds."""


# --- cancel and permits ---------------------------------------------------------------------------------------
async def hang_up_in_a_stream(base_url: str, route: str) -> None:
    """Read the first piece of a stream, then leave."""
    body = {"model": route, "stream": True, "messages": []}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{base_url}/v1/chat/completions", json=body) as answer,
    ):
        assert await answer.content.readany()


async def test_a_client_that_leaves_ends_the_upstream_call_and_frees_the_permit_at_once(
    command: Sequence[str], tmp_path: Path, embedded_url: str
) -> None:
    async with behaving("capped") as upstreams:
        document = catalogue(upstreams, {"narrow": ["capped"]}, capped={"max_concurrent": 1})
        async with world(command, tmp_path, embedded_url, upstreams, document) as here:
            upstreams.script("capped", LONG_STREAM)
            await hang_up_in_a_stream(here.gateway.base_url, "narrow")
            await until(lambda: _none_held(here), AT_ONCE_S)
            await asyncio.wait_for(upstreams.calls[0].ended.wait(), AT_ONCE_S)
            answer = await here.gateway.send()("narrow", False)
    assert upstreams.calls[0].gone
    assert answer.status == 200
    assert here.called() == ["capped", "capped"]


async def _none_held(here: World) -> bool:
    return await here.held() == 0


async def test_a_long_stream_keeps_its_permit_and_gives_it_back_at_its_end(
    command: Sequence[str], tmp_path: Path, embedded_url: str
) -> None:
    async with behaving("capped") as upstreams:
        settings = {"concurrency": {"permit_ttl_ms": 1_500}}
        document = catalogue(upstreams, {"narrow": ["capped"]}, capped={"max_concurrent": 1}, settings=settings)
        async with world(command, tmp_path, embedded_url, upstreams, document) as here:
            upstreams.script("capped", Behaviour(events=[CHUNK] * 50, event_gap_s=0.1))
            stream = asyncio.create_task(here.gateway.send()("narrow", True))
            held = []
            while not stream.done():
                held.append(await here.held())
                await asyncio.sleep(0.25)
            await until(lambda: _none_held(here), AT_ONCE_S)
    assert (await stream).status == 200
    assert set(held[2:-2]) == {1}, "the permit ended before its stream, which lasts three times its TTL"


async def test_permits_are_freed_when_the_decision_ends_in_failure(
    command: Sequence[str], tmp_path: Path, embedded_url: str
) -> None:
    """A capped account is no fallback: the second one takes a decision of its own, and the first has to end."""
    async with behaving("first", "second") as upstreams:
        cap = {"max_concurrent": 1}
        document = catalogue(upstreams, {"narrow": ["first", "second"]}, first=cap, second=cap)
        async with world(command, tmp_path, embedded_url, upstreams, document) as here:
            upstreams.script("first", behaviour("overloaded"))
            answer = await here.gateway.send()("narrow", False)
            await until(lambda: _none_held(here), AT_ONCE_S)
    assert (answer.status, here.called()) == (200, ["first", "second"])


# --- leases ---------------------------------------------------------------------------------------------------
def leasing(upstreams: Any) -> dict[str, Any]:
    caller = {"id": "agent", "key_sha256": AGENT_SHA256, "scopes": ["lease:exclusive"], "allowed_connections": ["own"]}
    return catalogue(upstreams, {"mine": ["own"], "both": ["own", "shared"]}, callers=[caller])


async def acquired(policy: Any) -> int:
    """Generation of a lease; a new listing is leased only some seconds after it was made."""
    request = lease_pb2.AcquireLeaseRequest(caller_key_sha256=AGENT_SHA256, owner=OWNER, model="mine")
    async with asyncio.timeout(20):
        while not (answer := await policy.AcquireLease(request, timeout=5)).HasField("lease"):
            await asyncio.sleep(0.2)
    generation: int = answer.lease.generation
    return generation


def _code(body: bytes) -> str:
    code: str = json.loads(body)["error"]["code"]
    return code


async def test_a_lease_is_honoured_and_its_secret_stays_in_the_gateway(
    command: Sequence[str], tmp_path: Path, embedded_url: str
) -> None:
    async with (
        behaving("own", "shared") as upstreams,
        world(command, tmp_path, embedded_url, upstreams, leasing(upstreams)) as here,
    ):
        generation = await acquired(here.policy)
        bearer = f"Bearer {AGENT_KEY}"
        fence = {"x_policy_lease_owner": OWNER, "x_policy_lease_generation": str(generation)}
        with_lease = await here.gateway.send(authorization=bearer, **fence)("mine", False)
        alias = {name.replace("policy", "omniroute"): value for name, value in fence.items()}
        by_alias = await here.gateway.send(authorization=bearer, **alias)("mine", False)
        torn = await here.gateway.send(authorization=bearer, **fence, x_omniroute_lease_generation="8")("mine", False)
        without = await here.gateway.send(authorization=bearer)("mine", False)
        stale = await here.gateway.send(authorization=bearer, **{**fence, "x_policy_lease_generation": "7"})(
            "mine", False
        )
        others = await here.gateway.send()("both", False)
        malformed = await here.gateway.send(authorization=bearer, **{**fence, "x_policy_lease_generation": "07"})(
            "mine", False
        )
    assert (with_lease.status, by_alias.status, here.called()) == (200, 200, ["own", "own", "shared"])
    assert others.status == 200
    assert (without.status, _code(without.body)) == (400, "LEASE_CONTEXT_REQUIRED")
    assert (stale.status, _code(stale.body)) == (409, "LEASE_FENCE_STALE")
    assert (malformed.status, _code(malformed.body)) == (400, "LEASE_CONTEXT_INVALID")
    assert (torn.status, _code(torn.body)) == (400, "LEASE_CONTEXT_INVALID")
    arrived = upstreams.calls[0].headers
    assert arrived["authorization"] == "Bearer key-of-own"
    assert OWNER not in str(arrived)
    assert OWNER not in here.gateway.log.read_text()


async def test_a_lease_that_ended_is_refused_and_nothing_is_sent(
    command: Sequence[str], tmp_path: Path, embedded_url: str
) -> None:
    async with (
        behaving("own", "shared") as upstreams,
        world(command, tmp_path, embedded_url, upstreams, leasing(upstreams)) as here,
    ):
        generation = await acquired(here.policy)
        lease = lease_pb2.LeaseContext(owner=OWNER, generation=generation)
        release = lease_pb2.ReleaseLeaseRequest(caller_key_sha256=AGENT_SHA256, lease=lease)
        await here.policy.ReleaseLease(release, timeout=5)
        fence = {"x_policy_lease_owner": OWNER, "x_policy_lease_generation": str(generation)}
        answer = await here.gateway.send(authorization=f"Bearer {AGENT_KEY}", **fence)("mine", False)
    assert (answer.status, _code(answer.body), here.called()) == (409, "LEASE_REQUIRED", [])


# --- waiting --------------------------------------------------------------------------------------------------
COOLDOWN = {
    "connection": {name: {"base_cooldown_ms": 1_500, "max_backoff_steps": 0} for name in ("api_key", "default")}
}


async def test_a_wait_is_waited_out_within_the_time_of_the_request(
    command: Sequence[str], tmp_path: Path, embedded_url: str
) -> None:
    async with behaving("only") as upstreams:
        document = catalogue(upstreams, {"one": ["only"]}, settings=COOLDOWN)
        async with world(command, tmp_path, embedded_url, upstreams, document) as here:
            upstreams.script("only", behaviour("overloaded"))
            began = time.monotonic()
            answer = await here.gateway.send()("one", False)
            took = time.monotonic() - began
    assert (answer.status, here.called()) == (200, ["only", "only"])
    assert took >= 1.4


async def test_a_wait_that_is_longer_than_the_request_may_take_is_told_to_the_client(
    command: Sequence[str], tmp_path: Path, embedded_url: str
) -> None:
    async with behaving("only") as upstreams:
        settings = {"connection": {name: {"base_cooldown_ms": 30_000} for name in ("api_key", "default")}}
        document = catalogue(upstreams, {"one": ["only"]}, settings=settings)
        async with world(command, tmp_path, embedded_url, upstreams, document, request_timeout_ms=3_000) as here:
            upstreams.script("only", behaviour("overloaded"))
            began = time.monotonic()
            answers = [await here.gateway.send()("one", False) for _ in range(2)]
            took = time.monotonic() - began
    assert {answer.status for answer in answers} <= {429, 503}
    assert 20 <= int(answers[1].retry_after or 0) <= 31
    assert here.called() == ["only"]
    assert took < 3


async def test_a_full_account_is_waited_for_in_line(command: Sequence[str], tmp_path: Path, embedded_url: str) -> None:
    async with behaving("capped") as upstreams:
        document = catalogue(upstreams, {"narrow": ["capped"]}, capped={"max_concurrent": 1})
        document["routes"][0]["strategy"] = "round-robin"  # the strategy whose requests stand in line
        async with world(command, tmp_path, embedded_url, upstreams, document) as here:
            upstreams.script("capped", Behaviour(json={}, delay_s=1.0))
            first = asyncio.create_task(here.gateway.send()("narrow", False))
            await until(lambda: _one_called(here), AT_ONCE_S)
            second = await here.gateway.send()("narrow", False)
            statuses = [(await first).status, second.status]
    assert (statuses, here.called()) == ([200, 200], ["capped", "capped"])


async def _one_called(here: World) -> bool:
    return len(here.upstreams.calls) == 1


# --- errors ---------------------------------------------------------------------------------------------------
async def test_a_status_that_the_service_puts_right_is_what_the_client_gets(
    command: Sequence[str], tmp_path: Path, embedded_url: str
) -> None:
    async with behaving("only") as upstreams:
        document = catalogue(upstreams, {"one": ["only"]})
        document["connections"][0]["provider"] = "agentrouter"
        async with world(command, tmp_path, embedded_url, upstreams, document, request_timeout_ms=2_000) as here:
            upstreams.script("only", behaviour("misstated_quota"))
            answer = await here.gateway.send()("one", False)
    assert answer.status == 429


async def test_an_account_that_the_gateway_does_not_know_is_named(command: Sequence[str], tmp_path: Path) -> None:
    async with started(Scripted("spare")) as service, beside(command, tmp_path, service, {}) as gateway:
        answer = await gateway.send()("one", False)
        log = gateway.log.read_text()
    assert answer.status == 502
    assert b"has no upstream house/spare" in answer.body
    assert f"no upstream house/spare in {gateway.log.with_suffix('.json')}: add it" in log


async def test_a_policy_address_where_nobody_answers_is_named(command: Sequence[str], tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with running(command, tmp_path, {"policy": policy_at(address, select_timeout_ms=300)}) as gateway:
        answers = [await gateway.send()("chat", False) for _ in range(2)]
        told = [line for line in gateway.log.read_text().splitlines() if "no decision" in line]
    assert [answer.status for answer in answers] == [503, 503]
    assert [address in line for line in told] == [True, True]


async def test_a_request_without_a_model_is_told_so(command: Sequence[str], tmp_path: Path, embedded_url: str) -> None:
    async with behaving("only") as upstreams:
        document = catalogue(upstreams, {"one": ["only"]})
        async with (
            world(command, tmp_path, embedded_url, upstreams, document) as here,
            aiohttp.ClientSession() as session,
        ):
            for body in (b"", b"not json", b"{}", b'{"model": 7}'):
                async with session.post(f"{here.gateway.base_url}/v1/chat/completions", data=body) as answer:
                    assert answer.status == 400, body


async def test_a_stream_that_breaks_off_does_not_look_complete_and_is_held_against_the_account(
    command: Sequence[str], tmp_path: Path, embedded_url: str
) -> None:
    async with behaving("first", "second") as upstreams:
        document = catalogue(upstreams, {"two": ["first", "second"]})
        async with world(command, tmp_path, embedded_url, upstreams, document) as here:
            upstreams.script("first", Behaviour(events=[CHUNK] * 3, event_gap_s=0.3, breaks_off=True))
            with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)):
                await _read_whole(here.gateway.base_url, "two")
    assert here.called() == ["first"]


async def _read_whole(base_url: str, route: str) -> bytes:
    body = {"model": route, "stream": True, "messages": []}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{base_url}/v1/chat/completions", json=body) as answer,
    ):
        return await answer.read()
