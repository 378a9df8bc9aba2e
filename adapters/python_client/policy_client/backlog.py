"""What could not be sent, kept within bounds until the service is back: reports, and grants to give back.

Order is kept; the oldest go first.
"""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Any, NamedTuple

from policy_client import messages

BATCH = 100
RETURNS_KEPT = 1_000
RETURNS_MS = 120_000
"""For so long a grant is tried to be given back: the default life of a permit, after which it has ended by itself."""


class Kept(NamedTuple):
    """A report. `began_at`: start of an attempt without token, by the client's clock; None with a token."""

    request: messages.ReportOutcomeRequest
    began_at: int | None

    def due(self, now: int) -> messages.ReportOutcomeRequest:
        """The report as it is sent now: an attempt without token says how long ago it began."""
        if self.began_at is None:
            return self.request
        dated = messages.ReportOutcomeRequest()
        dated.CopyFrom(self.request)
        dated.elapsed_ms = max(0, now - self.began_at)
        return dated


class Backlog:
    """The reports of one client. Safe for threads.

    Args:
        reports, size: bounds, the latter in bytes of the messages.
    """

    def __init__(self, reports: int, size: int) -> None:
        self._reports = reports
        self._size = size
        self._kept: deque[Kept] = deque()
        self._bytes = 0
        self._lock = Lock()
        self.dropped = 0
        """Reports given up because of the bounds."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, request: messages.ReportOutcomeRequest, began_at: int | None = None) -> None:
        """Keep a report for later."""
        with self._lock:
            self._kept.append(Kept(request, began_at))
            self._bytes += request.ByteSize()
            self._bound()

    def take(self, count: int = BATCH) -> list[Kept]:
        """Take the oldest out; `put_back` those that could not be sent."""
        with self._lock:
            taken = [self._kept.popleft() for _ in range(min(count, len(self._kept)))]
            self._bytes -= sum(each.request.ByteSize() for each in taken)
        return taken

    def put_back(self, taken: list[Kept]) -> None:
        """Put reports back in front, in their order."""
        with self._lock:
            self._kept.extendleft(reversed(taken))
            self._bytes += sum(each.request.ByteSize() for each in taken)
            self._bound()

    def _bound(self) -> None:
        while self._kept and (len(self._kept) > self._reports or self._bytes > self._size):
            self._bytes -= self._kept.popleft().request.ByteSize()
            self.dropped += 1


class Owed(NamedTuple):
    """A grant that is to be given back: the call that does so, and when it has ended by itself."""

    request: Any
    until: int


class Returns:
    """Grants of one client that could not be given back yet. Safe for threads."""

    def __init__(self) -> None:
        self._owed: deque[Owed] = deque(maxlen=RETURNS_KEPT)
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._owed)

    def keep(self, request: Any, now: int) -> None:
        """Keep a ReleasePermit, a CancelPermit or a ReleaseLease for later."""
        with self._lock:
            self._owed.append(Owed(request, now + RETURNS_MS))

    def take(self, now: int) -> deque[Owed]:
        """Take everything out that has not ended by itself."""
        with self._lock:
            taken = deque(each for each in self._owed if now < each.until)
            self._owed.clear()
        return taken

    def put_back(self, taken: deque[Owed]) -> None:
        """Put back in front what could not be given back."""
        with self._lock:
            self._owed = deque([*taken, *self._owed], maxlen=RETURNS_KEPT)


PASSING_CODES = frozenset({4, 8, 14})
"""DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNAVAILABLE: the report is sent again later. Any other refusal is final."""


def refused_for_now(sent: list[Kept], answer: messages.ReportOutcomesResponse) -> list[Kept]:
    """Of a batch, the reports that are to be sent again."""
    pairs = zip(sent, answer.results, strict=False)
    return [kept for kept, result in pairs if result.HasField("error") and result.error.code in PASSING_CODES]
