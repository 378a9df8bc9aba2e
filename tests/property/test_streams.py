"""Streams under any cut and any junk, and the watchdog against a model that keeps everything (spec/watchdog.md)."""

from __future__ import annotations

import gc
import itertools
import json
import os
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policy_service.domain.stream_events import EventSplitter, StreamEvent, StreamFormat, read_event
from policy_service.domain.watchdog import START, Verdict, WatchdogSettings, observe

pytestmark = pytest.mark.timeout(600)
EXAMPLES = int(os.environ.get("POLICY_HYPOTHESIS_EXAMPLES", "200"))
LIMIT = 24
"""A small limit, so that overlong events are common."""

_PIECES = [b"data: ", b"data:", b"event: error", b"\n", b"\r", b"\r\n", b"\n\n", b":", b"x" * 9, "€".encode(), b"\xff",
           b"\xef\xbb\xbf", b"[DONE]", b'{"choices": [{"delta": {"content": "a"}}]}']  # fmt: skip
streams = st.lists(st.one_of(st.sampled_from(_PIECES), st.binary(max_size=6)), max_size=40).map(b"".join)
cuts = st.lists(st.integers(0, 400), max_size=30)


def fed(text: bytes, at: list[int], limit: int) -> list[StreamEvent]:
    splitter = EventSplitter(limit)
    places = [0, *sorted(place for place in at if place < len(text)), len(text)]
    found = []
    for start, end in itertools.pairwise(places):
        found += splitter.feed(text[start:end])
        assert len(splitter.tail) <= limit + 2
    return found + splitter.finish()


@settings(max_examples=EXAMPLES, deadline=None)
@given(streams, cuts, st.sampled_from([LIMIT, 2_000]))
@example(b"data: 0123456789012345678901\n\r\ndata: 1\n\n", list(range(60)), LIMIT)
def test_any_cut_gives_the_same_events(text: bytes, at: list[int], limit: int) -> None:
    assert fed(text, at, limit) == fed(text, [], limit) == fed(text, list(range(len(text))), limit)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["text", "text_delta", "thinking", "mcp_call", "error", "content_block_delta", "message_stop"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "choices", "delta", "content", "text", "error", "candidates", "parts", "thought",
                         "item", "part", "response", "content_block", "code", "message", "tool_calls", "finish_reason",
                         "finishReason", "base_resp", "status_code", "success", "Error"]),
        inner, max_size=4),
    max_leaves=25,
)  # fmt: skip


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.one_of(json_values.map(json.dumps), st.text()), st.text(max_size=20), st.sampled_from([*StreamFormat, "x"]))
def test_no_event_raises_and_a_protected_one_has_no_bytes(data: str, name: str, format: str) -> None:
    for is_cut in (False, True):
        found = read_event(format, StreamEvent(name, data, is_cut))

        assert found.useful_bytes >= 0
        assert not (found.protected and found.useful_bytes)
        assert found.useful_bytes <= 3 * len(data)


ADVERSARIAL = {
    "line ends": b"\n" * 1_048_576,
    "returns": b"\r" * 1_048_576,
    "half line ends": b"\n\r" * 524_288,
    "heartbeats": b":\n\n" * 87_381,
    "data lines without an end": b"data: x\n" * 131_072,
    "one line": b"data: " + b"x" * 1_048_570,
    "open brackets": b"data: " + b"[" * 1_048_000 + b"\n\n",
    "nested objects": b"data: " + b'{"error":' * 116_000 + b"\n\n",
    "escapes": b'data: {"choices": [{"delta": {"content": "' + b"\\u20ac" * 174_000 + b'"}}]}\n\n',
    "digits": b"data: " + b"9" * 1_048_000 + b"\n\n",
    "small deltas": b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n' * 11_000,
}


def cost_s(text: bytes, chunk: int) -> float:
    """Processor time to cut and read a stream, the better of two: without what others make the collector do."""
    gc.collect()
    gc.disable()
    try:
        return min(_read_s(text, chunk) for _ in range(2))
    finally:
        gc.enable()


def _read_s(text: bytes, chunk: int) -> float:
    began = time.process_time()
    splitter = EventSplitter()
    for start in range(0, len(text), chunk):
        for event in splitter.feed(text[start : start + chunk]):
            read_event("unknown", event)
    for event in splitter.finish():
        read_event("unknown", event)
    return time.process_time() - began


@pytest.mark.alone
@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("chunk", [16, 1_048_576])
def test_a_long_stream_of_anything_costs_linear_time(name: str, chunk: int) -> None:
    text = ADVERSARIAL[name]
    half = cost_s(text[: len(text) // 2], chunk)

    assert cost_s(text, chunk) < max(3 * half, 0.05) + 0.25, half
    assert half < 5


class Model:
    """The watchdog as the specification words it, with every sample kept."""

    def __init__(self, given: WatchdogSettings) -> None:
        self.settings = given
        self.started_at: int | None = None
        self.samples: list[tuple[int, int]] = []
        self.protected = False

    def observe(self, useful_bytes: int, protected: bool, now: int) -> Verdict:
        if self.started_at is None:
            self.started_at = now
        if protected:
            self.protected = True
        elif useful_bytes > 0:
            self.samples.append((now, useful_bytes))
            self.protected = False
        window_ms = self.settings.window_ms
        self.samples = [sample for sample in self.samples if sample[0] >= now - window_ms]
        total = sum(size for _, size in self.samples)
        rate = total / max(1, window_ms / 1000)
        is_old_enough = now - self.started_at >= self.settings.warmup_ms + window_ms
        is_measurable = total == 0 or total >= self.settings.min_useful_bytes
        is_slow = rate < self.settings.min_useful_bytes_per_second
        judged = self.settings.enabled and is_old_enough and not self.protected and is_measurable
        return Verdict.ABORT if judged and is_slow else Verdict.CONTINUE


watchdogs = st.builds(
    WatchdogSettings,
    enabled=st.sampled_from([True, True, True, False]),
    warmup_ms=st.sampled_from([0, 1, 700]),
    window_ms=st.sampled_from([1_000, 2_000, 4_000]),
    min_useful_bytes_per_second=st.sampled_from([1, 2, 30, 90]),
    min_useful_bytes=st.sampled_from([1, 3, 100, 1_000]),
)
steps = st.tuples(
    st.sampled_from([0, 1, 3, 10, 10, 40, 999, 1_000, 1_001]),
    st.sampled_from([0, 0, 1, 1, 2, 5, 90]),
    st.sampled_from([False] * 9 + [True]),
    st.sampled_from([1, 1, 2, 40, 130]),
)
"""Time since the step before, useful bytes, protected, and how often it happens."""


@settings(max_examples=EXAMPLES * 3, deadline=None)
@given(watchdogs, st.lists(steps, max_size=40))
@example(WatchdogSettings(True, 0, 2_000, 30, 1), [(1, 1, False, 130), (10, 1, False, 40), (1_000, 0, False, 2)])
def test_the_verdict_is_that_of_a_watchdog_that_keeps_every_sample(
    given_settings: WatchdogSettings, played: list[tuple[int, int, bool, int]]
) -> None:
    model, state, now = Model(given_settings), START, 1_000_000
    for gap, useful_bytes, protected, times in played:
        for _ in range(times):
            now += gap
            state, verdict = observe(state, useful_bytes, protected, now, given_settings)

            assert verdict is model.observe(useful_bytes, protected, now)
            assert state.protected == model.protected
            if len(model.samples) <= 64:
                assert state.window_bytes >= min(sum(size for _, size in model.samples), 1)
