"""The error object inside a body: where providers put it, and what its code, type, message and status are.

Shared by the parsing of outcomes and the reading of hints. Shapes are data (key names); wrappers are unfolded
from outside in: lists, `error` members, JSON written into a text, the envelope of a failed response.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from html import unescape
from typing import NamedTuple

from policy_service.domain.stream_events import choice_error

Node = Mapping[str, object]

MAX_DEPTH = 6
"""Wrappers unfolded at most; deeper ones are not looked into."""
EMBEDDED_LIMIT = 65_536


_INNER_NAMES = ("error", "response", "errors", "fault", "base_resp", "detail", "message", "msg", "metadata", "raw")
_CODE_NAMES = ("code", "error_code", "errorCode", "errorcode", "status_code", "err_code")
_TYPE_NAMES = ("type", "__type", "error_type", "status")
_MESSAGE_NAMES = (
    "message", "msg", "error_description", "detail", "status_msg", "faultstring", "errorMessage", "error", "title",
)  # fmt: skip
_STATUS_NAMES = ("code", "status", "status_code", "statusCode", "http_status", "raw_status_code")
_CAPITALISED = {
    name[:1].upper() + name[1:]: name
    for name in (*_INNER_NAMES, *_CODE_NAMES, *_TYPE_NAMES, *_MESSAGE_NAMES, *_STATUS_NAMES)
}
_LOOSE_NAMES = ("code", "error_code", "status_code", "type", "__type", "status", "message", "msg", "detail", "error")
_QUOTES = ("'", '"')
_EMPTY_WORDS = frozenset({"", "error", "failed", "response.failed", "<nil>", "null", "none"})

_HTTP_STATUS = re.compile(r"[1-5][0-9]{2}")

_LOOSE_SPAN = 8_192
_LOOSE_TRIES = 8
_LOOSE_VALUE = re.compile(
    r"""["']\s{0,4}:\s{0,4}(?:"((?:[^"\\]|\\.){1,1024})|'((?:[^'\\]|\\.){1,1024})|([0-9]{1,15})(?![0-9.]))""", re.DOTALL
)

_PRINTED_LIMIT = 2_048
_PRINTED_OPENINGS = ("{'", "[{'")
_ELEMENT = re.compile(r"<(code|message)>([^<]{1,1024})</", re.IGNORECASE)

_DECODER = json.JSONDecoder(parse_constant=lambda _: None)


class ErrorObject(NamedTuple):
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
        if stripped.startswith(_PRINTED_OPENINGS) and (printed := _printed_by_python(stripped)) is not None:
            return printed
    return _first_object(stripped) if stripped[:1] in ("[", ")") else None


def _printed_by_python(text: str) -> object | None:
    """An error object that a gateway printed instead of writing it as JSON; None for anything else, and for a long one.

    Only literals are read: nothing of the text is run.
    """
    if len(text) > _PRINTED_LIMIT:
        return None
    try:
        return read_json(json.dumps(ast.literal_eval(text)))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def xml_node(text: str) -> Node | None:
    """Code and message of an error in XML, as AWS and object stores write it; None for pages and anything else."""
    head = text[:_LOOSE_SPAN].lstrip("\ufeff \t\r\n")
    if head[:1] != "<" or head[:15].lower().startswith(("<!doctype", "<html")):
        return None
    return {name.lower(): unescape(value).strip() for name, value in reversed(_ELEMENT.findall(head))} or None


def json_text(body: object) -> str:
    """JSON text of a parsed body, its characters as themselves; empty where it is nested too deeply."""
    try:
        return json.dumps(body, ensure_ascii=False)
    except (ValueError, RecursionError):
        return ""


def loose_node(text: str) -> Node | None:
    """What an error object names that is no JSON: cut off, quoted inside a sentence, or printed by Python.

    Of a name that occurs more than once the first value that says something counts. None where nothing is named.
    """
    head = text[:_LOOSE_SPAN]
    if '{\\"' in head:
        head = head.replace('\\"', '"')
    named = ((name, _loose_value(head, name)) for name in _LOOSE_NAMES)
    return {name: value for name, value in named if value} or None


def _loose_value(text: str, name: str) -> str:
    at = text.find(name)
    for _ in range(_LOOSE_TRIES):
        if at < 0:
            return ""
        found = _LOOSE_VALUE.match(text, at + len(name)) if text[at - 1 : at] in _QUOTES else None
        value = found[1] or found[2] or found[3] if found else ""
        if value.strip().lower() not in _EMPTY_WORDS:
            return value.replace('\\"', '"')
        at = text.find(name, at + len(name))
    return ""


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
        plain = _plainly_named(node)
        chain.append(plain)
        node = _inner(plain)
    return tuple(reversed(chain))


def _as_node(value: object, depth: int = 0) -> Node | None:
    if isinstance(value, dict):
        return value
    if isinstance(value, list):
        return next((item for item in value[:4] if isinstance(item, dict)), None)
    if isinstance(value, str) and depth == 0 and "{" in value and '"' in value:
        return _as_node(_first_object(value), 1)
    return None


def _plainly_named(node: Node) -> Node:
    """The node with its capitalised names (`Error`, `Message`) read as the plain ones that it lacks."""
    capitalised = node.keys() & _CAPITALISED.keys()
    if not capitalised:
        return node
    told = {name: value for name, value in node.items() if value is not None}
    return {**{_CAPITALISED[name]: node[name] for name in capitalised}, **told}


def _inner(node: Node) -> Node | None:
    if "choices" in node and (error := choice_error(node)) is not None:
        return error
    for name in _INNER_NAMES:
        value = node.get(name)
        if value is not None and (inner := _as_node(value)) is not None:
            return inner
    return None


def describe(nodes: tuple[Node, ...]) -> ErrorObject:
    """Code, type, message and status; an inner object speaks before its wrapper."""
    code = kind = message = ""
    status = None
    for node in nodes:
        code = code or _code(node)
        kind = kind or _type(node)
        message = message or _message(node)
        status = _status(node) if status is None else status
    return ErrorObject(code, kind, message, status)


def _code(node: Node) -> str:
    for name in _CODE_NAMES:
        value = node.get(name)
        if value is not None and _says_something(code := _short(value)):
            if name == "status_code" and _HTTP_STATUS.fullmatch(code):
                continue
            return code
    details = node.get("details")
    if isinstance(details, dict) and isinstance(detail := details.get("error_code"), str):
        return detail
    word = node.get("error") if node.get("error_description") else None
    return word if isinstance(word, str) else ""


def _type(node: Node) -> str:
    for name in _TYPE_NAMES:
        value = node.get(name)
        if isinstance(value, str) and _says_something(value) and not value.isdigit():
            return value.rpartition("#")[2]
    return ""


def _message(node: Node) -> str:
    for name in _MESSAGE_NAMES:
        value = node.get(name)
        if isinstance(value, list):
            value = "; ".join(item for item in value[:8] if isinstance(item, str))
        if isinstance(value, str) and value.strip():
            return value
    return ""


def _status(node: Node) -> int | None:
    for name in _STATUS_NAMES:
        value = node.get(name)
        if isinstance(value, str) and _HTTP_STATUS.fullmatch(value):
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 100 <= value <= 599:
            return value
    return None


def _short(value: object) -> str:
    """Text of a code; anything but a text or a number of sane length is none."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18 else ""


def _says_something(text: str) -> bool:
    return len(text) <= 200 and text.strip().lower() not in _EMPTY_WORDS
