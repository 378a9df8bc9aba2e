"""Carries out what the stages want beside replies: calls of the policy service, the notes of requests under way.

A call's result comes back as the event that the stage goes on with. An error of the service is an event as well; only
a service that is away ends the stream, so that Envoy's own fail mode decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from policy_envoy import actions, events, registry
from policy_envoy.calls import PolicyCallError, PolicyCalls
from policy_envoy.flight import Decision, Flight
from policy_service.generated.policy.v1 import lease_pb2, permit_pb2, policy_pb2

log = logging.getLogger(__name__)

T = TypeVar("T")
RENEW_EVERY_S = 0.2
_TOLD = 1_000
"""Connections without a cluster that are told of, each once."""
WAITING = object()
"""Stands for an event that has to be waited for."""


@dataclass(slots=True)
class Counters:
    """What the door has seen."""

    requests: int = 0
    attempts: int = 0
    reports: int = 0
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
    _strange: set[str] = field(default_factory=set)
    _background: set[asyncio.Task[Any]] = field(default_factory=set)
    _renewer: asyncio.Task[None] | None = None

    def perform(self, action: actions.Action) -> Any:
        """Carry out one action that is no reply; the event that it causes, if any. WAITING: nothing is done, see
        `awaited`."""
        now = _NOW.get(type(action))
        return WAITING if now is None else now(self, action)

    async def awaited(self, action: actions.Action) -> Any:
        """Carry out an action that takes waiting; the event that follows."""
        return await _WAITED_FOR[type(action)](self, action)

    def finish(self, wanted: Iterable[actions.Action]) -> None:
        """Carry out what still makes sense where Envoy has ended the stream: no reply, nothing that is waited for."""
        for each in wanted:
            action = actions.Report(each.request) if isinstance(each, actions.Judge) else each
            if (now := _AT_ONCE.get(type(action))) is not None:
                now(self, action)

    async def close(self) -> None:
        """Let reports under way come to their end."""
        if self._renewer is not None:
            self._renewer.cancel()
        await asyncio.sleep(0)  # what is still to do behind a last reply
        if self._background:
            await asyncio.wait(self._background, timeout=5)

    # -- waited for ----------------------------------------------------------------------------------------
    async def _select(self, action: actions.Select) -> Any:
        try:
            answer = await self.calls.select(action.request)
        except PolicyCallError as error:
            return _call_failed(error)
        return events.Selected(answer, self.now_ms())

    async def _judge(self, action: actions.Judge) -> Any:
        """In a task of its own: Envoy may end the stream, and with it whoever waits here, before the report is in."""
        self.counters.reports += 1
        return await asyncio.shield(self._run(self._reported(action.request)))

    async def _acquire(self, action: actions.Acquire) -> Any:
        try:
            if action.fence is not None:
                fence = await self.calls.check_fence(action.fence)
                if fence.status != lease_pb2.FENCE_STATUS_VALID:
                    return _fenced_off(fence.status)
            if action.permit is None:
                return events.Acquired()
            return _acquired(await self.calls.acquire(action.permit))
        except PolicyCallError as error:
            return _call_failed(error)

    async def _sleep(self, action: actions.Sleep) -> Any:
        await asyncio.sleep(action.duration_ms / 1000)
        return events.Waited()

    # -- at once -------------------------------------------------------------------------------------------
    def _selected(self, action: actions.Select) -> Any:
        try:
            found = self.calls.selected(action.request)
        except PolicyCallError as error:
            return _call_failed(error)
        if found is None:
            return WAITING
        now = self.now_ms()
        return events.Decided(found, now) if isinstance(found, Decision) else events.Selected(found, now)

    def _report(self, action: actions.Report) -> None:
        self.counters.reports += 1
        if action.request.final:
            self.flights.free(action.request.decision_token)
        self._run(self._reported(action.request))

    def _success(self, action: actions.Success) -> None:
        self.counters.reports += 1
        self.flights.free(action.token)
        try:
            if not self.calls.told(action):
                self._run(self._reported(action.request))
        except PolicyCallError as error:
            self._lost(error)

    async def _reported(self, request: policy_pb2.ReportOutcomeRequest) -> events.Judged | events.CallFailed:
        try:
            return events.Judged(await self.calls.report(request))
        except PolicyCallError as error:
            self._lost(error)
            return events.CallFailed(error.code, error.http_status, error.message)

    def _lost(self, error: PolicyCallError) -> None:
        self.counters.lost_reports += 1
        log.warning("a report was not taken: %s", error.message)

    def _all_reported(self, found: Iterable[policy_pb2.ReportOutcomeRequest]) -> None:
        for request in found:
            self._report(actions.Report(request))

    def _release(self, action: actions.Release) -> None:
        self._run(self._released(action.request))

    async def _released(self, request: permit_pb2.ReleasePermitRequest) -> None:
        try:
            await self.calls.release(request)
        except PolicyCallError as error:
            log.warning("a permit was not given back and ends by time: %s", error.message)

    def _tell_strange(self, action: actions.Strange) -> None:
        for name in action.connections:
            if name not in self._strange and len(self._strange) < _TOLD:
                self._strange.add(name)
                log.warning(
                    "Envoy has no cluster of connection %s, which is passed over: make its configuration anew with "
                    "`policy-service envoy-config`, and start Envoy with it",
                    name,
                )

    def _register(self, action: actions.Register) -> None:
        self.flights.enter(action.flight)

    def _hold(self, action: actions.Hold) -> None:
        self.flights.hold(action.flight, self.now_ms())
        if self._renewer is None:
            self._renewer = asyncio.get_running_loop().create_task(self._renew())

    def _begin(self, action: actions.Begin) -> None:
        if found := registry.begin(action.flight, action.attempt, self.now_ms()):
            self._all_reported(found)

    def _unanswered(self, action: actions.Unanswered) -> None:
        now = self.now_ms()
        self._all_reported(registry.unanswered(action.flight, action.step, action.dispatched_ms, now))

    def _settle(self, action: actions.Settle) -> None:
        found = registry.settle(
            action.flight,
            self.now_ms(),
            action.details,
            is_client_gone=action.is_client_gone,
            attempts=action.attempts,
        )
        self._all_reported(found)

    def _leave(self, action: actions.Leave) -> None:
        self.flights.leave(action.flight)

    # -- upkeep --------------------------------------------------------------------------------------------
    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            for flight in self.flights.due(self.now_ms()):
                await self._keep_alive(flight)

    async def _keep_alive(self, flight: Flight) -> None:
        """Renew; what has ended by another process of the door is renewed no more."""
        held = flight.held
        is_held = [await self._renewed(request) for request in renewals(flight)]
        if not any(is_held) and flight.held == held:
            self.flights.free(flight.token)

    async def _renewed(self, request: permit_pb2.RenewPermitRequest) -> bool:
        """False: everything had ended before."""
        try:
            answer = await self.calls.renew(request)
        except PolicyCallError as error:
            log.warning("permits were not renewed: %s", error.message)
            return True
        return any(result.HasField("expires_at_unix_ms") for result in answer.results)

    def _run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


_WAITED_FOR: Mapping[type, Callable[[Performer, Any], Awaitable[Any]]] = {
    actions.Select: Performer._select,
    actions.Judge: Performer._judge,
    actions.Acquire: Performer._acquire,
    actions.Sleep: Performer._sleep,
}
_AT_ONCE: Mapping[type, Callable[[Performer, Any], None]] = {
    actions.Report: Performer._report,
    actions.Success: Performer._success,
    actions.Release: Performer._release,
    actions.Register: Performer._register,
    actions.Strange: Performer._tell_strange,
    actions.Hold: Performer._hold,
    actions.Begin: Performer._begin,
    actions.Unanswered: Performer._unanswered,
    actions.Settle: Performer._settle,
    actions.Leave: Performer._leave,
}
_NOW: Mapping[type, Callable[[Performer, Any], Any]] = {**_AT_ONCE, actions.Select: Performer._selected}


def renewals(flight: Flight) -> Iterator[permit_pb2.RenewPermitRequest]:
    """What keeps the permits of a request alive: those of its decision, probes included, and those of its attempt."""
    if flight.permit_ids:
        yield permit_pb2.RenewPermitRequest(decision_token=flight.token)
    if flight.attempt_permits:
        yield permit_pb2.RenewPermitRequest(permit_ids=flight.attempt_permits)


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
