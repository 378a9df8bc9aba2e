"""How the calls of the asyncio client reach the service: a port, and gRPC behind it."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from policy_client import connection
from policy_client.connection import Connection, Method
from policy_client.errors import error_of
from policy_client.wire import failure_of

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


class AsyncRpc(Protocol):
    """How calls reach the service; `policy_client.testing` has one without a network."""

    async def call(self, method: Method[Q, A], request: Q, timeout_ms: int) -> A:
        """One call.

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
    """Calls over a gRPC channel that is opened with the first of them, in the loop that makes it."""

    def __init__(self, where: Connection, channel: grpc.aio.Channel | None = None) -> None:
        self._where = where
        self._channel = channel
        self._calls: dict[str, Any] = {}

    async def call(self, method: Method[Q, A], request: Q, timeout_ms: int) -> A:
        send = self._calls.get(method.name) or self._callable(method)
        try:
            answer: A = await send(request, timeout=timeout_ms / 1000, metadata=self._where.metadata)
        except grpc.aio.AioRpcError as error:
            raise error_of(failure_of(error)) from error
        return answer

    async def is_serving(self, timeout_ms: int) -> bool:
        check = self._open().unary_unary(connection.HEALTH_METHOD)
        try:
            answer = await check(connection.HEALTH_REQUEST, timeout=timeout_ms / 1000)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer == connection.HEALTH_SERVING)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    def _callable(self, method: Method[Any, Any]) -> Any:
        call = self._open().unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        self._calls[method.name] = call
        return call

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            options, tls = self._where.channel_options(), self._where.tls
            address = self._where.address
            self._channel = (
                grpc.aio.insecure_channel(address, options)
                if tls is None
                else grpc.aio.secure_channel(address, tls.credentials(), options)
            )
        return self._channel
