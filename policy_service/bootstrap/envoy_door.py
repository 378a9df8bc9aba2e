"""The Envoy door in the service's own process: its calls go straight to the methods of the running service."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from policy_envoy.actions import Success
from policy_envoy.calls import HTTP_STATUS_OF_CODE, PolicyCallError
from policy_envoy.options import DoorOptions
from policy_envoy.servicer import Door

from policy_service.application.errors import PolicyError
from policy_service.application.messages import DecisionToken, EndKind, ReportRequest
from policy_service.application.watch_stream import watchdog_settings
from policy_service.domain.ids import ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.outcome import Origin
from policy_service.domain.policy import Policy
from policy_service.generated.policy.v1 import lease_pb2, permit_pb2, policy_pb2
from policy_service.settings.catalogue_file import builtin_catalogue
from policy_service.settings.server import EnvoyConfig
from policy_service.transport.grpc.auth import Scope
from policy_service.transport.grpc.errors import CODES
from policy_service.transport.grpc.gate import Gate, Unary, unforeseen
from policy_service.transport.grpc.policy_servicer import PolicyServicer

T = TypeVar("T")

_YOUNG_OBJECTS = 20_000
"""Objects after which the collector looks at the young ones. At Python's 700 it does so for every few requests, finds
nothing but what those under way hold, and takes a twentieth of the time of a busy process."""
_DECISIONS_KEPT = 8_192
"""Decisions under way whose token need not be opened again; the oldest go first."""


class LocalCalls:
    """PolicyCalls within the process.

    Args:
        policy: SelectTarget and ReportOutcome.
        further: methods of leases and permits by name.
    """

    def __init__(self, policy: PolicyServicer, further: Mapping[str, Unary]) -> None:
        self._policy = policy
        self._further = further
        self._decisions: dict[bytes, DecisionToken] = {}

    async def select(self, request: policy_pb2.SelectTargetRequest) -> policy_pb2.SelectTargetResponse:
        """SelectTarget."""
        answer, token = await _answered("SelectTarget", self._policy.decided(request))
        if token is not None:
            self._remember(answer.decision_token, token)
        return answer

    def _remember(self, sealed: bytes, token: DecisionToken) -> None:
        self._decisions[sealed] = token
        if len(self._decisions) > _DECISIONS_KEPT:
            del self._decisions[next(iter(self._decisions))]

    async def report(self, request: policy_pb2.ReportOutcomeRequest) -> policy_pb2.ReportOutcomeResponse:
        """ReportOutcome."""
        if request.final:
            self._decisions.pop(request.decision_token, None)
        return await _answered("ReportOutcome", self._policy.report_outcome(request))

    def told(self, success: Success) -> bool:
        """ReportOutcome of a success that changes nothing."""
        try:
            token = self._decisions.pop(success.token, None) or self._policy.opened(success.token)
            return self._policy.reported_now(_report_of(success, token))
        except PolicyError as error:
            raise call_error(error) from error

    async def acquire(self, request: permit_pb2.AcquirePermitRequest) -> permit_pb2.AcquirePermitResponse:
        """AcquirePermit."""
        answer: permit_pb2.AcquirePermitResponse = await self._call("AcquirePermit", request)
        return answer

    async def renew(self, request: permit_pb2.RenewPermitRequest) -> permit_pb2.RenewPermitResponse:
        """RenewPermit."""
        answer: permit_pb2.RenewPermitResponse = await self._call("RenewPermit", request)
        return answer

    async def release(self, request: permit_pb2.ReleasePermitRequest) -> permit_pb2.ReleasePermitResponse:
        """ReleasePermit."""
        answer: permit_pb2.ReleasePermitResponse = await self._call("ReleasePermit", request)
        return answer

    async def check_fence(self, request: lease_pb2.CheckFenceRequest) -> lease_pb2.CheckFenceResponse:
        """CheckFence."""
        answer: lease_pb2.CheckFenceResponse = await self._call("CheckFence", request)
        return answer

    async def _call(self, method: str, request: Any) -> Any:
        return await _answered(method, self._further[method](request))


def _report_of(success: Success, token: DecisionToken) -> ReportRequest:
    served = success.target
    return ReportRequest(
        Target(ProviderId(served.provider), ConnectionId(served.connection), ModelId(served.model)),
        EndKind.HTTP_STATUS,
        token,
        attempt=success.attempt,
        attempt_offset_ms=success.attempt_offset_ms,
        final=True,
        status=success.status,
        headers=dict(success.headers),
        latency_ms=success.latency_ms,
        first_byte_ms=success.first_byte_ms,
        streamed=True,
        bytes_streamed=success.bytes_streamed,
        origin=Origin.UPSTREAM,
    )


async def _answered(method: str, call: Awaitable[T]) -> T:
    try:
        return await call
    except PolicyError as error:
        raise call_error(error) from error
    except Exception as error:
        raise call_error(unforeseen(method, error)) from error


def call_error(error: PolicyError) -> PolicyCallError:
    """The error of a call as the door knows it."""
    http_status = HTTP_STATUS_OF_CODE.get(CODES[error.kind].name, 500)
    return PolicyCallError(error.reason, http_status, error.message, error.retry_after_ms)


class DoorServicer:
    """The door behind the gate of the server.

    Args:
        door: what serves Envoy.
    """

    def __init__(self, door: Door) -> None:
        self.door = door

    def handler(self, gate: Gate) -> Any:
        """Generic handler."""

        def admit(metadata: Any) -> Callable[[], None]:
            try:
                return gate.admit(metadata, Scope.POLICY)
            except PolicyError as error:
                raise PolicyCallError(error.reason, 503, error.message, is_away=True) from error

        return self.door.handler(admit)

    async def close(self) -> None:
        """Let reports under way come to their end."""
        await self.door.close()


def door_servicer(
    policy: PolicyServicer, further: Mapping[str, Unary], config: EnvoyConfig, policy_in_force: Callable[[], Policy]
) -> DoorServicer:
    """The door of a running service.

    Args:
        policy_in_force: for settings of the watchdog, which may change while it runs.
    """
    gc.set_threshold(_YOUNG_OBJECTS)
    options = door_options(config, lambda connection: watchdog_settings(policy_in_force(), _target(connection)))
    return DoorServicer(Door(LocalCalls(policy, further), options))


def _target(connection: str) -> Target:
    return Target(ProviderId(""), ConnectionId(connection), ModelId(""))


def door_options(config: EnvoyConfig, watchdog: Callable[[str], Any]) -> DoorOptions:
    """Settings of the process as the door reads them."""
    fields = config.model_dump(exclude={"enabled"})
    return DoorOptions(**fields, watchdog=watchdog)


def fixed_watchdog(environment: Mapping[str, str]) -> Callable[[str], Any]:
    """Watchdog settings of a door in a process of its own: those of its environment, for every connection."""
    settings = watchdog_settings(Policy(builtin_catalogue(), environment), None)
    return lambda connection: settings
