"""The blocking client at the level of gRPC calls, by grpcio-testing: metadata, errors, what is sent behind."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from typing import Any

import grpc
import grpc_testing
import pytest
from google.protobuf.message import Message

from policy_client import (
    Connection,
    PolicyClient,
    PolicyClientError,
    RefusedWhileAwayError,
    Result,
    UnavailableError,
    messages,
    pool,
)
from policy_client._generated.policy.v1 import policy_pb2
from policy_client.away import AwayPolicy, FailMode
from policy_client.connection import Method
from policy_client.testing import target
from policy_client.wire import Done, GrpcRpc
from policy_service.application.errors import StoreLostError
from policy_service.transport.grpc.errors import to_status, trailers
from tests.python_client.test_clients import Upstream

SERVICE = policy_pb2.DESCRIPTOR.services_by_name["PolicyService"]
BOTH = pool("openai/main/gpt", "openai/spare/gpt")


class ThreadedRpc(GrpcRpc):
    """Futures of grpcio-testing take no callbacks: what is sent behind goes by a thread here."""

    def send(self, method: Method[Any, Any], request: Message, timeout_ms: int, done: Done) -> None:
        Thread(target=self._sent, args=(method, request, timeout_ms, done), daemon=True).start()

    def _sent(self, method: Method[Any, Any], request: Message, timeout_ms: int, done: Done) -> None:
        try:
            self.call(method, request, timeout_ms)
        except PolicyClientError as error:
            done(error)
        else:
            done(None)


class Line:
    """A client in a thread, and the other end of its channel."""

    def __init__(self) -> None:
        self.channel = grpc_testing.channel([SERVICE], grpc_testing.strict_real_time())
        where = Connection(key="gateway-key")
        rpc = ThreadedRpc(where, self.channel)
        self.client = PolicyClient(where=where, rpc=rpc, away=AwayPolicy(FailMode.CLOSED))
        self._threads = ThreadPoolExecutor(1)

    def run(self, upstream: Upstream) -> Future[Result[str]]:
        return self._threads.submit(self.client.run, BOTH, upstream)

    def take(self, method: str) -> tuple[dict[str, Any], Any, Any]:
        """Metadata and request of the next call of a method, and the call to answer."""
        metadata, request, rpc = self.channel.take_unary_unary(SERVICE.methods_by_name[method])
        rpc.send_initial_metadata(())
        return dict(metadata), request, rpc

    def answer(self, method: str, response: Any) -> Any:
        """Answer the next call of a method; its request."""
        _, request, rpc = self.take(method)
        rpc.terminate(response, (), grpc.StatusCode.OK, "")
        return request

    def fail(self, method: str, code: grpc.StatusCode, details: str = "", metadata: Any = ()) -> None:
        _, _, rpc = self.take(method)
        rpc.terminate(None, metadata, code, details)


@pytest.fixture
def line() -> Line:
    return Line()


def dispatched() -> messages.SelectTargetResponse:
    dispatch = messages.Dispatch(target=target("openai/main/gpt"), fallbacks=[target("openai/spare/gpt")])
    return messages.SelectTargetResponse(decision_token=b"t", dispatch=dispatch)


def test_every_call_carries_the_key_and_a_request_id(line: Line) -> None:
    running = line.run(Upstream(main=200))
    metadata, request, rpc = line.take("SelectTarget")
    rpc.terminate(dispatched(), (), grpc.StatusCode.OK, "")
    assert metadata["authorization"] == "Bearer gateway-key"
    assert request.request_id.endswith("-0")
    assert running.result(10).value == "main"
    assert line.answer("ReportOutcome", messages.ReportOutcomeResponse()).final
    assert line.client.settle()


def test_a_success_does_not_wait_for_its_report(line: Line) -> None:
    running = line.run(Upstream(main=200))
    line.answer("SelectTarget", dispatched())
    assert running.result(10).value == "main"
    assert not line.client.settle(timeout_s=0.05)


def test_a_failure_waits_for_what_to_do_next(line: Line) -> None:
    running = line.run(Upstream(main=503, spare=200))
    line.answer("SelectTarget", dispatched())
    action = messages.Action(kind=messages.ACTION_KIND_FALL_BACK, next_target=target("openai/spare/gpt"))
    assert not line.answer("ReportOutcome", messages.ReportOutcomeResponse(action=action)).final
    assert running.result(10).value == "spare"


def test_a_report_that_met_silence_is_kept(line: Line) -> None:
    running = line.run(Upstream(main=200))
    line.answer("SelectTarget", dispatched())
    running.result(10)
    line.fail("ReportOutcome", grpc.StatusCode.UNAVAILABLE)
    assert line.client.settle()
    assert (line.client.is_away, line.client.kept_reports) == (True, 1)


def test_a_lost_store_is_an_answer_with_its_reason(line: Line) -> None:
    running = line.run(Upstream(main=200))
    error = StoreLostError("the store is away", retry_after_ms=500)
    line.fail("SelectTarget", grpc.StatusCode.UNAVAILABLE, "the store is away", trailers(error, to_status(error)))
    with pytest.raises(UnavailableError) as caught:
        running.result(10)
    assert (caught.value.reason, caught.value.retry_after_ms) == ("STORE_UNAVAILABLE", 500)
    assert not line.client.is_away


def test_silence_means_away(line: Line) -> None:
    running = line.run(Upstream(main=200))
    line.fail("SelectTarget", grpc.StatusCode.UNAVAILABLE, "connection refused")
    with pytest.raises(RefusedWhileAwayError):
        running.result(10)
    assert line.client.is_away
