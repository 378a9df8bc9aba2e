"""A service of the contract as grpc handlers: each method of the descriptor behind the gate.

A method without implementation answers UNIMPLEMENTED with a text that says so; there is no second list to keep.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from policy_service.application.errors import NotBuiltError
from policy_service.transport.grpc.auth import Scope
from policy_service.transport.grpc.gate import Gate, Stream, Unary


def service_handler(
    service: ServiceDescriptor,
    scope: Scope,
    gate: Gate,
    unary: Mapping[str, Unary],
    streams: Mapping[str, Stream] | None = None,
) -> Any:
    """Generic handler for `add_generic_rpc_handlers`.

    Args:
        unary: implementations by method name: request message to answer message.
        streams: implementations of bidirectional streams.
    """
    handlers = {m.name: _handler(m, scope, gate, unary, streams or {}) for m in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _handler(
    method: MethodDescriptor, scope: Scope, gate: Gate, unary: Mapping[str, Unary], streams: Mapping[str, Stream]
) -> Any:
    read, write = gate.deserializer(GetMessageClass(method.input_type)), _serialize
    if method.client_streaming:
        stream = streams.get(method.name) or _absent_stream(method.name)
        return grpc.stream_stream_rpc_method_handler(gate.stream(method.name, scope, stream), read, write)
    call = unary.get(method.name) or _absent(method.name)
    return grpc.unary_unary_rpc_method_handler(gate.unary(method.name, scope, call), read, write)


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _not_built(method: str) -> NotBuiltError:
    text = f"{method} is part of the contract, but this release does not answer it yet"
    return NotBuiltError(text, metadata={"method": method})


def _absent(method: str) -> Unary:
    async def call(request: Any) -> Any:
        raise _not_built(method)

    return call


def _absent_stream(method: str) -> Stream:
    async def call(requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        raise _not_built(method)
        yield  # makes this an async generator

    return call
