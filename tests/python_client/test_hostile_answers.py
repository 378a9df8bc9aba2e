"""Odd texts, broken bodies and cancels at bad moments: the report reaches the service, the answer whoever asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import policy_client.httpx
from policy_client import AsyncPolicyClient, PolicyClient, answered, messages, outcomes, pool
from policy_client.connection import Method
from policy_client.errors import ServiceAwayError
from policy_client.httpx_shell import AsyncStream, BlockingStream, Passing
from policy_client.steps import Answer, Attempt
from policy_client.stream_reading import StreamReader
from policy_client.testing import ScriptedPolicy, target
from policy_client.upstreams import Door, Sent, Upstream, whole_outcome

BOTH = pool("openai/main/gpt", "openai/spare/gpt")
HALF_PAIR = b'{"model":"gpt-4o","messages":[{"content":"cut off: \\ud83d"}]}'
DEEP = b"[" * 60_000
JSON = (("content-type", "application/json"),)


def sent(body: bytes) -> Sent:
    return Sent("POST", "/v1/chat/completions", (), body)


def test_a_body_with_half_a_surrogate_pair_keeps_its_escape_when_the_model_is_rewritten() -> None:
    attempt = Attempt(target("openai/main/other"), 0)
    body = Door({"main": Upstream("https://h")}).outgoing(sent(HALF_PAIR), attempt).body
    assert json.loads(body) == {**json.loads(HALF_PAIR), "model": "other"}


def test_a_model_that_utf8_cannot_carry_is_asked_for_all_the_same() -> None:
    assert Door({}).asked(sent(b'{"model":"gpt-\\ud800"}')).route == "gpt-?"


def test_json_nested_too_deeply_is_read_as_no_json() -> None:
    assert sent(b'{"a":' + DEEP).json == {}
    assert not whole_outcome(200, JSON, DEEP, 1).is_success


@pytest.mark.parametrize(
    "outcome",
    [
        outcomes.http(503, {"x-odd": "bytes of a header \udcff"}),
        outcomes.network(outcomes.DNS, "no such host \udcff"),
        outcomes.local_fault(text="\udcff"),
    ],
)
def test_a_text_that_utf8_cannot_carry_costs_no_report(outcome: outcomes.Outcome) -> None:
    report = messages.ReportOutcomeRequest()
    outcomes.put(outcome, report)
    assert report.WhichOneof("outcome")


def test_a_body_in_another_encoding_than_stated_is_the_fault_of_the_upstream() -> None:
    outcome = outcomes.of_exception(httpx.DecodingError("incorrect header check"))
    assert outcome.network_error == outcomes.PROTOCOL_ERROR


def test_the_answer_of_a_broken_gzip_body_comes_from_the_next_target(scripted: ScriptedPolicy) -> None:
    def upstream(request: httpx.Request) -> httpx.Response:
        if request.url.host == "main":
            return httpx.Response(500, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"no gzip"))
        return httpx.Response(200, json={"id": "1"})

    way = Door({name: Upstream(f"https://{name}") for name in ("main", "spare")}, BOTH)
    inner: Any = httpx.MockTransport(upstream)
    with (
        scripted.client() as client,
        httpx.Client(transport=policy_client.httpx.PolicyTransport(client, way, inner)) as c,
    ):
        assert c.post("https://sdk/v1/chat/completions", json={"model": "gpt"}).json() == {"id": "1"}
    assert [each.WhichOneof("outcome") for each in scripted.reports] == ["network_error", "http_status"]


# --- cancels ----------------------------------------------------------------------------------------------------
class Stuck:
    """A way to the service on which the first call of one method hangs until it is cancelled, and is lost."""

    def __init__(self, policy: ScriptedPolicy, method: str) -> None:
        self._inner = policy.async_client()._rpc
        self._method = method
        self.is_reached = asyncio.Event()

    async def call(self, method: Method[Any, Any], request: Any, timeout_ms: int, silence_ms: int = 0) -> Any:
        if method.name == self._method and not self.is_reached.is_set():
            self.is_reached.set()
            await asyncio.sleep(30)
        return await self._inner.call(method, request, timeout_ms)

    async def is_serving(self, timeout_ms: int) -> bool:
        return True

    async def close(self) -> None:
        """Nothing to give back."""


async def limited(attempt: Attempt) -> Answer[str]:
    return answered("", 429, {"retry-after": "60"}, b"{}")


async def test_a_failure_is_heard_although_whoever_asked_left_while_it_was_reported(scripted: ScriptedPolicy) -> None:
    stuck = Stuck(scripted, "ReportOutcome")
    async with AsyncPolicyClient(rpc=stuck) as client:
        task = asyncio.create_task(client.run(BOTH, limited))
        await stuck.is_reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [each.http_status for each in scripted.reports] == [429]


async def test_a_flush_that_is_cancelled_keeps_its_reports(scripted: ScriptedPolicy) -> None:
    stuck = Stuck(scripted, "ReportOutcomes")
    client = AsyncPolicyClient(rpc=stuck)
    client._core.backlog.keep(messages.ReportOutcomeRequest(report_id="r", http_status=200))
    task = asyncio.create_task(client.flush())
    await stuck.is_reached.wait()
    task.cancel()
    await asyncio.wait((task,))
    assert client.kept_reports == 1
    await client.flush()
    assert [each.report_id for each in scripted.reports] == ["r"]


def test_a_flush_that_meets_any_error_keeps_its_reports(scripted: ScriptedPolicy) -> None:
    class Broken:
        def call(self, *_: Any) -> Any:
            raise ValueError("the channel is closed")

    client = PolicyClient(rpc=Broken())  # type: ignore[arg-type]
    client._core.backlog.keep(messages.ReportOutcomeRequest(report_id="r"))
    with pytest.raises(ValueError, match="closed"):
        client.flush()
    assert client.kept_reports == 1


# --- streams ----------------------------------------------------------------------------------------------------
class Unclosable:
    """A response whose connection fails while it is closed."""

    status_code = 200

    def close(self) -> None:
        raise ServiceAwayError("the connection is gone")

    async def aclose(self) -> None:
        raise ServiceAwayError("the connection is gone")


def passing() -> Passing:
    chunks: Iterator[bytes] = iter(())
    return Passing(Unclosable(), chunks, StreamReader("unknown", 0))  # type: ignore[arg-type]


async def test_the_end_of_a_stream_is_told_although_its_connection_cannot_be_closed() -> None:
    told: list[outcomes.Outcome] = []

    async def complete(outcome: outcomes.Outcome) -> None:
        told.append(outcome)

    with pytest.raises(ServiceAwayError):
        BlockingStream(passing(), told.append, httpx).close()
    with pytest.raises(ServiceAwayError):
        await AsyncStream(passing(), complete, httpx).aclose()
    assert [each.is_cancelled for each in told] == [True, True]
