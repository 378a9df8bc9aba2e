"""The first error among the events of a body: server-sent events or JSON lines. Pure.

Events are found by the marks that an error leaves, so that the cost does not grow with the number of lines. Read by
`outcome_parsing`; what one event says is `stream_events`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile

from policy_service.domain.error_object import read_json
from policy_service.domain.stream_events import carries_error

_MARKS_READ = 128
"""Lines with a mark that are looked at; a body with more of them says nothing new."""
_RUN_LINES = 64
"""Lines that one event is written over, at most, before and behind the one with the mark."""
_RUN_SPAN = 8_192
"""Characters of these lines, on either side."""
_MARKS = ('"error', '"Error', "event: error", "event:error", "failed", "base_resp", '"success"', '"code"', '"msg"')
_DATA = "data:"
_JSON_ENDS = ("}", "]", '"')
_NO_DATA = ("event:", "id:", "retry:", ":")
_SAY_NOTHING = r"(?:(?:(?:id|retry)?:[^\n]*|[ \t]*)\n)"
_LINES_THAT_SAY_NOTHING = re.compile(f"{_SAY_NOTHING}++")
_ERROR_EVENT = re.compile(rf"event:[ \t]*error[ \t]*\n{_SAY_NOTHING}{{0,16}}")
"""The name of an error event and the lines before its data that say nothing."""


def may_hold_error(text: str) -> bool:
    """Cheap look before a 2xx body is parsed: most are plain successes."""
    return any(mark in text for mark in _MARKS)


def stream_error(text: str) -> object | None:
    """JSON of the first error event, or the words of an `event: error`; None where no event is an error."""
    lines = _with_plain_ends(text)
    joined_to = 0
    for is_error_event, start, end in _suspects(lines):
        data = _data_of(lines[start:end])
        body = _json_of(data)
        if body is None and start >= joined_to and lines.startswith(_DATA, start):
            before, behind = [] if is_error_event else _run_before(lines, start), _run_behind(lines, end)
            joined_to = end + sum(len(line) + 1 for line in behind)
            data = "\n".join((*map(_data_of, before), data, *map(_data_of, behind)))
            body = _json_of(data) if before or behind else None
        if body is not None and carries_error(body):
            return body
        if is_error_event and data and (body is None or isinstance(body, dict)):
            return {"error": body or {"message": data}}
    return None


def _with_plain_ends(text: str) -> str:
    """Lines ended by LF alone; the standard knows CRLF and CR as well."""
    plain = text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
    return plain.removeprefix("\ufeff")


def _data_of(line: str) -> str:
    return line.removeprefix(_DATA).strip()


def _json_of(data: str) -> object | None:
    """The data as JSON, which is not tried where it ends in the middle."""
    return read_json(data) if data.endswith(_JSON_ENDS) else None


def _suspects(text: str) -> Iterator[tuple[bool, int, int]]:
    """Bounds of the lines that may tell an error: with a mark in them, or the data of an `event: error` (True)."""
    places = [(at, mark) for mark in _MARKS if (at := text.find(mark)) >= 0]
    for _ in range(_MARKS_READ):
        if not places:
            return
        start = text.rfind("\n", 0, min(places)[0]) + 1
        name = _ERROR_EVENT.match(text, start) if text.startswith("event:", start) else None
        if name:
            start = name.end()
        behind = _line_end(text, start)
        if not text.startswith(_NO_DATA, start):
            yield name is not None, start, behind
        elif name:
            behind = start
        elif silent := _LINES_THAT_SAY_NOTHING.match(text, start):
            behind = silent.end()
        places = [(at, mark) for old, mark in places if (at := old if old >= behind else text.find(mark, behind)) >= 0]


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return end if end >= 0 else len(text)


def _run_before(text: str, start: int) -> list[str]:
    """Data lines that lead up to one without a gap: together they are one event."""
    if not text.startswith(_DATA, text.rfind("\n", 0, max(0, start - 1)) + 1):
        return []
    lines = text[max(0, start - _RUN_SPAN) : start].rsplit("\n", _RUN_LINES + 1)[-_RUN_LINES - 1 : -1]
    return list(takewhile(_is_data, reversed(lines)))[::-1]


def _run_behind(text: str, end: int) -> list[str]:
    """Data lines that follow one without a gap."""
    if not text.startswith(_DATA, end + 1):
        return []
    lines = text[end + 1 : end + 1 + _RUN_SPAN].split("\n", _RUN_LINES)[:_RUN_LINES]
    return list(takewhile(_is_data, lines))


def _is_data(line: str) -> bool:
    return line.startswith(_DATA)
