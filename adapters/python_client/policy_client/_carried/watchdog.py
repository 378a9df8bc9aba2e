# Made by carry.py from policy_service/domain/watchdog.py. Change the original.
"""Slow-stream throughput watchdog: one pure step per event of a stream (spec/watchdog.md sections 1 to 3).

Detects an upstream that keeps sending but gives hardly any output; silence belongs to the idle timeout. Standard
library only and no import of its own package: the Envoy adapter uses it and the Python client carries a copy.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

EXACT_SAMPLES = 64
"""Samples kept whatever they say; beyond them only those that can still decide a verdict are kept."""


class Verdict(StrEnum):
    """What is to happen to the attempt."""

    CONTINUE = "CONTINUE"
    ABORT = "ABORT"


ABORT_REASON = "throughput_too_low"
ABORT_CODE = "STREAM_THROUGHPUT_TOO_LOW"
ABORT_FAILURE_KIND = "timeout"
"""Kind of the abort where failures are aggregated by kind (spec/diagnostics.md section 4)."""


class WatchdogSettings(NamedTuple):
    """Settings `stream_watchdog.*` of one attempt; the ranges are held where settings are read."""

    enabled: bool = False
    warmup_ms: int = 30_000
    window_ms: int = 30_000
    min_useful_bytes_per_second: float = 4
    min_useful_bytes: int = 1

    @property
    def is_judged_after_ms(self) -> int:
        """Age of a stream, from its first event, before which it is never judged."""
        return self.warmup_ms + self.window_ms


Samples: TypeAlias = tuple[int, int, Any] | None
"""Linked list of samples: time in ms, bytes, rest. Adding one copies nothing."""


class WatchState(NamedTuple):
    """What is known of one attempt. The samples are a queue of two lists, so that a step costs the same however
    many there are; states are not meant to be compared with each other."""

    started_at: int | None = None
    """Time of the first event, in ms."""
    window_bytes: int = 0
    """Useful bytes of the samples kept."""
    protected: bool = False
    """A tool or reasoning phase is under way: not judged until output follows."""
    sample_count: int = 0
    oldest_first: Samples = None
    newest_first: Samples = None


START = WatchState()
"""State of an attempt that has shown no event yet; also after a move to another reader (section 2)."""


def observe(
    state: WatchState, useful_bytes: int, protected: bool, now: int, settings: WatchdogSettings
) -> tuple[WatchState, Verdict]:
    """Take one event of the stream and judge the attempt (spec/watchdog.md section 2).

    Several events of one chunk are observed one after the other with the same `now`.

    Args:
        state: state after the event before; `START` for the first event of an attempt.
        useful_bytes: UTF-8 bytes of assistant output in the event; anything below zero counts as none.
        protected: the event belongs to a tool or reasoning phase; its bytes then count as none.
        now: milliseconds of a clock that does not go back.
        settings: settings of the attempt.

    Returns:
        The next state, and ABORT where the attempt has to be ended.
    """
    started_at = now if state.started_at is None else state.started_at
    if protected:
        state = state._replace(started_at=started_at, protected=True)
    elif useful_bytes > 0:
        state = _added(state, started_at, useful_bytes, now)
    elif state.started_at is None:
        state = state._replace(started_at=started_at)
    if state.sample_count:
        state = _trimmed(state, now - settings.window_ms, settings)
    is_slow = _is_slow(state, now - started_at, settings)
    return state, Verdict.ABORT if is_slow else Verdict.CONTINUE


def _added(state: WatchState, started_at: int, useful_bytes: int, now: int) -> WatchState:
    """With a sample more; the newest grows instead where it is of the same instant: samples of a chunk are one."""
    _, total, _, count, oldest, newest = state
    if newest is not None and newest[0] == now:
        return WatchState(
            started_at, total + useful_bytes, False, count, oldest, (now, newest[1] + useful_bytes, newest[2])
        )
    return WatchState(started_at, total + useful_bytes, False, count + 1, oldest, (now, useful_bytes, newest))


def _trimmed(state: WatchState, oldest_at: int, settings: WatchdogSettings) -> WatchState:
    """Without samples older than `oldest_at`; beyond `EXACT_SAMPLES` also without those that no verdict needs: while
    all newer ones are in the window the rate is high enough, and when one of them leaves it, this one has left too."""
    started_at, total, protected, count, oldest, newest = state
    while count:
        if oldest is None:
            oldest, newest = _turned(newest), None
        at, size, rest = oldest
        is_spare = count > EXACT_SAMPLES and not _is_below(total - size, settings)
        if at >= oldest_at and not is_spare:
            break
        total, count, oldest = total - size, count - 1, rest
    return WatchState(started_at, total, protected, count, oldest, newest)


def _turned(samples: Samples) -> Any:
    """The same samples the other way round."""
    turned: Samples = None
    while samples is not None:
        at, size, samples = samples
        turned = (at, size, turned)
    return turned


def _is_below(total: int, settings: WatchdogSettings) -> bool:
    """True where `total` bytes in the window are less than the minimum rate; whole numbers, so that nothing rounds."""
    return total * 1_000 < settings.min_useful_bytes_per_second * max(1_000, settings.window_ms)


def _is_slow(state: WatchState, elapsed_ms: int, settings: WatchdogSettings) -> bool:
    if not settings.enabled or state.protected or elapsed_ms < settings.is_judged_after_ms:
        return False
    is_measurable = state.window_bytes == 0 or state.window_bytes >= settings.min_useful_bytes
    return is_measurable and _is_below(state.window_bytes, settings)
