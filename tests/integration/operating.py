"""Operated services for tests: one or two replicas with stubs of both services, and what their errors say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from google.rpc import error_details_pb2, status_pb2

from policy_service.bootstrap import Service
from policy_service.generated.policy.v1 import admin_pb2, admin_pb2_grpc, policy_pb2
from tests.integration.serving import config, outcome, selection, serving

WITHIN_S = 5.0
"""A mutation reaches every replica within this time."""


class Replica(NamedTuple):
    """One service with stubs of both of its services."""

    service: Service
    policy: Any
    admin: Any


@asynccontextmanager
async def operated(
    directory: Path, url: str, name: str = "one", environment: Mapping[str, str] | None = None, **fields: Any
) -> AsyncIterator[Replica]:
    async with (
        serving(config(directory / name, url, replica=name, **fields), environment) as (service, policy),
        grpc.aio.insecure_channel(service.server.addresses[-1]) as channel,
    ):
        yield Replica(service, policy, admin_pb2_grpc.AdminServiceStub(channel))


@asynccontextmanager
async def two(directory: Path, url: str) -> AsyncIterator[tuple[Replica, Replica]]:
    async with operated(directory, url, "one") as one, operated(directory, url, "two") as another:
        yield one, another


async def refusal(replica: Replica, *connections: str) -> list[str]:
    answer = await replica.policy.SelectTarget(selection(*connections, explain=True))
    return [each.reason_text for each in answer.exclusions]


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a change to arrive."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.01)


async def becomes(replica: Replica, wanted: list[str], *connections: str) -> None:
    async def holds() -> bool:
        return await refusal(replica, *connections) == wanted

    await until(holds)


async def open_breaker(replica: Replica) -> None:
    for n in range(12):
        await replica.policy.ReportOutcome(outcome(f"c{n}", 503))


def details(error: grpc.aio.AioRpcError) -> tuple[error_details_pb2.ErrorInfo, dict[str, str]]:
    """ErrorInfo, and the descriptions of wrong fields by path."""
    trailing = dict(error.trailing_metadata() or ())
    info, fields = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status_pb2.Status.FromString(trailing["grpc-status-details-bin"]).details:
        detail.Unpack(info)
        detail.Unpack(fields)
    return info, {each.field: each.description for each in fields.field_violations}


async def refused(call: Any, code: grpc.StatusCode) -> tuple[error_details_pb2.ErrorInfo, dict[str, str]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code, caught.value
    return details(caught.value)


async def first_probe(replica: Replica) -> policy_pb2.SelectTargetResponse:
    """The first decision that holds a probe permit; until the replica hears of the open breaker there is none."""
    answers: list[policy_pb2.SelectTargetResponse] = []

    async def holds() -> bool:
        answers.append(await replica.policy.SelectTarget(selection("z")))
        return bool(answers[-1].dispatch.permits)

    await until(holds)
    return answers[-1]


def settings_patch(body: dict[str, Any], if_version: int | None = None) -> admin_pb2.PatchSettingsRequest:
    """A patch by full names."""
    request = ParseDict({"patch": body}, admin_pb2.PatchSettingsRequest())
    if if_version is not None:
        request.if_version = if_version
    return request
