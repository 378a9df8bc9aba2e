"""The Envoy door in the service's own process: its calls go straight to the methods of the running service."""

from __future__ import annotations

import gc
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import grpc
from policy_envoy.actions import Success
from policy_envoy.calls import HTTP_STATUS_OF_CODE, PolicyCallError
from policy_envoy.course import Course, course_of
from policy_envoy.flight import Decision
from policy_envoy.names import SERVICE
from policy_envoy.options import DoorOptions
from policy_envoy.servicer import Door

from policy_service.application.errors import PolicyError
from policy_service.application.messages import (
    DecisionToken,
    Dispatch,
    EndKind,
    HeardSuccess,
    ReportRequest,
    SelectAnswer,
    TokenTarget,
)
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
from policy_service.transport.grpc.mapping.select_answer import dispatch_to
from policy_service.transport.grpc.memo import Memo
from policy_service.transport.grpc.policy_servicer import PolicyServicer
from policy_service.transport.grpc.token import TokenTooLargeError

log = logging.getLogger(__name__)

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

    def selected(self, request: policy_pb2.SelectTargetRequest) -> Decision | policy_pb2.SelectTargetResponse | None:
        """SelectTarget from memory."""
        try:
            answer = self._policy.decided_now(request)
            return None if answer is None else self._written(answer)
        except PolicyError as error:
            raise call_error(error) from error
        except Exception as error:
            raise call_error(unforeseen("SelectTarget", error)) from error

    def _written(self, answer: SelectAnswer) -> Decision | policy_pb2.SelectTargetResponse:
        """As a value, unless there is more to say than where to go."""
        if (decision := self._decision(answer)) is not None:
            return decision
        message = self._policy.written(answer)
        if answer.token is not None:
            self._remember(message.decision_token, answer.token)
        return message

    def _decision(self, answer: SelectAnswer) -> Decision | None:
        verdict, token = answer.verdict, answer.token
        if not isinstance(verdict, Dispatch) or token is None or answer.explanation is not None or _has_more(verdict):
            return None
        try:
            sealed = self._policy.sealed(token)
        except TokenTooLargeError:  # fewer fallbacks than decided, which the message says
            return None
        self._remember(sealed, token)
        return Decision(answer.decision_id, sealed, answer.decided_at, _course((verdict.target, *verdict.fallbacks)))

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
        except PolicyError as error:
            raise call_error(error) from error
        if not 200 <= success.status < 300:
            return False
        target, offset_ms = _target_of(success), success.attempt_offset_ms
        in_full = partial(_report_of, success, token, target)
        return self._policy.heard_now(HeardSuccess(token, target, offset_ms, success.first_byte_ms, in_full))

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


def _has_more(verdict: Dispatch) -> bool:
    return bool(verdict.permits or verdict.set_headers or verdict.strip_headers)


_course: Memo[tuple[TokenTarget, ...], Course] = Memo(lambda targets: course_of(dispatch_to(targets)))


def _target_of(success: Success) -> Target:
    served = success.target
    return Target(ProviderId(served.provider), ConnectionId(served.connection), ModelId(served.model))


def _report_of(success: Success, token: DecisionToken, target: Target) -> ReportRequest:
    return ReportRequest(
        target,
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


class ClosedDoor:
    """Stands where the door is not open: Envoy is told why its call fails, and so is the log, once."""

    def __init__(self) -> None:
        self._is_told = False

    def handler(self, gate: Gate) -> Any:
        """Generic handler."""
        refused = grpc.stream_stream_rpc_method_handler(self._refuse)
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": refused})

    async def _refuse(self, requests: Any, context: Any) -> None:
        if not self._is_told:
            self._is_told = True
            log.warning("Envoy asks for its door (ext_proc), which is closed: start the service with --envoy")
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this service was started without --envoy")


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
