"""Waits that no upstream can mean, reported over real gRPC: they never keep a target, or a caller, away for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from policy_service.generated.policy.v1 import policy_pb2
from tests.integration.serving import config, outcome, selection, serving

MONTH_MS = 30 * 86_400_000
"""Longest wait that an upstream is believed (spec/retry_hints.md section 1)."""
ORDINARY_MS = 3_000
"""First cooldown of an API key whose wait nobody can read."""
LONG = "1000000000000"
HEADERS = ("retry-after", "retry-after-ms", "x-ratelimit-reset-requests", "anthropic-ratelimit-requests-reset")
UNREADABLE = ("1e12", "-5", "-1e308", "NaN", "Infinity", "9" * 400, "0x7fffffff", "", "1e999", "soon")
BODIES = ("-1", "NaN", "-Infinity", "1e999", '"NaN"', "[]", "true")


async def told(stub: Any, name: str, **fields: Any) -> policy_pb2.SelectTargetResponse:
    """What a caller hears of a connection whose call ended in a 429 with these fields."""
    decision = await stub.SelectTarget(selection(name))
    assert decision.dispatch.target.connection == name
    await stub.ReportOutcome(outcome(name, 429, decision_token=decision.decision_token, **fields))
    answer: policy_pb2.SelectTargetResponse = await stub.SelectTarget(selection(name, explain=True))
    assert answer.WhichOneof("verdict") == "reject"
    return answer


def within(answer: policy_pb2.SelectTargetResponse, low_ms: int, high_ms: int) -> bool:
    """The exclusion and the wait told to the client lie in the range, whole seconds rounded up."""
    (held,) = answer.exclusions
    return low_ms < held.remaining_ms <= high_ms and low_ms < answer.reject.retry_after_ms <= high_ms


async def test_a_wait_that_cannot_be_read_is_the_ordinary_one(tmp_path: Path, embedded_url: str) -> None:
    async with serving(config(tmp_path, embedded_url)) as (_, stub):
        for name in HEADERS:
            for number, value in enumerate(UNREADABLE):
                answer = await told(stub, f"{name}-{number}", headers=[{"name": name, "value": value}])
                assert within(answer, 0, ORDINARY_MS), (name, value)
        for number, value in enumerate(BODIES):
            body = f'{{"error": {{"message": "rate limit reached", "retry_after": {value}}}}}'.encode()
            assert within(await told(stub, f"body-{number}", body=body), 0, ORDINARY_MS), value


async def test_a_wait_of_thirty_thousand_years_ends_within_a_month(tmp_path: Path, embedded_url: str) -> None:
    texts: list[dict[str, Any]] = [
        {"headers": [{"name": "Retry-After", "value": LONG}]},
        {"headers": [{"name": "retry-after-ms", "value": LONG}]},
        {"headers": [{"name": "Retry-After", "value": "Fri, 31 Dec 9999 23:59:59 GMT"}]},
        {"body": b'{"error": {"message": "rate limit reached", "retry_after_ms": 1e12}}'},
    ]
    async with serving(config(tmp_path, embedded_url)) as (_, stub):
        for number, fields in enumerate(texts):
            assert within(await told(stub, f"c{number}", **fields), MONTH_MS - 60_000, MONTH_MS), fields


async def test_a_caller_that_may_wait_is_not_held_by_an_absurd_wait(tmp_path: Path, embedded_url: str) -> None:
    async with serving(config(tmp_path, embedded_url)) as (_, stub):
        await told(stub, "a", headers=[{"name": "Retry-After", "value": LONG}])
        answer = await asyncio.wait_for(stub.SelectTarget(selection("a", allow_wait=True, wait_budget_ms=600_000)), 5)
        assert answer.WhichOneof("verdict") == "reject"
        assert MONTH_MS - 60_000 < answer.reject.retry_after_ms <= MONTH_MS
        assert (await stub.SelectTarget(selection("a", "b"))).dispatch.target.connection == "b"
