"""Client requests under way in this process: found by their attempts, settled at their end, renewed while they last.

Envoy tells nobody why an attempt ended without an answer. It is known afterwards: if another attempt follows or an
answer reaches the client it failed on the way; if the client's own stream ends first, the client has left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from policy_envoy import reports
from policy_envoy.flight import RENEWALS, Flight, Step
from policy_envoy.names import ANSWERED
from policy_service.generated.policy.v1 import policy_pb2

SHORTEST_LIFE_MS = 30_000
"""Life taken for a permit whose grant does not tell when it began."""


class Registry:
    """Flights by the id of their first decision."""

    def __init__(self) -> None:
        self._flights: dict[str, Flight] = {}
        self._held: dict[bytes, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def enter(self, flight: Flight) -> None:
        """The listener stage has routed a request."""
        self._flights[flight.id] = flight

    def find(self, id: str) -> Flight | None:
        """The request of an attempt."""
        return self._flights.get(id)

    def leave(self, flight: Flight) -> None:
        """The listener stage is over: no further attempt will look for it."""
        self._flights.pop(flight.id, None)

    def hold(self, flight: Flight, now_ms: float) -> None:
        """Renew the permits of a request until its last report is in, or they are given back."""
        flight.renewal_ms = flight.renewal_ms or SHORTEST_LIFE_MS / RENEWALS
        flight.renews_at_ms = now_ms + flight.renewal_ms
        self._held[flight.token] = flight

    def free(self, token: bytes) -> None:
        """The last report of a decision is in."""
        if self._held and (flight := self._held.pop(token, None)) is not None:
            flight.permit_ids = flight.attempt_permits = ()

    def due(self, now_ms: float) -> Iterator[Flight]:
        """Requests whose permits have to be renewed now."""
        for token, flight in list(self._held.items()):
            if not (flight.permit_ids or flight.attempt_permits) or flight.token != token:
                del self._held[token]
            elif flight.renews_at_ms <= now_ms:
                flight.renews_at_ms = now_ms + flight.renewal_ms
                yield flight


def unanswered(flight: Flight, step: Step, started_ms: float, now_ms: float) -> list[policy_pb2.ReportOutcomeRequest]:
    """Note an attempt without answer; a report only where it is known already what it means."""
    flight.unanswered += ((step, started_ms),)
    if flight.is_client_gone or flight.is_over:
        return settle(flight, now_ms, "", is_client_gone=flight.is_client_gone)
    return []


def begin(flight: Flight, attempt: int, now_ms: float) -> list[policy_pb2.ReportOutcomeRequest]:
    """An attempt starts: reports of those before it that have failed on the way.

    An upstream that refuses a connection can end an attempt before the door has heard of it at all.
    """
    _note_unseen(flight, attempt - 1, now_ms)
    flight.begun = max(flight.begun, attempt)
    if not flight.unanswered:
        return []
    return settle(flight, now_ms, "", is_client_gone=False, is_over=False)


def _note_unseen(flight: Flight, attempts: int, now_ms: float) -> None:
    """Attempts that Envoy has made and the door has not seen."""
    if attempts <= flight.begun:
        return
    for step in flight.steps[flight.begun : attempts]:
        flight.unanswered += ((step, now_ms),)
    flight.begun = attempts


def settle(
    flight: Flight,
    now_ms: float,
    details: str,
    *,
    is_client_gone: bool,
    is_over: bool = True,
    attempts: int = 0,
) -> list[policy_pb2.ReportOutcomeRequest]:
    """Reports of the attempts that had no answer, now that it is known why.

    Args:
        details: Envoy's response code details of the last one.
        is_over: no further attempt follows.
        attempts: attempts that Envoy has made; 0: unknown.
    """
    if details != ANSWERED:
        _note_unseen(flight, attempts, now_ms)
    flight.is_client_gone, flight.is_over = is_client_gone, is_over
    if not flight.unanswered:
        return []
    waiting, flight.unanswered = flight.unanswered, ()
    return list(_reports(flight, waiting, now_ms, details))


def _reports(
    flight: Flight, waiting: Iterable[tuple[Step, float]], now_ms: float, details: str
) -> Iterator[policy_pb2.ReportOutcomeRequest]:
    for step, started_ms in waiting:
        times = (started_ms, now_ms)
        if flight.is_client_gone:
            yield reports.cancelled(flight, step, times)
            continue
        report = reports.network_error(flight, step, details, times)
        report.final = flight.is_over
        flight.attempts += (reports.earlier_attempt(step, report),)
        yield report
