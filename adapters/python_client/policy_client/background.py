"""Threads of the blocking client: work that goes on beside a call, and can be told to stop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Condition, Event, Thread

from policy_client.errors import PolicyClientError

log = logging.getLogger("policy_client")

Work = Callable[[Event], None]
"""Runs until it is done or the event is set."""


class Background:
    """One daemon thread. `cancel` does not wait for it."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._stopped = Event()
        self._thread = Thread(target=self._run, daemon=True, name="policy-client")
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def cancel(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        try:
            self._work(self._stopped)
        except PolicyClientError as error:
            log.info("not done: %s", error)
        except Exception:
            log.exception("a thread of the policy client failed")


class Pending:
    """Counts what was sent and not answered yet."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = Condition()

    def add(self) -> None:
        with self._changed:
            self._count += 1

    def done(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is pending; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count == 0, timeout_s)
