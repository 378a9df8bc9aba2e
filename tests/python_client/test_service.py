"""Both clients on the real service: failover, permits, leases, sockets, TLS, keys, loss and return."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from policy_client import (
    Answer,
    AsyncPolicyClient,
    Attempt,
    Budget,
    Connection,
    LeaseLostError,
    LeaseUnavailableError,
    NoTargetError,
    PolicyClient,
    ServiceAwayError,
    Tls,
    UnauthenticatedError,
    Wanted,
    messages,
    pool,
    route,
)
from policy_client.connection import RELEASE_LEASE
from policy_service.bootstrap import Service
from tests.integration.serving import config, process, ready, serving
from tests.integration.test_service import free_port
from tests.python_client.test_clients import Upstream

BOTH = pool("openai/main/gpt", "openai/spare/gpt")
PATIENT_MS = 5_000
"""Deadline for a machine that is busy with other tests."""


def patient(address: str, **fields: Any) -> Connection:
    return Connection(address, select_ms=PATIENT_MS, report_ms=PATIENT_MS, **fields)


@asynccontextmanager
async def started(
    directory: Path, url: str, catalogue: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Service]:
    if catalogue is not None:
        file = directory / "catalogue.yaml"
        file.write_text(yaml.safe_dump({"version": 1, **catalogue}))
        settings["catalogue"] = str(file)
    async with serving(config(directory, url, **settings)) as (service, _):
        yield service


def at(service: Service, **fields: Any) -> Connection:
    return patient(service.server.addresses[-1], **fields)


# --- failover ---------------------------------------------------------------------------------------------------
async def test_a_failure_is_remembered_for_the_next_request(tmp_path: Path, embedded_url: str) -> None:
    async with started(tmp_path, embedded_url) as service, AsyncPolicyClient(where=at(service)) as client:
        upstream = Upstream(main=[503, 200], spare=200)
        first = await client.run(BOTH, upstream.later)
        second = await client.run(BOTH, upstream.later)
    assert (first.value, second.value) == ("spare", "spare")
    assert upstream.called == ["main", "spare", "spare"]
    assert first.attempts[0].reason == "server_error"


async def test_the_blocking_client_does_the_same(tmp_path: Path, embedded_url: str) -> None:
    def block(where: Connection) -> list[str]:
        upstream = Upstream(main=[429, 200], spare=200)
        with PolicyClient(where=where) as client:
            for _ in range(2):
                client.run(BOTH, upstream)
        return upstream.called

    async with started(tmp_path, embedded_url) as service:
        assert await asyncio.to_thread(block, at(service)) == ["main", "spare", "spare"]


async def test_all_targets_failing_is_answered_by_the_policy(tmp_path: Path, embedded_url: str) -> None:
    async with started(tmp_path, embedded_url) as service, AsyncPolicyClient(where=at(service)) as client:
        with pytest.raises(NoTargetError) as caught:
            await client.run(BOTH, Upstream(main=503, spare=503).later, Budget(wait_ms=0))
    assert caught.value.http_status == 429
    assert len(caught.value.attempts) == 2


# --- permits ----------------------------------------------------------------------------------------------------
CAPPED = {
    "connections": [{"id": "solo", "provider": "mistral", "max_concurrent": 1}],
    "routes": [{"name": "solo", "strategy": "priority", "targets": [{"connection": "solo", "model": "m"}]}],
}


async def test_a_cancelled_call_gives_its_slot_back(tmp_path: Path, embedded_url: str) -> None:
    async def hangs(attempt: Attempt) -> Answer[str]:
        under_way.set()
        await asyncio.sleep(60)
        raise AssertionError("not reached")

    under_way = asyncio.Event()
    async with started(tmp_path, embedded_url, CAPPED) as service, AsyncPolicyClient(where=at(service)) as client:
        holder = asyncio.create_task(client.run(route("solo"), hangs))
        await under_way.wait()
        with pytest.raises(NoTargetError):
            await client.run(route("solo"), Upstream(solo=200).later, Budget(wait_ms=0))
        holder.cancel()
        async with asyncio.timeout(10):
            while not await _is_served(client):
                await asyncio.sleep(0.05)


async def _is_served(client: AsyncPolicyClient) -> bool:
    try:
        await client.run(route("solo"), Upstream(solo=200).later, Budget(wait_ms=0))
    except NoTargetError:
        return False
    return True


async def test_a_failed_call_of_a_capped_target_frees_its_slot(tmp_path: Path, embedded_url: str) -> None:
    async with started(tmp_path, embedded_url, CAPPED) as service, AsyncPolicyClient(where=at(service)) as client:
        for _ in range(3):
            result = await client.run(route("solo"), Upstream(solo=400).later, Budget(wait_ms=2_000))
            assert result.value == "solo"
            await client.settle()


# --- leases -----------------------------------------------------------------------------------------------------
LEASED = {
    "connections": [{"id": "one", "provider": "mistral"}],
    "callers": [
        {
            "id": "agent",
            "key_sha256": "df95cbaf52bac8155ff1a6248f0bd2f6d1563cc6ffb1fe9dd3124dbb93e9d055",
            "scopes": ["lease:exclusive"],
            "allowed_connections": ["one"],
        }
    ],
}


@pytest.mark.timeout(90)
async def test_a_lease_serves_its_owner_alone_until_it_is_released(tmp_path: Path, embedded_url: str) -> None:
    async with started(tmp_path, embedded_url, LEASED) as service, AsyncPolicyClient(where=at(service)) as client:
        await asyncio.sleep(5.2)  # a new listing is leased from 5 s after it on (docs/concepts/leases.md)
        async with client.lease(Wanted("m", "agent", ttl_ms=1_500)) as lease:
            with pytest.raises(LeaseUnavailableError) as caught:
                async with client.lease(Wanted("m", "agent")):
                    pass
            assert caught.value.answer.code == "LEASE_CAPACITY_UNAVAILABLE"
            await asyncio.sleep(2)
            assert not lease.is_lost
            asked = pool("mistral/two/m", "mistral/one/m", caller_id="agent")
            asked.lease.CopyFrom(lease.context)
            assert (await client.run(asked, Upstream(one=200).later)).value == "one"
            await _end_by_operator(client, lease.held.release(is_cancelled=False))
            async with asyncio.timeout(10):
                assert await lease.wait_lost() == "LEASE_FENCE_STALE"
            with pytest.raises(LeaseLostError):
                _ = lease.context


async def _end_by_operator(client: AsyncPolicyClient, release: messages.ReleaseLeaseRequest) -> None:
    await client.call(RELEASE_LEASE, release)


# --- ways in ----------------------------------------------------------------------------------------------------
async def test_a_unix_socket(tmp_path: Path, embedded_url: str) -> None:
    path = str(tmp_path / "policy.sock")
    where = patient(f"unix:{path}")
    listen = {"tcp": [], "unix": path}
    async with started(tmp_path, embedded_url, listen=listen), AsyncPolicyClient(where=where) as client:
        assert (await client.run(BOTH, Upstream(main=200).later)).value == "main"


@pytest.mark.parametrize("is_mutual", [False, True], ids=["tls", "mtls"])
async def test_tls_and_a_bearer_key(is_mutual: bool, tmp_path: Path, embedded_url: str) -> None:
    certificate, key = _certificate(tmp_path)
    tls = {"cert_file": certificate, "key_file": key, **({"client_ca_file": certificate} if is_mutual else {})}
    own = Tls(certificate, certificate, key) if is_mutual else Tls(certificate)
    secret = "gateway-key-of-at-least-16"
    async with started(tmp_path, embedded_url, tls=tls, auth={"keys": [secret]}) as service:
        async with AsyncPolicyClient(where=at(service, tls=own, key=secret)) as client:
            assert (await client.run(BOTH, Upstream(main=200).later)).value == "main"
        async with AsyncPolicyClient(where=at(service, tls=own, key="wrong")) as client:
            with pytest.raises(UnauthenticatedError, match="CREDENTIALS_INVALID"):
                await client.select(BOTH)
        stranger = Tls(certificate) if is_mutual else Tls()
        async with AsyncPolicyClient(where=at(service, tls=stranger, key=secret)) as client:
            with pytest.raises(ServiceAwayError):
                await client.select(BOTH)


def _certificate(directory: Path) -> tuple[str, str]:
    certificate, key = str(directory / "cert.pem"), str(directory / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


# --- loss and return --------------------------------------------------------------------------------------------
@pytest.mark.timeout(150)
async def test_a_killed_service_costs_no_request_and_hears_later_what_happened(
    tmp_path: Path, embedded_url: str
) -> None:
    port, flags = free_port(), ("--database-url", embedded_url.replace("+asyncpg", ""))
    where = patient(f"127.0.0.1:{port}")
    upstream = Upstream(main=[200, 429, 200], spare=200)
    async with AsyncPolicyClient(where=where) as client:
        with process(tmp_path, port, *flags) as child:
            await ready(child.address, 60)
            assert (await client.run(BOTH, upstream.later)).value == "main"
            await client.settle()
            child.kill()
        served = await client.run(BOTH, upstream.later)
        await client.settle()
        assert (served.value, served.attempt.is_local, client.kept_reports) == ("spare", True, 2)
        with process(tmp_path, port, *flags) as child:
            await ready(child.address, 60)
            async with asyncio.timeout(20):
                while client.is_away or client.kept_reports:
                    await asyncio.sleep(0.05)
            # The 429 that the service did not see is known to it now.
            assert (await client.run(BOTH, upstream.later)).value == "spare"
    assert upstream.called == ["main", "main", "spare", "spare"]
