"""How the calls of the asyncio client reach the service: a port, and gRPC behind it."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from policy_client import connection
from policy_client.connection import Connection, Method
from policy_client.errors import ClientClosedError, error_of
from policy_client.wire import HEALTH_MS, LOOK_S, failure_of, is_answer, silence

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


class AsyncRpc(Protocol):
    """How calls reach the service; `policy_client.testing` has one without a network."""

    async def call(self, method: Method[Q, A], request: Q, timeout_ms: int, silence_ms: int = 0) -> A:
        """One call; with `silence_ms`, ended early where the service answers nothing at all.

        Raises:
            PolicyClientError: it failed.
        """
        ...

    async def is_serving(self, timeout_ms: int) -> bool:
        """Whether the service is ready."""
        ...

    async def close(self) -> None:
        """Give the connection back."""
        ...


class GrpcAsyncRpc:
    """Calls over a gRPC channel that is opened with the first of them, in the loop that makes it; anew in another."""

    def __init__(self, where: Connection, channel: grpc.aio.Channel | None = None) -> None:
        self._where = where
        self._given = channel
        self._channel = channel
        self._calls: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._heard_at = 0.0

    async def call(self, method: Method[Q, A], request: Q, timeout_ms: int, silence_ms: int = 0) -> A:
        channel = self._open()
        send = self._calls.get(method.name) or self._callable(channel, method)
        cancels = _cancels()
        pending = send(request, timeout=timeout_ms / 1000, metadata=self._where.metadata)
        look = _Look(self, pending, silence_ms) if silence_ms else None
        try:
            answer: A = await pending
        except grpc.aio.AioRpcError as error:
            if is_answer(error):
                self._note_answer()
            raise (ClientClosedError() if self._is_closed else error_of(failure_of(error))) from error
        except asyncio.CancelledError:
            if look is not None and look.found_silence and _cancels() == cancels:
                raise silence(self._heard_at) from None
            if self._is_closed and _cancels() == cancels:
                raise ClientClosedError from None
            raise
        finally:
            if look is not None:
                look.stop()
        self._note_answer()
        return answer

    def _note_answer(self) -> None:
        self._heard_at = time.monotonic()

    def silent_ms(self, since: float) -> float:
        """Time without an answer to any call, ms; from `since` (monotonic clock, s) on."""
        return (time.monotonic() - max(since, self._heard_at)) * 1000

    async def is_serving(self, timeout_ms: int) -> bool:
        try:
            return bool(await self._health(timeout_ms) == connection.HEALTH_SERVING)
        except (grpc.aio.AioRpcError, ClientClosedError):
            return False

    async def answers(self, timeout_ms: int) -> bool:
        """Whether it says anything to a health check."""
        try:
            await self._health(timeout_ms)
        except grpc.aio.AioRpcError as error:
            return is_answer(error)
        except ClientClosedError:
            return True  # the call itself tells of the end
        return True

    async def _health(self, timeout_ms: int) -> Any:
        check = self._open().unary_unary(connection.HEALTH_METHOD)
        return await check(connection.HEALTH_REQUEST, timeout=timeout_ms / 1000)

    async def close(self) -> None:
        self._is_closed = True
        if self._channel is not None and self._loop in (None, asyncio.get_running_loop()):
            await self._channel.close()

    def _callable(self, channel: grpc.aio.Channel, method: Method[Any, Any]) -> Any:
        call = channel.unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        self._calls[method.name] = call
        return call

    def _open(self) -> grpc.aio.Channel:
        if self._is_closed:
            raise ClientClosedError
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._channel = loop, self._given
            self._calls.clear()
        if self._channel is None:
            options, tls = self._where.channel_options(), self._where.tls
            address = self._where.address
            self._channel = (
                grpc.aio.insecure_channel(address, options)
                if tls is None
                else grpc.aio.secure_channel(address, tls.credentials(), options)
            )
        return self._channel


class _Look:
    """Ends a call under way once the service gives no sign of life: neither an answer to a health check nor to any
    other call. Costs a timer, and a task only when nothing is heard."""

    def __init__(self, rpc: GrpcAsyncRpc, pending: Any, silence_ms: int) -> None:
        self._rpc = rpc
        self._pending = pending
        self._silence_ms = silence_ms
        self._look_ms = silence_ms
        self._began = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(silence_ms / 1000, self._start)
        self.found_silence = False

    def stop(self) -> None:
        """The call is over."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _again(self, after_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_s, self._start)

    def _start(self) -> None:
        left_ms = self._silence_ms - self._rpc.silent_ms(self._began)
        if left_ms > 0:  # it answers others: busy, not away
            self._again(left_ms / 1000)
        else:
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        if await self._rpc.answers(self._look_ms):
            # It is in no hurry once it has answered: the later looks may take longer.
            self._look_ms = HEALTH_MS
            self._again(LOOK_S)
        elif self._rpc.silent_ms(self._began) < self._look_ms:
            self._again(self._silence_ms / 1000)
        else:
            self.found_silence = True
            self._pending.cancel()


def _cancels() -> int:
    """How often the caller itself was cancelled; earlier cancels that it lives with count too."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0
