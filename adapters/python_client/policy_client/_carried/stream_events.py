# Made by carry.py from policy_service/domain/stream_events.py. Change the original.
"""Server-sent events of a streamed answer: cut from byte chunks, and what each says (spec/watchdog.md section 4).

Useful bytes, tool and reasoning phases, errors and the end, for OpenAI chat and responses, Anthropic and Gemini.
Standard library only and no import of its own package: the Envoy adapter uses it and the Python client carries a copy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

Node = Mapping[str, object]

EVENT_LIMIT = 1_048_576
"""Bytes of an event that is read whole. Of a longer one `HEAD_BYTES` are kept: it says its name and is protected."""
HEAD_BYTES = 1_024
DONE = "[DONE]"

_EVENT_END = re.compile(rb"\n\r?\n")
_BLANK_LINES = re.compile(rb"[\r\n]*")
_LINE_END = b"\r\n"
_BOM = "\ufeff"


class StreamFormat(StrEnum):
    """Wire formats that are told apart; `UNKNOWN` reads all of them."""

    CHAT_COMPLETIONS = "chat_completions"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"
    GEMINI = "gemini"
    UNKNOWN = "unknown"


class StreamEvent(NamedTuple):
    """One event as it came."""

    name: str
    data: str
    """Its `data:` lines joined with LF; empty for a comment or a heartbeat."""
    is_cut: bool = False
    """It was longer than the limit; `data` is its beginning."""


class EventReading(NamedTuple):
    """What one event says."""

    useful_bytes: int = 0
    """UTF-8 bytes of assistant output."""
    protected: bool = False
    """Tool call or reasoning."""
    is_error: bool = False
    """An error instead of output; `error_body` gives what ReportOutcome takes as the body."""
    is_end: bool = False
    """The answer is complete; a stream that ends without such an event was cut off."""


class EventSplitter:
    """Cuts the bytes of one stream into events. An object, since a value would copy its tail with every chunk.

    Events end at a blank line (LF or CRLF). Time is linear in the bytes fed however they are cut, memory is
    bounded by the limit plus one chunk.

    Args:
        limit: bytes of the longest event that is read whole.
    """

    def __init__(self, limit: int = EVENT_LIMIT) -> None:
        self._limit = limit
        self._head_bytes = min(HEAD_BYTES, limit)
        self._buffer = bytearray()
        self._searched = 0
        self._head = b""
        self._dropped = 0

    @property
    def tail(self) -> bytes:
        """Bytes kept for the next chunk: an event that is not complete yet, or the end of an overlong one."""
        return bytes(self._buffer)

    def feed(self, chunk: bytes) -> list[StreamEvent]:
        """Events that this chunk completes, in order.

        Args:
            chunk: any cut of the stream, also in the middle of a character or of a line end.
        """
        self._buffer += chunk
        events: list[StreamEvent] = []
        start = self._after_blank_lines(0)
        while (found := _EVENT_END.search(self._buffer, max(start, self._searched))) is not None:
            events.append(self._taken(start, found.start()))
            start = self._searched = self._after_blank_lines(found.end())
        self._keep(start)
        return events

    def finish(self) -> list[StreamEvent]:
        """The event that the end of the stream left without its blank line, if it says anything."""
        rest = bytes(self._buffer)
        event = self._taken(0, len(rest))
        self._buffer.clear()
        self._searched = 0
        return [event] if event.data or event.name else []

    def _after_blank_lines(self, position: int) -> int:
        buffer = self._buffer
        if self._dropped or position >= len(buffer) or buffer[position] not in _LINE_END:
            return position
        found = _BLANK_LINES.match(buffer, position)
        return found.end() if found else position

    def _taken(self, start: int, end: int) -> StreamEvent:
        """The event that ends at `end`, the bytes of it that were dropped before included."""
        length = self._dropped + end - start
        head = self._head or bytes(self._buffer[start : min(end, start + self._head_bytes)])
        self._head, self._dropped = b"", 0
        if length > self._limit:
            return read_block(head)._replace(is_cut=True)
        return read_block(bytes(self._buffer[start:end]))

    def _keep(self, start: int) -> None:
        """Keep what is not complete; of an overlong event its head and what may begin its end (at most 2 bytes)."""
        buffer = self._buffer
        del buffer[:start]
        if self._dropped + len(buffer) > self._limit + 2:
            self._head = self._head or bytes(buffer[: self._head_bytes])
            self._dropped += len(buffer) - 2
            del buffer[:-2]
        self._searched = max(0, len(buffer) - 2)


def read_block(block: bytes) -> StreamEvent:
    """Name and data of the lines of one event; comments and other fields are passed over."""
    name = ""
    data: list[str] = []
    for line in block.decode("utf-8", "replace").removeprefix(_BOM).split("\n"):
        field, _, value = line.removesuffix("\r").partition(":")
        if field == "data":
            data.append(value.removeprefix(" "))
        elif field == "event":
            name = value.removeprefix(" ")
    return StreamEvent(name, "\n".join(data))


def read_event(format: str, event: StreamEvent) -> EventReading:
    """What an event says in a format.

    Args:
        format: a `StreamFormat`; any other text is read as `UNKNOWN`.
        event: an event of `EventSplitter`.

    Returns:
        An overlong event is protected: it can't be judged, and a wrong 0 could end a healthy stream.
    """
    if event.is_cut:
        return EventReading(0, True, event.name == "error", event.name in _END_TYPES)
    body = _read_json(event.data)
    return EventReading(
        *_measured(format, event.name, body),
        event.name == "error" or carries_error(body),
        event.data.strip() == DONE or _ends(event.name, _node(body)),
    )


def analyse(format: str, event_name: str, data: str) -> tuple[int, bool]:
    """Useful bytes of an event, and whether it protects the stream (spec/watchdog.md section 4).

    Args:
        format: a `StreamFormat`; any other text is read as `UNKNOWN`.
        event_name: its `event:` field, or empty.
        data: its data; anything but a JSON object counts for nothing.
    """
    return _measured(format, event_name, _read_json(data))


def error_body(event: StreamEvent) -> str:
    """Text of an error event for the body of ReportOutcome, which knows an error by its JSON or its event name."""
    return event.data if carries_error(_read_json(event.data)) else f"event: error\ndata: {event.data}\n\n"


def _read_json(data: str) -> object | None:
    """What the data is as JSON; None for anything else."""
    try:
        return json.loads(data) if data else None
    except (ValueError, RecursionError):
        return None


_NOTHING: Node = {}

# --- useful bytes and protected phases

_PROTECTING_WORDS = ("reasoning", "thinking", "tool", "function_call")
_PROTECTING_MEMBERS = ("tool_calls", "function_call", "reasoning", "reasoning_content")
_PROTECTING_DELTAS = frozenset({"signature_delta", "input_json_delta"})
_PROTECTING_PARTS = ("functionCall", "functionResponse", "executableCode", "codeExecutionResult", "inlineData")
_REPEATS = ("done", "completed")
"""Ends of the types whose texts repeat the whole."""


def _measured(format: str, event_name: str, body: object | None) -> tuple[int, bool]:
    if body is None:
        return 0, False
    node = _node(body)
    kind = _text(node.get("type")) or event_name
    if _protects(kind) or _protects(event_name):
        return 0, True
    sizes = [table(kind, node) for table in _TABLES.get(format, _ALL_TABLES)]
    known = [size for size in sizes if size is not None]
    return (sum(known), False) if len(known) == len(sizes) else (0, True)


def _protects(kind: object) -> bool:
    """True where a type or an event name contains one of the words that protect in every format."""
    if not kind or not isinstance(kind, str):
        return False
    lowered = kind.lower()
    return any(word in lowered for word in _PROTECTING_WORDS)


def _chat(_: str, body: Node) -> int | None:
    size = 0
    for choice in _nodes(body.get("choices")):
        delta = _node(choice.get("delta"))
        if any(delta.get(name) for name in _PROTECTING_MEMBERS):
            return None
        content = delta.get("content")
        parts = _nodes(content)
        if parts and any(_protects(part.get("type")) for part in parts):
            return None
        size += sum(_size(part.get("text")) for part in parts) if parts else _size(content)
        size += _size(delta.get("refusal")) + _size(choice.get("text"))
    return size


def _responses(kind: str, body: Node) -> int | None:
    types = (_text(_node(body.get(name)).get("type")) for name in ("item", "part"))
    if "_call" in kind or any("_call" in inner or _protects(inner) for inner in types):
        return None
    return 0 if kind.endswith(_REPEATS) else _size(body.get("delta"))


def _anthropic(kind: str, body: Node) -> int | None:
    name = _ANTHROPIC_MEMBERS.get(kind)
    inner = _node(body.get(name)) if name else _NOTHING
    inner_type = _text(inner.get("type"))
    if inner_type in _PROTECTING_DELTAS or _protects(inner_type):
        return None
    return _size(inner.get("text")) if inner_type in ("text", "text_delta") else 0


_ANTHROPIC_MEMBERS = {"content_block_start": "content_block", "content_block_delta": "delta"}


def _gemini(_: str, body: Node) -> int | None:
    size = 0
    for candidate in _candidates(body):
        for part in _nodes(_node(candidate.get("content")).get("parts")):
            if part.get("thought") is True or any(part.get(name) is not None for name in _PROTECTING_PARTS):
                return None
            size += _size(part.get("text"))
    return size


def _candidates(body: Node) -> Iterable[Node]:
    return _nodes((_node(body.get("response")) or body).get("candidates"))


_Table = Callable[[str, Node], int | None]
"""Type and body of an event to its useful bytes; None where it protects."""
_TABLES: dict[str, tuple[_Table, ...]] = {
    StreamFormat.CHAT_COMPLETIONS: (_chat,),
    StreamFormat.RESPONSES: (_responses,),
    StreamFormat.ANTHROPIC: (_anthropic,),
    StreamFormat.GEMINI: (_gemini,),
}
_ALL_TABLES = (_chat, _responses, _anthropic, _gemini)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _size(value: object) -> int:
    """UTF-8 bytes of a text; 0 for anything else. Half of a surrogate pair counts 3 bytes."""
    if not isinstance(value, str):
        return 0
    return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))


def _node(value: object) -> Node:
    return value if isinstance(value, dict) else _NOTHING


def _nodes(value: object) -> Iterable[Node]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else ()


# --- errors and the end

_END_TYPES = frozenset({"message_stop", "response.completed", "response.incomplete", "response.failed"})


def _ends(event_name: str, body: Node) -> bool:
    """True for the event that completes the answer: by its type, or every choice in it has a reason to stop."""
    if event_name in _END_TYPES or _text(body.get("type")) in _END_TYPES:
        return True
    choices, candidates = body.get("choices"), _candidates(body)
    reasons = [choice.get("finish_reason") for choice in _nodes(choices)] if choices else []
    reasons += [candidate.get("finishReason") for candidate in candidates]
    return bool(reasons) and all(reasons)


_ERROR_TYPES = ("error", "response.failed")
_BARE_MESSAGES = frozenset({"message", "msg", "error_msg"})
_RESULTS = frozenset({"choices", "output", "candidates", "content", "data", "result", "results", "embeddings", "body"})
_SUCCESS_CODES = frozenset({"0", "200", "ok", "success", "succeeded"})


def carries_error(body: object | None) -> bool:
    """True where a JSON body (of a 2xx answer or a stream event) is an error."""
    root = next((item for item in body[:4] if isinstance(item, dict)), None) if isinstance(body, list) else body
    if not isinstance(root, dict):
        return False
    error = root.get("error")
    error = root.get("Error") if error is None else error
    if error is None and isinstance(root.get("Response"), dict):  # Tencent Cloud
        error = root["Response"].get("Error")
    if isinstance(error, dict | str) and error:
        return True
    if root.get("type") in _ERROR_TYPES or root.get("object") == "error":
        return True
    return choice_error(root) is not None or _reports_failure(root) or _is_bare_failure(root)


def choice_error(node: Node) -> Node | None:
    """Error that the first choice of a chat completion carries instead of a message; None without one."""
    choices = node.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    error = first.get("error") if isinstance(first, dict) else None
    return error if isinstance(error, dict) and error else None


def _is_bare_failure(root: Node) -> bool:
    """A root that is nothing but a code and a message: no result stands beside them, and the code is no success."""
    if not _BARE_MESSAGES.intersection(root) or any(root[name] is not None for name in _RESULTS.intersection(root)):
        return False
    if "error_code" not in root and root.get("id"):
        return False
    code = root.get("error_code", root.get("code", _own_status(root)))
    if isinstance(code, str):
        return bool(code) and code.lower() not in _SUCCESS_CODES
    return isinstance(code, int) and not isinstance(code, bool) and code not in (0, 200)


def _own_status(root: Node) -> int | None:
    """A number of three digits from 400 on in `status`; other words there are no code."""
    status = root.get("status")
    text = str(status) if isinstance(status, int) else status if isinstance(status, str) else ""
    return int(text) if len(text) == 3 and text.isascii() and text.isdigit() and text >= "400" else None


def _reports_failure(root: Node) -> bool:
    """Envelopes that carry their own result: `success: false`, or a business code other than zero."""
    result = root.get("base_resp")
    if isinstance(result, dict):
        return result.get("status_code") not in (0, "0", None)
    return root.get("success") is False and bool(root.get("errors") or root.get("message") or root.get("msg"))
