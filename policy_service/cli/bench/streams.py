"""What a streamed event costs a gateway: cut from its chunk, read, judged by the watchdog; beside the mere parsing
of its JSON. In this process, without a service."""

from __future__ import annotations

import json
from typing import Any, Final

from policy_service.cli.bench.figures import ROUNDS, Figure, compared
from policy_service.cli.bench.inprocess import Call, interleaved
from policy_service.domain.stream_events import EventSplitter, StreamFormat, read_event
from policy_service.domain.watchdog import START, WatchdogSettings, observe

_WORDS: Final = " and some"
_BODIES: Final[dict[StreamFormat, dict[str, Any]]] = {
    StreamFormat.CHAT_COMPLETIONS: {
        "id": "chatcmpl-A1b2C3d4E5f6", "object": "chat.completion.chunk", "created": 1_800_000_000, "model": "gpt-4o",
        "choices": [{"index": 0, "delta": {"content": _WORDS}, "logprobs": None, "finish_reason": None}],
    },
    StreamFormat.RESPONSES: {
        "type": "response.output_text.delta", "item_id": "msg_A1b2C3d4E5f6", "output_index": 0, "content_index": 0,
        "delta": _WORDS,
    },
    StreamFormat.ANTHROPIC: {
        "type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": _WORDS},
    },
    StreamFormat.GEMINI: {
        "candidates": [{"content": {"parts": [{"text": _WORDS}], "role": "model"}, "index": 0}],
        "usageMetadata": {"promptTokenCount": 8, "totalTokenCount": 12}, "modelVersion": "gemini-2.5-flash",
    },
}  # fmt: skip
"""One text delta of each format, as the providers send it."""
_SETTINGS: Final = WatchdogSettings(enabled=True)
_BETWEEN_MS: Final = 20
"""Fifty events a second: a window of 30 s then holds 1,500 of them."""


def figures(seconds: float) -> list[Figure]:
    """One figure a format, and one for events of a format that nobody named."""
    known = [_figure(sent, sent, seconds) for sent in _BODIES]
    return [*known, _figure(StreamFormat.UNKNOWN, StreamFormat.CHAT_COMPLETIONS, seconds)]


def _figure(format: StreamFormat, sent: StreamFormat, seconds: float) -> Figure:
    data = json.dumps(_BODIES[sent])
    ours = _watching(format, f"data: {data}\n\n".encode())
    pairs = [interleaved(ours, lambda: json.loads(data), seconds / ROUNDS / 5) for _ in range(ROUNDS)]
    return compared(f"stream.{format}", f"cut, read and judge an event, {format}, to its JSON", "us", pairs)


def _watching(format: StreamFormat, chunk: bytes) -> Call:
    """The next event of a stream that goes on for ever."""
    splitter, state, now = EventSplitter(), START, 0

    def call() -> object:
        nonlocal state, now
        now += _BETWEEN_MS
        for event in splitter.feed(chunk):
            reading = read_event(format, event)
            state, verdict = observe(state, reading.useful_bytes, reading.protected, now, _SETTINGS)
        return verdict

    return call
