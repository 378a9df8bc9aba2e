"""Reads a streamed answer while it passes: first output, errors inside it, its end, and whether it is too slow.

One reader a stream. What an event says and what is too slow is decided by the carried `stream_events` and `watchdog`;
nothing of the text is kept but the error event.
"""

from __future__ import annotations

from dataclasses import replace

from policy_client import outcomes
from policy_client._carried.stream_events import EventSplitter, StreamEvent, StreamFormat, error_body, read_event
from policy_client._carried.watchdog import START, Verdict, WatchdogSettings, observe
from policy_client.outcomes import Outcome

_FORMATS = (
    ("/chat/completions", StreamFormat.CHAT_COMPLETIONS),
    ("/responses", StreamFormat.RESPONSES),
    ("/messages", StreamFormat.ANTHROPIC),
    (":streamGenerateContent", StreamFormat.GEMINI),
)


def format_of(path: str) -> StreamFormat:
    """Wire format of the answers of a path; an unknown one is read as all of them."""
    return next((known for part, known in _FORMATS if part in path), StreamFormat.UNKNOWN)


class StreamReader:
    """Reads one stream.

    Args:
        format: its wire format.
        started_at: when the call was made; milliseconds of the clock that `feed` is given.
        watchdog: when a stream is too slow; disabled unless given.
    """

    def __init__(self, format: StreamFormat, started_at: int, watchdog: WatchdogSettings | None = None) -> None:
        self._format = format
        self._started_at = started_at
        self._watchdog = watchdog or WatchdogSettings()
        self._watched = START
        self._splitter = EventSplitter()
        self.bytes = 0
        self._first_byte_ms: int | None = None
        self.error = b""
        """The first error event, as ReportOutcome takes it."""
        self.is_complete = False
        """The event that ends the answer has come."""
        self.has_output = False
        """Something that a client would see."""
        self.is_too_slow = False

    def feed(self, chunk: bytes, now: int) -> None:
        """Take the next bytes."""
        if self._first_byte_ms is None:
            self._first_byte_ms = max(0, now - self._started_at)
        self.bytes += len(chunk)
        for event in self._splitter.feed(chunk):
            self._take(event, now)

    def finish(self, now: int) -> None:
        """The stream is over; its last event may lack the blank line."""
        for event in self._splitter.finish():
            self._take(event, now)

    def _take(self, event: StreamEvent, now: int) -> None:
        reading = read_event(self._format, event)
        if reading.is_error and not self.error:
            self.error = error_body(event).encode("utf-8", "replace")
        self.is_complete = self.is_complete or reading.is_end
        self.has_output = self.has_output or reading.useful_bytes > 0 or reading.protected
        self._watched, verdict = observe(self._watched, reading.useful_bytes, reading.protected, now, self._watchdog)
        self.is_too_slow = self.is_too_slow or verdict is Verdict.ABORT

    # -- how it ended ----------------------------------------------------------------------------------
    def ended(self, status: int) -> Outcome:
        """The upstream closed the stream: whole, with an error inside it, or cut off."""
        if not self.error and not self.is_complete and self._format is not StreamFormat.UNKNOWN:
            return self._stamped(outcomes.network(outcomes.STREAM_EARLY_EOF, "the stream ended before its end"))
        return self._stamped(replace(outcomes.http(status), stream_error=self.error))

    def broken(self, error: Exception) -> Outcome:
        """The network failed in the middle of it; an exception of our own code is our fault."""
        found = outcomes.of_exception(error)
        kind = found.network_error
        if kind == outcomes.READ_TIMEOUT:
            kind = outcomes.STREAM_IDLE_TIMEOUT
        elif kind == outcomes.PROTOCOL_ERROR:
            kind = outcomes.STREAM_EARLY_EOF
        return self._stamped(replace(found, network_error=kind))

    def left(self, status: int) -> Outcome:
        """The client closed it: after the end that is a success, before it a cancel."""
        return self.ended(status) if self.is_complete or self.error else self._stamped(outcomes.cancelled())

    def too_slow(self) -> Outcome:
        """The watchdog ended it."""
        return self._stamped(outcomes.network(outcomes.STREAM_TOO_SLOW, "STREAM_THROUGHPUT_TOO_LOW"))

    def _stamped(self, outcome: Outcome) -> Outcome:
        return replace(outcome, is_streamed=True, bytes_streamed=self.bytes, first_byte_ms=self._first_byte_ms)
