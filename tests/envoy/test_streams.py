"""Streamed answers through real Envoy: early errors fail over, slow ones are ended, permits last as long as they do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from tests.envoy.upstreams import hangs, says, streams
from tests.envoy.world import gateway

EARLY = json.dumps({"error": {"message": "The server is overloaded", "type": "server_error", "code": "overloaded"}})


def delta(text: str) -> str:
    """One event of a chat completion."""
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]})


END = json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
GOOD = streams(delta("Hel"), delta("lo"), END, "[DONE]")
WANTED = {"accept": "text/event-stream"}
WATCHED = {
    "stream_watchdog.enabled": True,
    "stream_watchdog.warmup_ms": 0,
    "stream_watchdog.window_ms": 1000,
    "stream_watchdog.min_useful_bytes_per_second": 100,
}


async def test_an_error_event_before_the_first_output_fails_over_unseen(tmp_path: Path, embedded_url: str) -> None:
    scripts = {"openai-one": [streams(": ping", EARLY)], "mistral-two": [GOOD]}
    async with gateway(tmp_path, embedded_url, scripts) as world:
        async with world.post(headers=WANTED) as answer:
            assert answer.status == 200
            text = await answer.text()
        assert "Hel" in text
        assert "overloaded" not in text
        heard = await world.heard(2)
        assert heard == [("openai-one", 200, 0), ("mistral-two", 200, 1)]
        assert world.reports[0].details.stream_error
        assert not world.answers[0].verdict.success
        assert world.answers[1].verdict.success


async def test_an_error_event_after_output_is_reported_and_passed_on(tmp_path: Path, embedded_url: str) -> None:
    scripts = {"openai-one": [streams(delta("Hel"), EARLY)], "mistral-two": [GOOD]}
    async with gateway(tmp_path, embedded_url, scripts) as world:
        async with world.post(headers=WANTED) as answer:
            text = await answer.text()
        assert "Hel" in text
        assert "overloaded" in text
        assert await world.heard(1) == [("openai-one", 200, 0)]
        assert not world.answers[0].verdict.success
        assert not world.upstreams["mistral-two"].requests


@pytest.mark.parametrize("headers", [WANTED, {}], ids=["expected", "unexpected"])
async def test_a_stream_passes_as_it_comes_and_is_reported_once_at_its_end(
    tmp_path: Path, embedded_url: str, headers: dict[str, str]
) -> None:
    scripts = {"openai-one": [streams(delta("Hel"), delta("lo"), END, pause_s=0.2)]}
    async with gateway(tmp_path, embedded_url, scripts) as world:
        async with world.post(headers=headers) as answer:
            first = await answer.content.readany()
            assert b"Hel" in first
            assert b"lo" not in first.replace(b"Hel", b"")
            assert not world.reports
            rest = await answer.content.read()
        assert END.encode() in rest
        await world.heard(1)
        report = world.reports[0]
        assert report.final
        assert report.latency_ms >= 400
        assert report.first_byte_ms < 300
        assert report.bytes_streamed > 100


async def test_a_first_output_that_takes_longer_than_a_message_timeout_is_waited_for(
    tmp_path: Path, embedded_url: str
) -> None:
    async def late(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        response = aiohttp.web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(8)
        await response.write(f"data: {delta('late')}\n\n".encode())
        return response

    async with gateway(tmp_path, embedded_url, {"openai-one": [late]}) as world, world.post(headers=WANTED) as answer:
        assert answer.status == 200
        assert "late" in await answer.text()


async def read_into(chunks: list[bytes], answer: aiohttp.ClientResponse) -> None:
    """Read until the end, keeping what came before it broke."""
    async for chunk in answer.content.iter_any():
        chunks.append(chunk)


@pytest.mark.parametrize("headers", [WANTED, {}], ids=["expected", "unexpected"])
async def test_a_slow_stream_is_ended_and_its_client_told(
    tmp_path: Path, embedded_url: str, headers: dict[str, str]
) -> None:
    scripts = {"openai-one": [streams(*[delta("x")] * 100, pause_s=0.1)]}
    async with gateway(tmp_path, embedded_url, scripts, catalogue={"settings": WATCHED}) as world:
        chunks: list[bytes] = []
        async with world.post(headers=headers) as answer:
            with pytest.raises(aiohttp.ClientError):
                await read_into(chunks, answer)
        assert b"STREAM_THROUGHPUT_TOO_LOW" in b"".join(chunks)
        assert await world.heard(1) == [("openai-one", "network_error", 0)]
        assert world.answers[0].verdict.failure_kind_text == "timeout"
        await asyncio.sleep(0.3)
        assert world.upstreams["openai-one"].cancelled == 1


async def test_a_client_that_leaves_frees_its_slot_and_blames_nobody(tmp_path: Path, embedded_url: str) -> None:
    capped = {"connections": {"openai-one": {"max_concurrent": 1}}}
    async with gateway(tmp_path, embedded_url, {"openai-one": [hangs(30)]}, catalogue=capped) as world:
        with pytest.raises(asyncio.TimeoutError):
            async with world.post(timeout=aiohttp.ClientTimeout(total=0.5)):
                pass
        assert await world.heard(1) == [("openai-one", "client_cancelled", 0)]
        await world.free_of_permits()
        assert not world.answers[0].effects


async def test_a_client_that_leaves_in_the_middle_of_a_stream_frees_its_slot(tmp_path: Path, embedded_url: str) -> None:
    capped = {"connections": {"openai-one": {"max_concurrent": 1}}}
    scripts = {"openai-one": [streams(*[delta("x")] * 100, pause_s=0.1)]}
    async with gateway(tmp_path, embedded_url, scripts, catalogue=capped) as world:
        async with world.post(headers=WANTED) as answer:
            await answer.content.readany()
            assert await world.permits() == 1
            answer.close()
        assert await world.heard(1) == [("openai-one", "client_cancelled", 0)]
        await world.free_of_permits()


async def test_a_slot_is_held_until_a_long_answer_ends(tmp_path: Path, embedded_url: str) -> None:
    async def long(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        response = aiohttp.web.StreamResponse(headers={"content-type": "application/octet-stream"})
        await response.prepare(request)
        for _ in range(4):
            await response.write(b"x" * 1000)
            await asyncio.sleep(0.2)
        return response

    capped = {"connections": {"openai-one": {"max_concurrent": 1}}}
    async with gateway(tmp_path, embedded_url, {"openai-one": [long]}, catalogue=capped) as world:
        async with world.post() as answer:
            await answer.content.readany()
            assert await world.permits() == 1
            assert not world.reports
            await answer.read()
        assert await world.heard(1) == [("openai-one", 200, 0)]
        await world.free_of_permits()


async def test_a_json_error_where_a_stream_was_expected_fails_over(tmp_path: Path, embedded_url: str) -> None:
    scripts = {"openai-one": [says(503, EARLY)], "mistral-two": [GOOD]}
    async with gateway(tmp_path, embedded_url, scripts) as world:
        async with world.post(headers=WANTED) as answer:
            assert answer.status == 200
            assert "Hel" in await answer.text()
        assert await world.heard(2) == [("openai-one", 503, 0), ("mistral-two", 200, 1)]


async def test_a_json_error_of_the_last_account_reaches_the_client_whole(tmp_path: Path, embedded_url: str) -> None:
    scripts = {"openai-one": [says(400, EARLY)]}
    async with gateway(tmp_path, embedded_url, scripts) as world, world.post(headers=WANTED) as answer:
        assert answer.status >= 400
        assert json.loads(await answer.text()) == json.loads(EARLY)
