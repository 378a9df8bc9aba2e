"""The door's way to the service of its own process: the same as over the wire, with less written and read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from policy_envoy import wire
from policy_envoy._generated.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from policy_envoy.actions import Success
from policy_envoy.calls import PolicyCallError
from policy_envoy.course import course_of
from policy_envoy.flight import Decision, decision_of, from_answer, from_carried

from policy_service.application.messages import Dispatch, PermitGrant, PermitKind
from policy_service.bootstrap import envoy_door
from policy_service.bootstrap.envoy_door import LocalCalls
from policy_service.generated.policy.v1 import policy_pb2
from policy_service.transport.grpc.limits import Limits
from policy_service.transport.grpc.mapping import Reading, report_request, select_request
from policy_service.transport.grpc.policy_servicer import PolicyServicer
from policy_service.transport.grpc.token import MAX_TOKEN_BYTES, TokenSeal
from tests.envoy.decisions import dispatched
from tests.integration.grpc_shell import SECRET, FakeClock, FakeEntropy, FakeReports, FakeSelects

POOL: Any = [{"provider": "p", "connection": each} for each in ("a", "b")]
GRANT = PermitGrant("p1", PermitKind.CONCURRENCY, "p/a", 30_000)
ASKED = policy_pb2.SelectTargetRequest(candidates=POOL)


class World:
    """A service without a server."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.reading = Reading(TokenSeal({1: SECRET}), self.clock, FakeEntropy(), Limits())
        self.selects, self.reports = FakeSelects(), FakeReports()
        self.calls = LocalCalls(PolicyServicer(self.selects, self.reports, self.reading), {})

    async def success(self, **more: Any) -> Success:
        """A success of a decision that is taken now."""
        answer = await self.calls.select(ASKED)
        return Success(answer.decision_token, 0, answer.dispatch.target, 7, 200, 50, **more)


@pytest.mark.parametrize("more", [{}, {"headers": (("retry-after", "3"),), "latency_ms": 900, "bytes_streamed": 12}])
async def test_a_success_is_told_as_its_message_would_be_read(more: dict[str, Any]) -> None:
    world = World()
    success = await world.success(**more)
    assert world.calls.told(success)
    assert world.calls.told(success), "its token is opened where the decision is not remembered any more"
    assert world.reports.seen == [report_request(success.request, world.reading)] * 2


async def test_a_success_that_takes_a_commit_is_left_to_the_message() -> None:
    world = World()
    success = await world.success()
    assert not world.calls.told(success._replace(attempt=1))
    assert (await world.calls.report(success.request)).verdict.reason_text == "server_error"


async def test_a_success_under_a_foreign_token_is_refused() -> None:
    world = World()
    with pytest.raises(PolicyCallError) as refused:
        world.calls.told((await world.success())._replace(token=TokenSeal({1: b"x" * 32}).seal(_token(world))))
    assert refused.value.code == "DECISION_TOKEN_INVALID"


def _token(world: World) -> Any:
    return next(iter(world.calls._decisions.values()))


async def test_decisions_are_remembered_until_their_last_report_and_never_more_than_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    ended = await world.success()
    failed = policy_pb2.ReportOutcomeRequest(decision_token=ended.token, http_status=500)
    await world.calls.report(failed)
    assert ended.token in world.calls._decisions
    failed.final = True
    await world.calls.report(failed)
    assert not world.calls._decisions
    monkeypatch.setattr(envoy_door, "_DECISIONS_KEPT", 2)
    kept = [(await world.success()).token for _ in range(3)][1:]
    assert list(world.calls._decisions) == kept


@pytest.mark.parametrize("connections", [("a",), ("a", "b")])
async def test_a_dispatch_at_once_is_what_its_message_would_be_read_as(connections: tuple[str, ...]) -> None:
    one, other = World(), World()
    pool: Any = [{"provider": "p", "connection": each} for each in connections]
    asked = policy_pb2.SelectTargetRequest(candidates=pool)
    decision = one.calls.selected(asked)
    assert isinstance(decision, Decision)
    assert decision == decision_of(await other.calls.select(asked))
    assert one.calls._decisions == other.calls._decisions


@pytest.mark.parametrize(
    "more", [{"set_headers": (("x-lane", "slow"),)}, {"strip_headers": ("x-own",)}, {"permits": (GRANT,)}]
)
async def test_a_dispatch_with_more_to_say_keeps_its_message(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    plain = world.selects.select_now(select_request(ASKED, world.reading))
    assert plain is not None
    assert isinstance(plain.verdict, Dispatch)
    answer = replace(plain, verdict=replace(plain.verdict, **more))
    monkeypatch.setattr(world.selects, "select_now", lambda request: answer)
    message = world.calls.selected(ASKED)
    assert isinstance(message, policy_pb2.SelectTargetResponse)
    assert message.dispatch.set_headers or message.dispatch.permits or "x-own" in message.dispatch.strip_headers
    assert world.calls._decisions == {message.decision_token: answer.token}


async def test_a_decision_whose_token_grows_too_large_is_told_by_its_message() -> None:
    long: Any = [{"provider": "p", "connection": f"{each}{'c' * 200}", "model": "m" * 200} for each in range(12)]
    asked = policy_pb2.SelectTargetRequest(candidates=long, max_fallbacks=11)
    message = World().calls.selected(asked)
    assert isinstance(message, policy_pb2.SelectTargetResponse)
    assert len(message.decision_token) <= MAX_TOKEN_BYTES
    assert 0 < len(message.dispatch.fallbacks) < 11


async def test_what_is_not_answered_at_once_is_left_to_waiting_and_errors_are_told_the_same_way() -> None:
    world = World()
    assert world.calls.selected(policy_pb2.SelectTargetRequest(route="hold")) is None
    rejected = world.calls.selected(policy_pb2.SelectTargetRequest(route="empty"))
    assert isinstance(rejected, policy_pb2.SelectTargetResponse)
    assert rejected.WhichOneof("verdict") == "reject"
    with pytest.raises(PolicyCallError) as refused:
        world.calls.selected(policy_pb2.SelectTargetRequest())
    assert (refused.value.code, refused.value.http_status) == ("FIELD_REQUIRED", 400)
    with pytest.raises(PolicyCallError) as broken:
        world.calls.selected(policy_pb2.SelectTargetRequest(route="broken"))
    assert broken.value.http_status == 500
    assert "secrets" not in broken.value.message


async def test_requests_without_an_id_that_are_alike_get_ids_of_their_own() -> None:
    world = World()
    for _ in range(3):
        await world.calls.select(ASKED)
    asked = [(each.request_id, each.is_retry_safe) for each in world.selects.seen]
    assert asked == [("drawn-1", False), ("drawn-2", False), ("drawn-3", False)]


def test_a_course_is_read_once_unless_it_has_permits() -> None:
    assert course_of(dispatched("a", "b").dispatch) is course_of(dispatched("a", "b", token=b"t2").dispatch)
    held = dispatched("a", permits=["p"]).dispatch
    assert course_of(held) is not course_of(held)


@pytest.mark.parametrize("permits", [(), ("p1", "p2")])
def test_what_is_carried_holds_all_that_the_attempts_need(permits: tuple[str, ...]) -> None:
    answer = dispatched("a", "b", permits=permits)
    answer.decided_at_unix_ms = 1_000
    answer.dispatch.set_headers.add(name="X-Lane", value="slow")
    answer.dispatch.strip_headers.append("x-session-id")
    flight = from_answer(answer, 5.0)
    again = from_carried(flight.carried(), 5.0)
    assert again is not None
    assert (again.id, again.token, again.steps, again.order) == (flight.id, flight.token, flight.steps, flight.order)
    assert (again.permit_ids, again.renewal_ms) == (permits, flight.renewal_ms)
    assert flight.stripped == {"x-session-id"}


def test_the_order_follows_what_a_retry_changes() -> None:
    flight = from_answer(dispatched("a", "b", "c"), 0)
    assert flight.order[0] == ("a", "b", "c")
    flight.put_next(flight.steps[0], flight.steps[2].target)
    assert flight.order[0] == ("a", "c", "b")


@pytest.mark.parametrize("size", [0, 1, 60, 120, 130, 5_000, 40_000, 3_000_000])
def test_the_metadata_is_written_as_protobuf_writes_it(size: int) -> None:
    flight = from_answer(dispatched("a"), 0)
    flight.path = "/" + "é" * size
    message = ext_proc.ProcessingResponse()
    carried = message.dynamic_metadata.fields["policy.decision"].struct_value.fields["request"]
    carried.string_value = flight.carried()
    assert wire._carried(flight) == message.SerializeToString()
