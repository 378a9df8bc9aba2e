"""WatchStream: progress of streamed answers, judged by the throughput watchdog (spec/watchdog.md, spec/fleet.md
section 8). One call watches many attempts; their outcomes go to ReportOutcome as always.

The state of the watchdog lives here alone: a stream that moves to another replica starts anew with a fresh warm-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from policy_service.application.errors import FieldProblem, InvalidRequestError, OverloadedError
from policy_service.application.stream_holdings import (
    Holding,
    LeaseLost,
    News,
    PermitNews,
    StreamHoldings,
    StreamOpening,
)
from policy_service.application.view import View
from policy_service.domain.ids import Target
from policy_service.domain.policy import Policy
from policy_service.domain.watchdog import (
    ABORT_CODE,
    ABORT_REASON,
    START,
    Verdict,
    WatchdogSettings,
    WatchState,
    observe,
)

MAX_STREAMS = 10_000
"""Attempts that one call may watch at a time."""
LEASE_LOST = "lease_lost"


class AbortOrder(NamedTuple):
    """Order to end an attempt: the reason, and the error code for the client."""

    reason: str
    code: str


TOO_SLOW = AbortOrder(ABORT_REASON, ABORT_CODE)
Told = AbortOrder | PermitNews


@dataclass(slots=True)
class _Watched:
    """One attempt under watch."""

    settings: WatchdogSettings
    holding: Holding
    state: WatchState = START
    is_aborted: bool = False


def watchdog_settings(policy: Policy, served: Target | None) -> WatchdogSettings:
    """Settings of an attempt; those of its connection win (spec/watchdog.md section 1)."""
    connection = policy.catalogue.connections.get(served.connection) if served else None
    values = (policy.setting(f"stream_watchdog.{name}", connection) for name in WatchdogSettings._fields)
    return WatchdogSettings(*values)


class WatchStream:
    """The use case.

    Args:
        monotonic_ms: the host's monotonic clock; the watchdog needs no time of the fleet.
    """

    def __init__(self, view: View, holdings: StreamHoldings, monotonic_ms: Callable[[], float]) -> None:
        self._view = view
        self._monotonic_ms = monotonic_ms
        self.holdings = holdings
        self.watched = 0
        """Attempts under watch now."""
        self.aborted = 0
        """Orders to end an attempt so far."""

    def call(self, tell: Callable[[int, Told], None]) -> WatchedCall:
        """A new call; `tell` gets stream number and news whenever there are any."""
        return WatchedCall(self, self._view, self.holdings, self._monotonic_ms, tell)


class WatchedCall:
    """The attempts that one call watches. Made by `WatchStream.call`; `end` it in any case."""

    def __init__(
        self,
        owner: WatchStream,
        view: View,
        holdings: StreamHoldings,
        monotonic_ms: Callable[[], float],
        tell: Callable[[int, Told], None],
    ) -> None:
        self._owner = owner
        self._view = view
        self._holdings = holdings
        self._monotonic_ms = monotonic_ms
        self._tell = tell
        self._streams: dict[int, _Watched] = {}

    def open(self, number: int, opening: StreamOpening) -> bool:
        """Watch an attempt from now on; True where its throughput is judged.

        Raises:
            InvalidRequestError: the number is in use.
            OverloadedError: too many attempts for one call.
        """
        if number in self._streams:
            raise _bad_number(number, "is open already", "a number that this call has not used")
        if len(self._streams) >= MAX_STREAMS:
            raise OverloadedError(f"more than {MAX_STREAMS} streams on one call", retry_after_ms=1_000)
        settings = watchdog_settings(self._view.policy, opening.served)
        holding = self._holdings.begin(opening, lambda news: self._take(number, news))
        self._streams[number] = _Watched(settings, holding)
        self._owner.watched += 1
        return settings.enabled

    def progress(self, number: int, events: Iterable[tuple[int, bool]], *, first_byte: bool = False) -> None:
        """Events of one chunk, in order: (useful bytes, protected). An order to abort is told at most once.

        Raises:
            InvalidRequestError: no such stream was opened.
        """
        watched = self._watched(number)
        if watched.is_aborted:
            return
        if first_byte:
            self._holdings.first_byte(watched.holding)
        self._holdings.progress(watched.holding)
        if watched.settings.enabled and self._is_slow(watched, events):
            self._abort(number, watched, TOO_SLOW)

    def close(self, number: int) -> None:
        """The attempt has ended. InvalidRequestError where no such stream was opened."""
        watched = self._watched(number)
        self._forget(number, watched)

    def end(self) -> None:
        """The call is over; nothing is told any more."""
        for number, watched in list(self._streams.items()):
            self._forget(number, watched)

    def _is_slow(self, watched: _Watched, events: Iterable[tuple[int, bool]]) -> bool:
        now = int(self._monotonic_ms())
        for useful_bytes, protected in events:
            watched.state, verdict = observe(watched.state, useful_bytes, protected, now, watched.settings)
            if verdict is Verdict.ABORT:
                return True
        return False

    def _abort(self, number: int, watched: _Watched, order: AbortOrder) -> None:
        watched.is_aborted = watched.holding.is_over = True
        watched.state = START
        self._owner.aborted += 1
        self._tell(number, order)

    def _take(self, number: int, news: News) -> None:
        watched = self._streams.get(number)
        if watched is None or watched.is_aborted:
            return
        if isinstance(news, LeaseLost):
            self._abort(number, watched, AbortOrder(LEASE_LOST, news.code))
        else:
            self._tell(number, news)

    def _forget(self, number: int, watched: _Watched) -> None:
        watched.holding.is_over = True
        del self._streams[number]
        self._owner.watched -= 1

    def _watched(self, number: int) -> _Watched:
        watched = self._streams.get(number)
        if watched is None:
            raise _bad_number(number, "was not opened on this call", "open comes first for each stream")
        return watched


def _bad_number(number: int, problem: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError((FieldProblem("stream_id", f"{number} {problem}", remedy),))
