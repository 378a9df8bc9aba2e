"""A fake gateway on the Python client: takes requests and sends them on through the client's httpx transport.

For judging the client by the kit. What an SDK in the same process would not need is here: the client's headers, leases,
and hanging up where a stream broke off.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from aiohttp import web

from policy_client import AsyncPolicyClient, AwayPolicy, messages
from policy_client.httpx import AsyncPolicyTransport, Door, Sent, Upstream
from policy_service.cli.conformance.scripted_client import GatewayAccess
from policy_service.cli.conformance.stage import Stage

_OF_THE_WIRE = frozenset({"content-length", "transfer-encoding", "connection"})


def asking(sent: Sent) -> messages.SelectTargetRequest:
    """What to select from: the route of the model, with session and lease of the client."""
    headers = {name.lower(): value for name, value in sent.headers}
    request = messages.route(sent.model)
    request.session_key = headers.get("x-session-id", "")
    request.caller_key_sha256 = hashlib.sha256(headers["authorization"].removeprefix("Bearer ").encode()).hexdigest()
    if "x-policy-lease-owner" in headers:
        request.lease.owner = headers["x-policy-lease-owner"]
        request.lease.generation = int(headers["x-policy-lease-generation"])
    return request


class ClientGateway:
    """Sends every request on through the client."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One client request."""
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _OF_THE_WIRE]
        call = self._http.build_request(
            "POST", "http://sdk/v1/chat/completions", headers=headers, content=await request.read()
        )
        answer = await self._http.send(call, stream=True)
        try:
            return await self._pass_on(request, answer)
        finally:
            await answer.aclose()

    async def _pass_on(self, request: web.Request, answer: httpx.Response) -> web.StreamResponse:
        headers = {name: value for name, value in answer.headers.items() if name not in _OF_THE_WIRE}
        response = web.StreamResponse(status=answer.status_code, headers=headers)
        await response.prepare(request)
        if answer.is_stream_consumed:
            await response.write(answer.content)
            return response
        try:
            async for piece in answer.aiter_raw():
                await response.write(piece)
        except httpx.TransportError:
            if request.transport:
                request.transport.abort()
        return response


@asynccontextmanager
async def serving(stage: Stage) -> AsyncIterator[GatewayAccess]:
    """The gateway on loopback."""
    upstreams = {
        name: Upstream(f"http://{address}/v1", {"authorization": f"Bearer {stage.keys[name]}"})
        for name, address in stage.upstreams.items()
    }
    # The stage's service shares the event loop with this gateway: its silence only means that the loop is busy.
    async with AsyncPolicyClient(stage.policy, away=AwayPolicy(silence_ms=0)) as policy:
        transport = AsyncPolicyTransport(policy, Door(upstreams, asking))
        async with httpx.AsyncClient(transport=transport, timeout=30) as http:
            application = web.Application()
            application.router.add_post("/v1/chat/completions", ClientGateway(http).handle)
            runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield GatewayAccess(f"127.0.0.1:{runner.addresses[0][1]}")
            await runner.cleanup()
