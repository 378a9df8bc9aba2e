"""Fake gateways that report, stream or notice a leaving client in a wrong way: the example with one method broken."""

# The example is no package: it is loaded from its file, without types.
# mypy: allow-subclassing-any

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from policy_service.generated.policy.v1 import types_pb2
from tests.conformance.gateway_under_test import example
from tests.conformance.wrong_steps import target

Gateway: Any = example.Gateway


class Messages(Gateway):
    """Base of those that report in a wrong way."""

    def message(self, held: Any, attempt: Any) -> Any:
        message = super().message(held, attempt)
        self.spoil(message, attempt)
        return message


class ReportsFailuresOnly(Gateway):
    def report_behind(self, journey: Any, held: Any, attempt: Any) -> None:
        return None


class ReportsTwice(Gateway):
    async def report(self, journey: Any, held: Any, attempt: Any) -> Any:
        await super().report(journey, held, attempt)
        return await super().report(journey, held, attempt)


class CountsFromOne(Messages):
    def spoil(self, message: Any, attempt: Any) -> None:
        message.attempt += 1


class MeasuresNoOffset(Messages):
    def spoil(self, message: Any, attempt: Any) -> None:
        message.attempt_offset_ms = 0


class TakesTheTokenForText(Messages):
    def spoil(self, message: Any, attempt: Any) -> None:
        message.decision_token = message.decision_token.decode("utf-8", "replace").encode()


class NamesAnotherTarget(Messages):
    def spoil(self, message: Any, attempt: Any) -> None:
        message.target.CopyFrom(target("alpha"))


class RemembersOneDecision(Gateway):
    held: Any = None

    async def walk(self, journey: Any, held: Any) -> Any:
        self.held = held
        return await super().walk(journey, held)

    def message(self, held: Any, attempt: Any) -> Any:
        return super().message(self.held, attempt)


class IsNeverDone(Messages):
    def spoil(self, message: Any, attempt: Any) -> None:
        message.final = False


class IsDoneAtOnce(Messages):
    def spoil(self, message: Any, attempt: Any) -> None:
        message.final = True


class ReportsWhatItSays(Messages):
    def spoil(self, message: Any, attempt: Any) -> None:
        message.http_status = 502


class ReportsNoHeaders(Messages):
    def spoil(self, message: Any, attempt: Any) -> None:
        message.ClearField("headers")


class TakesEveryHeaderForText(Gateway):
    def header(self, name: str, value: str) -> Any:
        return types_pb2.Header(name=name, value=value)


class ReportsNoBody(Messages):
    def spoil(self, message: Any, attempt: Any) -> None:
        message.body = b""


class ReportsWholeBodies(Messages):
    def spoil(self, message: Any, attempt: Any) -> None:
        message.body = attempt.body


class TellsItsKey(Messages):
    def spoil(self, message: Any, attempt: Any) -> None:
        key = self._upstreams["alpha"]["key"]
        message.headers.append(types_pb2.Header(name="authorization", value=f"Bearer {key}"))


class TellsTheOwner(Gateway):
    def question(self, journey: Any) -> Any:
        question = super().question(journey)
        question.session_key = journey.request.headers.get("x-policy-lease-owner", "")
        return question


class MeasuresNoTime(Messages):
    def spoil(self, message: Any, attempt: Any) -> None:
        message.latency_ms = 0


class KeepsTheClientForTheReport(Gateway):
    async def handle(self, request: web.Request) -> Any:
        response = await super().handle(request)
        await asyncio.gather(*self._behind, return_exceptions=True)
        return response


class KeepsTheStream(Gateway):
    async def stream(self, journey: Any, attempt: Any, response: Any) -> None:
        whole = await response.read()
        attempt.is_streamed, attempt.response = True, web.StreamResponse()
        await attempt.response.prepare(journey.request)
        await attempt.response.write(whole)


class BeginsTheStreamAtOnce(Gateway):
    async def first_event(self, attempt: Any, response: Any) -> bytes:
        return b""


class DoesNotSayStreamed(Messages):
    def spoil(self, message: Any, attempt: Any) -> None:
        message.streamed = False


class OverlooksTheErrorEvent(Messages):
    def spoil(self, message: Any, attempt: Any) -> None:
        message.details.stream_error = b""


class TakesTheCutForTheEnd(Gateway):
    async def stream(self, journey: Any, attempt: Any, response: Any) -> None:
        try:
            await super().stream(journey, attempt, response)
        except example.aiohttp.ClientPayloadError:
            return


class FinishesTheStream(Gateway):
    async def stream(self, journey: Any, attempt: Any, response: Any) -> None:
        attempt.is_streamed, attempt.response = True, web.StreamResponse()
        await attempt.response.prepare(journey.request)
        try:
            async for line in response.content:
                await attempt.response.write(line)
        except example.aiohttp.ClientPayloadError:
            await attempt.response.write(b"data: [DONE]\n\n")
            await attempt.response.write_eof()
            raise


class DoesNotNoticeTheClientLeaving(Gateway):
    async def handle(self, request: web.Request) -> Any:
        return await asyncio.shield(asyncio.ensure_future(super().handle(request)))


class ReportsTheCancelAsAStatus(Gateway):
    def put_outcome(self, message: Any, attempt: Any) -> None:
        message.http_status = 499
