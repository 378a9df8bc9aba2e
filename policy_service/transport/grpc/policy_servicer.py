"""PolicyService on the wire: read the request, run the use case, write the answer. No rule lives here.

`select_now` and `report_now` answer without suspending where they can; only what must wait (a permit, a line, a
commit) takes the asynchronous way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from policy_service.application.errors import FieldProblem, InvalidRequestError, PolicyError
from policy_service.application.messages import (
    DecisionToken,
    HeardSuccess,
    ReportAnswer,
    ReportRequest,
    SelectAnswer,
    SelectRequest,
)
from policy_service.generated.policy.v1 import policy_pb2
from policy_service.transport.grpc.auth import Scope
from policy_service.transport.grpc.errors import to_status
from policy_service.transport.grpc.gate import Gate, Stream, Unary, internal_error
from policy_service.transport.grpc.mapping import (
    Reading,
    report_answer,
    report_request,
    select_answer,
    select_request,
)
from policy_service.transport.grpc.service import service_handler

SERVICE = policy_pb2.DESCRIPTOR.services_by_name["PolicyService"]

M = TypeVar("M")
A = TypeVar("A")


TURN_S = 0.005


async def _in_turns(items: Iterable[M]) -> AsyncIterator[M]:
    """The items, with a turn for everybody else whenever they have kept the event loop for 5 ms: a batch of a thousand
    hard selections takes many seconds, and single calls must not wait for it."""
    clock = time.monotonic  # a loop's own clock may stand still until its next turn
    until = clock() + TURN_S
    for item in items:
        if clock() >= until:
            await asyncio.sleep(0)
            until = clock() + TURN_S
        yield item


async def _each(items: Sequence[M], run: Callable[[M], A | Awaitable[A]]) -> list[A | PolicyError]:
    """Run every item, then wait for those that have to; an error of one is its own result."""
    results = [_now(run, item) async for item in _in_turns(items)]
    waiting = [index for index, result in enumerate(results) if isinstance(result, Awaitable)]
    if waiting:
        settled = await asyncio.gather(*(_later(results[index]) for index in waiting))
        for index, result in zip(waiting, settled, strict=True):
            results[index] = result
    return results  # type: ignore[return-value]


def _now(run: Callable[[M], A], item: M) -> A | PolicyError:
    try:
        return run(item)
    except PolicyError as error:
        return error
    except Exception:
        return internal_error("item of a batch")


async def _later(pending: Any) -> Any:
    try:
        return await pending
    except PolicyError as error:
        return error
    except Exception:
        return internal_error("item of a batch")


def _put_report_result(
    item: policy_pb2.ReportOutcomeResult, result: policy_pb2.ReportOutcomeResponse | PolicyError
) -> None:
    if isinstance(result, PolicyError):
        item.error.CopyFrom(to_status(result))
    else:
        item.answer.CopyFrom(result)


class Selects(Protocol):
    """The selection use case."""

    def select_now(self, request: SelectRequest) -> SelectAnswer | None:
        """The answer, or None if it takes waiting."""
        ...

    async def select(self, request: SelectRequest) -> SelectAnswer:
        """The answer; PolicyError for a bad call."""
        ...


class Reports(Protocol):
    """The report use case."""

    def report_now(self, request: ReportRequest) -> ReportAnswer | None:
        """The answer, or None if it takes a commit."""
        ...

    def heard_now(self, success: HeardSuccess) -> bool:
        """A success that wants no answer; False if it takes a commit, and nothing is done."""
        ...

    async def report(self, request: ReportRequest) -> ReportAnswer:
        """The answer; PolicyError for a bad call."""
        ...


class PolicyServicer:
    """Methods of PolicyService.

    Args:
        selects, reports: the use cases.
        reading: seal, clock, ids and limits.
        further: implementations of the other methods by name (leases, permits).
        streams: implementation of WatchStream.
    """

    def __init__(
        self,
        selects: Selects,
        reports: Reports,
        reading: Reading,
        further: Mapping[str, Unary] | None = None,
        streams: Mapping[str, Stream] | None = None,
    ) -> None:
        self._selects = selects
        self._reports = reports
        self._reading = reading
        self._further = dict(further or {})
        self._streams = dict(streams or {})

    def handler(self, gate: Gate) -> Any:
        """Generic handler behind the gate."""
        built: dict[str, Unary] = {
            "SelectTarget": self.select_target,
            "SelectTargets": self.select_targets,
            "ReportOutcome": self.report_outcome,
            "ReportOutcomes": self.report_outcomes,
        }
        return service_handler(SERVICE, Scope.POLICY, gate, {**self._further, **built}, self._streams)

    async def select_target(self, message: policy_pb2.SelectTargetRequest) -> policy_pb2.SelectTargetResponse:
        """SelectTarget."""
        request = select_request(message, self._reading)
        answer = self._selects.select_now(request) or await self._selects.select(request)
        return select_answer(answer, self._reading.seal)

    async def report_outcome(self, message: policy_pb2.ReportOutcomeRequest) -> policy_pb2.ReportOutcomeResponse:
        """ReportOutcome."""
        request = report_request(message, self._reading)
        return report_answer(self._reports.report_now(request) or await self._reports.report(request))

    # -- for a door in this process: values, where a message would be written only to be read again -----------
    async def decided(
        self, message: policy_pb2.SelectTargetRequest
    ) -> tuple[policy_pb2.SelectTargetResponse, DecisionToken | None]:
        """SelectTarget, and what its token says."""
        request = select_request(message, self._reading)
        answer = self._selects.select_now(request) or await self._selects.select(request)
        return select_answer(answer, self._reading.seal), answer.token

    def decided_now(self, message: policy_pb2.SelectTargetRequest) -> SelectAnswer | None:
        """SelectTarget, where it takes no waiting."""
        return self._selects.select_now(select_request(message, self._reading))

    def written(self, answer: SelectAnswer) -> policy_pb2.SelectTargetResponse:
        """An answer as its message."""
        return select_answer(answer, self._reading.seal)

    def sealed(self, token: DecisionToken) -> bytes:
        """A token as bytes. Raises TokenTooLargeError."""
        return self._reading.seal.seal(token)

    def opened(self, token: bytes) -> DecisionToken:
        """What a token says. Raises TokenError."""
        return self._reading.seal.open(token, self._reading.clock.now())

    def heard_now(self, success: HeardSuccess) -> bool:
        """ReportOutcome without an answer. False: it takes a commit, and nothing is done."""
        return self._reports.heard_now(success)

    async def select_targets(self, message: policy_pb2.SelectTargetsRequest) -> policy_pb2.SelectTargetsResponse:
        """SelectTargets: each item on its own; those that wait do so together."""
        self._check_batch(len(message.items))
        results = await _each(message.items, self._select_item)
        response = policy_pb2.SelectTargetsResponse()
        async for result in _in_turns(results):
            self._put_select(response.results.add(), result)
        return response

    async def report_outcomes(self, message: policy_pb2.ReportOutcomesRequest) -> policy_pb2.ReportOutcomesResponse:
        """ReportOutcomes: each item on its own; those that commit share the next grouped commit."""
        self._check_batch(len(message.items))
        results = await _each(message.items, self._report_item)
        response = policy_pb2.ReportOutcomesResponse()
        async for result in _in_turns(results):
            _put_report_result(response.results.add(), result)
        return response

    def _check_batch(self, size: int) -> None:
        limit = self._reading.limits.batch
        if not 1 <= size <= limit:
            reason = "TOO_LARGE" if size else "FIELD_REQUIRED"
            raise InvalidRequestError((FieldProblem("items", f"{size} items", f"1 .. {limit} items", reason),))

    def _select_item(self, message: policy_pb2.SelectTargetRequest) -> SelectAnswer | Awaitable[SelectAnswer]:
        request = select_request(message, self._reading)
        answer = self._selects.select_now(request)
        return self._selects.select(request) if answer is None else answer

    def _put_select(self, item: policy_pb2.SelectTargetResult, result: SelectAnswer | PolicyError) -> None:
        if isinstance(result, PolicyError):
            item.error.CopyFrom(to_status(result))
            return
        try:
            select_answer(result, self._reading.seal, item.answer)
        except PolicyError as error:
            item.error.CopyFrom(to_status(error))

    def _report_item(
        self, message: policy_pb2.ReportOutcomeRequest
    ) -> policy_pb2.ReportOutcomeResponse | Awaitable[policy_pb2.ReportOutcomeResponse]:
        request = report_request(message, self._reading)
        answer = self._reports.report_now(request)
        return self._report_later(request) if answer is None else report_answer(answer)

    async def _report_later(self, request: ReportRequest) -> policy_pb2.ReportOutcomeResponse:
        return report_answer(await self._reports.report(request))
