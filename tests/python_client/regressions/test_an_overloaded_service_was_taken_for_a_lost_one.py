"""A service that answered others was taken for lost where its health check took longer than 15 ms: the client went on
without it, past every cooldown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from policy_client import Connection, ServiceAwayError
from policy_client.wire import GrpcRpc
from policy_client.wire_async import GrpcAsyncRpc, _Look

SILENCE_MS = 20
LATE = 6


class Pending:
    """A call whose answer comes late; `meanwhile` happens before each look."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self.meanwhile = meanwhile
        self.looks = 0
        self.is_cancelled = False

    def result(self, wait_s: float) -> str:
        assert wait_s <= SILENCE_MS / 1000, "looked after closely"
        self.looks += 1
        self.meanwhile()
        if self.looks < LATE:
            raise grpc.FutureTimeoutError
        return "answer"

    def cancel(self) -> None:
        self.is_cancelled = True


def blocking(monkeypatch: pytest.MonkeyPatch, health: Callable[[GrpcRpc], bool]) -> GrpcRpc:
    rpc = GrpcRpc(Connection("127.0.0.1:1"))
    monkeypatch.setattr(rpc, "_answers", lambda timeout_ms: health(rpc))
    return rpc


def asked(rpc: GrpcRpc) -> bool:
    raise AssertionError("no health check while others are answered")


def test_a_service_that_answers_others_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rpc = blocking(monkeypatch, asked)
    assert rpc._heard(Pending(rpc._note_answer), SILENCE_MS) == "answer"
    rpc.close()


def test_an_answer_during_the_health_check_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def unanswered(rpc: GrpcRpc) -> bool:
        rpc._note_answer()
        return False

    rpc = blocking(monkeypatch, unanswered)
    old = iter(range(1, 100))
    monkeypatch.setattr(rpc, "_silent_ms", lambda since: SILENCE_MS if next(old) % 2 else 0)
    assert rpc._heard(Pending(lambda: None), SILENCE_MS) == "answer"
    rpc.close()


def test_a_service_that_answers_nobody_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    rpc = blocking(monkeypatch, lambda rpc: False)
    monkeypatch.setattr(rpc, "_silent_ms", lambda since: SILENCE_MS)
    pending = Pending(lambda: None)
    with pytest.raises(ServiceAwayError):
        rpc._heard(pending, SILENCE_MS)
    assert pending.is_cancelled
    rpc.close()


class Rpc(GrpcAsyncRpc):
    """Health checks get no answer; how long nothing was heard is what the test says."""

    def __init__(self, *silences: float) -> None:
        super().__init__(Connection("127.0.0.1:1"))
        self.silences = list(silences)
        self.checks = 0

    def silent_ms(self, since: float) -> float:
        return self.silences.pop(0) if len(self.silences) > 1 else self.silences[0]

    async def answers(self, timeout_ms: int) -> bool:
        self.checks += 1
        return False


async def looked(rpc: Rpc) -> tuple[int, bool]:
    """Health checks of a call until it is given up, or half a second; and whether it is."""
    given_up = asyncio.Event()
    pending: Any = Pending(lambda: None)
    pending.cancel = given_up.set
    look = _Look(rpc, pending, 1)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(given_up.wait(), 0.5)
    look.stop()
    return rpc.checks, look.found_silence


async def test_asyncio_waits_for_a_service_that_answers_others() -> None:
    assert await looked(Rpc(0.5)) == (0, False)


async def test_asyncio_gives_up_on_a_service_that_answers_nobody_any_more() -> None:
    assert await looked(Rpc(0.5, 0.5, 1, 1)) == (1, True)


async def test_asyncio_counts_an_answer_during_the_health_check() -> None:
    checks, is_given_up = await looked(Rpc(1, 0, 1, 0, 0))
    assert (checks, is_given_up) == (2, False)
