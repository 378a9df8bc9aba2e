"""A streamed answer as the door sees it pass: errors inside it, its first output, its throughput, its end.

Keeps sizes and the text of an error event; output is counted and dropped (spec/watchdog.md sections 2 to 4).
"""

from __future__ import annotations

from typing import NamedTuple

from policy_service.domain.stream_events import EventSplitter, StreamEvent, StreamFormat, error_body, read_event
from policy_service.domain.watchdog import START, Verdict, WatchdogSettings, observe

_FORMATS = (
    ("/chat/completions", StreamFormat.CHAT_COMPLETIONS),
    ("/completions", StreamFormat.CHAT_COMPLETIONS),
    ("/responses", StreamFormat.RESPONSES),
    ("/messages", StreamFormat.ANTHROPIC),
    ("GenerateContent", StreamFormat.GEMINI),
)


class Progress(NamedTuple):
    """What is known after a chunk."""

    has_output: bool = False
    """Output, reasoning or a tool call has come: from here on nothing can be taken back."""
    error: str = ""
    """Body of the first error event, as ReportOutcome takes it."""
    is_complete: bool = False
    """The event that ends an answer has come."""
    is_too_slow: bool = False


class StreamWatch:
    """Follows one attempt. An object, since its splitter keeps a tail.

    Args:
        format: wire format of the events.
        settings: throughput watchdog.
    """

    def __init__(self, format: StreamFormat, settings: WatchdogSettings) -> None:
        self._format = format
        self._settings = settings
        self._splitter = EventSplitter()
        self._watched = START
        self.progress = Progress()
        self.bytes = 0

    def feed(self, chunk: bytes, is_end: bool, now_ms: float) -> Progress:
        """Progress after this chunk."""
        self.bytes += len(chunk)
        events = self._splitter.feed(chunk)
        if is_end:
            events += self._splitter.finish()
        for event in events:
            self._observe(event, int(now_ms))
        return self.progress

    def _observe(self, event: StreamEvent, now_ms: int) -> None:
        reading = read_event(self._format, event)
        known = self.progress
        self._watched, verdict = observe(self._watched, reading.useful_bytes, reading.protected, now_ms, self._settings)
        self.progress = Progress(
            known.has_output or reading.useful_bytes > 0 or reading.protected,
            known.error or (error_body(event) if reading.is_error else ""),
            known.is_complete or reading.is_end,
            known.is_too_slow or verdict is Verdict.ABORT,
        )


def format_of(path: str) -> StreamFormat:
    """Wire format of the answers of a path; an unknown one is read as all of them."""
    plain = path.partition("?")[0]
    return next((found for part, found in _FORMATS if part in plain), StreamFormat.UNKNOWN)
