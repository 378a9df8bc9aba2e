"""SIGTERM in the pause before a lost worker was started again: the new worker never heard of it and ran for ever.
Workers that were lost all together could end the service instead of being started again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from policy_service.cli import exit_codes, serve
from policy_service.settings.server import ServerConfig

KILLED = -signal.SIGKILL


class Worker:
    """A process that ends when the test says so or SIGTERM comes."""

    def __init__(self, pid: int, exitcode: int | None = None) -> None:
        self.pid, self.exitcode = pid, exitcode

    def start(self) -> None:
        return None

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float) -> None:
        return None


class Started:
    """Stands for the multiprocessing context: the first workers are lost at once, later ones run."""

    def __init__(self, lost: int, then: Callable[[], None] = lambda: None) -> None:
        self.workers: list[Worker] = []
        self._lost, self._then = lost, then

    def Process(self, **given: object) -> Worker:  # noqa: N802, as multiprocessing has it
        worker = Worker(1 + len(self.workers), KILLED if len(self.workers) < self._lost else None)
        self.workers.append(worker)
        if len(self.workers) > self._lost:
            self._then()
        return worker

    def kill(self, pid: int, number: int) -> None:
        self.workers[pid - 1].exitcode = 0


def parent(monkeypatch: pytest.MonkeyPatch, started: Started, pause: Callable[[float], None]) -> serve._Parent:
    made = serve._Parent(ServerConfig(workers=2), {})
    monkeypatch.setattr(made, "_context", started)
    monkeypatch.setattr(os, "kill", started.kill)
    monkeypatch.setattr(time, "sleep", pause)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    return made


def test_no_worker_is_started_after_the_signal_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(lost=1)
    made = parent(monkeypatch, started, lambda _: made._end(signal.SIGTERM, None))
    assert made.run() == exit_codes.OK
    assert [worker.exitcode for worker in started.workers] == [KILLED, 0]


def test_a_worker_that_was_just_being_started_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(lost=0, then=lambda: made._end(signal.SIGTERM, None))
    made = parent(monkeypatch, started, lambda _: None)
    assert made.run() == exit_codes.OK
    assert [worker.exitcode for worker in started.workers] == [0]


def test_workers_that_are_lost_together_are_all_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    started = Started(lost=2)
    made = parent(monkeypatch, started, pauses.append)

    def end_once_both_run(worker: Worker, timeout: float) -> None:
        if len(pauses) == 2:
            made._end(signal.SIGTERM, None)

    monkeypatch.setattr(Worker, "join", end_once_both_run)
    made.run()
    assert [worker.exitcode for worker in started.workers] == [KILLED, KILLED, 0, 0]
