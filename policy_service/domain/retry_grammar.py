"""Grammar of stated waits: numbers, durations, instants, clock times (spec/retry_hints.md sections 2 and 4).

Readers take a text and a position and give a value or None; they never raise on junk and look at a bounded
number of characters. Only the reading of hints uses this; which place is looked at is decided there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from email.utils import parsedate_to_datetime
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.retry_phrases import MONTHS, UNITS, ZONE_OFFSETS, ZONE_REGIONS

SECOND_MS, HOUR_MS, DAY_MS = 1_000, 3_600_000, 86_400_000
VALUE_LIMIT = 64
"""Longest header or JSON value that is read; a longer one is junk."""
EPOCH_SECONDS_ABOVE = 1_000_000_000
EPOCH_MS_ABOVE = 10_000_000_000

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_NUMBER = re.compile(r"[0-9]{1,18}(?:\.[0-9]{0,18})?")

_COUNTED = " token"
_LETTERS = r"a-zA-Z\u00c0-\u024f\u0400-\u04ff\u1e00-\u1eff"
_CHARACTERS = r"\u3040-\u9fff\uac00-\ud7af"
_STEP = re.compile(
    rf"([0-9]{{1,12}}(?:\.[0-9]{{1,12}})?)[ \t\u00a0]{{0,2}}(?:([{_LETTERS}]{{1,13}})|([{_CHARACTERS}]{{1,3}}))"
)
_JOINT = re.compile(r"[ ,\u00a0]{0,2}(?:(?:and|und|et|y|e|и)[ \u00a0])?", re.IGNORECASE)
_ISO = re.compile(
    r"([0-9]{4})[-/]([0-9]{1,2})[-/]([0-9]{1,2})(?![0-9])"
    r"(?:(?:T|,?[ \u00a0]{1,2}(?:at[ ])?)([0-9]{1,2}):([0-9]{2})(?::([0-9]{2})(?:[.,]([0-9]{1,9}))?)?(?![0-9]))?",
    re.IGNORECASE,
)
_MONTH_DAY = re.compile(r"([0-9]{2})-([0-9]{2})[ ]{1,2}([0-9]{2}):([0-9]{2})(?::([0-9]{2}))?(?![0-9:])")
_CLOCK = re.compile(r"([0-9]{1,2})(?::([0-9]{2}))?(?::([0-9]{2}))?(?:[ \u00a0]?([ap])\.?m\.?(?![a-z]))?", re.IGNORECASE)
_STOPWATCH = re.compile(r"([0-9]{1,3}):([0-5][0-9]):([0-5][0-9])(?![0-9:])")
_NAMED_DAY = re.compile(
    r"([a-z]{3})[a-z]{0,6}\.?[ ]([0-9]{1,2})(?:st|nd|rd|th)?(?:,?[ ]([0-9]{4}))?,?[ ](?:at[ ])?", re.IGNORECASE
)
_ZONE = re.compile(
    r"[ \u00a0]{0,2}\(?(?:(?:UTC|GMT|Z)?(?P<offset>[+-][0-9]{1,2}(?::?[0-9]{2})?)"
    r"|(?P<name>[A-Za-z]{1,12})(?P<place>(?:/[A-Za-z0-9_+-]{1,32}){0,2}))(?![A-Za-z0-9/_])"
)


def scaled(number: str, unit_ms: int) -> DurationMs:
    """Decimal digits times a unit, rounded up to whole milliseconds without binary fractions."""
    whole, _, fraction = number.partition(".")
    divisor: int = 10 ** len(fraction)
    return -(-int(whole + fraction) * unit_ms // divisor)


def read_number(raw: object, unit_ms: int) -> DurationMs | None:
    """A JSON number, or a text that is wholly a plain decimal number, times a unit; None for anything else."""
    if isinstance(raw, str):
        text = raw.strip() if len(raw) <= VALUE_LIMIT else ""
        return scaled(text, unit_ms) if _NUMBER.fullmatch(text) else None
    if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not 0 <= raw < 10**18:
        return None
    return raw * unit_ms if isinstance(raw, int) else math.ceil(round(raw * unit_ms, 6))


def read_duration(text: str, position: int = 0) -> tuple[DurationMs, int] | None:
    """Sum of numbers with units from large to small; only the last may have a fraction.

    Returns the milliseconds and the position behind the duration.
    """
    total, end, smallest = 0, position, math.inf
    while step := _STEP.match(text, position):
        number, unit_ms, step_end = step[1], *_unit_of(step)
        if not 0 < unit_ms < smallest:
            break
        total, end, smallest = total + scaled(number, unit_ms), step_end, unit_ms
        if "." in number:
            break
        joint = _JOINT.match(text, end)
        position = joint.end() if joint else end
    return (total, end) if smallest != math.inf else None


def read_stopwatch(text: str, position: int) -> tuple[DurationMs, int] | None:
    """`H:MM:SS` as a span of time, as .NET prints one; the caller knows that no clock time is meant."""
    found = _STOPWATCH.match(text, position)
    if found is None:
        return None
    hours, minutes, seconds = map(int, found.groups())
    return ((hours * 60 + minutes) * 60 + seconds) * SECOND_MS, found.end()


def _unit_of(step: re.Match[str]) -> tuple[int, int]:
    """Milliseconds of the unit (0: no unit) and the position behind it."""
    word, characters = step[2], step[3]
    if word:  # "5M" is a count of millions, and so is "5m tokens"
        is_count = word == "M" or (word == "m" and step.string.startswith(_COUNTED, step.end()))
        return (0 if is_count else UNITS.get(word.lower(), 0)), step.end()
    start = step.start(3)  # no spaces between words: the longest unit that the characters begin with
    sizes = range(len(characters), 0, -1)
    return next(((UNITS[unit], start + size) for size in sizes if (unit := characters[:size]) in UNITS), (0, start))


def whole_duration(raw: str) -> DurationMs | None:
    """A text that is nothing but a duration."""
    text = raw.strip() if len(raw) <= VALUE_LIMIT else ""
    found = read_duration(text)
    return found[0] if found and found[1] == len(text) else None


def to_instant(moment: datetime) -> Instant:
    """Epoch milliseconds, rounded up; a time without zone is UTC."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return -((_EPOCH - aware) // _MS)


def _sound(build: Callable[[], datetime]) -> Instant | None:
    """Instant of a date that may not exist (month 13, year 0)."""
    try:
        return to_instant(build())
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def read_iso(text: str, position: int = 0, *, date_only: bool = False) -> tuple[Instant, int] | None:
    """Date-time at a position: T or space between, seconds, fraction and zone optional, no zone means UTC.

    With `date_only` a bare date stands for its first moment.
    """
    found = _ISO.match(text, position)
    if found is None or (found[4] is None and not date_only):
        return None
    zone, end = read_zone(text, found.end()) or (UTC, found.end())
    parts = [int(part or 0) for part in found.groups()[:6]]
    micros = int((found[7] or "0").ljust(6, "0")[:6])
    at = _sound(lambda: datetime(*parts, micros, tzinfo=zone))  # type: ignore[misc,arg-type]
    return None if at is None else (at, end)


def read_date(raw: str) -> Instant | None:
    """A whole value that is an ISO date, with or without a time, or one of the three HTTP date forms."""
    text = raw.strip() if len(raw) <= VALUE_LIMIT else ""
    found = read_iso(text, date_only=True)
    if found:
        return found[0] if found[1] == len(text) else None
    return _sound(lambda: parsedate_to_datetime(text)) if text[:3].isalpha() else None


def read_zone(text: str, position: int) -> tuple[tzinfo, int] | None:
    """Zone at a position: UTC, an offset, an unambiguous abbreviation or an IANA name, maybe in brackets."""
    found = _ZONE.match(text, position)
    if found is None:
        return None
    zone = _offset_zone(found["offset"]) if found["offset"] else _named_zone(found["name"], found["place"])
    return None if zone is None else (zone, found.end())


def _offset_zone(offset: str) -> tzinfo | None:
    digits = offset[1:].replace(":", "")
    hours, minutes = (int(digits[:-2]), int(digits[-2:])) if len(digits) > 2 else (int(digits), 0)
    delta = timedelta(hours=hours, minutes=minutes)
    return timezone(-delta if offset[0] == "-" else delta) if hours < 15 else None


def _named_zone(name: str, place: str) -> tzinfo | None:
    if place:
        return _place_zone(name + place) if name.lower() in ZONE_REGIONS else None
    hours = ZONE_OFFSETS.get(name.upper())
    return None if hours is None else UTC if hours == 0 else timezone(timedelta(hours=hours))


@lru_cache(maxsize=512)
def _place_zone(name: str) -> tzinfo | None:
    try:
        return ZoneInfo(name) if len(name) <= VALUE_LIMIT else None
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return None


def read_month_day(text: str, position: int, now: Instant) -> tuple[Instant, int] | None:
    """`MM-DD HH:MM[:SS]` in UTC: its next occurrence, this year or a later one."""
    found = _MONTH_DAY.match(text, position)
    if found is None:
        return None
    month, day, hour, minute, second = (int(part or 0) for part in found.groups())
    at = _next_in_year(now, month, day, (hour, minute, second), UTC)
    return None if at is None else (at, found.end())


def read_clock(text: str, position: int, now: Instant) -> tuple[Instant, int] | None:
    """Clock time with a zone, maybe behind a named day ("Oct 6, 10am (UTC)"): its next occurrence in that zone.

    Without a zone there is no answer: guessing one is worse than no hint.
    """
    day = _NAMED_DAY.match(text, position)
    found = _CLOCK.match(text, day.end() if day else position)
    if found is None or not (found[2] or found[4]):
        return None
    clock, zone = _clock_of(found), read_zone(text, found.end())
    if clock is None or zone is None:
        return None
    at = _on_named_day(day, now, clock, zone[0]) if day else _next_day(now, clock, zone[0])
    return None if at is None else (at, zone[1])


def _clock_of(found: re.Match[str]) -> tuple[int, int, int] | None:
    hour, minute, second = (int(part or 0) for part in found.groups()[:3])
    if found[4]:
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + (12 if found[4] in "pP" else 0)
    return (hour, minute, second) if hour < 24 and minute < 60 and second < 60 else None


def _local_date(now: Instant, zone: tzinfo) -> date:
    return (_EPOCH + now * _MS).astimezone(zone).date()


def _next_day(now: Instant, clock: tuple[int, int, int], zone: tzinfo) -> Instant | None:
    today = _local_date(now, zone)
    days = (_sound(lambda d=d: datetime.combine(today + timedelta(d), time(*clock), zone)) for d in (0, 1))  # type: ignore[misc]
    return next((at for at in days if at is not None and at > now), None)


def _next_in_year(
    now: Instant, month: int, day: int, clock: tuple[int, int, int], zone: tzinfo, *, years: range | None = None
) -> Instant | None:
    span = years or range(_local_date(now, zone).year, _local_date(now, zone).year + 9)  # reaches a 29 February
    days = (_sound(lambda y=y: datetime(y, month, day, *clock, tzinfo=zone)) for y in span)  # type: ignore[misc]
    return next((at for at in days if at is not None and at > now), None)


def _on_named_day(day: re.Match[str], now: Instant, clock: tuple[int, int, int], zone: tzinfo) -> Instant | None:
    year = range(int(day[3]), int(day[3]) + 1) if day[3] else None
    return _next_in_year(now, MONTHS.get(day[1].lower(), 0), int(day[2]), clock, zone, years=year)
