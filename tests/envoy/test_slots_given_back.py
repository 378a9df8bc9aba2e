"""Slots of a decision whose next attempt never came were renewed for ever: they go back with the end of the request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from policy_envoy import actions, events, listener, registry
from policy_envoy.attempt import TABLE
from policy_envoy.flight import Flight
from policy_envoy.options import DoorOptions

from policy_service.generated.policy.v1 import policy_pb2
from tests.envoy.decisions import flight_of, judged
from tests.envoy.test_attempt_stage import begun, failed, head, of_kind, step
from tests.envoy.upstreams import Answer, hangs
from tests.envoy.world import Gateway, gateway

LEFT = events.Closed(500.0)


async def breaks_later(request: web.Request) -> web.StreamResponse:
    """No answer: the connection ends after a while."""
    await asyncio.sleep(0.6)
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def status_of(world: Gateway) -> int:
    async with world.post() as answer:
        status: int = answer.status
        return status


async def test_a_slot_is_back_where_the_next_account_has_none_left_after_a_broken_connection(
    tmp_path: Path, embedded_url: str
) -> None:
    capped = {"connections": {name: {"max_concurrent": 1} for name in ("openai-one", "mistral-two")}}
    scripts: dict[str, list[Answer]] = {"openai-one": [breaks_later], "mistral-two": [hangs(5)]}
    async with gateway(tmp_path, embedded_url, scripts, catalogue=capped) as world:
        first = asyncio.create_task(status_of(world))
        await asyncio.sleep(0.3)
        second = asyncio.create_task(status_of(world))  # takes the slot that the first one would fall back to
        assert await first == 503
        second.cancel()
        await world.free_of_permits()


# --- the stages -------------------------------------------------------------------------------------------------
def held() -> Flight:
    return flight_of("a", "b", permits=["p1"])


def retried(flight: Flight) -> None:
    """The first attempt has failed, and the same account may be tried again."""
    again = policy_pb2.ACTION_KIND_RETRY_SAME
    step(TABLE, failed(flight).state, events.Judged(judged(again)))


def refused(flight: Flight) -> None:
    """The first attempt has failed on the way, and the second is not allowed."""
    sent = begun(flight)
    flight.begun = 1
    for action in of_kind(step(TABLE, sent.state, events.Closed(200.0)), actions.Unanswered):
        registry.unanswered(flight, action.step, action.dispatched_ms, 200.0)
    found = begun(flight, 2, "b")
    registry.begin(flight, 2, 300.0)
    step(TABLE, found.state, events.Refused("QUEUE_FULL", 429, "no slot"))


def ended(flight: Flight, event: Any) -> list[bytes]:
    """Tokens of the decisions that the listener stage gives back with this event."""
    state = listener.Listener(DoorOptions(), listener.Phase.ROUTED, flight=flight)
    return [each.request.decision_token for each in of_kind(step(listener.TABLE, state, event), actions.Release)]


def answered(attempts: int) -> events.ResponseHeaders:
    """Head of the last answer."""
    headers = {":status": "503", "x-envoy-attempt-count": str(attempts)}
    return events.ResponseHeaders(503, headers, True, 500.0, "via_upstream")


@pytest.mark.parametrize("event", [LEFT, answered(2)], ids=["left", "answered"])
def test_a_refused_second_attempt_keeps_no_slot_of_the_first(event: Any) -> None:
    flight = held()
    refused(flight)
    assert ended(flight, event) == [b"t1"]
    assert flight.permit_ids == (), "nothing is renewed any more"


@pytest.mark.parametrize("event", [LEFT, answered(1)], ids=["left", "answered"])
def test_a_retry_that_never_begins_keeps_no_slot(event: Any) -> None:
    flight = held()
    retried(flight)
    flight.begun = 1
    assert flight.permit_ids == ("p1",)
    assert ended(flight, event) == [b"t1"]


@pytest.mark.parametrize("event", [LEFT, answered(1)], ids=["left", "answered"])
def test_an_attempt_under_way_keeps_its_slot_until_its_own_end(event: Any) -> None:
    flight = held()
    opened = step(TABLE, begun(flight).state, head(200))
    flight.begun = 1
    assert ended(flight, event) == []
    step(TABLE, opened.state, LEFT)
    assert flight.under_way == 0


def test_what_failed_on_the_way_is_given_back_by_its_last_report() -> None:
    unseen, noted = held(), held()
    assert ended(unseen, answered(1)) == []
    assert [report.final for report in registry.settle(unseen, 500.0, "", is_client_gone=False, attempts=1)] == [True]
    step(TABLE, begun(noted).state, LEFT)
    noted.begun = 1
    noted.unanswered = ((noted.steps[0], 100.0),)
    assert ended(noted, LEFT) == []
