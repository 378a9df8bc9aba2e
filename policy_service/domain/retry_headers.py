"""Waits stated in response headers (spec/retry_hints.md sections 1, 2 and 4.2).

Each reader yields the waits that a place states, in milliseconds, zero and past ones included; the first
positive one is the hint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.retry_grammar import (
    DAY_MS,
    EPOCH_MS_ABOVE,
    SECOND_MS,
    VALUE_LIMIT,
    read_date,
    read_number,
    whole_duration,
)

Headers = Mapping[str, str]

_RESET_EPOCH_ABOVE = 1_700_000_000
_LONGEST_EPOCH_MS = 30 * DAY_MS
_PERCENT = 1_000
"""Numbers are rounded up: in thousandths, 99.5 per cent is not yet all."""
_SPENT = re.compile(r"(?<![a-z])(?:r|remaining)=0(?![0-9.])", re.IGNORECASE)
_TIME_TO_RESET = re.compile(r"(?<![a-z])(?:t|reset)=([0-9]{1,12})(?![0-9.])", re.IGNORECASE)
_EXACT = ("ratelimit-reset", "x-ratelimit-reset-after")
_CLAIMS = {"five_hour": "5h", "seven_day": "7d"}
_UNIFIED = "anthropic-ratelimit-unified-"
_ANTHROPIC = "anthropic-ratelimit-"
_SPELLINGS = ("x-ratelimit-", "x-rate-limit-")
_REJECTED = "rejected"


def header_waits(headers: Headers, now: Instant, *, extended: bool) -> Iterable[DurationMs]:
    """Waits in the order of the table; Retry-After ends the stage whatever it says."""
    found = _relevant(headers)
    stated = found.get("retry-after")
    if stated is not None:
        wait = _retry_after(stated, now, extended=extended)
        return () if wait is None else (wait,)
    return chain(_epoch_reset(found, now), _extended(found, now) if extended and found else ())


def _relevant(headers: Headers) -> dict[str, str]:
    """Lower-case names that can state a wait; of a repeated name the first value. Retry-After alone where it is there
    and spelt one way: nothing beside it is read."""
    plainly = headers.get("retry-after")
    if isinstance(plainly, str) and "Retry-After" not in headers:
        return {"retry-after": _first_of_list(plainly)}
    found: dict[str, str] = {}
    for name, value in headers.items():
        lowered = name.lower()
        if ("rate" in lowered or "retry" in lowered or "x-codex" in lowered) and isinstance(value, str):
            found.setdefault(lowered, _first_of_list(value))
    return found


def _first_of_list(value: str) -> str:
    """First value of a list of numbers ("45, 10"); a date keeps its comma. Empty for a value too long to be any."""
    whole = value.strip()[: VALUE_LIMIT + 1]
    first = whole.partition(",")[0].rstrip()
    chosen = first if first.isascii() and first.isdigit() else whole
    return chosen if len(chosen) <= VALUE_LIMIT else ""


def _retry_after(value: str, now: Instant, *, extended: bool) -> DurationMs | None:
    if value.isascii() and value.isdigit():
        seconds = int(value)
        return _epoch_soon(seconds, now) or seconds * SECOND_MS if extended else seconds * SECOND_MS
    at = read_date(value)
    if at is not None:
        return at - now
    if not extended:
        return None
    bare = read_number(value, SECOND_MS)
    return whole_duration(value) if bare is None else bare


def _epoch_soon(seconds: int, now: Instant) -> DurationMs | None:
    """Time to an epoch second of the next 30 days: what some gateways put where a number of seconds belongs."""
    wait = seconds * SECOND_MS - now
    return wait if 0 < wait <= _LONGEST_EPOCH_MS < seconds * SECOND_MS else None


def _epoch_reset(headers: Headers, now: Instant) -> Iterator[DurationMs]:
    value = headers.get("x-ratelimit-reset", "")
    if _is_epoch(value):
        yield (int(value) if int(value) > EPOCH_MS_ABOVE else int(value) * SECOND_MS) - now


def _is_epoch(value: str) -> bool:
    """An instant, of the past even: more seconds than any header may make one wait."""
    return value.isascii() and value.isdigit() and int(value) * SECOND_MS > _LONGEST_EPOCH_MS


def _extended(headers: Headers, now: Instant) -> Iterator[DurationMs]:
    wait = read_number(headers.get("retry-after-ms"), 1)
    if wait is not None:
        yield wait
    names = " ".join(headers)
    if "x-codex-" in names:
        yield from _codex_windows(headers, now)
    if _UNIFIED in names:
        yield from _unified_windows(headers, now)
    yield from (wait for name in _EXACT if (wait := read_reset(headers.get(name), now)) is not None)
    yield from _dimension_waits(headers, now)
    yield from _bare_reset(headers, now)
    yield from _structured_limit(headers)


def read_reset(value: str | None, now: Instant) -> DurationMs | None:
    """Wait of a reset value: a duration, bare seconds, epoch time above 1 700 000 000, or a date."""
    if not value:
        return None
    bare = read_number(value, SECOND_MS)
    if bare is None:
        at = read_date(value)
        return whole_duration(value) if at is None else at - now
    if bare > EPOCH_MS_ABOVE * SECOND_MS:
        return bare // SECOND_MS - now
    return bare - now if bare > _RESET_EPOCH_ABOVE * SECOND_MS else bare


def _latest(waits: Iterator[DurationMs | None]) -> Iterator[DurationMs]:
    known = [wait for wait in waits if wait is not None]
    if known:
        yield max(known)


def _codex_windows(headers: Headers, now: Instant) -> Iterator[DurationMs]:
    """A window's reset counts only where the window is used up."""
    prefixes = (f"x-codex-{window}-" for window in ("primary", "secondary"))
    full = (p for p in prefixes if is_used_up(headers.get(p + "used-percent")))
    yield from _latest(
        _first_wait(headers, now, prefix + "reset-after-seconds", prefix + "reset-at") for prefix in full
    )


def is_used_up(percent: str | None) -> bool:
    """A header states the used share of a window: all of it, or more."""
    return (read_number(percent, _PERCENT) or 0) >= 100 * _PERCENT


def _first_wait(headers: Headers, now: Instant, *names: str) -> DurationMs | None:
    return next((wait for name in names if (wait := read_reset(headers.get(name), now)) is not None), None)


def _unified_windows(headers: Headers, now: Instant) -> Iterator[DurationMs]:
    """The window that the claim names, else the unified reset, else the windows rejected by themselves."""
    status = headers.get(_UNIFIED + "status", _REJECTED).lower()
    window = _CLAIMS.get(headers.get(_UNIFIED + "representative-claim", "").lower())
    if window and status == _REJECTED:
        yield from _latest(iter([read_reset(headers.get(f"{_UNIFIED}{window}-reset"), now)]))
    if headers.get(_UNIFIED + "status", "").lower() == _REJECTED:
        yield from _latest(iter([read_reset(headers.get(_UNIFIED + "reset"), now)]))
    rejected = (w for w in _CLAIMS.values() if headers.get(f"{_UNIFIED}{w}-status", "").lower() == _REJECTED)
    yield from _latest(read_reset(headers.get(f"{_UNIFIED}{w}-reset"), now) for w in rejected)


class _Dimension(NamedTuple):
    is_spent: bool | None
    """None: no header says how much remains."""
    reset: str | None


def _dimension_waits(headers: Headers, now: Instant) -> Iterator[DurationMs]:
    """Latest reset of the spent dimensions; of all where nothing says what remains."""
    dimensions = list(_dimensions(headers))
    tells = any(dimension.is_spent is not None for dimension in dimensions)
    yield from _latest(read_reset(d.reset, now) for d in dimensions if d.is_spent or not tells)


def _dimensions(headers: Headers) -> Iterator[_Dimension]:
    names = {key for name in headers if name not in _EXACT and (key := _dimension_of(name))}
    for remaining, reset in sorted(names):
        left = headers.get(remaining)
        yield _Dimension(None if left is None else _is_zero(left), headers.get(reset))
    status, reset_at = headers.get(_UNIFIED + "status"), headers.get(_UNIFIED + "reset")
    if status is not None or reset_at is not None:
        yield _Dimension(None if status is None else status.lower() == _REJECTED, reset_at)


def _dimension_of(name: str) -> tuple[str, str] | None:
    """Names of the remaining and the reset header of the dimension that a header belongs to."""
    for prefix in _SPELLINGS:
        kind, _, dimension = name.removeprefix(prefix).partition("-") if name.startswith(prefix) else ("", "", "")
        if dimension and kind in ("remaining", "reset"):
            return f"{prefix}remaining-{dimension}", f"{prefix}reset-{dimension}"
    if not name.startswith(_ANTHROPIC) or name.startswith(_UNIFIED.removesuffix("-")):
        return None
    dimension, _, kind = name.removeprefix(_ANTHROPIC).rpartition("-")
    known = dimension and kind in ("remaining", "reset")
    return (f"{_ANTHROPIC}{dimension}-remaining", f"{_ANTHROPIC}{dimension}-reset") if known else None


def _bare_reset(headers: Headers, now: Instant) -> Iterator[DurationMs]:
    """`x-ratelimit-reset` that is no epoch time: seconds to go, a duration or a date, where nothing remains. Without a
    header of its own that says so it counts as little as any such dimension beside others that tell."""
    value, left = headers.get("x-ratelimit-reset", ""), headers.get("x-ratelimit-remaining")
    if not value or _is_epoch(value):
        return
    is_spent = not any(d.is_spent is not None for d in _dimensions(headers)) if left is None else _is_zero(left)
    if is_spent:
        yield from _latest(iter([read_reset(value, now)]))


def _is_zero(left: str) -> bool:
    return read_number(left, 1) == 0


def _structured_limit(headers: Headers) -> Iterator[DurationMs]:
    """`ratelimit: "default";r=0;t=30`, and the older `limit=10, remaining=0, reset=30`: seconds to go if spent."""
    value = headers.get("ratelimit", "")
    found = _TIME_TO_RESET.search(value) if _SPENT.search(value) else None
    if found:
        yield int(found[1]) * SECOND_MS
