"""Requests under way in one process: attempts without an answer, permits kept alive, failed calls, cut streams."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.rpc import error_details_pb2, status_pb2
from policy_envoy import actions, registry
from policy_envoy._generated.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from policy_envoy.calls import PolicyCallError
from policy_envoy.flight import from_carried
from policy_envoy.options import DoorOptions
from policy_envoy.performing import Performer, renewals
from policy_envoy.phases import Next
from policy_envoy.remote import call_error
from policy_envoy.servicer import Door, Run

from policy_service.generated.policy.v1 import permit_pb2, policy_pb2
from tests.envoy.decisions import dispatched, flight_of


class FakeCalls:
    """A policy service that takes everything down, and fails where a test says so."""

    def __init__(self) -> None:
        self.reports: list[policy_pb2.ReportOutcomeRequest] = []
        self.renewals: list[permit_pb2.RenewPermitRequest] = []
        self.releases: list[permit_pb2.ReleasePermitRequest] = []
        self.answer = dispatched("a", "b")
        self.error: PolicyCallError | None = None

    async def select(self, request: policy_pb2.SelectTargetRequest) -> policy_pb2.SelectTargetResponse:
        if self.error is not None:
            raise self.error
        return self.answer

    def selected(self, request: policy_pb2.SelectTargetRequest) -> None:
        """Everything takes waiting."""

    def told(self, success: actions.Success) -> bool:
        return False

    async def report(self, request: policy_pb2.ReportOutcomeRequest) -> policy_pb2.ReportOutcomeResponse:
        await asyncio.sleep(0)
        self.reports.append(request)
        return policy_pb2.ReportOutcomeResponse()

    async def acquire(self, request: Any) -> Any:
        return permit_pb2.AcquirePermitResponse(granted=permit_pb2.PermitGrantSet())

    async def renew(self, request: permit_pb2.RenewPermitRequest) -> permit_pb2.RenewPermitResponse:
        self.renewals.append(request)
        return permit_pb2.RenewPermitResponse()

    async def release(self, request: permit_pb2.ReleasePermitRequest) -> permit_pb2.ReleasePermitResponse:
        self.releases.append(request)
        return permit_pb2.ReleasePermitResponse()

    async def check_fence(self, request: Any) -> Any:
        raise AssertionError("no lease here")


def kinds(found: list[policy_pb2.ReportOutcomeRequest]) -> list[tuple[str | None, int, bool]]:
    return [(report.WhichOneof("outcome"), report.attempt, report.final) for report in found]


def test_an_attempt_before_another_one_failed_on_the_way_seen_or_not() -> None:
    seen, unseen = flight_of("a", "b"), flight_of("a", "b")
    assert registry.begin(seen, 1, 0.0) == []
    assert registry.unanswered(seen, seen.steps[0], 0.0, 1.0) == []
    assert kinds(registry.begin(seen, 2, 2.0)) == [("network_error", 0, False)]
    assert kinds(registry.begin(unseen, 2, 2.0)) == [("network_error", 0, False)]
    assert [attempt.target.connection for attempt in seen.attempts] == ["a"]


def test_the_last_attempt_is_known_by_what_ends_the_request() -> None:
    failed, left, late = flight_of("a"), flight_of("a"), flight_of("a")
    details = "upstream_reset_before_response_started{connection_timeout}"
    (report,) = registry.settle(failed, 1.0, details, is_client_gone=False, attempts=1)
    assert report.network_error == policy_pb2.NETWORK_ERROR_KIND_CONNECT_TIMEOUT
    assert report.final
    registry.unanswered(left, left.steps[0], 0.0, 1.0)
    assert kinds(registry.settle(left, 2.0, "", is_client_gone=True)) == [("client_cancelled", 0, True)]
    assert registry.settle(late, 1.0, "", is_client_gone=True) == []
    assert kinds(registry.unanswered(late, late.steps[0], 0.0, 2.0)) == [("client_cancelled", 0, True)]


def test_permits_are_renewed_within_a_third_of_their_life_until_the_last_report() -> None:
    flight, flights = flight_of("a", permits=["p1"]), registry.Registry()
    flight.attempt_permits = ("p2",)
    flights.hold(flight, 0.0)
    assert list(flights.due(7_499.0)) == []
    assert list(flights.due(7_500.0)) == [flight]
    assert list(flights.due(7_501.0)) == []
    first, second = renewals(flight)
    assert (first.decision_token, list(first.permit_ids)) == (b"t1", [])
    assert list(second.permit_ids) == ["p2"]
    flights.free(b"t1")
    assert list(flights.due(1e9)) == []
    assert flight.permit_ids == ()


async def test_what_is_left_to_tell_is_told_where_envoy_has_ended_the_stream() -> None:
    calls = FakeCalls()
    performer = Performer(calls, lambda: 0.0)
    report = policy_pb2.ReportOutcomeRequest(http_status=200)
    release = permit_pb2.ReleasePermitRequest(permit_ids=["p"])
    performer.finish([actions.Pass("response_body"), actions.Report(report), actions.Judge(report)])
    performer.finish([actions.Release(release), actions.Sleep(1_000)])
    await performer.close()
    assert (len(calls.reports), calls.releases) == (2, [release])


class CutOff:
    """A stream that Envoy ends while a reply is written."""

    METADATA = (("x-policy-stage", "upstream"), ("x-policy-connection", "a"))

    def __init__(self, *messages: Any) -> None:
        self._messages = list(messages)
        self.aborted: grpc.StatusCode | None = None

    async def read(self) -> Any:
        return self._messages.pop(0) if self._messages else grpc.aio.EOF

    async def write(self, data: bytes) -> None:
        if not self._messages:
            raise asyncio.CancelledError

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        self.aborted = code


def message(kind: str, **headers: str) -> Any:
    made = ext_proc.ProcessingRequest()
    for name, value in headers.items():
        header = getattr(made, kind).headers.headers.add(key=name.replace("__", ":").replace("_", "-"))
        header.raw_value = value.encode()
    return made


async def test_a_report_outlives_the_stream_that_it_is_about() -> None:
    calls = FakeCalls()
    door = Door(calls, DoorOptions(), lambda: 0.0)
    asked = message("request_headers", __path="/v1/x", x_envoy_attempt_count="1")
    flight = flight_of("a")
    carried = asked.metadata_context.filter_metadata["policy.decision"].fields["request"]
    carried.string_value = flight.carried()
    stream = CutOff(asked, message("response_headers", __status="200"))
    last = await door._process_of(None, CutOff.METADATA)(None, stream)
    assert last is not None
    assert ext_proc.ProcessingResponse.FromString(last).WhichOneof("response") == "response_headers"
    assert calls.reports == [], "the reply goes out first"
    await door.close()
    assert kinds(calls.reports) == [("http_status", 0, True)]


async def test_a_report_is_made_though_the_reply_before_it_reaches_nobody() -> None:
    calls = FakeCalls()
    door = Door(calls, DoorOptions(), lambda: 0.0)
    report = actions.Report(policy_pb2.ReportOutcomeRequest(http_status=500))
    state: Any = SimpleNamespace(phase="open", is_over=False)
    table: Any = {("open", int): lambda state, event: Next(state, (actions.Pass("response_body"), report))}
    with pytest.raises(asyncio.CancelledError):
        await door._take(Run(table, state, {}, False), CutOff().write, 1)
    await door.close()
    assert calls.reports == [report.request]


async def test_a_stream_that_envoy_ends_has_no_last_reply() -> None:
    door = Door(FakeCalls(), DoorOptions(), lambda: 0.0)
    stream = CutOff()
    await door._process_of(None, CutOff.METADATA)(None, stream)
    assert stream.aborted is grpc.StatusCode.CANCELLED


async def test_a_service_that_is_away_ends_the_stream_and_leaves_it_to_envoy() -> None:
    calls = FakeCalls()
    calls.error = PolicyCallError("", 503, "nobody there", is_away=True)
    context = CutOff(message("request_headers", __path="/routes/chat/v1/x"))
    await Door(calls, DoorOptions()).handler().service(_Details()).stream_unary(None, context)
    assert context.aborted is grpc.StatusCode.UNAVAILABLE


class _Details:
    method = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
    invocation_metadata = (("x-policy-stage", "listener"),)


def test_the_door_leaves_the_methods_of_others_alone() -> None:
    assert Door(FakeCalls(), DoorOptions()).handler().service(SimpleNamespace(method="/policy.v1.X/Process")) is None


def test_a_decision_travels_to_another_process_and_garbage_does_not() -> None:
    flight = flight_of("a", "b")
    flight.explanation = "decision=d1"
    again = from_carried(flight.carried(), 5.0)
    assert again is not None
    assert (again.id, again.path, again.explanation, again.order[0]) == (
        "d1",
        flight.path,
        "decision=d1",
        ("a", "b"),
    )
    for text in ("", "x", "a\n0\nb\nc\n!!!", "a\n0\nb\nc\n" + "AAAA", "a\nb\n\n\n"):
        assert from_carried(text, 0.0) is None


class Failed(grpc.aio.AioRpcError):  # type: ignore[misc]
    """An RPC that failed with these details."""

    def __init__(self, code: grpc.StatusCode, *details: Any) -> None:
        status = status_pb2.Status(code=code.value[0], message="no")
        for each in details:
            packed = Packed()
            packed.Pack(each)
            status.details.append(packed)
        trailers = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
        super().__init__(code, grpc.aio.Metadata(), trailers if details else grpc.aio.Metadata(), details="no")


@pytest.mark.parametrize(
    ("code", "reason", "is_away", "http_status"),
    [
        (grpc.StatusCode.UNAVAILABLE, "", True, 503),
        (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE", False, 503),
        (grpc.StatusCode.UNAVAILABLE, "DRAINING", True, 503),
        (grpc.StatusCode.FAILED_PRECONDITION, "LEASE_FENCE_STALE", False, 409),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", True, 504),
    ],
)
def test_only_what_the_transport_says_means_that_the_service_is_away(
    code: grpc.StatusCode, reason: str, is_away: bool, http_status: int
) -> None:
    info = [error_details_pb2.ErrorInfo(reason=reason, domain="policy.v1")] if reason else []
    error = call_error(Failed(code, *info))
    assert (error.is_away, error.http_status) == (is_away, http_status)
    assert error.code == (reason or code.name)
