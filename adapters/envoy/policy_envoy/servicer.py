"""The ext_proc service: takes Envoy's messages to the stages, and what these want to `performing`.

One coroutine a stream, no threads, no queue: the next message is read when the one before is answered, which is how
Envoy sends them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from policy_envoy import attempt, events, listener, wire
from policy_envoy.actions import REPLIES, Action, Reply
from policy_envoy.attempt_state import Attempt
from policy_envoy.calls import PolicyCallError, PolicyCalls
from policy_envoy.flight import Flight, from_carried
from policy_envoy.names import (
    ATTEMPT_COUNT_HEADER,
    BASE_PATH,
    CONNECTION,
    LISTENER_STAGE,
    SERVICE,
    STAGE,
    UPSTREAM_STAGE,
)
from policy_envoy.options import DoorOptions
from policy_envoy.performing import Counters, Performer
from policy_envoy.phases import Table, UnexpectedEventError, step
from policy_envoy.wire import write_reply

log = logging.getLogger(__name__)

Admit = Callable[[Any], Callable[[], None]]
"""Lets a stream in by its metadata and returns what ends it; raises to refuse."""


def monotonic_ms() -> float:
    """The host's monotonic clock, ms."""
    return time.monotonic() * 1000


@dataclass(slots=True)
class Run:
    """One stream of Envoy."""

    table: Table
    state: Any
    metadata: Mapping[str, str]
    is_listener: bool


class Door:
    """Serves `envoy.service.ext_proc.v3.ExternalProcessor`.

    Args:
        calls: the policy service.
        options: settings of the door.
        now_ms: monotonic clock.
    """

    def __init__(self, calls: PolicyCalls, options: DoorOptions, now_ms: Callable[[], float] = monotonic_ms) -> None:
        self._listener = listener.Listener(options)
        self._attempt = Attempt(options)
        self._now_ms = now_ms
        self._performer = Performer(calls, now_ms)

    @property
    def counters(self) -> Counters:
        """What the door has seen."""
        return self._performer.counters

    @property
    def under_way(self) -> int:
        """Client requests whose answer has not begun."""
        return len(self._performer.flights)

    def handler(self, admit: Admit | None = None) -> Any:
        """Generic handler for `add_generic_rpc_handlers`.

        To the library a call with one answer, though others may be written before it: that one goes out together with
        the status, which saves each stream a turn of both sides. On the wire there is no difference.
        """
        process = grpc.stream_unary_rpc_method_handler(self._process_of(admit), wire.read_message, None)
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": process})

    async def close(self) -> None:
        """Let reports under way come to their end."""
        await self._performer.close()

    def _process_of(self, admit: Admit | None) -> Callable[[Any, Any], Awaitable[bytes | None]]:
        async def process(requests: Any, context: Any) -> bytes | None:
            metadata = context.invocation_metadata() or ()
            leave = last = None
            try:
                leave = None if admit is None else admit(metadata)
                last = await self._serve(context, {key: value for key, value in metadata if isinstance(value, str)})
                if last is None:
                    await context.abort(grpc.StatusCode.CANCELLED, "ended by Envoy")
            except PolicyCallError as error:  # the service is away: Envoy's fail mode decides
                await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)
            except UnexpectedEventError as error:
                log.error("the filter is not configured as the door expects: %s", error)
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            finally:
                if leave is not None:
                    leave()
            return last

        return process

    async def _serve(self, context: Any, metadata: Mapping[str, str]) -> bytes | None:
        """The reply that ends the stream; None: Envoy has ended it."""
        run, last = self._begin(metadata), None
        try:
            while not run.state.is_over and (message := await context.read()) is not grpc.aio.EOF:
                last = await self._take(run, context.write, self._event(run, message))
            return last
        finally:
            self._finish(run)

    def _begin(self, metadata: Mapping[str, str]) -> Run:
        stage = metadata.get(STAGE)
        if stage == LISTENER_STAGE:
            return Run(listener.TABLE, self._listener, metadata, True)
        if stage == UPSTREAM_STAGE:
            return Run(attempt.TABLE, self._attempt, metadata, False)
        raise UnexpectedEventError(f"initial metadata {STAGE} is {stage!r}; send {LISTENER_STAGE} or {UPSTREAM_STAGE}")

    async def _take(self, run: Run, write: Callable[[bytes], Awaitable[None]], event: Any) -> bytes | None:
        """One event, and those that the calls it causes result in; the reply that ends the stream is returned."""
        perform = self._performer.perform
        while event is not None:
            run.state, wanted = step(run.table, run.state, event)
            last = _last_reply(wanted) if run.state.is_over else None
            event, left = None, iter(wanted)
            try:
                for action in left:
                    if action is last:
                        asyncio.get_running_loop().call_soon(self._performer.finish, left)  # once the reply is out
                        return write_reply(last)
                    if isinstance(action, REPLIES):
                        await write(write_reply(action))
                    elif (waiting := perform(action)) is not None:
                        event = await waiting
            except BaseException:  # Envoy is gone, which is no reason to keep a report back
                self._performer.finish(left)
                raise
        return None

    def _finish(self, run: Run) -> None:
        """The stream is over; there may still be something to tell."""
        if run.state.is_over:
            return
        run.state, wanted = step(run.table, run.state, events.Closed(self._now_ms()))
        self._performer.finish(wanted)

    # -- events --------------------------------------------------------------------------------------------
    def _event(self, run: Run, message: Any) -> Any:
        kind = message.WhichOneof("request")
        return _READ[kind](self, run, message, getattr(message, kind))

    def _request_headers(self, run: Run, message: Any, part: Any) -> Any:
        now = self._now_ms()
        if run.is_listener:
            self.counters.requests += 1
            return events.RequestHeaders(wire.headers_of(part), not part.end_of_stream, now)
        self.counters.attempts += 1
        headers = wire.some_headers_of(part, _OF_ATTEMPT)
        return events.AttemptHeaders(
            headers,
            not part.end_of_stream,
            now,
            self._flight_of(message, now),
            int(headers.get(ATTEMPT_COUNT_HEADER) or 1),
            run.metadata.get(CONNECTION) or wire.connection_of(message),
            run.metadata.get(BASE_PATH, ""),
        )

    def _flight_of(self, message: Any, now: float) -> Flight | None:
        carried = wire.decision_of(message)
        if not carried:
            return None
        return self._performer.flights.find(carried.partition("\n")[0]) or from_carried(carried, now)

    def _response_headers(self, run: Run, message: Any, part: Any) -> Any:
        headers = wire.some_headers_of(part, _OF_LAST_ANSWER) if run.is_listener else wire.headers_of(part)
        details = wire.details_of(message) if run.is_listener else ""
        status = int(headers.get(":status") or 0)
        return events.ResponseHeaders(status, headers, not part.end_of_stream, self._now_ms(), details)

    def _request_body(self, run: Run, message: Any, part: Any) -> Any:
        return events.RequestBody(part.body)

    def _response_body(self, run: Run, message: Any, part: Any) -> Any:
        return events.ResponseBody(part.body, part.end_of_stream, self._now_ms())

    def _response_trailers(self, run: Run, message: Any, part: Any) -> Any:
        return events.ResponseTrailers(self._now_ms())


def _last_reply(wanted: Sequence[Action]) -> Reply | None:
    return next((action for action in reversed(wanted) if isinstance(action, REPLIES)), None)


_OF_ATTEMPT = frozenset({":path", ATTEMPT_COUNT_HEADER})
_OF_LAST_ANSWER = frozenset({":status", "content-type", ATTEMPT_COUNT_HEADER})
"""What the stages look at in these messages."""

_READ: Mapping[str, Callable[[Door, Run, Any, Any], Any]] = {
    "request_headers": Door._request_headers,
    "request_body": Door._request_body,
    "response_headers": Door._response_headers,
    "response_body": Door._response_body,
    "response_trailers": Door._response_trailers,
}
