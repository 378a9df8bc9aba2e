"""Carries out what the stages want: replies to Envoy, calls of the policy service, the notes of requests under way.

A call's result comes back as the event that the stage goes on with. An error of the service is an event as well; only
a service that is away ends the stream, so that Envoy's own fail mode decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from policy_envoy import actions, events, registry, wire
from policy_envoy.calls import PolicyCallError, PolicyCalls
from policy_service.generated.policy.v1 import lease_pb2, permit_pb2, policy_pb2

log = logging.getLogger(__name__)

Write = Callable[[bytes], Awaitable[None]]
T = TypeVar("T")
RENEW_EVERY_S = 1.0


@dataclass(slots=True)
class Counters:
    """What the door has seen."""

    requests: int = 0
    attempts: int = 0
    reports: int = 0
    local_replies: int = 0
    lost_reports: int = 0


@dataclass(slots=True)
class Performer:
    """Carries out actions.

    Args:
        calls: the policy service.
        now_ms: monotonic clock.
    """

    calls: PolicyCalls
    now_ms: Callable[[], float]
    flights: registry.Registry = field(default_factory=registry.Registry)
    counters: Counters = field(default_factory=Counters)
    _background: set[asyncio.Task[Any]] = field(default_factory=set)
    _renewer: asyncio.Task[None] | None = None

    async def perform(self, write: Write | None, action: actions.Action) -> Any:
        """Carry out one action; the event that it results in, if any.

        Args:
            write: sends a reply; None: the stream is over, and replies are dropped.
        """
        return await _PERFORMED[type(action)](self, write, action)

    def spawn(self, wanted: tuple[actions.Action, ...]) -> None:
        """Carry out actions whose results nobody waits for."""
        self._run(self._all(wanted))

    async def close(self) -> None:
        """Let reports under way come to their end."""
        if self._renewer is not None:
            self._renewer.cancel()
        if self._background:
            await asyncio.wait(self._background, timeout=5)

    async def _all(self, wanted: tuple[actions.Action, ...]) -> None:
        for action in wanted:
            await self.perform(None, action)

    async def _send(self, write: Write | None, reply: actions.Pass | actions.Local) -> None:
        if type(reply) is actions.Local:
            self.counters.local_replies += 1
        if write is not None:
            await write(wire.write_reply(reply))

    async def _select(self, write: Write | None, action: actions.Select) -> Any:
        try:
            answer = await self.calls.select(action.request)
        except PolicyCallError as error:
            return _call_failed(error)
        return events.Selected(answer, self.now_ms())

    async def _report(self, write: Write | None, action: actions.Report) -> Any:
        """In a task of its own: Envoy may end the stream, and with it whoever waits here, before the report is in."""
        self.counters.reports += 1
        if action.request.final:
            self.flights.free(action.request.decision_token)
        task = self._run(self._reported(action.request))
        return await asyncio.shield(task) if action.is_awaited else None

    async def _reported(self, request: policy_pb2.ReportOutcomeRequest) -> events.Judged | events.CallFailed:
        try:
            return events.Judged(await self.calls.report(request))
        except PolicyCallError as error:
            self.counters.lost_reports += 1
            log.warning("a report was not taken: %s", error.message)
            return events.CallFailed(error.code, error.http_status, error.message)

    async def _acquire(self, write: Write | None, action: actions.Acquire) -> Any:
        try:
            if action.fence is not None:
                fence = await self.calls.check_fence(action.fence)
                if fence.status != lease_pb2.FENCE_STATUS_VALID:
                    return _fenced_off(fence.status)
            return _acquired(await self.calls.acquire(action.permit))
        except PolicyCallError as error:
            return _call_failed(error)

    async def _release(self, write: Write | None, action: actions.Release) -> None:
        self._run(self._released(action.request))

    async def _released(self, request: permit_pb2.ReleasePermitRequest) -> None:
        try:
            await self.calls.release(request)
        except PolicyCallError as error:
            log.warning("a permit was not given back and ends by time: %s", error.message)

    async def _sleep(self, write: Write | None, action: actions.Sleep) -> Any:
        await asyncio.sleep(action.duration_ms / 1000)
        return events.Waited()

    async def _register(self, write: Write | None, action: actions.Register) -> None:
        self.flights.enter(action.flight)

    async def _hold(self, write: Write | None, action: actions.Hold) -> None:
        self.flights.hold(action.flight, action.answer, self.now_ms())
        if self._renewer is None:
            self._renewer = asyncio.get_running_loop().create_task(self._renew())

    async def _begin(self, write: Write | None, action: actions.Begin) -> None:
        found = registry.begin(action.flight, action.attempt, self.now_ms())
        if found:
            self.spawn(tuple(map(actions.Report, found)))

    async def _unanswered(self, write: Write | None, action: actions.Unanswered) -> None:
        found = registry.unanswered(action.flight, action.step, action.dispatched_ms, self.now_ms())
        await self._all(tuple(map(actions.Report, found)))

    async def _settle(self, write: Write | None, action: actions.Settle) -> None:
        found = registry.settle(
            action.flight,
            self.now_ms(),
            action.details,
            is_client_gone=action.is_client_gone,
            attempts=action.attempts,
        )
        await self._all(tuple(map(actions.Report, found)))

    async def _leave(self, write: Write | None, action: actions.Leave) -> None:
        self.flights.leave(action.flight)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            for flight in self.flights.due(self.now_ms()):
                try:
                    await self.calls.renew(permit_pb2.RenewPermitRequest(permit_ids=flight.permit_ids))
                except PolicyCallError as error:
                    log.warning("permits were not renewed: %s", error.message)

    def _run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


_PERFORMED: Mapping[type, Callable[[Performer, Write | None, Any], Awaitable[Any]]] = {
    actions.Pass: Performer._send,
    actions.Local: Performer._send,
    actions.Select: Performer._select,
    actions.Report: Performer._report,
    actions.Acquire: Performer._acquire,
    actions.Release: Performer._release,
    actions.Sleep: Performer._sleep,
    actions.Register: Performer._register,
    actions.Hold: Performer._hold,
    actions.Begin: Performer._begin,
    actions.Unanswered: Performer._unanswered,
    actions.Settle: Performer._settle,
    actions.Leave: Performer._leave,
}


def _call_failed(error: PolicyCallError) -> events.CallFailed:
    if error.is_away:
        raise error
    return events.CallFailed(error.code, error.http_status, error.message, error.retry_after_ms)


_FENCES = {
    lease_pb2.FENCE_STATUS_REQUIRED: "LEASE_REQUIRED",
    lease_pb2.FENCE_STATUS_STALE: "LEASE_FENCE_STALE",
    lease_pb2.FENCE_STATUS_AUTHORIZATION_MISMATCH: "LEASE_AUTHORIZATION_MISMATCH",
    lease_pb2.FENCE_STATUS_CONNECTION_MISMATCH: "LEASE_CONNECTION_MISMATCH",
}


def _fenced_off(status: Any) -> events.Refused:
    code = _FENCES.get(status, "LEASE_FENCE_STALE")
    return events.Refused(code, 409, "the lease of this request does not allow this upstream")


def _acquired(answer: permit_pb2.AcquirePermitResponse) -> events.Acquired | events.Refused:
    if answer.WhichOneof("result") == "refused":
        refused = answer.refused
        after_ms = refused.retry_after_ms if refused.HasField("retry_after_ms") else None
        return events.Refused(refused.code, refused.http_status or 503, f"no slot at {refused.gate}", after_ms)
    if answer.WhichOneof("result") == "already_ended":
        return events.Refused("PERMIT_EXPIRED", 503, "the permit of this attempt has ended already")
    return events.Acquired(tuple(permit.permit_id for permit in answer.granted.permits))
