"""Fake gateways that ask, go, hold or fall back in a wrong way: the example gateway with one method broken."""

# The example is no package: it is loaded from its file, without types.
# mypy: allow-subclassing-any

from __future__ import annotations

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


class RemembersAttemptsForEver(Gateway):
    async def wait(self, journey: Any, wait: Any) -> Any:
        attempts = list(journey.earlier)
        response = await super().wait(journey, wait)
        journey.earlier += attempts
        return response


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


class OverlooksTheAttemptPolicy(Dispatches):
    overlooked = "attempt_policy"


class SendsEveryTool(Dispatches):
    overlooked = "degradations"


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
