"""How the calls of the blocking client reach the service: a port, and gRPC behind it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from threading import Lock
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from policy_client import connection
from policy_client.connection import Connection, Method
from policy_client.errors import (
    DEADLINE_EXCEEDED,
    ClientClosedError,
    Failure,
    PolicyClientError,
    ServiceAwayError,
    error_of,
)

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)

Done = Callable[[PolicyClientError | None], None]
"""Told the end of a call that was sent behind; None: it was answered."""
HEALTH_MS = 250
LOOK_S = 1.0
"""Between two looks for a service that lets a call wait."""
SILENT = "the service answers nothing, not even a health check"
NEVER_HEARD = "nothing listens, or what does has never answered"


_forking = Lock()
_of_parents: list[Any] = []


class Rpc(Protocol):
    """How calls reach the service; `policy_client.testing` has one without a network."""

    def call(self, method: Method[Q, A], request: Q, timeout_ms: int, silence_ms: int = 0) -> A:
        """One call; with `silence_ms`, ended early where the service answers nothing at all.

        Raises:
            PolicyClientError: it failed.
        """
        ...

    def send(self, method: Method[Any, Any], request: Message, timeout_ms: int, done: Done) -> None:
        """Start a call and return; `done` hears of its end, in any thread."""
        ...

    def is_serving(self, timeout_ms: int) -> bool:
        """Whether the service is ready."""
        ...

    def close(self) -> None:
        """Give the connection back."""
        ...


class GrpcRpc:
    """Calls over a gRPC channel; a forked process opens one of its own."""

    def __init__(self, where: Connection, channel: grpc.Channel | None = None) -> None:
        self._where = where
        self._given = channel
        self._is_closed = False
        self._heard_at = 0.0
        self._open()

    def _open(self) -> None:
        self._channel = self._given or _channel(self._where)
        self._calls = {method.name: self._callable(method) for method in connection.METHODS}
        self._process = os.getpid()

    def call(self, method: Method[Q, A], request: Q, timeout_ms: int, silence_ms: int = 0) -> A:
        call = self._callable_of(method)
        try:
            if not silence_ms:
                answer: A = call(request, timeout=timeout_ms / 1000, metadata=self._where.metadata)
            else:
                pending = call.future(request, timeout=timeout_ms / 1000, metadata=self._where.metadata)
                answer = self._heard(pending, silence_ms)
        except grpc.RpcError as error:
            if is_answer(error):
                self._note_answer()
            raise (ClientClosedError() if self._is_closed else error_of(failure_of(error))) from error
        except ValueError:  # gRPC's own word for a channel that was closed just now
            if self._is_closed:
                raise ClientClosedError from None
            raise
        self._note_answer()
        return answer

    def _note_answer(self) -> None:
        self._heard_at = time.monotonic()

    def _silent_ms(self, since: float) -> float:
        """Time without an answer to any call, ms; from `since` (monotonic clock, s) on."""
        return (time.monotonic() - max(since, self._heard_at)) * 1000

    def _callable_of(self, method: Method[Any, Any]) -> Any:
        if self._process != os.getpid():
            self._leave_to_parent()
        if self._is_closed:
            raise ClientClosedError
        return self._calls[method.name]

    def _leave_to_parent(self) -> None:
        """A channel of the process that this one was forked from answers nothing here, and is not to be closed."""
        with _forking:
            if self._process != os.getpid():
                _of_parents.append(self._channel)
                self._open()

    def _heard(self, pending: Any, silence_ms: int) -> Any:
        """Answer of a call under way, as long as the service gives any sign of life: an answer to a health check, or to
        any other call.

        It is in no hurry once it has answered a look: its later ones may take longer.
        """
        began, wait_s, look_ms = time.monotonic(), silence_ms / 1000, silence_ms
        while True:
            try:
                return _result(pending, wait_s)
            except grpc.FutureTimeoutError:
                left_ms = silence_ms - self._silent_ms(began)
            if left_ms > 0:  # it answers others: busy, not away
                wait_s = left_ms / 1000
            elif self._answers(look_ms):
                wait_s, look_ms = LOOK_S, HEALTH_MS
            elif self._silent_ms(began) < look_ms:
                wait_s = silence_ms / 1000
            else:
                pending.cancel()
                raise silence(self._heard_at) from None

    def send(self, method: Method[Any, Any], request: Message, timeout_ms: int, done: Done) -> None:
        try:
            call = self._callable_of(method)
            future = call.future(request, timeout=timeout_ms / 1000, metadata=self._where.metadata)
        except (ClientClosedError, ValueError):
            done(ClientClosedError())
        else:
            future.add_done_callback(lambda ended: done(_error_in(ended)))

    def is_serving(self, timeout_ms: int) -> bool:
        try:
            return bool(self._health(timeout_ms) == connection.HEALTH_SERVING)
        except (grpc.RpcError, ValueError):
            return False

    def _answers(self, timeout_ms: int) -> bool:
        try:
            self._health(timeout_ms)
        except grpc.RpcError as error:
            return is_answer(error)
        return True

    def _health(self, timeout_ms: int) -> Any:
        check = self._channel.unary_unary(connection.HEALTH_METHOD)
        return check(connection.HEALTH_REQUEST, timeout=timeout_ms / 1000)

    def close(self) -> None:
        self._is_closed = True
        if self._process == os.getpid():
            self._channel.close()

    def _callable(self, method: Method[Any, Any]) -> Any:
        return self._channel.unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )


def silence(heard_at: float) -> ServiceAwayError:
    """The error of a service that gives no sign of life; where it never gave one, most likely nothing is connected."""
    return ServiceAwayError(SILENT, DEADLINE_EXCEEDED) if heard_at else ServiceAwayError(NEVER_HEARD)


def _result(pending: Any, wait_s: float | None) -> Any:
    try:
        return pending.result(wait_s)
    except (KeyboardInterrupt, SystemExit):
        pending.cancel()
        raise


def _channel(where: Connection) -> grpc.Channel:
    options = where.channel_options()
    if where.tls is None:
        return grpc.insecure_channel(where.address, options)
    return grpc.secure_channel(where.address, where.tls.credentials(), options)


def failure_of(error: Any) -> Failure:
    """What a failed gRPC call tells, asyncio or not."""
    return Failure(error.code().name, error.details() or "", tuple(error.trailing_metadata() or ()))


def is_answer(error: Any) -> bool:
    """Whether a failed health check was answered: by a service that knows no health, or refuses it."""
    return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def _error_in(ended: Any) -> PolicyClientError | None:
    return error_of(failure_of(ended)) if ended.code() is not grpc.StatusCode.OK else None
