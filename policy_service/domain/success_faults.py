"""A 2xx answer that carries nothing usable: empty, a web page, a stream without events, JSON cut in the middle.

Errors that stand inside a 2xx as errors are found by `outcome_parsing`; this looks at what is left. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final

from policy_service.domain.stream_events import EventSplitter, StreamFormat, read_event
from policy_service.domain.verdict import NOBODY, PROVIDER, Verdict

FAULTS: Final = {
    "empty-answer": Verdict(PROVIDER, "server_error", True, rule="empty-answer"),
    "page-instead-of-answer": Verdict(PROVIDER, "server_error", True, rule="page-instead-of-answer"),
    "empty-stream": Verdict(PROVIDER, "server_error", True, rule="empty-stream"),
    "cut-answer": Verdict(PROVIDER, "network", True, rule="cut-answer"),
    "blocked-prompt": Verdict(NOBODY, "content_policy", False, rule="blocked-prompt"),
    "filtered-answer": Verdict(NOBODY, "content_policy", False, rule="filtered-answer"),
    "cut-stream": Verdict(NOBODY, "network", False, rule="cut-stream"),
}
"""A stream that was cut has been delivered in part: the caller holds half an answer, so nothing may be repeated."""
NO_FAULT: Final = Verdict(NOBODY, "none", False, rule="success")


def judge_success(body: str) -> Verdict:
    """Verdict on a 2xx answer by its body text; `NO_FAULT` where it looks whole."""
    name = success_fault(body)
    return FAULTS[name] if name else NO_FAULT


def success_fault(body: str) -> str:
    """Name of the fault of a 2xx body, empty where it looks whole."""
    text = body.strip("\ufeff \t\r\n")
    if not text:
        return "empty-answer"
    if text[:15].lower().startswith(("<!doctype html", "<html")):
        return "page-instead-of-answer"
    if text.startswith(("data:", "event:", ":")):
        return _stream_fault(text)
    return _json_fault(text) if text[0] in "{[" else ""


def output_came_first(body: str) -> bool:
    """True for an event stream that had begun to answer when its error came: the caller holds a part of the answer."""
    splitter = EventSplitter()
    for event in (*splitter.feed(body.encode("utf-8", "replace")), *splitter.finish()):
        told = read_event(StreamFormat.UNKNOWN, event)
        if told.is_error or told.useful_bytes:
            return not told.is_error
    return False


def _json_fault(text: str) -> str:
    if not _is_json(text):
        return "cut-answer"
    if _FILTERED.search(text):
        return "filtered-answer"
    if _BLOCKED.search(text) and '"text"' not in text:
        return "blocked-prompt"
    without_parts = '"candidates"' in text and '"parts"' not in text
    return "empty-answer" if without_parts or _HOLLOW.search(text) else ""


_BLOCKED: Final = re.compile(
    r'"blockReason"|"finishReason":\s{0,4}"(?:SAFETY|RECITATION|BLOCKLIST|SPII)"|"PROHIBITED_CONTENT"'
)
_FILTERED: Final = re.compile(r'"(?:finish_reason|reason)":\s{0,4}"content_filter"')
"""The provider's filter ended the answer, as the ends of OpenAI's formats say."""
_HOLLOW: Final = re.compile(r'"(?:choices|candidates)":\s{0,4}\[\s{0,4}\]')


def _stream_fault(text: str) -> str:
    events = [data for data in _data_lines(text) if data != "[DONE]"]
    if not events:
        return "empty-stream"
    last = events[-1]
    if _FILTERED.search(last):
        return "filtered-answer"
    return "cut-stream" if last.startswith("{") and not _is_json(last) else ""


def _data_lines(text: str) -> Iterator[str]:
    lines = (line.strip() for line in text.splitlines())
    return (line[5:].strip() for line in lines if line.startswith("data:"))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
