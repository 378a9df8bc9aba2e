"""What every call passes before its servicer: size, drain, load, key, deadline; and the way out of errors.

One wrapper around each method instead of interceptors, which cost tens of microseconds each. The gate also counts
the calls in flight, which the drain waits for.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, TypeAlias
from weakref import WeakSet

from google.protobuf.message import DecodeError, Message

from policy_service.application.errors import (
    DeadlineError,
    DrainingError,
    FieldProblem,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PolicyError,
    StoreLostError,
)
from policy_service.application.ports import StoreUnavailableError
from policy_service.application.trace_context import PROPAGATED, TRACE_HEADERS
from policy_service.domain.ids import DurationMs
from policy_service.transport.grpc.auth import KeyRing, Metadata, Scope
from policy_service.transport.grpc.errors import abort
from policy_service.transport.grpc.limits import Limits

log = logging.getLogger(__name__)

Context: TypeAlias = Any
"""grpc.aio.ServicerContext; grpc ships no types."""
Unary = Callable[[Any], Awaitable[Any]]
Stream = Callable[[AsyncIterator[Any]], AsyncGenerator[Any, None]]

KEY_NAME: ContextVar[str] = ContextVar("key_name", default="")
"""Name of the bearer key of the call under way; the actor of admin acts."""

OVERLOAD_PUSHBACK_MS = 100
DRAIN_PUSHBACK_MS = 100
_SWEEP_S = 0.1


class Unreadable:
    """Stands for a message that could not be read; carries the error to answer."""

    __slots__ = ("error",)

    def __init__(self, error: PolicyError) -> None:
        self.error = error


class Gate:
    """Admits calls and counts them.

    Args:
        keys: bearer keys.
        limits: sizes and number of calls.
        deadlines: longest time of a call by method name, ms; a method without entry is not limited.
        is_traced: hand the caller's trace headers on.
    """

    def __init__(
        self,
        keys: KeyRing,
        limits: Limits,
        deadlines: Mapping[str, DurationMs] | None = None,
        *,
        is_traced: bool = False,
    ) -> None:
        self.keys = keys
        self.limits = limits
        self.in_flight = 0
        self.is_draining = False
        self._deadlines = dict(deadlines or {})
        self._is_traced = is_traced
        self._running: dict[asyncio.Task[Any], float] = {}
        self._overrun: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._streams: set[asyncio.Task[Any]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def deserializer(self, message: type[Message]) -> Callable[[bytes], Message | Unreadable]:
        """Reader of a request that turns oversize and garbage into typed errors instead of INTERNAL."""
        limit, read = self.limits.message_bytes, message.FromString

        def deserialize(data: bytes) -> Message | Unreadable:
            if len(data) > limit:
                return Unreadable(_oversize(len(data), limit))
            try:
                return read(data)
            except DecodeError as error:
                return Unreadable(_garbage(error))

        return deserialize

    def unary(self, method: str, scope: Scope, call: Unary) -> Callable[[Any, Context], Awaitable[Any]]:
        """The wrapped handler of a unary call."""
        is_guarded, limit_ms = self.keys.guards(scope), self._deadlines.get(method)
        needs_metadata = is_guarded or self._is_traced

        async def handle(request: Any, context: Context) -> Any:
            # Inlined rather than layered: this runs for every decision.
            try:
                self._enter(limit_ms)
                try:
                    if needs_metadata:
                        self._read_metadata(context.invocation_metadata() or (), scope if is_guarded else None)
                    if type(request) is Unreadable:
                        raise request.error
                    return await call(request)
                finally:
                    self._leave(limit_ms)
            except PolicyError as error:
                await abort(context, error)
            except asyncio.CancelledError:
                await self._cancelled(method, context)
            except Exception as error:
                await abort(context, unforeseen(method, error))

        return handle

    def stream(self, method: str, scope: Scope, call: Stream) -> Callable[[Any, Context], AsyncIterator[Any]]:
        """The wrapped handler of a bidirectional stream; streams are not subject to method deadlines, and a drain ends
        them at once: the gateway opens them anew on another replica."""

        async def handle(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            task = _this_task()
            try:
                self._enter(None)
                self._streams.add(task)
                try:
                    guard = scope if self.keys.guards(scope) else None
                    self._read_metadata(context.invocation_metadata() or (), guard)
                    async with aclosing(call(_readable(requests))) as answers:
                        async for answer in answers:
                            yield answer
                finally:
                    self._streams.discard(task)
                    self._leave(None)
            except PolicyError as error:
                await abort(context, error)
            except asyncio.CancelledError:
                await self._ended(task, context)
            except Exception as error:
                await abort(context, unforeseen(method, error))

        return handle

    def end_streams(self) -> None:
        """Tell every open stream that this replica drains."""
        for task in self._streams:
            self._overrun.add(task)
            task.cancel()

    def admit(self, metadata: Metadata, scope: Scope) -> Callable[[], None]:
        """Let a stream of another contract in by the same rules; it ends by what is returned, and a drain waits for it.

        Raises:
            PolicyError: draining, overloaded, or no key.
        """
        self._enter(None)
        try:
            if self.keys.guards(scope):
                self.keys.authorise(metadata, scope)
        except PolicyError:
            self._leave(None)
            raise
        return lambda: self._leave(None)

    async def until_idle(self) -> None:
        """Return once no call is in flight."""
        await self._idle.wait()

    def close(self) -> None:
        """Stop watching deadlines."""
        if self._sweeper is not None:
            self._sweeper.cancel()

    def _enter(self, limit_ms: DurationMs | None) -> None:
        if self.is_draining:
            raise _draining()
        if self.in_flight >= self.limits.concurrent_calls:
            raise OverloadedError(
                f"more than {self.limits.concurrent_calls} calls in flight", retry_after_ms=OVERLOAD_PUSHBACK_MS
            )
        self.in_flight += 1
        self._idle.clear()
        if limit_ms is not None:
            self._watch(limit_ms)

    def _leave(self, limit_ms: DurationMs | None) -> None:
        self.in_flight -= 1
        if limit_ms is not None:
            self._running.pop(_this_task(), None)
        if self.in_flight == 0:
            self._idle.set()

    def _watch(self, limit_ms: DurationMs) -> None:
        # A deadline per call would cost a timer each; one sweep a tenth of a second serves all of them.
        self._running[_this_task()] = asyncio.get_running_loop().time() + limit_ms / 1000
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = loop.time()
            late = [task for task, end in self._running.items() if end <= now and task not in self._overrun]
            for task in late:
                self._overrun.add(task)
                task.cancel()

    async def _cancelled(self, method: str, context: Context) -> None:
        task = _this_task()
        if task not in self._overrun:
            raise asyncio.CancelledError
        self._overrun.discard(task)
        task.uncancel()
        limit = self._deadlines[method]
        await abort(context, DeadlineError(f"{method} may take {limit} ms", metadata={"limit_ms": str(limit)}))

    async def _ended(self, task: asyncio.Task[Any], context: Context) -> None:
        """A stream was cancelled: by its gateway, or by the drain, which says so."""
        if task not in self._overrun:
            raise asyncio.CancelledError
        self._overrun.discard(task)
        task.uncancel()
        await abort(context, _draining())

    def _read_metadata(self, metadata: Metadata, scope: Scope | None) -> None:
        if scope is not None:
            KEY_NAME.set(self.keys.authorise(metadata, scope))
        if self._is_traced:
            found = {name: value for name, value in metadata if name in PROPAGATED and isinstance(value, str)}
            TRACE_HEADERS.set(found or None)


def _draining() -> DrainingError:
    return DrainingError("this replica is shutting down", retry_after_ms=DRAIN_PUSHBACK_MS)


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "handlers run in a task"
    return task


async def _readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if type(request) is Unreadable:
            raise request.error
        yield request


def _oversize(size: int, limit: int) -> OverloadedError:
    text = f"message of {size} bytes; at most {limit} are read (bodies may be cut at 64 KiB before they are sent)"
    return OverloadedError(text, reason="TOO_LARGE", metadata={"limit_bytes": str(limit)})


def _garbage(error: DecodeError) -> InvalidRequestError:
    problem = "invalid UTF-8 in a text field" if "UTF-8" in str(error) else "not a message of this contract"
    return InvalidRequestError((FieldProblem("", problem, "send bytes in the bytes fields only"),))


def unforeseen(method: str, error: Exception) -> PolicyError:
    """What a caller is told of an error that no use case told: that the store is away, else that it is ours."""
    if isinstance(error, StoreUnavailableError):
        return StoreLostError("this call needs the store, which does not answer")
    return internal_error(method)


def internal_error(method: str) -> InternalError:
    """What the caller hears of an exception that nobody foresaw; the log has the rest. Call it while handling one."""
    reference = secrets.token_hex(6)
    log.exception("call failed", extra={"method": method, "reference": reference})
    return InternalError(f"internal fault, reference {reference}", metadata={"reference": reference})
