"""Fake gateways, each wrong in one way: the example gateway with one method broken, and the rule that has to notice.

`MUTANTS` lists them by rule: the case in which the fault shows, and the class. A rule without a mutant fails a test.
"""

# The example is no package: it is loaded from its file, without types.
# mypy: allow-subclassing-any

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from aiohttp import web

from policy_service.generated.policy.v1 import permit_pb2, policy_pb2, types_pb2
from tests.conformance.gateway_under_test import example

Gateway: Any = example.Gateway


def target(connection: str) -> types_pb2.Target:
    """A target of the mutant's own."""
    return types_pb2.Target(provider="openai", connection=connection, model=f"model-of-{connection}")


def dispatch_to(connection: str) -> policy_pb2.SelectTargetResponse:
    """A decision that no service made."""
    return policy_pb2.SelectTargetResponse(dispatch=policy_pb2.Dispatch(target=target(connection)))


class CallsBeforeItAsks(Gateway):
    async def handle(self, request: web.Request) -> Any:
        held = example.Held(dispatch_to("alpha"))
        attempt = example.Attempt(0, target("alpha"), 0)
        await self.call(example.Journey(request, await request.json()), held, attempt, [])
        return await super().handle(request)


class GoesToAFavourite(Gateway):
    def url(self, target: Any) -> str:
        return f"{self._upstreams['charlie']['base_url']}/v1/chat/completions"


class StartsWithTheFallback(Gateway):
    async def walk(self, journey: Any, held: Any) -> Any:
        changed = policy_pb2.SelectTargetResponse()
        changed.CopyFrom(held.answer)
        changed.dispatch.target.CopyFrom(held.dispatch.fallbacks[0])
        return await super().walk(journey, example.Held(changed))


class SendsTheClientsModel(Gateway):
    def upstream_body(self, journey: Any, held: Any, target: Any) -> Any:
        return {**super().upstream_body(journey, held, target), "model": journey.body["model"]}


class SendsTheClientsKey(Gateway):
    def upstream_headers(self, journey: Any, held: Any, target: Any, added: Any) -> Any:
        return {
            **super().upstream_headers(journey, held, target, added),
            "authorization": journey.request.headers["authorization"],
        }


class Questions(Gateway):
    """Base of those that ask in a wrong way."""

    def question(self, journey: Any) -> Any:
        question = super().question(journey)
        self.spoil(question, journey)
        return question


class AsksWithoutId(Questions):
    def spoil(self, question: Any, journey: Any) -> None:
        question.request_id = ""


class AsksWithOneIdForAll(Questions):
    def spoil(self, question: Any, journey: Any) -> None:
        question.request_id = "always-the-same"


class AsksWithANewIdEachTime(Questions):
    def spoil(self, question: Any, journey: Any) -> None:
        question.request_id = example.uuid.uuid4().hex


class ForgetsTheSession(Questions):
    def spoil(self, question: Any, journey: Any) -> None:
        question.ClearField("session")


class ForgetsTheWaitsToken(Questions):
    def spoil(self, question: Any, journey: Any) -> None:
        question.previous_decision_token = b""


class ForgetsEarlierAttempts(Questions):
    def spoil(self, question: Any, journey: Any) -> None:
        question.ClearField("earlier_attempts")


class ForgetsTheLease(Questions):
    def spoil(self, question: Any, journey: Any) -> None:
        question.ClearField("lease")


class AsksWithoutDeadline(Gateway):
    async def select(self, journey: Any) -> Any:
        answer = await self._stub.SelectTarget(self.question(journey))
        journey.token = answer.decision_token
        return answer


class DoesNotWait(Gateway):
    async def wait(self, journey: Any, wait: Any) -> None:
        return None


class SaysItsOwnStatus(Gateway):
    def refuse(self, reject: Any) -> Any:
        return example.failure(503, "no_target")


class SaysMilliseconds(Gateway):
    def refuse(self, reject: Any) -> Any:
        response = super().refuse(reject)
        response.headers["retry-after"] = str(reject.retry_after_ms)
        return response


class TakesTheUnknownForLeave(Gateway):
    async def select(self, journey: Any) -> Any:
        answer = await super().select(journey)
        return answer if answer.WhichOneof("verdict") else dispatch_to("alpha")


class SetsNoHeaders(Gateway):
    def upstream_headers(self, journey: Any, held: Any, target: Any, added: Any) -> Any:
        return super().upstream_headers(journey, held, target, [])


class SetsHeadersEverywhere(Gateway):
    def upstream_headers(self, journey: Any, held: Any, target: Any, added: Any) -> Any:
        return super().upstream_headers(journey, held, target, held.dispatch.set_headers)


class StripsNothing(Gateway):
    def upstream_headers(self, journey: Any, held: Any, target: Any, added: Any) -> Any:
        client = {name.lower(): value for name, value in journey.request.headers.items()}
        kept = {name: value for name, value in client.items() if name.startswith(("x-policy-", "x-kit-private"))}
        return {**kept, **super().upstream_headers(journey, held, target, added)}


class FollowsItsOwnOrder(Gateway):
    def following(self, attempt: Any, action: Any) -> Any:
        return target("bravo"), []


class RetriesAtOnce(Gateway):
    async def report(self, journey: Any, held: Any, attempt: Any) -> Any:
        answer = await super().report(journey, held, attempt)
        answer.action.delay_ms = 0
        return answer


class RetriesWithoutHeaders(Gateway):
    def following(self, attempt: Any, action: Any) -> Any:
        return super().following(attempt, action)[0], []


class DoesNotAskAgain(Gateway):
    async def end(self, journey: Any, attempt: Any, reported: Any) -> Any:
        return self.restate(attempt, reported.verdict)


class HidesTheAnswer(Gateway):
    def restate(self, attempt: Any, verdict: Any) -> Any:
        return example.failure(502, "upstream_failed")


class DoesNotRestate(Gateway):
    def restate(self, attempt: Any, verdict: Any) -> Any:
        return example.answer(attempt.status or 502, attempt)


class KnowsEveryValue(Gateway):
    async def report(self, journey: Any, held: Any, attempt: Any) -> Any:
        answer = await super().report(journey, held, attempt)
        policy_pb2.ActionKind.Name(answer.action.kind)
        return answer


class Dispatches(Gateway):
    """Base of those that overlook a field of the Dispatch."""

    overlooked = ""

    async def walk(self, journey: Any, held: Any) -> Any:
        changed: Any = policy_pb2.SelectTargetResponse()
        changed.CopyFrom(held.answer)
        changed.dispatch.ClearField(self.overlooked)
        return await super().walk(journey, example.Held(changed))


class HasNoTimeout(Dispatches):
    overlooked = "attempt_policy"


class HasNoBound(Dispatches):
    overlooked = "attempt_policy"


class SendsEveryTool(Dispatches):
    overlooked = "degradations"


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


class KeepsItsPermits(Gateway):
    async def release(self, held: Any) -> None:
        return None


class FreesItsPermitsBeforeItGoes(Gateway):
    async def attempt(self, journey: Any, held: Any, attempt: Any, headers: Any) -> Any:
        await self.release(held)
        return await super().attempt(journey, held, attempt, headers)


class FreesItsPermitsTwice(Gateway):
    async def report(self, journey: Any, held: Any, attempt: Any) -> Any:
        answer = await super().report(journey, held, attempt)
        await self._stub.ReleasePermit(
            permit_pb2.ReleasePermitRequest(decision_token=held.answer.decision_token), timeout=5
        )
        return answer


class DoesNotRenew(Gateway):
    async def renew(self, held: Any) -> None:
        return None


class TrustsItsFence(Gateway):
    async def fence_holds(self, journey: Any, held: Any, target: Any) -> bool:
        return True


class FailsOpenAlways(Gateway):
    async def serve(self, journey: Any) -> Any:
        try:
            return await super().serve(journey)
        except grpc.aio.AioRpcError:
            attempt = example.Attempt(0, target("alpha"), 0)
            await self.call(journey, example.Held(dispatch_to("alpha")), attempt, [])
            return example.answer(attempt.status, attempt)


class DoesNotRetry(Gateway):
    channel = (("grpc.enable_retries", 0),)


class RetriesAsItLikes(Gateway):
    channel = (("grpc.enable_retries", 0),)

    async def select(self, journey: Any) -> Any:
        try:
            return await super().select(journey)
        except grpc.aio.AioRpcError:
            return await super().select(journey)


class RetriesUnderAnotherId(RetriesAsItLikes):
    def question(self, journey: Any) -> Any:
        question = super().question(journey)
        question.request_id = example.uuid.uuid4().hex
        return question


class GivesUpTheService(Gateway):
    is_given_up = False

    async def serve(self, journey: Any) -> Any:
        if self.is_given_up:
            return example.failure(503, "policy_unavailable")
        return await super().serve(journey)

    def without_service(self, journey: Any, error: Any) -> Any:
        self.is_given_up = True
        return super().without_service(journey, error)


MUTANTS: dict[str, list[tuple[str, type[Any]]]] = {
    "ask-first": [("success", CallsBeforeItAsks)],
    "served-target": [("success", GoesToAFavourite)],
    "first-target": [("success", StartsWithTheFallback)],
    "model-of-target": [("success", SendsTheClientsModel)],
    "own-credential": [("success", SendsTheClientsKey), ("success", GoesToAFavourite)],
    "request-id": [("success", AsksWithoutId), ("two-requests", AsksWithOneIdForAll)],
    "deadline": [("success", AsksWithoutDeadline)],
    "silent-service": [("silent", AsksWithoutDeadline)],
    "session": [("session", ForgetsTheSession)],
    "wait": [("wait", DoesNotWait), ("wait", ForgetsTheWaitsToken)],
    "wait-sends-nothing": [("wait-too-long", DoesNotWait)],
    "wait-in-line": [("wait-in-line", AsksWithANewIdEachTime)],
    "reject": [("reject", SaysItsOwnStatus)],
    "reject-retry-after": [("reject", SaysMilliseconds), ("reject-for-good", SaysMilliseconds)],
    "unknown-verdict": [("unknown-verdict", TakesTheUnknownForLeave)],
    "set-headers": [("headers", SetsNoHeaders), ("headers", SetsHeadersEverywhere)],
    "strip-headers": [("headers", StripsNothing)],
    "control-headers": [("control-headers", StripsNothing), ("lease", StripsNothing)],
    "fallbacks-in-order": [("next-target-wins", FollowsItsOwnOrder)],
    "select-again": [("select-again", ForgetsEarlierAttempts), ("select-again", DoesNotAskAgain)],
    "retry-same": [("retry-same", RetriesAtOnce), ("retry-same", RetriesWithoutHeaders)],
    "wait-and-select": [("wait-and-select", DoesNotAskAgain)],
    "return-to-client": [("return-to-client", HidesTheAnswer)],
    "restated": [("restated", DoesNotRestate)],
    "unknown-values": [("unknown-action", KnowsEveryValue)],
    "attempt-timeout": [("attempt-timeout", HasNoTimeout)],
    "max-dispatches": [("endless-retry", HasNoBound)],
    "tool-limit": [("tool-limit", SendsEveryTool)],
    "report-every-attempt": [("success", ReportsFailuresOnly)],
    "report-once": [("fallbacks", ReportsTwice)],
    "attempt-numbers": [("success", CountsFromOne)],
    "attempt-offsets": [("fallbacks", MeasuresNoOffset)],
    "token-as-bytes": [("success", TakesTheTokenForText)],
    "reported-target": [("fallbacks", NamesAnotherTarget)],
    "requests-apart": [("at-once", RemembersOneDecision)],
    "final": [("success", IsNeverDone), ("fallbacks", IsDoneAtOnce), ("retry-same", IsDoneAtOnce)],
    "status-as-it-came": [("restated", ReportsWhatItSays)],
    "headers-reported": [("fallbacks", ReportsNoHeaders)],
    "body-reported": [("fallbacks", ReportsNoBody)],
    "body-capped": [("huge-body", ReportsWholeBodies)],
    "success-body-private": [("success", ReportsWholeBodies)],
    "no-secrets": [("success", TellsItsKey), ("lease", TellsTheOwner)],
    "network-errors": [("refused", ReportsWhatItSays), ("reset", ReportsWhatItSays), ("no-http", ReportsWhatItSays)],
    "times": [("fallbacks", MeasuresNoTime)],
    "report-again": [("report-again", DoesNotRetry)],
    "report-beside": [("slow-report", KeepsTheClientForTheReport)],
    "stream-through": [("stream", KeepsTheStream)],
    "stream-reported": [("stream", DoesNotSayStreamed)],
    "stream-error": [("stream-error", OverlooksTheErrorEvent)],
    "stream-held": [("stream-fails-at-once", BeginsTheStreamAtOnce)],
    "stream-cut": [("stream-cut", TakesTheCutForTheEnd), ("stream-cut", FinishesTheStream)],
    "cancel-upstream": [("client-leaves-a-call", DoesNotNoticeTheClientLeaving)],
    "cancel-reported": [
        ("client-leaves-a-call", ReportsTheCancelAsAStatus),
        ("client-leaves-a-stream", DoesNotNoticeTheClientLeaving),
    ],
    "cancel-while-waiting": [("client-leaves-a-wait", DoesNotNoticeTheClientLeaving)],
    "cancel-in-line": [("client-leaves-the-line", DoesNotNoticeTheClientLeaving)],
    "permit-freed": [
        ("return-to-client", KeepsItsPermits),
        ("client-leaves-a-call", DoesNotNoticeTheClientLeaving),
        ("long-call", FreesItsPermitsBeforeItGoes),
    ],
    "permit-freed-once": [("permit", FreesItsPermitsTwice)],
    "permit-renewed": [("long-call", DoesNotRenew)],
    "lease-passed": [("lease", ForgetsTheLease)],
    "lease-fence": [("lease-holds", TrustsItsFence)],
    "lease-stale": [("lease-ends-between", TrustsItsFence), ("lease-ended", FailsOpenAlways)],
    "error-is-not-away": [("store-away", FailsOpenAlways)],
    "retry-unavailable": [("draining", DoesNotRetry), ("draining", RetriesUnderAnotherId)],
    "pushback": [("draining", RetriesAsItLikes)],
    "overload": [("overloaded", FailsOpenAlways)],
    "no-fail-open": [("away", FailsOpenAlways)],
    "no-fail-open-leased": [("away-leased", FailsOpenAlways)],
    "recovery": [("away", GivesUpTheService)],
}
"""By rule: the case in which the fault shows, and the gateway."""
