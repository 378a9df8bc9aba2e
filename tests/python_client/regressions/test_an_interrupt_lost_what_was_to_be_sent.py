"""An interrupt between a step and the sending of what it left behind lost that: a slot stayed taken for its whole life,
a report was never sent. An interrupt of a selection left it running at the service.
"""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from policy_client import Connection, messages, pool, wire
from policy_client._generated.policy.v1 import permit_pb2
from policy_client.connection import SELECT
from policy_client.testing import ScriptedPolicy, _Blocking
from policy_client.wire import GrpcRpc
from tests.python_client.test_clients import Upstream

BOTH = pool("openai/main/gpt", "openai/spare/gpt")


class Interrupted(_Blocking):
    """The first call that is sent behind is interrupted."""

    is_interrupted = False

    def send(self, *arguments: Any) -> None:
        if not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt
        super().send(*arguments)


def test_a_slot_is_given_back_though_the_interrupt_came_before_it_was_sent(scripted: ScriptedPolicy) -> None:
    scripted.will_dispatch("openai/main/gpt", permits=[permit_pb2.Permit(kind=permit_pb2.PERMIT_KIND_CONCURRENCY)])
    scripted.will_judge(action=messages.Action(kind=messages.ACTION_KIND_WAIT_AND_SELECT, delay_ms=1))
    with scripted.client() as client:
        client._rpc = Interrupted(scripted)
        with pytest.raises(KeyboardInterrupt):
            client.run(BOTH, Upstream(main=503))
    assert "ReleasePermit" in scripted.calls


class Pending:
    """A call whose wait is interrupted."""

    is_cancelled = False

    def result(self, timeout: float | None = None) -> Any:
        raise KeyboardInterrupt

    def cancel(self) -> None:
        self.is_cancelled = True


class Channel:
    """Gives every call the same pending answer."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def unary_unary(self, *_: Any, **__: Any) -> Any:
        return self

    def future(self, *_: Any, **__: Any) -> Pending:
        return self._pending


def test_an_interrupted_selection_is_cancelled() -> None:
    pending = Pending()
    rpc = GrpcRpc(Connection(), Channel(pending))
    with pytest.raises(KeyboardInterrupt):
        rpc.call(SELECT, BOTH, 1_000, silence_ms=15)
    assert pending.is_cancelled


class Slow(Pending):
    """Answers once it was waited for three times."""

    def __init__(self) -> None:
        self.waits: list[float | None] = []

    def result(self, timeout: float | None = None) -> Any:
        self.waits.append(timeout)
        if len(self.waits) <= 3:
            raise grpc.FutureTimeoutError
        return "answered"


def test_a_selection_in_line_is_not_given_up_for_one_slow_look(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, looks = Slow(), list[int]()

    def answers(_: GrpcRpc, timeout_ms: int) -> bool:
        looks.append(timeout_ms)
        return True

    monkeypatch.setattr(GrpcRpc, "_answers", answers)
    monkeypatch.setattr(GrpcRpc, "_silent_ms", lambda _, since: 1_000)
    assert GrpcRpc(Connection(), Channel(slow)).call(SELECT, BOTH, 30_000, silence_ms=15) == "answered"
    assert looks == [15, wire.HEALTH_MS, wire.HEALTH_MS]
