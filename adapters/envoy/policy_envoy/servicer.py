"""The ext_proc service: takes Envoy's messages to the stages, and what these want to `performing`.

One coroutine a stream, no threads, no queue: the next message is read when the one before is answered, which is how
Envoy sends them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import grpc

from policy_envoy import attempt, events, listener, wire
from policy_envoy.actions import REPLIES, Action, Reply
from policy_envoy.attempt_state import Attempt
from policy_envoy.calls import PolicyCallError, PolicyCalls
from policy_envoy.flight import Flight, from_carried
from policy_envoy.names import (
    ANSWERED,
    ATTEMPT_COUNT_HEADER,
    BASE_PATH,
    CONNECTION,
    CONNECTIONS,
    LISTENER_STAGE,
    SERVICE,
    STAGE,
    UPSTREAM_STAGE,
)
from policy_envoy.options import DoorOptions
from policy_envoy.performing import WAITING, Counters, Performer
from policy_envoy.phases import Table, UnexpectedEventError, step
from policy_envoy.wire import write_reply

log = logging.getLogger(__name__)

Metadata = Iterable[tuple[str, Any]]
"""Of a stream."""
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
    is_over: bool = False
    """Nothing that Envoy may still say matters."""


class Door:
    """Serves `envoy.service.ext_proc.v3.ExternalProcessor`.

    Args:
        calls: the policy service.
        options: settings of the door.
        now_ms: monotonic clock.
    """

    def __init__(self, calls: PolicyCalls, options: DoorOptions, now_ms: Callable[[], float] = monotonic_ms) -> None:
        self._options = options
        self._listeners: dict[str, listener.Listener] = {}
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
        return _Process(
            lambda metadata: grpc.stream_unary_rpc_method_handler(
                self._process_of(admit, metadata), wire.read_message, None
            )
        )

    async def close(self) -> None:
        """Let reports under way come to their end."""
        await self._performer.close()

    def _process_of(self, admit: Admit | None, metadata: Metadata) -> Callable[[Any, Any], Awaitable[bytes | None]]:
        named = dict(metadata)

        async def process(requests: Any, context: Any) -> bytes | None:
            leave = last = None
            try:
                leave = None if admit is None else admit(metadata)
                last = await self._serve(context, named)
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
            while not run.is_over and (message := await context.read()) is not grpc.aio.EOF:
                last = await self._take(run, context.write, self._event(run, message))
            return last
        finally:
            self._finish(run)

    def _begin(self, metadata: Mapping[str, str]) -> Run:
        stage = metadata.get(STAGE)
        if stage == LISTENER_STAGE:
            return Run(listener.TABLE, self._listener_of(metadata.get(CONNECTIONS, "")), metadata, True)
        if stage == UPSTREAM_STAGE:
            return Run(attempt.TABLE, self._attempt, metadata, False)
        raise UnexpectedEventError(f"initial metadata {STAGE} is {stage!r}; send {LISTENER_STAGE} or {UPSTREAM_STAGE}")

    def _listener_of(self, connections: str) -> listener.Listener:
        """The first state of the stage for an Envoy with these clusters; there are few of them."""
        found = self._listeners.get(connections)
        if found is None:
            if len(self._listeners) >= _ENVOYS_KEPT:
                self._listeners.clear()
            options = replace(self._options, connections=frozenset(connections.split()))
            found = self._listeners[connections] = listener.Listener(options)
        return found

    async def _take(self, run: Run, write: Callable[[bytes], Awaitable[None]], event: Any) -> bytes | None:
        """One event, and those that the calls it causes result in; the reply that ends the stream is returned."""
        performer = self._performer
        while event is not None:
            run.state, wanted = step(run.table, run.state, event)
            run.is_over = run.state.is_over
            last = _last_reply(wanted) if run.is_over else None
            event, left = None, iter(wanted)
            try:
                for action in left:
                    if isinstance(action, REPLIES):
                        data = write_reply(action)
                        # Whatever else has come is worked on first: replies of a busy process then leave close
                        # together, and Envoy is woken once for several of them.
                        await asyncio.sleep(0)
                        if action is last:
                            asyncio.get_running_loop().call_soon(performer.finish, left)  # once the reply is out
                            return data
                        await write(data)
                    elif (found := performer.perform(action)) is not None:
                        event = await performer.awaited(action) if found is WAITING else found
            except BaseException:  # Envoy is gone, which is no reason to keep a report back
                self._performer.finish(left)
                raise
        return None

    def _finish(self, run: Run) -> None:
        """The stream is over; there may still be something to tell."""
        if run.is_over:
            return
        run.state, wanted = step(run.table, run.state, events.Closed(self._now_ms()))
        self._performer.finish(wanted)

    # -- events --------------------------------------------------------------------------------------------
    def _event(self, run: Run, message: Any) -> Any:
        kind = message.WhichOneof("request")
        return _READ[kind](self, run, message, getattr(message, kind))

    def _request_headers(self, run: Run, message: Any, part: Any) -> Any:
        now = self._now_ms()
        counters = self._performer.counters
        if run.is_listener:
            counters.requests += 1
            return events.RequestHeaders(wire.headers_of(part), not part.end_of_stream, now)
        counters.attempts += 1
        return events.AttemptHeaders(
            {":path": wire.header_of(part, ":path")},
            not part.end_of_stream,
            now,
            self._flight_of(message, now),
            int(wire.header_of(part, ATTEMPT_COUNT_HEADER, comes_late=True) or 1),
            run.metadata.get(CONNECTION) or wire.connection_of(message),
            run.metadata.get(BASE_PATH, ""),
        )

    def _flight_of(self, message: Any, now: float) -> Flight | None:
        carried = wire.decision_of(message)
        if not carried:
            return None
        return self._performer.flights.find(carried.partition("\n")[0]) or from_carried(carried, now)

    def _response_headers(self, run: Run, message: Any, part: Any) -> Any:
        if run.is_listener:
            return self._last_answer(message, part)
        headers = wire.headers_of(part)
        status = int(headers.get(":status") or 0)
        return events.ResponseHeaders(status, headers, not part.end_of_stream, self._now_ms())

    def _last_answer(self, message: Any, part: Any) -> Any:
        """What the listener stage looks at in the head of the answer that the client gets."""
        details = wire.details_of(message)
        headers = {ATTEMPT_COUNT_HEADER: wire.header_of(part, ATTEMPT_COUNT_HEADER, comes_late=True)}
        if details != ANSWERED:
            headers["content-type"] = wire.header_of(part, "content-type")
        return events.ResponseHeaders(_UNREAD, headers, not part.end_of_stream, self._now_ms(), details)

    def _request_body(self, run: Run, message: Any, part: Any) -> Any:
        return events.RequestBody(part.body)

    def _response_body(self, run: Run, message: Any, part: Any) -> Any:
        return events.ResponseBody(part.body, part.end_of_stream, self._now_ms())

    def _response_trailers(self, run: Run, message: Any, part: Any) -> Any:
        return events.ResponseTrailers(self._now_ms())


class _Process(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc ships no types
    """Finds the method of a stream. The library has read the stream's metadata for that already; a context would read
    it once more. A filter sends the same with each stream, unless it is traced."""

    def __init__(self, method: Callable[[Metadata], Any]) -> None:
        self._method = lru_cache(maxsize=_FILTERS_KEPT)(method)

    def service(self, details: Any) -> Any:
        """The method's handler; None: of another service."""
        return self._method(details.invocation_metadata) if details.method == _PATH else None


_PATH = f"/{SERVICE}/Process"
_UNREAD = 0
"""Status of an answer of which the listener stage looks at nothing but details and attempts."""
_ENVOYS_KEPT = 64
_FILTERS_KEPT = 1_024


def _last_reply(wanted: Sequence[Action]) -> Reply | None:
    for action in reversed(wanted):
        if isinstance(action, REPLIES):
            return action
    return None


_READ: Mapping[str, Callable[[Door, Run, Any, Any], Any]] = {
    "request_headers": Door._request_headers,
    "request_body": Door._request_body,
    "response_headers": Door._response_headers,
    "response_body": Door._response_body,
    "response_trailers": Door._response_trailers,
}
