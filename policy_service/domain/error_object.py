"""The error object inside a body: where providers put it, and what its code, type, message and status are.

Shared by the parsing of outcomes and the reading of hints. Shapes are data (key names); wrappers are unfolded
from outside in: lists, `error` members, JSON written into a text, the envelope of a failed response.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from policy_service.domain.stream_events import choice_error

Node = Mapping[str, object]

MAX_DEPTH = 6
"""Wrappers unfolded at most; deeper ones are not looked into."""
EMBEDDED_LIMIT = 65_536

_INNER_KEYS = ("error", "response", "errors", "fault", "base_resp", "detail", "message", "msg", "metadata", "raw")
_CODE_KEYS = ("code", "error_code", "errorCode", "errorcode", "status_code", "err_code")
_TYPE_KEYS = ("type", "__type", "error_type", "status")
_MESSAGE_KEYS = (
    "message", "msg", "error_description", "detail", "status_msg", "faultstring", "errorMessage", "error", "title",
)  # fmt: skip
_STATUS_KEYS = ("code", "status", "status_code", "statusCode", "http_status", "raw_status_code")
_EMPTY_WORDS = frozenset({"", "error", "failed", "response.failed", "<nil>", "null", "none"})

_HTTP_STATUS = re.compile(r"[1-5][0-9]{2}")

_DECODER = json.JSONDecoder(parse_constant=lambda _: None)


@dataclass(frozen=True, slots=True)
class ErrorObject:
    """What an error body says of itself; empty strings where it says nothing."""

    code: str = ""
    type: str = ""
    message: str = ""
    status: int | None = None
    """HTTP status named inside the body."""


def read_json(text: str) -> object | None:
    """Parse a JSON text: also behind a BOM or an XSSI prefix, or with a tail cut off after a whole object.

    NaN and the infinities read as null. None where nothing can be read.
    """
    stripped = text.strip("\ufeff \t\r\n")
    if stripped[:1] in ("{", "[", '"'):
        whole = _decode(stripped, 0)
        if whole is not None and whole[1] == len(stripped):
            return whole[0]
    return _first_object(stripped) if stripped[:1] in ("[", ")") else None


def _decode(text: str, position: int) -> tuple[object, int] | None:
    try:
        return _DECODER.raw_decode(text, position)
    except (ValueError, RecursionError):
        return None


def _first_object(text: str) -> object | None:
    """The first JSON object written into a text."""
    start = text.find("{", 0, EMBEDDED_LIMIT)
    found = _decode(text, start) if start >= 0 else None
    return found[0] if found else None


def error_nodes(body: object) -> tuple[Node, ...]:
    """Objects that describe the error, innermost first, the root last; empty where the body is no object."""
    chain: list[Node] = []
    node = _as_node(body)
    while node is not None and len(chain) < MAX_DEPTH:
        chain.append(node)
        node = _inner(node)
    return tuple(reversed(chain))


def _as_node(value: object, depth: int = 0) -> Node | None:
    if isinstance(value, dict):
        return value
    if isinstance(value, list):
        return next((item for item in value[:4] if isinstance(item, dict)), None)
    if isinstance(value, str) and depth == 0 and "{" in value and '"' in value:
        return _as_node(_first_object(value), 1)
    return None


def _inner(node: Node) -> Node | None:
    if (error := choice_error(node)) is not None:
        return error
    found = (_as_node(value) for key in _INNER_KEYS if (value := member(node, key)))
    return next((inner for inner in found if inner is not None), None)


def member(node: Node, key: str) -> object | None:
    """Value of a member by name or capitalised name (`Error`, `Message`)."""
    value = node.get(key)
    return value if value is not None else node.get(_capitalised(key))


@lru_cache(maxsize=256)
def _capitalised(key: str) -> str:
    return key[:1].upper() + key[1:]


def describe(nodes: tuple[Node, ...]) -> ErrorObject:
    """Code, type, message and status; an inner object speaks before its wrapper."""
    return ErrorObject(
        code=_first_text(nodes, _code_candidates),
        type=_first_text(nodes, _type_candidates),
        message=_first_text(nodes, _message_candidates),
        status=next((status for node in nodes for status in _statuses(node)), None),
    )


def _first_text(nodes: tuple[Node, ...], candidates: Callable[[Node], Iterator[str]]) -> str:
    return next((text for node in nodes for text in candidates(node)), "")


def _code_candidates(node: Node) -> Iterator[str]:
    for key in _CODE_KEYS:
        value = member(node, key)
        code = _short(value)
        if _says_something(code) and not (key == "status_code" and _HTTP_STATUS.fullmatch(code)):
            yield code
    details = node.get("details")
    if isinstance(details, dict) and isinstance(detail := details.get("error_code"), str):
        yield detail
    if node.get("error_description") and isinstance(word := node.get("error"), str):
        yield word


def _type_candidates(node: Node) -> Iterator[str]:
    for key in _TYPE_KEYS:
        value = member(node, key)
        if isinstance(value, str) and _says_something(value) and not value.isdigit():
            yield value.rpartition("#")[2]


def _message_candidates(node: Node) -> Iterator[str]:
    for key in _MESSAGE_KEYS:
        value = member(node, key)
        if isinstance(value, list):
            value = "; ".join(item for item in value[:8] if isinstance(item, str))
        if isinstance(value, str) and value.strip():
            yield value


def _short(value: object) -> str:
    """Text of a code; anything but a text or a number of sane length is none."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18 else ""


def _says_something(text: str) -> bool:
    return len(text) <= 200 and text.strip().lower() not in _EMPTY_WORDS


def _statuses(node: Node) -> Iterator[int]:
    for key in _STATUS_KEYS:
        value = member(node, key)
        if isinstance(value, str) and len(value) == 3 and value.isascii() and value.isdigit():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 100 <= value <= 599:
            yield value
