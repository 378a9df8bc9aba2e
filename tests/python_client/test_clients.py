"""Both clients on the scripted policy: the whole loop, cancel, leases, what is done while the service is away."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from policy_client import (
    Answer,
    Attempt,
    AwayPolicy,
    Budget,
    FailMode,
    LeaseLostError,
    NoTargetError,
    OverloadedError,
    RefusedWhileAwayError,
    ServiceError,
    UnavailableError,
    Wanted,
    answered,
    messages,
    pool,
    streaming,
)
from policy_client.connection import METHODS
from policy_client.core import Sources
from policy_client.leasing import Held
from policy_client.outcomes import http
from policy_client.testing import ScriptedPolicy

BOTH = pool("openai/main/gpt", "openai/spare/gpt")


class Upstream:
    """Answers by connection; the last status is given again."""

    def __init__(self, **statuses: int | list[int]) -> None:
        self._statuses = {name: [each] if isinstance(each, int) else each for name, each in statuses.items()}
        self.called: list[str] = []

    def __call__(self, attempt: Attempt) -> Answer[str]:
        name = attempt.target.connection
        self.called.append(name)
        left = self._statuses[name]
        status = left.pop(0) if len(left) > 1 else left[0]
        return answered(name, status, {"retry-after": "60"} if status == 429 else {}, b"{}")

    async def later(self, attempt: Attempt) -> Answer[str]:
        return self(attempt)


class Either:
    """One test body for both clients."""

    def __init__(self, policy: ScriptedPolicy, *, is_async: bool, away: AwayPolicy | None = None) -> None:
        self._policy = policy
        self._is_async = is_async
        self._away = away

    def run(self, upstream: Upstream, asked: Any = BOTH, budget: Budget | None = None, times: int = 1) -> list[Any]:
        """Values or errors of several requests one after the other."""
        if self._is_async:
            return asyncio.run(self._later(upstream, asked, budget, times))
        with self._policy.client(self._away) as client:
            return [_value(lambda: client.run(asked, upstream, budget)) for _ in range(times)]

    async def _later(self, upstream: Upstream, asked: Any, budget: Budget | None, times: int) -> list[Any]:
        found: list[Any] = []
        async with self._policy.async_client(self._away) as client:
            for _ in range(times):
                try:
                    found.append((await client.run(asked, upstream.later, budget)).value)
                except Exception as error:
                    found.append(error)
                await client.settle()
        return found


def _value(run: Callable[[], Any]) -> Any:
    try:
        return run().value
    except Exception as error:
        return error


@pytest.fixture(params=[False, True], ids=["blocking", "asyncio"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def either(scripted: ScriptedPolicy, is_async: bool) -> Either:
    return Either(scripted, is_async=is_async)


# --- the loop ---------------------------------------------------------------------------------------------------
def test_a_request_fails_over_and_every_attempt_is_reported(either: Either, scripted: ScriptedPolicy) -> None:
    upstream = Upstream(main=503, spare=200)
    assert either.run(upstream) == ["spare"]
    assert upstream.called == ["main", "spare"]
    assert [(each.attempt, each.http_status, each.final) for each in scripted.reports] == [
        (0, 503, False),
        (1, 200, True),
    ]


def test_a_wait_is_waited_and_the_request_asked_again(either: Either, scripted: ScriptedPolicy) -> None:
    scripted.will_wait(20)
    began = time.monotonic()
    assert either.run(Upstream(main=200)) == ["main"]
    assert time.monotonic() - began >= 0.02
    assert len({each.request_id for each in scripted.selections}) == 1


def test_a_wait_beyond_the_budget_is_not_waited(either: Either, scripted: ScriptedPolicy) -> None:
    scripted.will_wait(60_000)
    (error,) = either.run(Upstream(main=200), budget=Budget(wait_ms=100))
    assert isinstance(error, NoTargetError)
    assert error.retry_after_ms == 60_000


def test_an_exception_of_ours_is_raised_as_it_is(either: Either, scripted: ScriptedPolicy) -> None:
    (error,) = either.run(Upstream(other=200))
    assert isinstance(error, KeyError)
    assert scripted.reports[0].WhichOneof("outcome") == "local_fault"


def test_a_report_that_the_service_refuses_for_good_does_not_fail_the_request(
    either: Either, scripted: ScriptedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(request: object) -> None:
        raise ServiceError("altered", "DECISION_TOKEN_INVALID", "INVALID_ARGUMENT")

    monkeypatch.setattr(scripted, "_by_status", refuses)
    assert either.run(Upstream(main=503, spare=200)) == ["spare"]


def test_a_report_that_the_service_has_no_room_for_is_kept_and_sent_again(
    scripted: ScriptedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(request: object) -> None:
        raise OverloadedError("the spool is full", "SPOOL_FULL", "RESOURCE_EXHAUSTED")

    now = [0]
    with scripted.client(sources=Sources(now=lambda: now[0])) as client:
        with monkeypatch.context() as patched:
            patched.setattr(scripted, "_by_status", is_full)
            assert client.run(BOTH, Upstream(main=503, spare=200)).value == "spare"
        assert (client.kept_reports, client.is_away) == (2, False)
        now[0] = 1_000
        client.select(BOTH)
        _eventually(lambda: client.kept_reports == 0)
    assert [each.http_status for each in scripted.reports[-2:]] == [503, 200]


def _eventually(holds: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < ends_at
        time.sleep(0.005)


# --- cancel -----------------------------------------------------------------------------------------------------
async def test_a_cancelled_task_reports_and_frees(scripted: ScriptedPolicy) -> None:
    async def call(attempt: Attempt) -> Answer[str]:
        await asyncio.sleep(30)
        raise AssertionError("not reached")

    async with scripted.async_client() as client:
        task = asyncio.create_task(client.run(BOTH, call))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [(each.WhichOneof("outcome"), each.final) for each in scripted.reports] == [("client_cancelled", True)]


async def test_a_cancel_in_a_wait_withdraws_the_request(scripted: ScriptedPolicy) -> None:
    scripted.will_wait(30_000)
    async with scripted.async_client() as client:
        task = asyncio.create_task(client.run(BOTH, Upstream(main=200).later))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert scripted.calls == ["SelectTarget", "CancelPermit"]


def test_an_interrupt_of_a_blocking_call_reports_a_cancel(scripted: ScriptedPolicy) -> None:
    def call(attempt: Attempt) -> Answer[str]:
        raise KeyboardInterrupt

    with scripted.client() as client, pytest.raises(KeyboardInterrupt):
        client.run(BOTH, call)
    assert [each.WhichOneof("outcome") for each in scripted.reports] == ["client_cancelled"]


async def test_an_attempt_that_takes_too_long_is_ended_and_goes_elsewhere(scripted: ScriptedPolicy) -> None:
    async def call(attempt: Attempt) -> Answer[str]:
        await asyncio.sleep(0 if attempt.number else 30)
        return answered(attempt.target.connection, 200)

    async with scripted.async_client() as client:
        assert (await client.run(BOTH, call, Budget(attempt_ms=20))).value == "spare"
    assert scripted.reports[0].network_error == messages.NetworkErrorKind.Value("NETWORK_ERROR_KIND_READ_TIMEOUT")


# --- streams ----------------------------------------------------------------------------------------------------
async def test_the_end_of_a_stream_is_told_once_with_its_own_outcome(scripted: ScriptedPolicy) -> None:
    async def call(attempt: Attempt) -> Answer[str]:
        return streaming("open")

    async with scripted.async_client() as client:
        result = await client.run(BOTH, call)
        assert scripted.reports == []
        await client.complete(result, http(502))
        await client.settle()
        plain = await client.run(BOTH, Upstream(main=200).later)
        with pytest.raises(ValueError, match="no open stream"):
            await client.complete(plain, http(200))
    assert [(each.http_status, each.final) for each in scripted.reports] == [(502, True), (200, True)]


# --- without the service ----------------------------------------------------------------------------------------
def test_a_pool_that_was_served_goes_on_in_its_last_order_and_is_reported_later(
    scripted: ScriptedPolicy, is_async: bool
) -> None:
    scripted.will_dispatch("openai/spare/gpt", "openai/main/gpt")

    class Leaving(Upstream):
        def __call__(self, attempt: Attempt) -> Answer[str]:
            answer = super().__call__(attempt)
            scripted.is_away = len(self.called) in (1, 2)
            return answer

    upstream = Leaving(main=200, spare=[200, 503, 200])
    either = Either(scripted, is_async=is_async)
    values = either.run(upstream, times=2)
    assert values == ["spare", "main"]
    assert upstream.called == ["spare", "spare", "main"]


def test_a_target_that_must_not_be_used_without_the_service_is_not(scripted: ScriptedPolicy, is_async: bool) -> None:
    scripted.will_dispatch("openai/main/gpt", "openai/spare/gpt", no_fail_open=True)
    upstream = _goes_away_after_the_first(scripted, main=200, spare=200)
    assert Either(scripted, is_async=is_async).run(upstream, times=2) == ["main", "spare"]


def test_only_targets_that_must_not_be_used_are_known_refuses(scripted: ScriptedPolicy, is_async: bool) -> None:
    scripted.will_dispatch("openai/main/gpt", no_fail_open=True)
    upstream = _goes_away_after_the_first(scripted, main=200)
    values = Either(scripted, is_async=is_async).run(upstream, times=2)
    assert isinstance(values[1], RefusedWhileAwayError)
    assert upstream.called == ["main"]


def test_fail_closed_refuses(scripted: ScriptedPolicy, is_async: bool) -> None:
    upstream = _goes_away_after_the_first(scripted, main=200)
    either = Either(scripted, is_async=is_async, away=AwayPolicy(FailMode.CLOSED))
    assert isinstance(either.run(upstream, times=2)[1], RefusedWhileAwayError)


def test_a_request_with_a_lease_is_never_served_without_the_service(scripted: ScriptedPolicy, is_async: bool) -> None:
    asked = messages.SelectTargetRequest(lease=messages.LeaseContext(owner="vlo_x", generation=1))
    asked.MergeFrom(BOTH)
    upstream = _goes_away_after_the_first(scripted, main=200, spare=200)
    either = Either(scripted, is_async=is_async, away=AwayPolicy(trusts_candidates=True))
    assert isinstance(either.run(upstream, asked, times=2)[1], RefusedWhileAwayError)


def test_a_pool_that_was_never_heard_of_is_used_only_where_the_caller_vouches_for_it(
    scripted: ScriptedPolicy, is_async: bool
) -> None:
    scripted.is_away = True
    (refused,) = Either(scripted, is_async=is_async).run(Upstream(main=200))
    vouching = Either(scripted, is_async=is_async, away=AwayPolicy(trusts_candidates=True))
    assert isinstance(refused, RefusedWhileAwayError)
    assert vouching.run(Upstream(main=200)) == ["main"]


def test_an_answer_of_the_service_is_not_its_absence(either: Either, scripted: ScriptedPolicy) -> None:
    scripted.will_dispatch("openai/main/gpt").will_fail(UnavailableError("away", "STORE_UNAVAILABLE", "UNAVAILABLE"))
    values = either.run(Upstream(main=200), times=2)
    assert values[0] == "main"
    assert isinstance(values[1], UnavailableError)


def _goes_away_after_the_first(scripted: ScriptedPolicy, **statuses: int) -> Upstream:
    class Leaving(Upstream):
        def __call__(self, attempt: Attempt) -> Answer[str]:
            threading.Timer(0, lambda: setattr(scripted, "is_away", True)).start()
            return super().__call__(attempt)

    return Leaving(**statuses)


async def test_kept_reports_are_sent_when_the_service_is_back_with_their_age(scripted: ScriptedPolicy) -> None:
    async with scripted.async_client() as client:
        upstream = Upstream(main=[200, 503], spare=200)
        await client.run(BOTH, upstream.later)
        await client.settle()
        scripted.is_away = True
        assert (await client.run(BOTH, upstream.later)).value == "spare"
        await client.settle()
        assert (client.is_away, client.kept_reports) == (True, 2)
        scripted.is_away = False
        async with asyncio.timeout(5):
            while client.kept_reports or client.is_away:
                await asyncio.sleep(0.01)
    late = scripted.reports[1:]
    assert [(each.target.connection, each.http_status) for each in late] == [("main", 503), ("spare", 200)]
    assert all(each.report_id and each.elapsed_ms >= 0 and not each.decision_token for each in late)


# --- leases -----------------------------------------------------------------------------------------------------
WANTED = Wanted("gpt", caller_id="agent", ttl_ms=90)


async def test_a_lease_is_renewed_while_it_is_held_and_released_at_its_end(scripted: ScriptedPolicy) -> None:
    async with scripted.async_client() as client:
        async with client.lease(WANTED) as lease:
            await asyncio.sleep(0.3)
            assert not lease.is_lost
            assert lease.context.generation == 1
        await client.settle()
    assert scripted.calls.count("RenewLease") >= 2
    assert scripted.calls[-1] == "ReleaseLease"


async def test_an_exception_is_no_loss_of_a_lease(scripted: ScriptedPolicy) -> None:
    async with scripted.async_client() as client, client.lease(Wanted("gpt", "agent", ttl_ms=3_000)) as lease:
        lease.update(_due_now(lease.held))
        scripted.is_away = True
        await asyncio.sleep(0.05)
        assert not lease.is_lost
        scripted.is_away = False


def _due_now(held: Held) -> Held:
    return replace(held, renew_at=0)


async def test_no_is_a_loss_and_nothing_is_dispatched_any_more(scripted: ScriptedPolicy) -> None:
    async with scripted.async_client() as client, client.lease(WANTED) as lease:
        scripted.lease_lost = "LEASE_FENCE_STALE"
        async with asyncio.timeout(5):
            assert await lease.wait_lost() == "LEASE_FENCE_STALE"
        with pytest.raises(LeaseLostError, match="LEASE_FENCE_STALE"):
            _ = lease.context


def test_the_blocking_client_renews_loses_and_releases(scripted: ScriptedPolicy) -> None:
    with scripted.client() as client:
        with client.lease(WANTED) as lease:
            time.sleep(0.15)
            assert not lease.is_lost
        assert scripted.calls[-1] == "ReleaseLease"
        with client.lease(WANTED) as lease:
            scripted.lease_lost = "LEASE_REQUIRED"
            assert lease.wait_lost(5) == "LEASE_REQUIRED"
    assert scripted.calls.count("RenewLease") >= 2


# --- the fake ---------------------------------------------------------------------------------------------------
def test_the_fake_answers_every_call_that_the_clients_make(scripted: ScriptedPolicy) -> None:
    least = {
        "SelectTarget": messages.SelectTargetRequest(route="r"),
        "ReportOutcome": messages.ReportOutcomeRequest(report_id="r", http_status=200),
    }
    for method in METHODS:
        assert isinstance(scripted.answer(method, least.get(method.name, method.request())), method.response)
