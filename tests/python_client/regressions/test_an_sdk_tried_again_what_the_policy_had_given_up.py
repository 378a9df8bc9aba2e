"""SDKs over the transports: their own retries came on top of ours, an error of the service was a 503 whatever it was, a
compressed failure that was restated could not be read, and an option `proxy` led around the policy."""

from __future__ import annotations

import gzip
from collections.abc import Coroutine
from typing import Any

import anthropic
import openai
import pytest

import policy_client.httpx
import policy_client.httpx2
from policy_client import AsyncPolicyClient, messages
from policy_client.errors import InvalidCallError, OverloadedError, ServiceError, UnavailableError
from policy_client.testing import ScriptedPolicy
from tests.python_client.test_httpx import HELLO, OVERLOADED, door, either_library, say
from tests.python_client.upstream_server import Reply, UpstreamServer, chat, said

BACK = messages.Action(kind=messages.ACTION_KIND_RETURN_TO_CLIENT)


def eager(kit: Any, policy: ScriptedPolicy, upstream: UpstreamServer) -> openai.OpenAI:
    """An SDK with the retries that it has by default."""
    return openai.OpenAI(api_key="sdk-key", http_client=kit.client(policy.client(), door(upstream)))


@either_library
def test_a_failure_that_the_policy_gives_back_is_not_tried_again(
    kit: Any, upstream: UpstreamServer, scripted: ScriptedPolicy
) -> None:
    upstream.will("main", OVERLOADED)
    upstream.will("spare", said(500, {"error": {"message": "x"}}, x_should_retry="true"))
    with pytest.raises(openai.InternalServerError):
        say(eager(kit, scripted, upstream))
    assert upstream.order == ["main", "spare"]


def test_a_reject_is_not_asked_for_again(upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    scripted.will_reject(429, retry_after_ms=60_000)
    given: Any = {"api_key": "x", "http_client": policy_client.httpx2.client(scripted.client(), door(upstream))}
    with pytest.raises(anthropic.RateLimitError):
        anthropic.Anthropic(**given).messages.create(model="m", max_tokens=9, messages=HELLO)
    assert len(scripted.selections) == 1


@either_library
def test_a_compressed_failure_with_another_status_can_be_read(
    kit: Any, upstream: UpstreamServer, scripted: ScriptedPolicy
) -> None:
    body = gzip.compress(b'{"error": {"message": "over the quota"}}')
    upstream.will("main", Reply(403, body, {"content-type": "application/json", "content-encoding": "gzip"}))
    scripted.will_judge(verdict=messages.Verdict(restated_status=429, retry_after_ms=500), action=BACK)
    with pytest.raises(openai.RateLimitError, match="over the quota"):
        say(eager(kit, scripted, upstream))


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (InvalidCallError("route: required", "FIELD_REQUIRED", "INVALID_ARGUMENT"), 400, None),
        (OverloadedError("busy", "TOO_MANY_CALLS", "RESOURCE_EXHAUSTED", retry_after_ms=1_500), 429, "2"),
        (UnavailableError("draining", "DRAINING", "UNAVAILABLE", retry_after_ms=100), 503, "1"),
    ],
)
def test_an_error_of_the_service_has_its_own_status_and_time(
    upstream: UpstreamServer, scripted: ScriptedPolicy, error: ServiceError, status: int, retry_after: str | None
) -> None:
    kit: Any = policy_client.httpx2
    scripted.will_fail(error)
    with pytest.raises(openai.APIStatusError) as caught:
        say(eager(kit, scripted, upstream))
    assert caught.value.status_code == status
    assert caught.value.response.headers.get("retry-after") == retry_after


@either_library
def test_no_option_leads_around_the_policy(kit: Any, upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    upstream.will("main", said(200, {"error": None}))
    options = {"proxy": "http://127.0.0.1:1", "verify": False, "http1": True}
    with kit.client(scripted.client(), door(upstream), **options) as proxied:
        proxied.post("http://sdk.test/v1/chat/completions", json={"model": "gpt-4o"})
    assert {report.WhichOneof("outcome") for report in scripted.reports} == {"network_error"}, "of the proxy"
    assert upstream.order == []
    for name in ("mounts", "transport"):
        with pytest.raises(TypeError, match="around the policy"):
            kit.client(scripted.client(), door(upstream), **{name: None})
        with pytest.raises(TypeError, match="around the policy"):
            kit.async_client(scripted.async_client(), door(upstream), **{name: None})


@either_library
def test_an_sdk_is_told_how_long_an_answer_took(kit: Any, upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    upstream.will("main", chat("hello"))
    upstream.will("spare", OVERLOADED)
    way = eager(kit, scripted, upstream).chat.completions.with_raw_response
    answer = way.create(model="gpt-4o", messages=HELLO)
    assert answer.parse().choices[0].message.content == "hello"
    assert answer.elapsed.total_seconds() > 0
    upstream.will("main", OVERLOADED)
    with pytest.raises(openai.InternalServerError) as caught:
        way.create(model="gpt-4o", messages=HELLO)
    assert caught.value.response.elapsed.total_seconds() > 0


def test_another_kind_of_loop_is_named() -> None:
    async def ask() -> None:
        await AsyncPolicyClient("127.0.0.1:1").select(messages.SelectTargetRequest(route="x"))

    work: Coroutine[Any, Any, None] = ask()
    with pytest.raises(RuntimeError, match="needs asyncio"):
        work.send(None)
