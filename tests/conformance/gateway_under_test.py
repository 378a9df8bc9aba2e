"""The example gateway, or one made of it, in this process, between the scripted service and the scripted upstreams."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import grpc
from aiohttp import web

from policy_service.cli.conformance.cases import Case, load_cases
from policy_service.cli.conformance.record import Record
from policy_service.cli.conformance.scripted_client import GatewayAccess
from policy_service.cli.conformance.stage import Stage, staged
from policy_service.generated.policy.v1 import policy_pb2_grpc
from tests.docs_pages import ROOT


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_gateway", ROOT / "docs" / "examples" / "gateway.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


example = _loaded()
CASES = {case.name: case for case in load_cases()}


@asynccontextmanager
async def serving(stage: Stage, kind: type[Any]) -> AsyncIterator[GatewayAccess]:
    """A gateway of this class, listening on loopback."""
    options = getattr(kind, "channel", example.CHANNEL)
    upstreams = {
        name: {"base_url": f"http://{address}", "key": stage.keys[name]} for name, address in stage.upstreams.items()
    }
    async with (
        grpc.aio.insecure_channel(stage.policy, list(options)) as channel,
        await example.upstreams_session() as http,
    ):
        gateway = kind(policy_pb2_grpc.PolicyServiceStub(channel), upstreams, http)
        runner = web.AppRunner(example.application(gateway), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield GatewayAccess(f"127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()


async def record_of(kind: type[Any], *cases: Case) -> list[Record]:
    """What these cases show of a gateway of this class."""
    async with staged() as stage, serving(stage, kind) as access:
        return [await stage.play(case, access) for case in cases]
