"""Junk, mutations and traps: no exception, waits within (0, 30 days], bounded time (spec/retry_hints.md).

POLICY_FUZZ_EXAMPLES is the number of mutated answers, spread over the volume tests.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.profiles import HintProfile
from policy_service.domain.retry_hints import parse_resets_in, read_hint, stated_wait_ms

EXAMPLES = int(os.environ.get("POLICY_FUZZ_EXAMPLES", "20000"))
NOW = 1_780_315_200_000
CAP_MS = 30 * 86_400_000
PROFILE = HintProfile()
SLOWEST_S = 0.002
LARGEST = 65_536

HEADERS = {
    "retry-after": ["120", "Mon, 01 Jun 2026 12:01:30 GMT", "60s", "1.5", "0", "-1"],
    "x-ratelimit-reset": ["1780315260", "1780315260000", "60"],
    "retry-after-ms": ["900", "1.5"],
    "ratelimit-reset": ["30"],
    "x-ratelimit-remaining-tokens": ["0", "5"],
    "x-ratelimit-reset-tokens": ["6m0s", "250ms", "1780315245"],
    "anthropic-ratelimit-input-tokens-remaining": ["0"],
    "anthropic-ratelimit-input-tokens-reset": ["2026-06-01T12:02:00Z"],
    "anthropic-ratelimit-unified-status": ["rejected", "allowed"],
    "anthropic-ratelimit-unified-representative-claim": ["five_hour", "seven_day"],
    "anthropic-ratelimit-unified-5h-reset": ["1780318800"],
    "x-codex-primary-used-percent": ["100", "30"],
    "x-codex-primary-reset-after-seconds": ["900"],
}
BODIES = [
    '{"error":{"message":"Please try again in 6m0s.","code":"rate_limit_exceeded"}}',
    '{"error":{"code":429,"details":[{"@type":"type.googleapis.com/google.rpc.RetryInfo","retryDelay":"26.66s"}]}}',
    '{"error":{"type":"usage_limit_reached","resets_at":1780318800,"resets_in_seconds":3600}}',
    '{"error":{"metadata":{"headers":{"X-RateLimit-Reset":"1780315260000"},"retry_after_seconds":17}}}',
    '[{"error":{"message":"Quota will reset after 161h39m41s","retryAfter":"2026-06-01T14:00:00Z"}}]',
    '{"error":"{\\"error\\":{\\"message\\":\\"resets 3pm (Europe/Berlin)\\"}}"}',
    "limit reached, reset at 2026-08-29 21:01:21",
    "reset at 08-29 15:29:00 UTC; wait 1 hour 30 minutes; resets Oct 6, 10am (UTC)",
    "请在20秒后重试 Повторите попытку через 5 минут 额度将在 2026-08-29 21:01:21 重置",
    'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"wait 5 s"}}\n\n',
]
SPLICES = [
    "0", "9" * 40, "-", ".", ":", "h", "ms", "Z", "+99:99", "T", "{", "}", '"', "\\", "\x00", "\ufeff", "İ",
    "ſ", "K", "١", "\u2028", "1e999", "NaN", "null", "[", "]", "@type", "RetryInfo", " resets in ",
    " try again at ", "2026-02-30 25:61:61", "(Europe/X)", "0000-00-00 00:00", "9999-12-31T23:59:59-14:00",
    "0001-01-01 00:00 UTC+14", "12am (UTC)",
]  # fmt: skip

TRAPS = [
    "retry ", "retry in 5x ", "1", "1s", "wait 5 ", "wait 5s ", "resets 3pm (Europe/Xx) ", "resets Oct 6 10am ",
    "{", "[", '{"a":', '"', "limit 5 requested ", "limit 1 ", "limit 0", "在5秒后", "5秒",
    "reset at 2026-13-45 25:61:61 ", "recently retry in 5s ", '{"error":"{\\"', 'data: {"error":1}\n',
    'data: {"error":\n', "event: error\n", "limit reached|", " ", "try again in ", "20 ",
    "2026-08-29 21:01:21 ", '{"error":', "1h2m", "9.", "\\u0041", "İ", "а", "api request failed (429): {",
    '"error', '[{"error":', "{}", "-", "wait until ", "esperes ", "ressayer dans 5 ", "a" * 13 + "5",
    "5 " + "a" * 13, "a\n", ":\n", "data:\n", "a\r", "\u2028a", '"code"\n', "event: error\n:\n", "failed\n",
    "data: failed\n\n", 'data: "error\n\n',
    "event: error\ndata: {\n\n", 'data: {"error":{}}\n', '[{"code":1},',
]  # fmt: skip


LOOKALIKES = ({ord("s"): "ſ"}, {ord("k"): "\u212a"}, {ord("i"): "ı"}, {ord("5"): "٥"})
"""Letters and digits that only some readings of a text take for the plain ones."""


def _mutated(dice: random.Random, text: str) -> str:
    for _ in range(dice.randrange(4)):
        at, span = dice.randrange(len(text) + 1), dice.randrange(6)
        kind = dice.randrange(5)
        if kind == 4:
            text = text[:at] + text[at:].translate(dice.choice(LOOKALIKES))
        elif kind == 0:
            text = text[:at] + dice.choice(SPLICES) + text[at + span :]
        elif kind == 1:
            text = text[:at] + text[at + span :]
        elif kind == 2:
            text = text[:at] + chr(dice.choice((dice.randrange(32, 127), dice.randrange(0x3000)))) + text[at:]
        else:
            text = text[:at] + text[max(0, at - 8) : at] * dice.randrange(4) + text[at:]
    return text


def _answer(dice: random.Random) -> RawOutcome:
    names = dice.sample(sorted(HEADERS), dice.randrange(5))
    headers = [
        (_mutated(dice, n) if dice.random() < 0.1 else n, _mutated(dice, dice.choice(HEADERS[n]))) for n in names
    ]
    body = _mutated(dice, dice.choice(BODIES)).encode("utf-8", "replace")
    return RawOutcome(status=dice.choice((200, 400, 403, 429, 503)), headers=headers, body=body)


def _read(raw: RawOutcome) -> int | None:
    outcome = parse_outcome(raw)
    hint = read_hint(outcome.headers, outcome.body, outcome.text, NOW, PROFILE)
    return hint.wait_ms if hint else None


def _within_bounds(wait: int | None) -> bool:
    return wait is None or (type(wait) is int and 0 < wait <= CAP_MS)


def _cost(run: Callable[[], object]) -> float:
    """CPU seconds of this thread: the best of a few runs, as soon as one is fast enough."""
    best = float("inf")
    for _ in range(6):
        started = time.thread_time()
        run()
        best = min(best, time.thread_time() - started)
        if best < SLOWEST_S:
            break
    return best


@pytest.mark.parametrize("seed", range(4))
def test_mutated_answers_never_raise_and_waits_stay_in_bounds(seed: int) -> None:
    dice = random.Random(seed)
    read = 0
    for _ in range(EXAMPLES // 4):
        raw = _answer(dice)
        wait = _read(raw)
        assert _within_bounds(wait), raw
        read += wait is not None
    assert read > EXAMPLES // 4 // 10  # mutations that destroyed every hint would prove nothing


@given(
    headers=st.dictionaries(st.sampled_from(sorted(HEADERS)) | st.text(max_size=12), st.text(max_size=40), max_size=5),
    body=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30) | st.sampled_from(BODIES),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["error", "details", "@type", "retryDelay", "retry_after", "resets_at", "message", "metadata"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=8,
    ),
    text=st.text(max_size=80),
    now=st.integers(0, 4_000_000_000_000),
)
@settings(max_examples=min(300, EXAMPLES), deadline=None)
def test_any_body_of_any_shape_at_any_time_is_read_without_error(
    headers: dict[str, str], body: object, text: str, now: int
) -> None:
    hint = read_hint(headers, body, text, now, PROFILE)
    stated = stated_wait_ms(headers, body, text, now, PROFILE)
    assert hint is None or (_within_bounds(hint.wait_ms) and hint.reset_at == now + hint.wait_ms)
    assert (hint is None) == (not stated)
    assert _within_bounds(parse_resets_in(text))


@given(body=st.binary(max_size=200), status=st.sampled_from((200, 429, 500, None)), report=st.text(max_size=30))
@settings(max_examples=min(300, EXAMPLES), deadline=None)
def test_any_bytes_parse_to_an_outcome(body: bytes, status: int | None, report: str) -> None:
    outcome = parse_outcome(RawOutcome(status=status, network_error=report, body=body))
    assert outcome.status is not None or not report
    assert len(outcome.text) <= LARGEST


@pytest.mark.alone
@pytest.mark.parametrize("trap", TRAPS)
def test_no_read_of_the_largest_text_takes_over_two_milliseconds(trap: str) -> None:
    text = (trap * LARGEST)[:LARGEST]
    body = {"error": {"message": text, "retry_after": text, "details": [{"@type": text, "retryDelay": text}]}}
    headers = dict.fromkeys(HEADERS, text)
    raw_body = text.encode()[:LARGEST]
    assert _cost(lambda: read_hint({}, None, text, NOW, PROFILE)) < SLOWEST_S
    assert _cost(lambda: read_hint({}, body, text, NOW, PROFILE)) < SLOWEST_S
    assert _cost(lambda: read_hint(headers, None, "", NOW, PROFILE)) < SLOWEST_S
    assert _cost(lambda: parse_resets_in(text)) < SLOWEST_S
    for status in (200, 429):
        assert _cost(lambda s=status: parse_outcome(RawOutcome(status=s, body=raw_body))) < SLOWEST_S  # type: ignore[misc]


@pytest.mark.alone
@pytest.mark.parametrize("trap", TRAPS)
def test_twice_the_text_takes_at_most_about_twice_the_time(trap: str) -> None:
    def run(size: int) -> Callable[[], object]:
        text = (trap * size)[:size]
        raw = RawOutcome(status=429, body=json.dumps({"error": {"message": text}})[:size].encode())
        return lambda: (_read(raw), read_hint({}, None, text, NOW, PROFILE))

    half, whole = run(LARGEST // 2), run(LARGEST)
    assert min(map(_cost, [whole] * 3)) < 3 * min(map(_cost, [half] * 3)) + 0.001
