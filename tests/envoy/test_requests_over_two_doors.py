"""A request whose attempts another process of the door serves: blamed on nobody, its slots renewed where it is seen."""

from __future__ import annotations

from typing import Any

from policy_envoy import actions, events, registry
from policy_envoy.attempt import TABLE
from policy_envoy.flight import Flight, from_carried
from policy_envoy.listener import TABLE as LISTENER_TABLE
from policy_envoy.listener import Listener, Phase
from policy_envoy.options import DoorOptions
from policy_envoy.performing import Performer

from policy_service.generated.policy.v1 import permit_pb2
from tests.envoy.decisions import flight_of
from tests.envoy.test_attempt_stage import begun, head, of_kind, step
from tests.envoy.test_requests_under_way import FakeCalls, kinds


def answered(flight: Flight, details: str) -> Any:
    """The listener stage sees the head of the answer to one attempt."""
    event = events.ResponseHeaders(200, {":status": "200", "x-envoy-attempt-count": "1"}, True, 500.0, details)
    return step(LISTENER_TABLE, Listener(DoorOptions(), Phase.ROUTED, flight=flight), event)


def told(flight: Flight, details: str) -> list[tuple[str | None, int, bool]]:
    """Reports at the end of the listener stage."""
    (settle,) = of_kind(answered(flight, details), actions.Settle)
    return kinds(registry.settle(flight, 500.0, settle.details, is_client_gone=False, attempts=settle.attempts))


def test_an_answer_that_another_door_has_seen_is_no_network_error() -> None:
    assert told(flight_of("a"), "via_upstream") == []
    assert told(flight_of("a"), "upstream_reset_before_response_started{x}") == [("network_error", 0, True)]


def test_the_slot_of_an_answer_that_another_door_has_seen_is_not_given_back_here() -> None:
    flight = flight_of("a", permits=["p1"])
    assert of_kind(answered(flight, "via_upstream"), actions.Release) == []
    assert flight.permit_ids == (), "nor renewed"


def test_the_door_that_serves_the_attempt_renews_its_slot() -> None:
    carried = from_carried(flight_of("a", permits=["p1"]).carried(), 5.0)
    assert carried is not None
    (hold,) = of_kind(begun(carried), actions.Hold)
    assert hold.flight is carried
    assert of_kind(step(TABLE, begun(carried).state, head(200)), actions.Success) == [], "at its end"


def test_attempts_that_another_door_has_reported_are_no_network_errors_of_the_one_that_goes_on() -> None:
    home = flight_of("a", "b", "c")
    registry.begin(home, 1, 100.0)  # and answered with an error, which was reported there
    third = from_carried(home.carried(), 200.0)
    assert third is not None
    assert kinds(registry.begin(third, 3, 200.0)) == [("network_error", 1, False)], "nobody saw the second"


class Answers(FakeCalls):
    """RenewPermit answers with these results; what happens meanwhile is the test's."""

    def __init__(self, *results: permit_pb2.PermitResult) -> None:
        super().__init__()
        self.results = results
        self.meanwhile: Any = lambda: None

    async def renew(self, request: permit_pb2.RenewPermitRequest) -> permit_pb2.RenewPermitResponse:
        await super().renew(request)
        self.meanwhile()
        return permit_pb2.RenewPermitResponse(results=self.results)


ENDED = permit_pb2.PermitResult(permit_id="p1", already_ended=True)
HELD = permit_pb2.PermitResult(permit_id="p2", expires_at_unix_ms=9)


async def renewed(calls: Answers, flight: Flight) -> tuple[str, ...]:
    """Permits that are renewed further after one round."""
    performer = Performer(calls, lambda: 0.0)
    performer.flights.hold(flight, 0.0)
    await performer._keep_alive(flight)
    return tuple(name for due in performer.flights.due(1e9) for name in due.permit_ids)


async def test_what_another_door_has_ended_is_not_renewed_for_ever() -> None:
    assert await renewed(Answers(ENDED), flight_of("a", permits=["p1"])) == ()
    assert await renewed(Answers(ENDED, HELD), flight_of("a", permits=["p1", "p2"])) == ("p1", "p2")


async def test_slots_taken_while_the_old_ones_are_found_ended_are_renewed() -> None:
    calls, flight = Answers(ENDED), flight_of("a", permits=["p1"])
    calls.meanwhile = lambda: setattr(flight, "permit_ids", ("p3",))
    assert await renewed(calls, flight) == ("p3",)
