"""The ways to the service: TCP, Unix socket, TLS and bearer key, several replicas that restart one after the other."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.fleet import Replica, database, fleet
from tests.integration.serving import config, serving
from tests.integration.test_grpc_security import authority
from tests.polyglot.doors import Gateway, policy_at, running
from tests.polyglot.upstreams import Upstreams
from tests.polyglot.world import behaving, behaviour, catalogue, routed, written

KEY = "gateway-key-of-at-least-16"
CALLERS = 6


def secured(place: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of a service with TLS and a key, and those of the gateway's part `policy`."""
    ours = authority("ours")
    key, certificate = ours.issue("server")
    for name, text in (("tls.key", key), ("tls.crt", certificate), ("ca.crt", ours.pem)):
        (place / name).write_bytes(text)
    tls = {"cert_file": str(place / "tls.crt"), "key_file": str(place / "tls.key")}
    return {"tls": tls, "auth": {"keys": [KEY]}}, {"ca_file": str(place / "ca.crt"), "key": KEY}


def way(name: str, place: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the service and of the gateway's part `policy` for one way."""
    listen = {"tcp": ["127.0.0.1:0"], "unix": str(place / "p.sock")}
    socket = {"listen": listen}, {"address": f"unix:{place / 'p.sock'}"}
    if name == "tcp":
        return {}, {}
    if name == "unix":
        return socket
    return secured(place)


@pytest.mark.parametrize("name", ["tcp", "unix", "tls and key"])
async def test_failover_works_on_every_way_to_the_service(
    command: Sequence[str], tmp_path: Path, embedded_url: str, name: str
) -> None:
    service_part, gateway_part = way(name, tmp_path)
    async with behaving("main", "spare") as upstreams:
        file = written(tmp_path, catalogue(upstreams, {"chat": ["main", "spare"]}))
        upstreams.script("main", behaviour("overloaded"))
        async with serving(config(tmp_path, embedded_url, catalogue=str(file), **service_part)) as (service, _):
            policy = {**policy_at(service.server.addresses[-1]), **gateway_part}
            settings = {"policy": policy, "upstreams": routed(file, upstreams), "fail_mode": "closed"}
            async with running(command, tmp_path, settings) as gateway:
                answers = [(await gateway.send()("chat", False)).status for _ in range(2)]
    assert answers == [200, 200]
    assert [call.connection for call in upstreams.calls] == ["main", "spare", "spare"]


async def test_a_wrong_key_or_authority_lets_nothing_through(
    command: Sequence[str], tmp_path: Path, embedded_url: str
) -> None:
    service_part, gateway_part = secured(tmp_path)
    (tmp_path / "other.crt").write_bytes(authority("theirs").pem)
    wrong = {"key": {"key": "not-the-key-that-it-wants"}, "authority": {"ca_file": str(tmp_path / "other.crt")}}
    async with behaving("main") as upstreams:
        file = written(tmp_path, catalogue(upstreams, {"chat": ["main"]}))
        async with serving(config(tmp_path, embedded_url, catalogue=str(file), **service_part)) as (service, _):
            for name, part in wrong.items():
                policy = policy_at(service.server.addresses[-1], **{**gateway_part, **part})
                async with running(
                    command, tmp_path, {"policy": policy, "upstreams": routed(file, upstreams)}
                ) as gateway:
                    answer = await gateway.send()("chat", False)
                    assert answer.status == {"key": 500, "authority": 503}[name]
    assert upstreams.calls == []


@pytest.mark.timeout(300)
async def test_rolling_restarts_of_the_replicas_cost_no_request(command: Sequence[str], tmp_path: Path) -> None:
    async with behaving("main", "spare") as upstreams, database() as where:
        file = written(tmp_path, catalogue(upstreams, {"chat": ["main", "spare"]}))
        async with fleet(tmp_path, where, 2, "--catalogue", str(file)) as replicas:
            address = "ipv4:" + ",".join(replica.address for replica in replicas)
            settings = {"policy": policy_at(address), "upstreams": routed(file, upstreams), "fail_mode": "closed"}
            async with running(command, tmp_path, settings) as gateway:
                statuses = await _restarted_under_load(gateway, replicas)
                log = gateway.log.read_text()
    assert statuses.total() > 100
    assert set(statuses) == {200}, log[-2_000:]
    _assert_no_call_was_lost(upstreams, statuses)


def _assert_no_call_was_lost(upstreams: Upstreams, statuses: Counter[int]) -> None:
    assert len(upstreams.calls) == statuses.total()


async def _restarted_under_load(gateway: Gateway, replicas: Sequence[Replica]) -> Counter[int]:
    """Statuses of a busy load while every replica is restarted in turn."""
    statuses: Counter[int] = Counter()
    is_over = asyncio.Event()

    async def load() -> None:
        send = gateway.send()
        while not is_over.is_set():
            statuses[(await send("chat", False)).status] += 1
            await asyncio.sleep(0.02)

    callers = [asyncio.create_task(load()) for _ in range(CALLERS)]
    await asyncio.sleep(1)
    for replica in replicas:
        assert await asyncio.to_thread(replica.running.end) == 0
        await asyncio.sleep(1)
        replica.launch()
        await replica.ready()
        await asyncio.sleep(1.5)
    is_over.set()
    await asyncio.gather(*callers)
    return statuses
