"""Waits stated in words (spec/retry_hints.md sections 4 and 4.1).

One scan finds the phrases that announce a wait, the grammar reads what follows each, and the number of the row
decides between several. Rows 1 to 7 are the reference's wordings; 8 to 10 are the extended ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.retry_grammar import (
    DAY_MS,
    SECOND_MS,
    read_clock,
    read_duration,
    read_iso,
    read_month_day,
    read_stopwatch,
)
from policy_service.domain.retry_phrases import (
    CONNECTORS,
    ENDINGS,
    FILLERS,
    FOREIGN_CONNECTORS,
    FOREIGN_LEADS,
    LEADS,
    TRAILS,
    TRAILS_OF_INSTANT,
)

TEXT_LIMIT = 8_192
"""Characters of a text that are read; a message that states a wait states it early."""
_PHRASES_READ = 24

_EXTENDED_ROW, _CLOCK_ROW, _FOREIGN_ROW = 8, 9, 10
_CAPS = {1: DAY_MS}
WAIT_CAP_MS = 30 * DAY_MS

_LINK = re.compile(
    rf"{ENDINGS}(?![a-z])[ :\-\u00a0]{{0,3}}"
    rf"(?:({CONNECTORS})(?=[ :~0-9])[ :]{{0,2}})?(?:(?:{FILLERS})[ ]?)?(?=[a-z0-9])"
)
_FOREIGN_LEAD = re.compile(rf"(?:{FOREIGN_LEADS})[ :\u00a0]{{0,3}}(?:(?:{FOREIGN_CONNECTORS})[ \u00a0]{{0,2}})?$")
"""For lower-case text: a pattern that ignores case tries every place."""
_FOREIGN_LEAD_SPAN = 48
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_TRAIL = re.compile(TRAILS)
_TRAIL_OF_INSTANT = re.compile(TRAILS_OF_INSTANT)
_HMS = re.compile(r"(?:[0-9]+h)?(?:[0-9]+m)?(?:[0-9]+(?:\.[0-9]+)?s)?", re.IGNORECASE)
_SECONDS = re.compile(r"[0-9]+(?:\.[0-9]+)?s", re.IGNORECASE)
_DAYS = re.compile(r"[0-9]+ days?", re.IGNORECASE)
_CONDITION, _CONDITION_SPAN = "recently", 128
_LIMIT = re.compile(r"limit:?[ ]([0-9]{1,12})(?!\.?[0-9])(?:[^\n]{0,80}?\brequested:?[ ]~?([0-9]{1,12}))?")
_TEXT_PROTO = re.compile(r"retry_delay:?\s{0,8}\{\s{0,8}seconds:\s{0,8}([0-9]{1,12})")
_PIPED_EPOCH = re.compile(r"limit reached[^|\n]{0,40}\|([0-9]{10})(?![0-9])")

_INSTANT_PHRASES = frozenset({
    ("try_again", "at"), ("wait", "until"), ("reset", "at"), ("available", "at"), ("retry", "after"),
    ("please_retry", "after"),
})  # fmt: skip
_RELATIVE_PHRASES = {("please_retry", "in"): 1, ("reset", "after"): 3, ("reset", "in"): 5}


class _Reading(NamedTuple):
    row: int
    position: int
    wait_ms: DurationMs


def text_waits(text: str, message: str, now: Instant, *, extended: bool) -> Iterator[tuple[DurationMs, DurationMs]]:
    """(wait, cap) of each wording, best row first.

    Args:
        text: the whole answer, for rows 1 to 7.
        message: message of the error object, for the extended rows; empty: the whole answer.
        now: database time, ms.
        extended: whether rows 8 to 10 are read.
    """
    head = text[:TEXT_LIMIT]
    words = head if not message or message == text else message[:TEXT_LIMIT]
    if extended and can_never_fit(_lowered(words)):
        return
    stages = (partial(_readings, head, now), *((partial(stage, words, now) for stage in _EXTENDED) if extended else ()))
    for reading in chain.from_iterable(sorted(stage()) for stage in stages):
        yield reading.wait_ms, _CAPS.get(reading.row, WAIT_CAP_MS)


def _lowered(text: str) -> str:
    """Lower case at the same positions; the dotted capital I is the one letter that would grow."""
    return text.replace("\u0130", "i").lower()


def _occurrences(lowered: str, word: str) -> Iterator[int]:
    """Positions of a word that begins where no other word goes on; a bounded number of them."""
    at = lowered.find(word)
    for _ in range(_PHRASES_READ):
        if at < 0:
            return
        if at == 0 or not lowered[at - 1].isalnum():
            yield at
        at = lowered.find(word, at + len(word))


def can_never_fit(lowered: str) -> bool:
    """True where the text itself says that waiting is in vain: a limit of 0, or more requested than the limit."""
    found = (_LIMIT.match(lowered, at) for at in _occurrences(lowered, "limit"))
    return any(int(stated[1]) == 0 or int(stated[2] or 0) > int(stated[1]) for stated in found if stated)


class _Lead(NamedTuple):
    """A phrase that announces a wait: its stem and connector, where it begins and where the value begins."""

    phrase: tuple[str, str]
    start: int
    value: int


def _leads(lowered: str) -> Iterator[_Lead]:
    for words, stem in LEADS.items():
        for at in _occurrences(lowered, words):
            link = _LINK.match(lowered, at + len(words))
            if link:
                yield _Lead((stem, link[1] or ""), at, link.end())


def _readings(text: str, now: Instant, *, extended: bool = False) -> Iterator[_Reading]:
    """Rows 1 to 7, or the rows 8 and 9 of the same phrases."""
    if not _NUMBER.search(text):
        return
    lowered = _lowered(text)
    for lead in islice(_leads(lowered), _PHRASES_READ):
        reading = _classic(text, lead, now) or (_further(text, lead, now) if extended else None)
        if reading and (reading.row >= _EXTENDED_ROW) == extended and not _is_conditional(lowered, lead.start):
            yield reading


def _is_conditional(lowered: str, start: int) -> bool:
    """ "If you recently changed this, try again after 5 minutes" promises nothing to anybody else."""
    at = lowered.rfind(_CONDITION, max(0, start - _CONDITION_SPAN), start)
    return at >= 0 and not any(end in lowered[at:start] for end in ".!?\n")


def _classic(text: str, lead: _Lead, now: Instant) -> _Reading | None:
    if lead.phrase in _INSTANT_PHRASES:
        instant = read_iso(text, lead.value)
        if instant:
            return _Reading(2, lead.value, instant[0] - now)
    if lead.phrase == ("reset", "at"):
        month_day = read_month_day(text, lead.value, now)
        return _Reading(7, lead.value, month_day[0] - now) if month_day else None
    duration = read_duration(text, lead.value) if lead.phrase in _RELATIVE_PHRASES else None
    row = _row_of_duration(text[lead.value : duration[1]], lead.phrase) if duration else None
    return _Reading(row, lead.value, duration[0]) if duration and row else None


def _row_of_duration(written: str, phrase: tuple[str, str]) -> int | None:
    row = _RELATIVE_PHRASES[phrase]
    if row == 1:
        return 1 if _SECONDS.fullmatch(written) else None
    if _HMS.fullmatch(written):
        return row
    return 6 if row == 5 and _DAYS.fullmatch(written) else None


def _further(text: str, lead: _Lead, now: Instant) -> _Reading | None:
    at = lead.value
    duration = read_duration(text, at) or (read_stopwatch(text, at) if lead.phrase[1] == "in" else None)
    if duration:
        return _Reading(_EXTENDED_ROW, at, duration[0])
    instant = read_iso(text, at, date_only=True) or read_clock(text, at, now)
    return _Reading(_CLOCK_ROW, at, instant[0] - now) if instant else None


def _foreign(text: str, now: Instant) -> Iterator[_Reading]:
    """Values with words of another language before or behind them."""
    behind, lowered = 0, _lowered(text)
    for number in islice(_NUMBER.finditer(text), 2 * _PHRASES_READ):
        if number.start() < behind:
            continue
        duration = read_duration(text, number.start())
        if duration:
            behind = duration[1]
            if _is_announced(lowered, number.start(), behind):
                yield _Reading(_FOREIGN_ROW, number.start(), duration[0])
        elif not text.isascii() and (instant := read_iso(text, number.start())):
            behind = instant[1]
            if _TRAIL_OF_INSTANT.match(text, behind):
                yield _Reading(_FOREIGN_ROW, number.start(), instant[0] - now)


def _is_announced(lowered: str, start: int, end: int) -> bool:
    before = lowered[max(0, start - _FOREIGN_LEAD_SPAN) : start]
    return _TRAIL.match(lowered, end) is not None or _FOREIGN_LEAD.search(before) is not None


def _piped(text: str, now: Instant) -> Iterator[_Reading]:
    """ "limit reached|1749924000": epoch seconds behind a bar."""
    found = _PIPED_EPOCH.search(text.lower()) if "|" in text else None
    if found:
        yield _Reading(_CLOCK_ROW, found.start(), int(found[1]) * SECOND_MS - now)


def _text_proto(text: str, now: Instant) -> Iterator[_Reading]:
    """ "retry_delay { seconds: 44 }", the text form of RetryInfo; it speaks of the minute where a day is spent too."""
    found = _TEXT_PROTO.search(text) if "retry_delay" in text and "perday" not in text.lower() else None
    if found:
        yield _Reading(_EXTENDED_ROW, found.start(), int(found[1]) * SECOND_MS)


_EXTENDED = (partial(_readings, extended=True), _piped, _text_proto, _foreign)


_RESETS_IN = re.compile(r"resets in (?=[0-9])", re.IGNORECASE)


def parse_resets_in(text: str) -> DurationMs | None:
    """Wait of "resets in N days | hours | minutes | seconds", in ms, at most 30 days; None where it is absent."""
    for found in islice(_RESETS_IN.finditer(text[:TEXT_LIMIT]), _PHRASES_READ):
        duration = read_duration(text, found.end())
        if duration and duration[0] > 0:
            return min(duration[0], WAIT_CAP_MS)
    return None
