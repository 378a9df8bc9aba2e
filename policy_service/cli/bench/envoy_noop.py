"""An ext_proc server that decides nothing: it answers the same messages in the same phases with constant bytes.

The reference of `bench --envoy`: whatever the door costs beyond it is the door's own.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import uvloop
from policy_envoy._generated.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from policy_envoy._generated.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


def replies(*, with_body: bool) -> dict[str, bytes]:
    """Reply by kind of message; the listener stage asks for the head of the answer, as the door does, and with
    `with_body` for the request body."""
    kinds = ("request_headers", "request_body", "response_headers", "response_body", "response_trailers")
    made: dict[str, Any] = {kind: ext_proc.ProcessingResponse() for kind in kinds}
    for kind, message in made.items():
        getattr(message, kind).SetInParent()
    asks = ext_proc.ProcessingResponse()
    asks.CopyFrom(made["request_headers"])
    mode = ProcessingMode(
        request_header_mode=ProcessingMode.SEND,
        response_header_mode=ProcessingMode.SEND,
        request_body_mode=ProcessingMode.BUFFERED if with_body else ProcessingMode.NONE,
    )
    asks.mode_override.CopyFrom(mode)
    return {**{kind: message.SerializeToString() for kind, message in made.items()}, "asks": asks.SerializeToString()}


def handler(known: dict[str, bytes]) -> Any:
    """Generic handler of the service."""

    async def process(requests: Any, context: Any) -> None:
        stage = dict(context.invocation_metadata()).get("x-policy-stage")
        while (message := await context.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("request")
            is_first = stage == "listener" and kind == "request_headers"
            await context.write(known["asks" if is_first else kind])

    read = ext_proc.ProcessingRequest.FromString
    return grpc.method_handlers_generic_handler(
        SERVICE, {"Process": grpc.stream_stream_rpc_method_handler(process, read, None)}
    )


async def serve(address: str, *, with_body: bool) -> None:
    """Serve until the process is ended."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler(replies(with_body=with_body)),))
    server.add_insecure_port(address)
    await server.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], with_body="--body" in sys.argv[2:]))
