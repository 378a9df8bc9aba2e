"""Withdrawals and releases that met a deadline of the transport were forgotten: after a burst of cancelled requests two
of four slots stayed taken for two minutes, though nobody held them. Reports were kept; grants were not.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from policy_client import (
    Answer,
    Attempt,
    Budget,
    FenceError,
    NoTargetError,
    Wanted,
    answered,
    messages,
    pool,
    streaming,
)
from policy_client._generated.policy.v1 import permit_pb2
from policy_client.away import Presence
from policy_client.backlog import RETURNS_MS
from policy_client.connection import Method
from policy_client.core import Sources
from policy_client.errors import PolicyClientError, ServiceAwayError
from policy_client.testing import ScriptedPolicy
from tests.python_client.test_clients import Upstream, _eventually

BOTH = pool("openai/main/gpt", "openai/spare/gpt")
GIVING_BACK = {"ReleasePermit", "CancelPermit", "ReleaseLease"}


class Slow(ScriptedPolicy):
    """Does not answer in time when something is given back, until told otherwise."""

    def __init__(self, error: PolicyClientError | None = None) -> None:
        super().__init__()
        self.error: PolicyClientError | None = error or ServiceAwayError("late", "DEADLINE_EXCEEDED")
        self.failed: list[str] = []

    def answer(self, method: Method[Any, Any], request: Any) -> Any:
        if method.name in GIVING_BACK and self.error is not None:
            self.failed.append(method.name)
            raise self.error
        return super().answer(method, request)

    def recovers(self) -> None:
        self.error = None


def in_line() -> Slow:
    """A policy whose next answer is a place in line, too far behind."""
    policy = Slow()
    policy._will(messages.SelectTargetResponse(wait=messages.Wait(wait_ms=60_000, ticket=7)))
    return policy


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.005)


def test_a_place_in_line_is_given_back_by_the_blocking_client_until_it_is_heard() -> None:
    policy = in_line()
    with policy.client() as client:
        with pytest.raises(NoTargetError):
            client.run(BOTH, Upstream(main=200), Budget(wait_ms=0))
        _eventually(lambda: len(policy.failed) > 1)
        policy.recovers()
        _eventually(lambda: "CancelPermit" in policy.calls)


async def test_a_place_in_line_is_given_back_by_the_asyncio_client_until_it_is_heard() -> None:
    policy = in_line()
    async with policy.async_client() as client:
        with pytest.raises(NoTargetError):
            await client.run(BOTH, Upstream(main=200).later, Budget(wait_ms=0))
        await until(lambda: len(policy.failed) > 1)
        policy.recovers()
        await until(lambda: "CancelPermit" in policy.calls)


async def test_a_lease_is_given_back_until_it_is_heard() -> None:
    policy = Slow()
    async with policy.async_client() as client:
        async with client.lease(Wanted("gpt", caller_id="agent")):
            pass
        await until(lambda: len(policy.failed) > 1)
        policy.recovers()
        await until(lambda: "ReleaseLease" in policy.calls)


def test_a_lease_of_the_blocking_client_is_given_back_until_it_is_heard() -> None:
    policy = Slow()
    with policy.client() as client:
        with client.lease(Wanted("gpt", caller_id="agent")):
            pass
        _eventually(lambda: len(policy.failed) > 1)
        policy.recovers()
        _eventually(lambda: "ReleaseLease" in policy.calls)


def test_a_grant_that_the_service_does_not_know_is_not_given_back_again() -> None:
    policy = Slow(FenceError("over", "LEASE_REQUIRED", "FAILED_PRECONDITION"))
    with policy.client() as client, client.lease(Wanted("gpt", caller_id="agent")):
        pass
    assert policy.failed == ["ReleaseLease"]


def test_a_grant_that_has_ended_by_itself_is_not_given_back() -> None:
    policy, now = Slow(), [0]
    with policy.client(sources=Sources(now=lambda: now[0])) as client:
        client._core.keep(permit_pb2.CancelPermitRequest(request_id="old"))
        now[0] = RETURNS_MS
        client.flush()
    assert policy.failed == []


# --- selections whose answer came too late ----------------------------------------------------------------------
class Late(ScriptedPolicy):
    """Hears selections, and answers them after their deadline, until it recovers. A fault for tests."""

    def __init__(self, *errors: ServiceAwayError) -> None:
        super().__init__()
        self.errors = [*errors]
        self.unanswered: list[str] = []
        self.withdrawn: list[str] = []

    def answer(self, method: Method[Any, Any], request: Any) -> Any:
        if method.name == "SelectTarget" and self.errors:
            self.unanswered.append(request.request_id)
            raise self.errors.pop(0)
        if method.name == "CancelPermit":
            self.withdrawn.append(request.request_id)
        return super().answer(method, request)


LATE = ServiceAwayError("late", "DEADLINE_EXCEEDED")
NOT_REACHED = ServiceAwayError("UNAVAILABLE: failed to connect to all addresses; last error: refused")
LOST = ServiceAwayError("UNAVAILABLE: Socket closed")


def test_a_selection_whose_deadline_passed_is_withdrawn_by_the_blocking_client() -> None:
    policy = Late(LATE)
    with policy.client() as client:
        with pytest.raises(ServiceAwayError):
            client.run(BOTH, Upstream(main=200))
        _eventually(lambda: bool(policy.withdrawn))
    assert policy.withdrawn == policy.unanswered


async def test_a_selection_whose_deadline_passed_is_withdrawn_by_the_asyncio_client() -> None:
    policy = Late(LATE)
    async with policy.async_client() as client:
        with pytest.raises(ServiceAwayError):
            await client.run(BOTH, Upstream(main=200).later)
        await until(lambda: bool(policy.withdrawn))
    assert policy.withdrawn == policy.unanswered


def test_a_service_that_was_not_reached_is_owed_nothing() -> None:
    """Requests that nobody heard would have filled the list of grants to give back."""
    policy = Late(NOT_REACHED, LOST)
    client = policy.client()
    client._core.presence = Presence()  # does not look for the service by itself
    for _ in range(2):
        with pytest.raises(ServiceAwayError):
            client.run(BOTH, Upstream(main=200))
    assert [each.request.request_id for each in client._core.returns.take(0)] == policy.unanswered[1:]
    client.close()


# --- streams that nobody completes ------------------------------------------------------------------------------
def streams(attempt: Attempt) -> Answer[str]:
    return streaming("open")


async def streams_later(attempt: Attempt) -> Answer[str]:
    return streaming("open")


def test_a_stream_that_nobody_can_complete_any_more_gives_its_slot_back(scripted: ScriptedPolicy) -> None:
    scripted.will_dispatch("openai/main/gpt", permits=[_short_lived()])
    with scripted.client() as client:
        result = client.run(BOTH, streams)
        _eventually(lambda: "RenewPermit" in scripted.calls)
        assert scripted.reports == []
        del result
        gc.collect()
        _eventually(lambda: bool(scripted.reports))
        _eventually(lambda: not renewing_threads())
    assert [each.WhichOneof("outcome") for each in scripted.reports] == ["client_cancelled"]


async def test_a_stream_that_no_task_can_complete_any_more_gives_its_slot_back(scripted: ScriptedPolicy) -> None:
    scripted.will_dispatch("openai/main/gpt", permits=[_short_lived()])
    async with scripted.async_client() as client:
        await client.run(BOTH, streams_later)
        gc.collect()
        await until(lambda: bool(scripted.reports))
    assert [each.WhichOneof("outcome") for each in scripted.reports] == ["client_cancelled"]


def test_a_stream_of_a_second_decision_leaves_no_renewals_of_the_first(scripted: ScriptedPolicy) -> None:
    for name in ("main", "spare"):
        scripted.will_dispatch(f"openai/{name}/gpt", permits=[_short_lived()])

    def second_streams(attempt: Attempt) -> Answer[str]:
        return answered("", 503) if attempt.target.connection == "main" else streaming("open")

    with scripted.client() as client:
        result = client.run(BOTH, second_streams)
        _eventually(lambda: len(renewing_threads()) == 1)
        client.complete(result, result.outcome)


def _short_lived() -> permit_pb2.Permit:
    return permit_pb2.Permit(kind=permit_pb2.PERMIT_KIND_CONCURRENCY, expires_at_unix_ms=300)


def renewing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "policy-client"]
