"""Unmodified SDKs go through the policy by `http_client=`: the real packages, upstreams on loopback, streams too."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anthropic
import httpx
import openai
import pytest

import policy_client.httpx
import policy_client.httpx2
from policy_client import messages, outcomes
from policy_client._carried.watchdog import WatchdogSettings
from policy_client._generated.policy.v1 import permit_pb2
from policy_client.testing import ScriptedPolicy
from policy_client.upstreams import Door, Sent, Upstream
from tests.python_client.upstream_server import (
    ANTHROPIC_OVERLOADED,
    CHAT_ERROR,
    Reply,
    UpstreamServer,
    chat,
    chat_event,
    chat_stream,
    message,
    message_events,
    said,
    streamed,
)

POOL = messages.pool("openai/main/gpt-4o", "openai/spare/gpt-4o-mini")
HELLO: Any = [{"role": "user", "content": "hello"}]
OVERLOADED = said(503, {"error": {"message": "busy", "type": "server_error", "code": "busy"}}, retry_after="7")
KITS = (policy_client.httpx, policy_client.httpx2)
either_library = pytest.mark.parametrize("kit", KITS, ids=("httpx", "httpx2"))


def door(upstream: UpstreamServer, asking: Any = POOL, **fields: Any) -> Door:
    """Two upstreams, each with a credential of its own."""
    table = {
        name: Upstream(upstream.base_url(name), {"authorization": f"Bearer {name}-key"}) for name in ("main", "spare")
    }
    return Door(table, asking, **fields)


def openai_client(kit: Any, policy: ScriptedPolicy, way: Door) -> openai.OpenAI:
    return openai.OpenAI(api_key="sdk-key", http_client=kit.client(policy.client(), way), max_retries=0)


def say(client: openai.OpenAI, **fields: Any) -> str:
    answer = client.chat.completions.create(model="gpt-4o", messages=HELLO, **fields)
    return str(answer.choices[0].message.content)


def read(client: openai.OpenAI) -> str:
    stream = client.chat.completions.create(model="gpt-4o", messages=HELLO, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def told(policy: ScriptedPolicy) -> list[tuple[str, Any, bool]]:
    """Connection, end and finality of every report."""
    return [(each.target.connection, _end(each), each.final) for each in policy.reports]


def _end(report: messages.ReportOutcomeRequest) -> Any:
    kind = report.WhichOneof("outcome")
    return getattr(report, kind) if kind in ("http_status", "network_error") else kind


# --- whole answers ----------------------------------------------------------------------------------------------
@either_library
def test_openai_fails_over_and_neither_its_host_nor_its_key_travels(
    kit: Any, upstream: UpstreamServer, scripted: ScriptedPolicy
) -> None:
    upstream.will("main", OVERLOADED)
    upstream.will("spare", chat("hi"))
    assert say(openai_client(kit, scripted, door(upstream))) == "hi"
    assert told(scripted) == [("main", 503, False), ("spare", 200, True)]
    first, second = (seen for _, seen in upstream.seen)
    assert [first.path, second.path] == ["/v1/chat/completions"] * 2
    assert [first.headers["authorization"], second.headers["authorization"]] == ["Bearer main-key", "Bearer spare-key"]
    assert first.headers["host"] == f"127.0.0.1:{upstream.port}"
    assert [first.body["model"], second.body["model"]] == ["gpt-4o", "gpt-4o-mini"]


def test_the_service_is_told_status_headers_and_body_of_a_failure_and_no_body_of_a_success(
    upstream: UpstreamServer, scripted: ScriptedPolicy
) -> None:
    upstream.will("main", OVERLOADED)
    upstream.will("spare", chat("secret words"))
    say(openai_client(policy_client.httpx, scripted, door(upstream)))
    failure, success = scripted.reports
    assert b'"busy"' in failure.body
    assert ("retry-after", "7") in [(each.name.lower(), each.value) for each in failure.headers]
    assert (success.body, success.bytes_streamed > 0, success.latency_ms >= 0) == (b"", True, True)


def test_anthropic_fails_over(upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    upstream.will("main", said(529, {"type": "error", "error": {"type": "overloaded_error", "message": "x"}}))
    upstream.will("spare", message("hi"))
    way = door(upstream)
    client = anthropic.Anthropic(
        api_key="sdk-key", http_client=policy_client.httpx2.client(scripted.client(), way), max_retries=0
    )
    answer = client.messages.create(model="gpt-4o", max_tokens=9, messages=HELLO)
    assert [getattr(block, "text", "") for block in answer.content] == ["hi"]
    assert [seen.path for _, seen in upstream.seen] == ["/v1/messages"] * 2
    assert "x-api-key" not in upstream.seen[0][1].headers
    assert told(scripted) == [("main", 529, False), ("spare", 200, True)]


def test_an_error_inside_a_200_is_a_failure(upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    upstream.will("main", said(200, {"error": {"message": "quota", "code": "insufficient_quota"}}))
    upstream.will("spare", chat("hi"))
    assert say(openai_client(policy_client.httpx, scripted, door(upstream))) == "hi"
    assert b"insufficient_quota" in scripted.reports[0].body


def test_a_body_that_breaks_off_is_a_network_error_and_goes_elsewhere(
    upstream: UpstreamServer, scripted: ScriptedPolicy
) -> None:
    upstream.will("main", Reply(200, b'{"id": ', {"content-type": "application/json"}, breaks=True))
    upstream.will("spare", chat("hi"))
    assert say(openai_client(policy_client.httpx, scripted, door(upstream))) == "hi"
    assert scripted.reports[0].WhichOneof("outcome") == "network_error"


def test_a_refused_connection_is_told_as_such(upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    upstream.will("spare", chat("hi"))
    table = {"main": Upstream(f"http://127.0.0.1:{free}/v1"), "spare": Upstream(upstream.base_url("spare"))}
    assert say(openai_client(policy_client.httpx, scripted, Door(table, POOL))) == "hi"
    assert told(scripted)[0] == ("main", outcomes.CONNECT_REFUSED, False)
    assert "authorization" not in upstream.seen[0][1].headers


def test_the_last_network_error_reaches_the_sdk_as_its_own_exception(
    upstream: UpstreamServer, scripted: ScriptedPolicy
) -> None:
    upstream.will("main", Reply(pause_s=5))
    client = openai_client(policy_client.httpx, scripted, door(upstream, messages.pool("openai/main/gpt-4o")))
    scripted.will_dispatch("openai/main/gpt-4o").will_judge(
        action=messages.Action(kind=messages.ACTION_KIND_RETURN_TO_CLIENT)
    )
    with pytest.raises(openai.APITimeoutError):
        say(client, timeout=0.05)
    assert told(scripted) == [("main", outcomes.READ_TIMEOUT, True)]


def test_a_wrong_request_is_tried_once_and_its_answer_given_back(
    upstream: UpstreamServer, scripted: ScriptedPolicy
) -> None:
    upstream.will("main", said(400, {"error": {"message": "bad", "type": "invalid_request_error"}}))
    with pytest.raises(openai.BadRequestError, match="bad"):
        say(openai_client(policy_client.httpx, scripted, door(upstream)))
    assert upstream.order == ["main"]


def test_a_restated_answer_has_the_status_and_the_time_of_the_service(
    upstream: UpstreamServer, scripted: ScriptedPolicy
) -> None:
    upstream.will("main", said(403, {"error": {"message": "limit"}}))
    verdict = messages.Verdict(restated_status=429, retry_after_ms=2_500)
    scripted.will_judge(verdict=verdict, action=messages.Action(kind=messages.ACTION_KIND_RETURN_TO_CLIENT))
    with pytest.raises(openai.RateLimitError) as caught:
        say(openai_client(policy_client.httpx, scripted, door(upstream)))
    assert caught.value.response.headers["retry-after"] == "3"


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_a_reject_reads_as_an_error_of_the_api(sdk: str, upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    scripted.will_reject(429, "all_targets_cooling_down", retry_after_ms=4_000, message="come back later")
    given: Any = {"api_key": "x", "max_retries": 0}
    given["http_client"] = policy_client.httpx2.client(scripted.client(), door(upstream))
    ask: dict[str, Callable[[], object]] = {
        "openai": lambda: say(openai.OpenAI(**given)),
        "anthropic": lambda: anthropic.Anthropic(**given).messages.create(model="m", max_tokens=9, messages=HELLO),
    }
    with pytest.raises((openai.RateLimitError, anthropic.RateLimitError), match="come back later") as caught:
        ask[sdk]()
    error: Any = caught.value
    assert error.response.headers["retry-after"] == "4"


def test_a_request_may_name_its_route_by_its_model(upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    upstream.will("main", chat("hi"))
    scripted.will_dispatch("openai/main/gpt-4o")
    say(openai_client(policy_client.httpx, scripted, door(upstream, None)))
    assert scripted.selections[0].route == "gpt-4o"


def test_what_is_asked_may_depend_on_the_request(upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    def asking(sent: Sent) -> messages.SelectTargetRequest:
        user = next(value for name, value in sent.headers if name == "x-user")
        return messages.pool(f"openai/main/{sent.model}", session_key=user)

    upstream.will("main", chat("hi"))
    say(openai_client(policy_client.httpx, scripted, door(upstream, asking)), extra_headers={"x-user": "u7"})
    assert scripted.selections[0].session_key == "u7"


def test_a_target_without_an_upstream_is_our_fault_and_nobody_elses(
    upstream: UpstreamServer, scripted: ScriptedPolicy
) -> None:
    client = openai_client(policy_client.httpx, scripted, door(upstream, messages.pool("openai/unknown/gpt-4o")))
    with pytest.raises(LookupError, match="openai/unknown"):
        say(client)
    assert told(scripted) == [("unknown", "local_fault", True)]


# --- streams ----------------------------------------------------------------------------------------------------
@either_library
def test_a_stream_is_reported_at_its_end(kit: Any, upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    upstream.will("main", chat_stream("a", "b"))
    assert read(openai_client(kit, scripted, door(upstream))) == "ab"
    (report,) = scripted.reports
    assert (report.http_status, report.streamed, report.final) == (200, True, True)
    assert report.latency_ms >= report.first_byte_ms >= 0
    assert report.bytes_streamed > 100


@either_library
def test_an_error_before_the_first_output_goes_elsewhere_and_the_client_sees_nothing_of_it(
    kit: Any, upstream: UpstreamServer, scripted: ScriptedPolicy
) -> None:
    upstream.will("main", streamed(": ping\n\n", CHAT_ERROR))
    upstream.will("spare", chat_stream("a", "b"))
    assert read(openai_client(kit, scripted, door(upstream))) == "ab"
    assert b"overloaded" in scripted.reports[0].details.stream_error
    assert told(scripted) == [("main", 200, False), ("spare", 200, True)]


def test_a_stream_that_ends_before_its_first_output_goes_elsewhere(
    upstream: UpstreamServer, scripted: ScriptedPolicy
) -> None:
    upstream.will("main", streamed(": ping\n\n"))
    upstream.will("spare", chat_stream("ok"))
    assert read(openai_client(policy_client.httpx, scripted, door(upstream))) == "ok"
    assert told(scripted)[0] == ("main", outcomes.STREAM_EARLY_EOF, False)


def test_an_error_after_output_is_passed_on_and_reported(upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    upstream.will("main", streamed(chat_event("a"), CHAT_ERROR))
    with pytest.raises(openai.APIError, match="overloaded"):
        read(openai_client(policy_client.httpx, scripted, door(upstream)))
    (report,) = scripted.reports
    assert (report.http_status, report.final) == (200, True)
    assert b"overloaded" in report.details.stream_error


def test_a_stream_that_ends_early_is_reported_as_cut_off(upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    upstream.will("main", streamed(chat_event("a")))
    assert read(openai_client(policy_client.httpx, scripted, door(upstream))) == "a"
    assert told(scripted) == [("main", outcomes.STREAM_EARLY_EOF, True)]


def test_a_connection_that_breaks_in_a_stream_is_a_network_error(
    upstream: UpstreamServer, scripted: ScriptedPolicy
) -> None:
    upstream.will("main", streamed(chat_event("a"), breaks=True))
    with pytest.raises(Exception, match=r"peer closed|incomplete|disconnected|Connection"):
        read(openai_client(policy_client.httpx, scripted, door(upstream)))
    assert told(scripted) == [("main", outcomes.STREAM_EARLY_EOF, True)]


def test_silence_in_a_stream_is_an_idle_timeout(upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    upstream.will("main", streamed(chat_event("a"), hangs=True))
    client = openai_client(policy_client.httpx, scripted, door(upstream)).with_options(timeout=0.2)
    with pytest.raises((openai.APITimeoutError, openai.APIConnectionError, httpx.ReadTimeout)):
        read(client)
    assert told(scripted) == [("main", outcomes.STREAM_IDLE_TIMEOUT, True)]


def test_a_client_that_leaves_a_stream_is_a_cancel(upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    upstream.will("main", streamed(chat_event("a"), chat_event("b"), hangs=True))
    client = openai_client(policy_client.httpx, scripted, door(upstream))
    with client.chat.completions.create(model="gpt-4o", messages=HELLO, stream=True) as stream:
        next(iter(stream))
    assert told(scripted) == [("main", "client_cancelled", True)]


def test_a_stream_without_output_is_ended_by_the_watchdog(upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    upstream.will("main", streamed(chat_event("a"), *[": ping\n\n"] * 600))
    eager = WatchdogSettings(True, warmup_ms=0, window_ms=300, min_useful_bytes_per_second=100)
    with pytest.raises(openai.APIConnectionError) as caught:
        read(openai_client(policy_client.httpx, scripted, door(upstream, watchdog=eager)))
    assert "STREAM_THROUGHPUT_TOO_LOW" in str(caught.value.__cause__)
    assert told(scripted) == [("main", outcomes.STREAM_TOO_SLOW, True)]


def test_a_stream_keeps_its_grants_until_its_end(upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    permit = messages.Permit(permit_id="p", kind=permit_pb2.PERMIT_KIND_CONCURRENCY, expires_at_unix_ms=30)
    scripted.will_dispatch("openai/main/gpt-4o", permits=[permit])
    upstream.will("main", chat_stream(*["x"] * 80))
    read(openai_client(policy_client.httpx, scripted, door(upstream)))
    assert "RenewPermit" in scripted.calls
    assert scripted.calls[-1] == "ReportOutcome"


def test_anthropic_streams_fail_over_and_end(upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    upstream.will("main", streamed(ANTHROPIC_OVERLOADED))
    upstream.will("spare", streamed(*message_events("a", "b")))
    client = anthropic.Anthropic(
        api_key="x", http_client=policy_client.httpx2.client(scripted.client(), door(upstream)), max_retries=0
    )
    with client.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == "ab"
    assert told(scripted) == [("main", 200, False), ("spare", 200, True)]
    assert scripted.reports[1].details.stream_error == b""


# --- asyncio ----------------------------------------------------------------------------------------------------
def async_openai(kit: Any, policy: Any, way: Door) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="x", http_client=kit.async_client(policy, way), max_retries=0)


async def read_async(client: openai.AsyncOpenAI) -> str:
    stream = await client.chat.completions.create(model="gpt-4o", messages=HELLO, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


@either_library
async def test_async_openai_fails_over_whole_and_streamed(
    kit: Any, upstream: UpstreamServer, scripted: ScriptedPolicy
) -> None:
    upstream.will("main", OVERLOADED, streamed(CHAT_ERROR))
    upstream.will("spare", chat("hi"), chat_stream("a", "b"))
    async with scripted.async_client() as policy:
        client = async_openai(kit, policy, door(upstream))
        answer = await client.chat.completions.create(model="gpt-4o", messages=HELLO)
        assert answer.choices[0].message.content == "hi"
        assert await read_async(client) == "ab"
    assert told(scripted) == [
        ("main", 503, False),
        ("spare", 200, True),
        ("main", 200, False),
        ("spare", 200, True),
    ]


async def test_async_anthropic_streams(upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    upstream.will("main", OVERLOADED)
    upstream.will("spare", streamed(*message_events("a", "b")))
    async with scripted.async_client() as policy:
        http_client = policy_client.httpx2.async_client(policy, door(upstream))
        client = anthropic.AsyncAnthropic(api_key="x", http_client=http_client, max_retries=0)
        async with client.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream:
            assert "".join([text async for text in stream.text_stream]) == "ab"
    assert told(scripted) == [("main", 503, False), ("spare", 200, True)]


@pytest.mark.parametrize("reply", [Reply(pause_s=5), streamed(chat_event("a"), hangs=True)], ids=["whole", "stream"])
async def test_a_cancelled_task_is_a_cancel(reply: Reply, upstream: UpstreamServer, scripted: ScriptedPolicy) -> None:
    upstream.will("main", reply)
    async with scripted.async_client() as policy:
        task = asyncio.create_task(read_async(async_openai(policy_client.httpx, policy, door(upstream))))
        async with asyncio.timeout(10):
            while not upstream.seen:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    assert told(scripted) == [("main", "client_cancelled", True)]


async def test_a_plain_httpx_client_reads_what_is_no_event_stream(
    upstream: UpstreamServer, scripted: ScriptedPolicy
) -> None:
    upstream.will("main", Reply(200, b"\x00\x01", {"content-type": "audio/mpeg"}))
    async with scripted.async_client() as policy:
        client = policy_client.httpx.async_client(policy, door(upstream))
        answer = await client.post("https://api.openai.com/v1/audio/speech", json={"model": "gpt-4o"})
    assert answer.content == b"\x00\x01"
