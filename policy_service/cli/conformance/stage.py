"""The stage of a run: scripted service and upstreams on loopback, and cases played against a gateway, one by one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from policy_service.cli.conformance.cases import CONNECTIONS, Case
from policy_service.cli.conformance.checks.views import attempts, dispatched, freeing, place
from policy_service.cli.conformance.record import Record
from policy_service.cli.conformance.scripted_client import GatewayAccess, exchange
from policy_service.cli.conformance.scripted_service import ScriptedService
from policy_service.cli.conformance.scripted_upstreams import ScriptedUpstreams, mark

_QUIET_S: Final = 0.15
_LOOK_S: Final = 0.02
_LEASE_HEADER: Final = "x-policy-lease-owner"


@dataclass(frozen=True, slots=True)
class Stage:
    """What runs for a gateway under test.

    Args:
        policy: host:port of the scripted policy service.
        upstreams: host:port of each connection.
        keys: credential of each connection.
    """

    policy: str
    upstreams: dict[str, str]
    keys: dict[str, str]
    _service: ScriptedService
    _scripted: ScriptedUpstreams

    async def play(self, case: Case, access: GatewayAccess) -> Record:
        """Send the requests of a case through the gateway and keep what was seen."""
        await asyncio.sleep(case.rest_ms / 1000)
        record = Record(case, keys=self.keys, secrets=_secrets(case, access))
        self._service.begin(record)
        self._scripted.begin(record)
        send = [exchange(access, script, mark(case.name)) for script in case.clients]
        if case.together:
            record.clients += await asyncio.gather(*send)
            await _settle(record)
            return record
        for script, request in zip(case.clients, send, strict=True):
            await asyncio.sleep(script.after_ms / 1000)
            record.clients.append(await request)
            await _settle(record)
        return record


@asynccontextmanager
async def staged(base_port: int = 0) -> AsyncIterator[Stage]:
    """Start service and upstreams. Port 0: free ports; else this one for the service, the next ones for upstreams."""
    async with ScriptedUpstreams(base_port + 1 if base_port else 0).listening() as scripted:
        service = ScriptedService(scripted.addresses)
        async with service.listening(base_port) as policy:
            keys = {name: f"sk-conformance-key-of-{name}" for name in CONNECTIONS}
            yield Stage(policy, scripted.addresses, keys, service, scripted)


def _secrets(case: Case, access: GatewayAccess) -> dict[str, str]:
    """What only the gateway may know."""
    headers = [header for script in case.clients for header in script.headers.items()]
    owners = [value for name, value in headers if name.lower() == _LEASE_HEADER]
    return {"the client's key": access.key, **dict(zip(["the lease owner"], owners, strict=False))}


async def _settle(record: Record) -> None:
    """Wait for what comes late: until everything is reported and freed and nothing happens, or the time is over."""
    began = time.monotonic()
    await asyncio.sleep(record.case.watch_ms / 1000)
    while time.monotonic() < began + record.case.settle_ms / 1000:
        if is_settled(record) and time.monotonic() - _newest(record) > _QUIET_S:
            return
        await asyncio.sleep(_LOOK_S)


def is_settled(record: Record) -> bool:
    """Calls are over, reported, and their decisions ended."""
    now = time.monotonic()
    ended = {place(record, call.request) for call in freeing(record)}
    return (
        all(end <= now for end in _ends(record))
        and len(attempts(record)) >= len(record.upstream)
        and all(record.decisions.index(call.answer) in ended for call in dispatched(record) if _holds(call.answer))
    )


def _holds(answer: Any) -> bool:
    return bool(answer.dispatch.permits)


def _newest(record: Record) -> float:
    """Instant of the last thing that happened."""
    return max([*_ends(record), *(client.ended_at for client in record.clients)])


def _ends(record: Record) -> list[float]:
    return [*(call.ended_at for call in record.upstream), *(call.ended_at for call in record.policy)]
