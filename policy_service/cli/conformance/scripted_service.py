"""Scripted policy service: a fake PolicyService that answers as the case says and keeps every call.

It decides nothing. A call that names a token or permit of an earlier case belongs to that case's record.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
from google.rpc import status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from policy_service.application.errors import (
    DrainingError,
    FenceError,
    NotBuiltError,
    OverloadedError,
    PolicyError,
    SpoolRefusalError,
    StoreLostError,
    TokenError,
)
from policy_service.cli.conformance import answers
from policy_service.cli.conformance.cases import Step
from policy_service.cli.conformance.record import CANCEL, FENCE, RELEASE, RENEW, REPORT, SELECT, PolicyCall, Record
from policy_service.cli.conformance.scripted_upstreams import PortTakenError
from policy_service.generated.policy.v1 import lease_pb2, permit_pb2, policy_pb2, policy_pb2_grpc
from policy_service.transport.grpc.errors import abort, to_status

_RENEWED_MS: Final = 1_200
_ERRORS: Final[Mapping[str, type[PolicyError]]] = {
    "STORE_UNAVAILABLE": StoreLostError,
    "DRAINING": DrainingError,
    "TOO_MANY_CALLS": OverloadedError,
    "SPOOL_FULL": SpoolRefusalError,
    "LEASE_FENCE_STALE": FenceError,
    "LEASE_REQUIRED": FenceError,
}


class ScriptedService(policy_pb2_grpc.PolicyServiceServicer):
    """Answers by the script of the case that has begun.

    Args:
        addresses: host:port of each connection, for targets.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = addresses
        self._current: Record | None = None
        self._owners: dict[bytes | str, Record] = {}
        self._done: Counter[tuple[str, str, int]] = Counter()
        self._given: dict[tuple[bytes, int], policy_pb2.ReportOutcomeResponse] = {}

    @asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[str]:
        """Serve on loopback until the end of the block; gives host:port. Port 0: a free one.

        Raises:
            PortTakenError: somebody else listens there.
        """
        logging.getLogger("grpc._cython.cygrpc").addHandler(logging.NullHandler())  # says that calls were cancelled
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)])
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(self, server)
        healthy = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        for name in ("", "readiness", "liveness", "policy.v1.PolicyService"):
            await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
        try:
            found = server.add_insecure_port(f"127.0.0.1:{port}")
        except RuntimeError:
            raise PortTakenError(f"cannot listen on 127.0.0.1:{port}") from None
        await server.start()
        try:
            yield f"127.0.0.1:{found}"
        finally:
            await server.stop(0)

    def begin(self, record: Record) -> None:
        """From now on new requests belong to this record."""
        self._current = record

    # -- calls of the contract ---------------------------------------------------------------------------
    async def SelectTarget(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._serve(SELECT, request, context, self._select)

    async def ReportOutcome(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._serve(REPORT, request, context, self._judge)

    async def CheckFence(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._serve(FENCE, request, context, _valid_fence)

    async def RenewPermit(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._serve(RENEW, request, context, self._renew)

    async def ReleasePermit(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._serve(RELEASE, request, context, self._release)

    async def CancelPermit(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._serve(CANCEL, request, context, lambda *_: permit_pb2.CancelPermitResponse())

    async def AcquirePermit(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._serve("AcquirePermit", request, context, _nothing_to_hold)

    async def AcquireLease(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._serve("AcquireLease", request, context, _unscripted)

    async def RenewLease(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._serve("RenewLease", request, context, _unscripted)

    async def ReleaseLease(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._serve("ReleaseLease", request, context, _unscripted)

    async def GetLease(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._serve("GetLease", request, context, _unscripted)

    async def WatchStream(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        await abort(context, NotBuiltError("WatchStream is not scripted"))
        yield

    async def SelectTargets(self, request: Any, context: Any) -> Any:  # noqa: N802
        results = [await self._item(SELECT, item, context, self._select) for item in request.items]
        return policy_pb2.SelectTargetsResponse(
            results=[policy_pb2.SelectTargetResult(answer=a, error=e) for a, e in results]
        )

    async def ReportOutcomes(self, request: Any, context: Any) -> Any:  # noqa: N802
        results = [await self._item(REPORT, item, context, self._judge) for item in request.items]
        return policy_pb2.ReportOutcomesResponse(
            results=[policy_pb2.ReportOutcomeResult(answer=a, error=e) for a, e in results]
        )

    # -- one call ----------------------------------------------------------------------------------------
    async def _serve(self, method: str, request: Any, context: Any, usual: Usual) -> Any:
        """Answer one call, or end it with its error."""
        try:
            return await self._kept(method, request, context, usual)
        except PolicyError as error:
            await abort(context, error)
        except _BareError as error:
            await context.abort(error.code, "scripted: the service is away")

    async def _item(self, method: str, request: Any, context: Any, usual: Usual) -> tuple[Any, Any]:
        """Answer one item of a batch."""
        try:
            return await self._kept(method, request, context, usual), None
        except PolicyError as error:
            return None, to_status(error)
        except _BareError as error:
            return None, status_pb2.Status(code=error.code.value[0])

    async def _kept(self, method: str, request: Any, context: Any, usual: Usual) -> Any:
        """The answer; call, answer and end are kept."""
        record = self._record_of(request)
        call = PolicyCall(method, request, time.monotonic(), _limit_s(context))
        record.policy.append(call)
        try:
            call.answer = await self._answer(record, call, usual)
            return call.answer
        except asyncio.CancelledError:
            call.left = True
            raise
        except PolicyError as error:
            call.error = error.kind.name
            raise
        except _BareError as error:
            call.error = error.code.name
            raise
        finally:
            call.ended_at = time.monotonic()

    async def _answer(self, record: Record, call: PolicyCall, usual: Usual) -> Any:
        """By the next step of the script, else as usual. What was answered before gets its first answer again."""
        if (repeated := self._repeated(call)) is not None:
            return repeated
        step = self._next(record, call)
        await asyncio.sleep(step.after_ms / 1000)
        if step.error:
            raise _error(step.error)
        return usual(record, call.request, dict(step.answer))

    def _next(self, record: Record, call: PolicyCall) -> Step:
        """The step that is due; a Wait stays due where the gateway does not want one."""
        # A client request is recorded at its end: their number is that of the present one.
        present, made = len(record.clients), len(record.upstream)
        every = record.case.policy.get(call.method, ())
        steps = [step for step in every if step.request in (None, present) and step.calls in (None, made)]
        key = (record.case.name, call.method, present if any(step.request is not None for step in steps) else 0)
        step = _at(steps, self._done[key])
        if "wait" in step.answer and call.request.HasField("allow_wait") and not call.request.allow_wait:
            return Step(answers.refusal_in_place_of(step.answer["wait"]))
        self._done[key] += 1
        return step

    def _repeated(self, call: PolicyCall) -> policy_pb2.ReportOutcomeResponse | None:
        if call.method != REPORT:
            return None
        known = self._given.get((call.request.decision_token, call.request.attempt))
        if known is None:
            return None
        again = policy_pb2.ReportOutcomeResponse()
        again.CopyFrom(known)
        again.ignored_texts.append("duplicate")
        return again

    def _record_of(self, request: Any) -> Record:
        names = [getattr(request, "decision_token", b""), *getattr(request, "permit_ids", ())]
        found = next((self._owners[name] for name in names if name in self._owners), self._current)
        assert found is not None, "no case has begun"
        return found

    # -- usual answers -----------------------------------------------------------------------------------
    def _select(self, record: Record, request: Any, short: dict[str, Any]) -> Any:
        token = _token(record, len(record.decisions))
        document = answers.expand(
            short or answers.refusal_past_the_script(), self._addresses, _now_ms(), record.case.name
        )
        answer = answers.selection(document)
        answer.request_id = request.request_id or f"drawn-{token[:6].hex()}"
        answer.decision_id = f"{record.case.name}-{len(record.decisions)}"
        answer.decision_token = token
        answer.decided_at_unix_ms = _now_ms()
        record.decisions.append(answer)
        self._owners[token] = record
        self._owners.update((permit.permit_id, record) for permit in answer.dispatch.permits)
        return answer

    def _judge(self, record: Record, request: Any, short: dict[str, Any]) -> Any:
        if request.decision_token and request.decision_token not in self._owners:
            raise TokenError("DECISION_TOKEN_INVALID", "altered, truncated or not given out by this kit")
        document = answers.expand(short, self._addresses, _now_ms(), record.case.name)
        answer = answers.judgement(document) if short else answers.usual_judgement(request)
        self._given[request.decision_token, request.attempt] = answer
        return answer

    def _renew(self, record: Record, request: Any, _: dict[str, Any]) -> Any:
        return answers.renewed(_ids(record, request), _now_ms() + _RENEWED_MS)

    def _release(self, record: Record, request: Any, _: dict[str, Any]) -> Any:
        return answers.released(_ids(record, request))


Usual = Callable[[Record, Any, dict[str, Any]], Any]


class _BareError(Exception):
    """A failure without ErrorInfo, as the transport has them."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code.name)
        self.code = code


def _error(given: Mapping[str, Any]) -> Exception:
    reason = given.get("reason", "")
    if not reason:
        return _BareError(grpc.StatusCode[given["code"]])
    return _ERRORS[reason]("scripted", reason=reason, retry_after_ms=given.get("pushback_ms"))


def _valid_fence(_: Record, __: Any, short: dict[str, Any]) -> Any:
    status = lease_pb2.FenceStatus.Value(short.get("status", "FENCE_STATUS_VALID"))
    return lease_pb2.CheckFenceResponse(status=status, checked_at_unix_ms=_now_ms())


def _nothing_to_hold(_: Record, request: Any, __: dict[str, Any]) -> Any:
    return permit_pb2.AcquirePermitResponse(granted=permit_pb2.PermitGrantSet(), request_id=request.request_id)


def _unscripted(_: Record, __: Any, ___: dict[str, Any]) -> Any:
    raise NotBuiltError("no case scripts this call")


def _at(steps: Sequence[Step], place: int) -> Step:
    """Past the end: the last one again if it repeats, else no step."""
    if place < len(steps):
        return steps[place]
    return steps[-1] if steps and steps[-1].repeats else Step()


def _ids(record: Record, request: Any) -> list[str]:
    """Permits that a call is about."""
    held = [
        each for each in record.decisions if request.decision_token and each.decision_token == request.decision_token
    ]
    return [*request.permit_ids, *(permit.permit_id for each in held for permit in each.dispatch.permits)]


def _token(record: Record, number: int) -> bytes:
    """Bytes of the wanted length that are no UTF-8, the same in every run."""
    seed = hashlib.sha256(f"{record.case.name} {number}".encode()).digest()
    return (b"\xff\x00" + seed * (record.case.token_bytes // len(seed) + 1))[: record.case.token_bytes]


def _limit_s(context: Any) -> float | None:
    left = context.time_remaining()
    return None if left is None else float(left)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
