"""The fake for users' tests answers as the real service does, call by call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from policy_client import AsyncPolicyClient, messages, pool
from policy_client.connection import REPORTS, SELECTS
from policy_client.errors import PolicyClientError, ServiceError
from policy_client.testing import ScriptedPolicy
from tests.python_client.test_service import at, started

Client = AsyncPolicyClient
Case = Callable[[Client], Awaitable[object]]
BOTH = ("openai/main/gpt", "openai/spare/gpt")


def chosen(response: messages.SelectTargetResponse) -> object:
    """What a caller acts on."""
    verdict = response.WhichOneof("verdict")
    if verdict != "dispatch":
        return verdict, response.reject.http_status
    places = (response.dispatch.target, *response.dispatch.fallbacks)
    return verdict, [each.connection for each in places], bool(response.decision_token)


async def selected(client: Client, *candidates: str, **fields: Any) -> object:
    request = pool(*candidates)
    request.MergeFrom(messages.SelectTargetRequest(**fields))
    return chosen(await client.select(request))


async def prioritised(client: Client) -> object:
    request = pool(*BOTH)
    request.candidates[0].priority = 2
    request.candidates[1].priority = 1
    return chosen(await client.select(request))


async def reported(client: Client, **fields: Any) -> object:
    target = messages.Target(provider="openai", connection="main", model="gpt")
    answer = await client.report(messages.ReportOutcomeRequest(target=target, final=True, **fields))
    return answer.verdict.success, answer.action.kind


async def of_decision(client: Client, status: int) -> object:
    decision = await client.select(pool(*BOTH))
    report = messages.ReportOutcomeRequest(
        decision_token=decision.decision_token, target=decision.dispatch.target, http_status=status
    )
    answer = await client.report(report)
    return answer.verdict.success, answer.action.kind, answer.action.next_target.connection


async def in_batches(client: Client) -> object:
    good, bad = messages.ReportOutcomeRequest(report_id="b", http_status=200, elapsed_ms=5), pool()
    good.target.CopyFrom(messages.Target(provider="openai", connection="main", model="gpt"))
    reports = messages.ReportOutcomesRequest(items=[good, messages.ReportOutcomeRequest()])
    selections = messages.SelectTargetsRequest(items=[pool(*BOTH), bad])
    answers: list[Any] = [
        *(await client.call(REPORTS, reports)).results,
        *(await client.call(SELECTS, selections)).results,
    ]
    return [each.error.code if each.HasField("error") else "answered" for each in answers]


CASES: dict[str, Case] = {
    "nothing to select from": selected,
    "an unknown route": lambda client: selected(client, route="nowhere"),
    "a route and candidates": lambda client: selected(client, *BOTH, route="nowhere"),
    "in order": lambda client: selected(client, *BOTH),
    "forced": lambda client: selected(client, *BOTH, forced_connection="spare"),
    "forced elsewhere": lambda client: selected(client, *BOTH, forced_connection="else"),
    "allowed": lambda client: selected(client, *BOTH, allowed_connections=["spare"]),
    "by priority": prioritised,
    "success": lambda client: of_decision(client, 200),
    "overload": lambda client: of_decision(client, 503),
    "wrong request": lambda client: of_decision(client, 400),
    "a report of nothing": lambda client: reported(client, http_status=200),
    "a foreign token": lambda client: reported(client, http_status=200, decision_token=b"foreign"),
    "by report id": lambda client: reported(client, http_status=200, report_id="r", elapsed_ms=5),
    "in batches": in_batches,
    "no outcome": lambda client: reported(client, report_id="r2", elapsed_ms=5),
}


async def outcome(client: Client, case: Case) -> object:
    """What comes of a case: its result, or kind, reason and status of the error."""
    try:
        return await case(client)
    except ServiceError as error:
        return type(error).__name__, error.code, error.reason
    except PolicyClientError as error:
        return type(error).__name__


async def test_the_fake_answers_as_the_service(tmp_path: Path, embedded_url: str) -> None:
    real, fake = {}, {}
    for name, case in CASES.items():
        fake[name] = await outcome(ScriptedPolicy().async_client(), case)
    async with started(tmp_path, embedded_url) as service, AsyncPolicyClient(where=at(service)) as client:
        for name, case in CASES.items():
            real[name] = await outcome(client, case)
    assert fake == real
