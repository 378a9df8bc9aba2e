"""A door in a process of its own asked again after a Wait under another request id, and went to the end of the line."""

from __future__ import annotations

import grpc
from policy_envoy.remote import RemoteCalls

from policy_service.generated.policy.v1 import policy_pb2


async def test_whoever_asks_again_has_the_same_request_id() -> None:
    heard: list[str] = []

    async def select(request: policy_pb2.SelectTargetRequest, _: object) -> policy_pb2.SelectTargetResponse:
        heard.append(request.request_id)
        return policy_pb2.SelectTargetResponse(wait=policy_pb2.Wait(wait_ms=1))

    read, write = policy_pb2.SelectTargetRequest.FromString, policy_pb2.SelectTargetResponse.SerializeToString
    method = grpc.unary_unary_rpc_method_handler(select, request_deserializer=read, response_serializer=write)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("policy.v1.PolicyService", {"SelectTarget": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        calls, asked = RemoteCalls(channel), policy_pb2.SelectTargetRequest(route="chat")
        await calls.select(asked)
        again = policy_pb2.SelectTargetRequest()
        again.CopyFrom(asked)
        await calls.select(again)
        await calls.select(policy_pb2.SelectTargetRequest(route="chat"))
    await server.stop(None)
    first, second, other = heard
    assert first == second != other
