"""What both clients share and neither waits for: what the service last said, if it is there, reports kept for later.

Turns answers and failures of the service into events of a `Journey`. No I/O; safe for threads.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet, ref

from policy_client import connection, messages, steps
from policy_client.away import AwayPolicy, FailMode, KnownOrders, Presence, local_order
from policy_client.backlog import Backlog, Kept, Owed, Returns
from policy_client.connection import Connection, Method
from policy_client.errors import (
    OverloadedError,
    PolicyClientError,
    RefusedWhileAwayError,
    ServiceAwayError,
    ServiceError,
    UnavailableError,
)
from policy_client.journey import Turn, begin
from policy_client.outcomes import Outcome, cancelled, put, timed
from policy_client.steps import Behind, BehindReport, Budget, OpenReport, Result

log = logging.getLogger("policy_client")

PASSING = (ServiceAwayError, OverloadedError, UnavailableError)
"""Failures of a call that may go well later; what it says is kept."""
FLUSH_MS = 1_000
"""Pause between two tries to send what a service that is there had no room for."""


def monotonic_ms() -> int:
    """The clock of a client."""
    return time.monotonic_ns() // 1_000_000


def new_id() -> str:
    """Id of a request."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Sources:
    """Where time and ids come from; tests give their own."""

    now: Callable[[], int] = monotonic_ms
    sleep: Callable[[float], None] = time.sleep
    """Of the blocking client, seconds."""
    new_id: Callable[[], str] = new_id


class Core:
    """State of one client.

    Args:
        where: deadlines of the calls.
        away: behaviour without the service.
        sources: time and ids.
        on_loss: called once when the service is lost.
    """

    def __init__(self, where: Connection, away: AwayPolicy, sources: Sources, on_loss: Callable[[], None]) -> None:
        self._where = where
        self._away = away
        self.sources = sources
        self.known = KnownOrders()
        self._on_loss = on_loss
        self._start_afresh()

    def _start_afresh(self) -> None:
        self.presence = Presence(self._on_loss)
        self.backlog = Backlog(self._away.kept_reports, self._away.kept_bytes)
        self.returns = Returns()
        self._flush_at = 0

    def after_fork(self) -> None:
        """In a forked process: what is kept is sent by the parent, and locks that were held stay so for ever."""
        self.known.unlock()
        self._start_afresh()

    def begin(self, asked: messages.SelectTargetRequest, budget: Budget) -> Turn[Any]:
        """Start a request."""
        return begin(asked, budget, self.sources.new_id(), self.sources.now())

    # -- selecting -------------------------------------------------------------------------------------
    def without_service(self, request: messages.SelectTargetRequest) -> steps.LocalOrder | steps.Failed | None:
        """The decision while the service is known to be away; None: ask it all the same, as nothing else is left."""
        if not self.presence.is_away or request.HasField("lease"):
            return None
        order = local_order(request, self._away, self.known)
        if order:
            return steps.LocalOrder(order)
        return steps.Failed(_refused()) if self._away.mode is FailMode.CLOSED else None

    def selected(
        self, request: messages.SelectTargetRequest, response: messages.SelectTargetResponse
    ) -> steps.Selected:
        """The service decided."""
        if response.HasField("dispatch"):
            self.known.learn(request, response.dispatch)
        return steps.Selected(response)

    def not_selected(
        self, request: messages.SelectTargetRequest, error: PolicyClientError
    ) -> steps.LocalOrder | steps.Failed:
        """SelectTarget failed; only a failure of the transport lets the client decide by itself."""
        if not isinstance(error, ServiceAwayError):
            return steps.Failed(error)
        may_hold = not error.was_not_reached
        order = local_order(request, self._away, self.known)
        return steps.LocalOrder(order, may_hold) if order else steps.Failed(_refused(error), may_hold)

    # -- sending behind --------------------------------------------------------------------------------
    def not_reported(self, request: messages.ReportOutcomeRequest, error: Exception) -> steps.ReportLost:
        """A report failed whose answer was awaited."""
        self.not_sent(BehindReport(request), error)
        return steps.ReportLost()

    def not_sent(self, behind: Behind, error: Exception) -> None:
        """Something sent behind failed: kept for later, unless the service refuses it for good."""
        if isinstance(error, PASSING):
            stated_ms = (error.retry_after_ms or 0) if isinstance(error, ServiceError) else 0
            self._flush_at = self.sources.now() + max(FLUSH_MS, stated_ms)
            self.keep(behind)
        elif isinstance(behind, BehindReport):
            log.warning("a report is not taken: %s", error)
        else:
            log.info("not given back: %s", error)

    def keep(self, behind: Behind) -> None:
        """Keep something for the next `flush`."""
        if isinstance(behind, BehindReport):
            self.backlog.keep(behind.request, behind.began_at)
        else:
            self.returns.keep(behind, self.sources.now())

    @property
    def has_kept(self) -> bool:
        """Whether something waits for a `flush`."""
        return bool(len(self.backlog) or len(self.returns))

    def is_time_to_flush(self) -> bool:
        """Whether what is kept is to be tried again, once in `FLUSH_MS`: the service may have room now."""
        now = self.sources.now()
        if not self.has_kept or self.presence.is_away or now < self._flush_at:
            return False
        self._flush_at = now + FLUSH_MS
        return True

    def owed(self) -> deque[Owed]:
        """Grants that are still to be given back, taken out."""
        return self.returns.take(self.sources.now())

    def closing(self) -> None:
        """The last word on what is kept."""
        if self.has_kept:
            log.warning("closed; not sent: reports %d, grants to give back %d", len(self.backlog), len(self.returns))

    def due(self) -> tuple[list[Kept], messages.ReportOutcomesRequest]:
        """The oldest kept reports, taken out, and the batch that sends them."""
        taken, now = self.backlog.take(), self.sources.now()
        return taken, messages.ReportOutcomesRequest(items=[each.due(now) for each in taken])

    def completion(self, result: Result[Any], outcome: Outcome) -> BehindReport:
        """The report that a stream owed.

        Raises:
            ValueError: the result owes none.
        """
        owed = result.owed
        if owed is None:
            raise ValueError("this result is no open stream: it has been reported")
        return _completed(owed, outcome, self.sources.now())

    # -- calls -----------------------------------------------------------------------------------------
    def timeout_ms(self, method: Method[Any, Any], line_ms: int = 0) -> int:
        """Deadline of a call."""
        own = {"SelectTarget": self._where.select_ms, "ReportOutcome": self._where.report_ms}
        return own.get(method.name, self._where.call_ms) + line_ms

    def silence_ms(self, request: messages.SelectTargetRequest) -> int:
        """How long a selection may be silent before the service is asked whether it is there; 0: to its deadline.

        Only a request that may go on without the service gains by the question (spec/fleet.md section 6).
        """
        return self._away.silence_ms if local_order(request, self._away, self.known) else 0

    def heard(self, error: PolicyClientError | None = None) -> None:
        """Note what a call tells about the presence of the service."""
        if isinstance(error, ServiceAwayError):
            self.presence.lost()
        elif error is None or (isinstance(error, ServiceError) and error.reason):
            self.presence.found()


def _completed(owed: steps.OpenReport, outcome: Outcome, now: int) -> BehindReport:
    request = messages.ReportOutcomeRequest()
    request.CopyFrom(owed.report)
    for name in ("headers", "latency_ms", "first_byte_ms", "http_status"):
        request.ClearField(name)
    put(timed(outcome, now - owed.called_at), request)
    return BehindReport(request, None if request.decision_token else owed.called_at)


def _refused(error: ServiceAwayError | None = None) -> RefusedWhileAwayError:
    refusal = RefusedWhileAwayError("the service is away and no target may be used without it")
    refusal.__cause__ = error
    return refusal


_METHODS: dict[type, Method[Any, Any]] = {
    messages.ReleaseLeaseRequest: connection.RELEASE_LEASE,
    messages.ReleasePermitRequest: connection.RELEASE_PERMIT,
    messages.CancelPermitRequest: connection.CANCEL_PERMIT,
}


def method_of(behind: Behind) -> tuple[Method[Any, Any], Any]:
    """The call that sends something behind."""
    if isinstance(behind, BehindReport):
        return connection.REPORT, behind.request
    return _METHODS[type(behind)], behind


class Cancellable(Protocol):
    """Work beside a request: a task, or a thread."""

    def cancel(self) -> object: ...


class ClientBase:
    """What users see of both clients alike, and the bookkeeping of grants that are kept alive."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._holds: dict[bytes, Cancellable] = {}
        self._streams: dict[bytes, tuple[ref[Result[Any]], OpenReport]] = {}
        _clients.add(self)

    def after_fork(self) -> None:
        """In a forked process: threads and tasks of the parent are not here."""
        self._core.after_fork()
        self._holds, self._streams = {}, {}

    @property
    def is_away(self) -> bool:
        """Whether the last call met the transport's silence."""
        return self._core.presence.is_away

    @property
    def kept_reports(self) -> int:
        """Reports that wait for the service."""
        return len(self._core.backlog)

    def _let_go(self, turn: Turn[Any]) -> None:
        """Stop renewing at the end of a request; an open stream goes on until it is completed, or given up."""
        result = turn.step.result if isinstance(turn.step, steps.Return) else None
        owed = result.owed if result is not None else None
        open_token = owed.report.decision_token if owed is not None else None
        for token in turn.journey.held_tokens:
            if token != open_token:
                self._release_hold(token)
            elif result is not None and owed is not None:
                self._streams[token] = ref(result), owed

    def _abandoned(self, token: bytes) -> tuple[Behind, ...]:
        """The report of a stream whose result is gone: nobody can complete it. Empty while somebody can."""
        result, owed = self._streams.get(token, (None, None))
        if result is None or owed is None or result() is not None:
            return ()
        del self._streams[token], self._holds[token]
        log.warning("a stream was neither completed nor closed: its grants are given back")
        return (_completed(owed, cancelled(), self._core.sources.now()),)

    def _release_hold(self, token: bytes) -> None:
        self._streams.pop(token, None)
        work = self._holds.pop(token, None)
        if work is not None:
            work.cancel()


_clients: WeakSet[ClientBase] = WeakSet()


def _after_fork() -> None:
    for client in _clients:
        client.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
