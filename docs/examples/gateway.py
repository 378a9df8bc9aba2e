"""A small gateway that keeps every rule of `policy-service conformance`: ask, call, report, do what the answer says.

    policy-service conformance --command "python docs/examples/gateway.py"

It takes OpenAI-shaped requests, needs aiohttp beside this package, and is fail-closed: 503 without the service.
Variables: POLICY_TARGET and GATEWAY_LISTEN (host:port), UPSTREAMS_FILE (JSON, see docs/doors/conformance.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from aiohttp import web

from policy_service.generated.policy.v1 import lease_pb2, permit_pb2, policy_pb2, policy_pb2_grpc, types_pb2

RETRY = {
    "maxAttempts": 4,
    "initialBackoff": "0.05s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
SERVICE_CONFIG = json.dumps(
    {"methodConfig": [{"name": [{"service": "policy.v1.PolicyService"}], "retryPolicy": RETRY}]}
)
CHANNEL = [("grpc.service_config", SERVICE_CONFIG), ("grpc.enable_retries", 1), ("grpc.enable_http_proxy", 0)]
SELECT_S, REPORT_S = 2.0, 5.0
LIFE_OF_A_PERMIT_S = 120
CUT_OFF = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
"""After these nobody knows what the service did with the call."""
PATIENCE_MS = 30_000
"""Longest Wait that a client is kept for."""
BODY_LIMIT = 65_536
NOT_FORWARDED = {"host", "authorization", "content-length", "connection", "transfer-encoding", "accept-encoding"}


@dataclass(slots=True)
class Journey:
    """One client request on its way."""

    request: web.Request
    body: dict[str, Any]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    asked: int = 0
    token: bytes = b""
    calls: int = 0
    earlier: list[Any] = field(default_factory=list)

    @property
    def lease(self) -> Any:
        """Lease of the client; None: it has none."""
        headers = self.request.headers
        if "x-policy-lease-owner" not in headers:
            return None
        generation = int(headers.get("x-policy-lease-generation", "0"))
        return lease_pb2.LeaseContext(owner=headers["x-policy-lease-owner"], generation=generation)

    @property
    def key_sha256(self) -> str:
        """What the service may know of the client's key."""
        key = self.request.headers.get("authorization", "").removeprefix("Bearer ")
        return hashlib.sha256(key.encode()).hexdigest() if key else ""


@dataclass(slots=True)
class Held:
    """A decision and when its answer came, monotonic."""

    answer: Any
    at: float = field(default_factory=time.monotonic)

    @property
    def dispatch(self) -> Any:
        return self.answer.dispatch


@dataclass(slots=True)
class Attempt:
    """One upstream call and what came back. `status` 0: no usable answer, see `network_error`."""

    number: int
    target: Any
    offset_ms: int
    began: float = field(default_factory=time.monotonic)
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    network_error: str = ""
    text: str = ""
    first_byte_ms: int | None = None
    latency_ms: int = 0
    is_streamed: bool = False
    stream_error: bytes = b""
    is_cancelled: bool = False
    is_timeout: bool = False
    response: web.StreamResponse | None = None
    """Already on its way to the client."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300 and not self.stream_error

    @property
    def is_last(self) -> bool:
        """Nothing can come behind it: it succeeded, the client has a part of it, or the client left."""
        return self.is_success or self.response is not None or self.is_cancelled


class Gateway:
    """Serves client requests by the decisions of the service.

    Args:
        stub: of PolicyService.
        upstreams: base URL and key of each connection.
        http: to call them with.
    """

    def __init__(self, stub: Any, upstreams: Mapping[str, Mapping[str, str]], http: aiohttp.ClientSession) -> None:
        self._stub = stub
        self._upstreams = upstreams
        self._http = http
        self._behind: set[asyncio.Task[Any]] = set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One client request."""
        journey = Journey(request, await request.json())
        try:
            return await self.serve(journey)
        except grpc.aio.AioRpcError as error:
            return self.without_service(journey, error)

    async def serve(self, journey: Journey) -> web.StreamResponse:
        """Ask until there is an answer for the client."""
        while True:
            decision = await self.select(journey)
            verdict = decision.WhichOneof("verdict")
            if verdict == "dispatch":
                response = await self.walk(journey, Held(decision))
            elif verdict == "wait":
                response = await self.wait(journey, decision.wait)
            else:
                response = self.refuse(decision.reject) if verdict == "reject" else failure(503, "unknown_verdict")
            if response is not None:
                return response

    # -- asking ----------------------------------------------------------------------------------------
    async def select(self, journey: Journey) -> Any:
        """SelectTarget. The id stays while nothing was granted, so that a place in line is kept."""
        question = self.question(journey)
        try:
            answer = await self._stub.SelectTarget(question, timeout=SELECT_S)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            if not isinstance(error, grpc.aio.AioRpcError) or error.code() in CUT_OFF:
                self.behind(self.withdraw(question.request_id))
            raise
        journey.token = answer.decision_token
        journey.asked += answer.HasField("dispatch")
        return answer

    async def withdraw(self, request_id: str) -> None:
        """Give back what a SelectTarget took whose answer did not come, as soon as the service hears of it."""
        for _ in range(LIFE_OF_A_PERMIT_S):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._stub.CancelPermit(permit_pb2.CancelPermitRequest(request_id=request_id), timeout=REPORT_S)
                return
            await asyncio.sleep(1)

    def question(self, journey: Journey) -> Any:
        """The message of SelectTarget."""
        session = journey.request.headers.get("x-session-id")
        headers = [types_pb2.Header(name="x-session-id", value=session)] if session else []
        return policy_pb2.SelectTargetRequest(
            request_id=f"{journey.id}-{journey.asked}",
            route=str(journey.body.get("model", "")),
            caller_key_sha256=journey.key_sha256,
            session=types_pb2.SessionSource(headers=headers),
            lease=journey.lease,
            previous_decision_token=journey.token,
            earlier_attempts=journey.earlier,
        )

    async def wait(self, journey: Journey, wait: Any) -> web.StreamResponse | None:
        """Sleep and ask again, or tell the client to come back where that would take too long."""
        if wait.wait_ms > PATIENCE_MS:
            return failure(429, wait.reason_text, retry_after_s=-(-wait.wait_ms // 1000))
        await asyncio.sleep(wait.wait_ms / 1000)
        journey.earlier.clear()
        return None

    def refuse(self, reject: Any) -> web.Response:
        """A Reject as the client gets it."""
        retry_after = reject.retry_after_ms // 1000 if reject.HasField("retry_after_ms") else None
        return failure(reject.http_status, reject.code, reject.type, reject.message, retry_after)

    def without_service(self, journey: Journey, error: grpc.aio.AioRpcError) -> web.StreamResponse:
        """Fail closed. A stale fence is the client's affair."""
        is_stale = error.code() is grpc.StatusCode.FAILED_PRECONDITION
        return failure(409 if is_stale else 503, "lease_stale" if is_stale else "policy_unavailable")

    # -- going -----------------------------------------------------------------------------------------
    async def walk(self, journey: Journey, held: Held) -> web.StreamResponse | None:
        """The attempts of one decision; None: ask again."""
        async with self.renewing(held):
            return await self.attempts(journey, held)

    async def attempts(self, journey: Journey, held: Held) -> web.StreamResponse | None:
        target, headers, number = held.dispatch.target, held.dispatch.set_headers, 0
        while True:
            journey.calls += 1
            attempt = await self.attempt(journey, held, Attempt(number, target, since_ms(held.at)), headers)
            if attempt.is_last:
                self.report_behind(journey, held, attempt)
                return attempt.response or answer(attempt.status, attempt)
            reported = await self.report(journey, held, attempt)
            journey.earlier.append(earlier(attempt, reported))
            if self.leads_on(journey, held, reported.action):
                await asyncio.sleep(reported.action.delay_ms / 1000)
                target, headers = self.following(attempt, reported.action)
                if not await self.fence_holds(journey, held, target):
                    await self.release(held)
                    return failure(409, "lease_stale")
                number += 1
                continue
            await self.release(held)
            return await self.end(journey, attempt, reported)

    def leads_on(self, journey: Journey, held: Held, action: Any) -> bool:
        """The action names another attempt of this decision, and one more may be made."""
        if journey.calls >= (held.dispatch.attempt_policy.max_dispatches or 30):
            return False
        falls_back = action.kind == policy_pb2.ACTION_KIND_FALL_BACK and action.HasField("next_target")
        return falls_back or action.kind == policy_pb2.ACTION_KIND_RETRY_SAME

    def following(self, attempt: Attempt, action: Any) -> tuple[Any, Any]:
        """Target and headers of the next attempt."""
        same = action.kind == policy_pb2.ACTION_KIND_RETRY_SAME
        return (attempt.target if same else action.next_target), action.set_headers

    async def end(self, journey: Journey, attempt: Attempt, reported: Any) -> web.StreamResponse | None:
        """None: ask again; else the last answer, restated. An action that is not known ends here, too."""
        kind = reported.action.kind
        if kind in (policy_pb2.ACTION_KIND_FALL_BACK, policy_pb2.ACTION_KIND_WAIT_AND_SELECT) and journey.calls < 30:
            await asyncio.sleep(reported.action.delay_ms / 1000)
            return None
        return self.restate(attempt, reported.verdict)

    def restate(self, attempt: Attempt, verdict: Any) -> web.Response:
        """The upstream's answer with the status and the time that the verdict puts in their place."""
        status = verdict.restated_status if verdict.HasField("restated_status") else attempt.status or 502
        response = answer(status, attempt)
        if verdict.HasField("retry_after_ms"):
            response.headers["retry-after"] = str(-(-verdict.retry_after_ms // 1000))
        return response

    async def fence_holds(self, journey: Journey, held: Held, target: Any) -> bool:
        """The last word before a leased call that no fresh SelectTarget covers."""
        if journey.lease is None:
            return True
        request = lease_pb2.CheckFenceRequest(
            caller_key_sha256=journey.key_sha256,
            lease=journey.lease,
            connection=target.connection,
            decision_token=held.answer.decision_token,
        )
        checked = await self._stub.CheckFence(request, timeout=SELECT_S)
        return bool(checked.status == lease_pb2.FENCE_STATUS_VALID)

    # -- calling ---------------------------------------------------------------------------------------
    async def attempt(self, journey: Journey, held: Held, attempt: Attempt, headers: Any) -> Attempt:
        """One upstream call; every end but a cancel is a result, and a cancel is reported."""
        try:
            await self.call(journey, held, attempt, headers)
        except TimeoutError:
            attempt.network_error, attempt.is_timeout = "READ_TIMEOUT", True
        except aiohttp.ClientError as error:
            attempt.text, attempt.network_error = str(error), network_error(error, attempt)
        except asyncio.CancelledError:
            attempt.is_cancelled, attempt.latency_ms = True, since_ms(attempt.began)
            self.report_behind(journey, held, attempt)
            raise
        attempt.latency_ms = since_ms(attempt.began)
        return attempt

    async def call(self, journey: Journey, held: Held, attempt: Attempt, headers: Any) -> None:
        """Send the request on; a stream goes through to the client."""
        limit_ms = held.dispatch.attempt_policy.target_timeout_ms or None
        async with asyncio.timeout(limit_ms / 1000 if limit_ms else None):
            async with self._http.post(
                self.url(attempt.target),
                data=json.dumps(self.upstream_body(journey, held, attempt.target)),
                headers=self.upstream_headers(journey, held, attempt.target, headers),
            ) as response:
                attempt.status, attempt.headers = response.status, response.headers
                attempt.first_byte_ms = since_ms(attempt.began)
                if response.status == 200 and response.content_type == "text/event-stream":
                    await self.stream(journey, attempt, response)
                else:
                    attempt.body = await response.read()

    def url(self, target: Any) -> str:
        return f"{self._upstreams[target.connection]['base_url']}/v1/chat/completions"

    def upstream_body(self, journey: Journey, held: Held, target: Any) -> dict[str, Any]:
        """The client's request for the model of the target, with the degradations carried out."""
        body = {**journey.body, "model": target.model}
        for degradation in held.dispatch.degradations:
            if degradation.HasField("tool_limit"):
                body["tools"] = body.get("tools", [])[: degradation.tool_limit]
        return body

    def upstream_headers(self, journey: Journey, held: Held, target: Any, added: Any) -> dict[str, str]:
        """The client's headers without those of the gateway and the policy; the connection's own credential."""
        stripped = {*NOT_FORWARDED, *held.dispatch.strip_headers, *(header.name.lower() for header in added)}
        client = {name.lower(): value for name, value in journey.request.headers.items()}
        kept = {n: v for n, v in client.items() if n not in stripped and not n.startswith("x-policy-")}
        key = self._upstreams[target.connection]["key"]
        return {**kept, **{header.name: header.value for header in added}, "authorization": f"Bearer {key}"}

    async def stream(self, journey: Journey, attempt: Attempt, response: aiohttp.ClientResponse) -> None:
        """Pass events on as they come. Where the first one is an error nothing has begun: another target may serve."""
        attempt.is_streamed = True
        begun = await self.first_event(attempt, response)
        if attempt.stream_error:
            return
        attempt.response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await attempt.response.prepare(journey.request)
        try:
            await attempt.response.write(begun)
            async for line in response.content:
                self.look(attempt, line)
                await attempt.response.write(line)
        except aiohttp.ClientPayloadError:
            if journey.request.transport:
                journey.request.transport.abort()  # the break reaches the client as one
            raise

    async def first_event(self, attempt: Attempt, response: aiohttp.ClientResponse) -> bytes:
        """What comes up to the first event, that one included."""
        begun = b""
        async for line in response.content:
            self.look(attempt, line)
            begun += line
            if line.startswith(b"data:"):
                break
        return begun

    def look(self, attempt: Attempt, line: bytes) -> None:
        """Keep an error event for the report."""
        if line.startswith(b"data:") and b'"error"' in line:
            attempt.stream_error = line.removeprefix(b"data:").strip()[:BODY_LIMIT]

    # -- reporting -------------------------------------------------------------------------------------
    async def report(self, journey: Journey, held: Held, attempt: Attempt) -> Any:
        """This is what came back; what now?"""
        return await self._stub.ReportOutcome(self.message(held, attempt), timeout=REPORT_S)

    def report_behind(self, journey: Journey, held: Held, attempt: Attempt) -> None:
        """Report without keeping the client: there is nothing left to decide for it."""
        self.behind(self.report(journey, held, attempt))

    def behind(self, work: Coroutine[Any, Any, Any]) -> None:
        """Go on with it after the client is gone."""
        task = asyncio.ensure_future(work)
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)

    def message(self, held: Held, attempt: Attempt) -> Any:
        """The message of ReportOutcome."""
        message = policy_pb2.ReportOutcomeRequest(
            decision_token=held.answer.decision_token,
            attempt=attempt.number,
            target=attempt.target,
            attempt_offset_ms=attempt.offset_ms,
            final=attempt.is_last,
            latency_ms=attempt.latency_ms,
            first_byte_ms=attempt.first_byte_ms,
            streamed=attempt.is_streamed,
            headers=[self.header(name, value) for name, value in attempt.headers.items()],
            body=b"" if attempt.is_success else attempt.body[:BODY_LIMIT],
            network_error_text=attempt.text,
        )
        message.details.stream_error = attempt.stream_error
        message.details.target_timeout = attempt.is_timeout
        self.put_outcome(message, attempt)
        return message

    def header(self, name: str, value: str) -> Any:
        """A header of the answer. What is no UTF-8 reaches us as surrogates, which the contract's text cannot hold."""
        if value.isprintable():
            return types_pb2.Header(name=name, value=value)
        return types_pb2.Header(name=name, value_bytes=value.encode("utf-8", "surrogateescape"))

    def put_outcome(self, message: Any, attempt: Attempt) -> None:
        """Exactly one of cancel, network error and status."""
        if attempt.is_cancelled:
            message.client_cancelled.SetInParent()
        elif attempt.network_error:
            kind = policy_pb2.NetworkErrorKind.Value(f"NETWORK_ERROR_KIND_{attempt.network_error}")
            message.network_error = kind
        else:
            message.http_status = attempt.status

    async def release(self, held: Held) -> None:
        """Free what a decision still holds whose last report was not final."""
        if held.dispatch.permits:
            request = permit_pb2.ReleasePermitRequest(decision_token=held.answer.decision_token)
            await self._stub.ReleasePermit(request, timeout=REPORT_S)

    @contextlib.asynccontextmanager
    async def renewing(self, held: Held) -> AsyncIterator[None]:
        """Renew the permits of a decision at a third of their life, until the end of the block."""
        task = asyncio.ensure_future(self.renew(held)) if held.dispatch.permits else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()

    async def renew(self, held: Held) -> None:
        life_ms = min(each.expires_at_unix_ms for each in held.dispatch.permits) - held.answer.decided_at_unix_ms
        while True:
            await asyncio.sleep(life_ms / 3000)
            request = permit_pb2.RenewPermitRequest(decision_token=held.answer.decision_token)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._stub.RenewPermit(request, timeout=REPORT_S)


def since_ms(instant: float) -> int:
    """Whole milliseconds since then."""
    return int((time.monotonic() - instant) * 1000)


def network_error(error: aiohttp.ClientError, attempt: Attempt) -> str:
    """The contract's name of a failure of aiohttp."""
    if isinstance(error, aiohttp.ClientPayloadError):
        return "STREAM_EARLY_EOF" if attempt.is_streamed else "CONNECTION_RESET"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "DNS"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "CONNECT_REFUSED"
    return "PROTOCOL_ERROR" if isinstance(error, aiohttp.ClientResponseError) else "CONNECTION_RESET"


def earlier(attempt: Attempt, reported: Any) -> Any:
    """What the next SelectTarget is told about a failed attempt: the texts, which no release outgrows."""
    verdict = reported.verdict
    return types_pb2.EarlierAttempt(
        target=attempt.target,
        http_status=attempt.status or None,
        reason=verdict.reason_text,
        scope=verdict.scope_text,
        kind=verdict.failure_kind_text,
        retry_hint_ms=verdict.retry_after_ms if verdict.HasField("retry_after_ms") else None,
    )


def answer(status: int, attempt: Attempt) -> web.Response:
    """The upstream's answer for the client."""
    kind = attempt.headers.get("content-type", "application/json")
    return web.Response(status=status, body=attempt.body, headers={"content-type": kind})


def failure(
    status: int, code: str, kind: str = "", message: str = "", retry_after_s: int | None = None
) -> web.Response:
    """An error of the gateway in the shape of OpenAI's."""
    error = {"code": code, "type": kind or "service_unavailable", "message": message or code}
    headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
    return web.json_response({"error": error}, status=status, headers=headers)


async def upstreams_session() -> aiohttp.ClientSession:
    """Connections are not kept: a stale one would look like a failure of the upstream."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0), auto_decompress=False)


def application(gateway: Gateway) -> web.Application:
    """The gateway as a web application. Run it with `handler_cancellation`, so that a client that leaves is noticed."""
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post("/v1/chat/completions", gateway.handle)
    return app


async def main() -> None:
    """Serve until the process is ended."""
    upstreams = listed(Path(os.environ["UPSTREAMS_FILE"]))
    host, _, port = os.environ["GATEWAY_LISTEN"].rpartition(":")
    async with (
        grpc.aio.insecure_channel(os.environ["POLICY_TARGET"], CHANNEL) as channel,
        await upstreams_session() as http,
    ):
        app = application(Gateway(policy_pb2_grpc.PolicyServiceStub(channel), upstreams, http))
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, host, int(port)).start()
        await asyncio.Event().wait()


def listed(file: Path) -> dict[str, Any]:
    """Base URL and key of each connection."""
    try:
        return {name.partition("/")[2]: each for name, each in json.loads(file.read_text())["upstreams"].items()}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"UPSTREAMS_FILE {file}: {error}") from None


def remedy(error: Exception) -> str:
    """What is wrong with the surroundings, in a line."""
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"GATEWAY_LISTEN {os.environ['GATEWAY_LISTEN']} is in use: end what listens there, or name another port"
    is_unset = isinstance(error, KeyError)
    return f"{error.args[0]} is not set" if is_unset else str(error)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (OSError, KeyError, ValueError) as problem:
        sys.exit(f"gateway: {remedy(problem)}; the surroundings are described in docs/doors/conformance.md")
