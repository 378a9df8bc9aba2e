"""Session keys: what makes two requests one conversation (spec/affinity.md section 1). Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

SESSION_HEADERS = ("x-codex-session-id", "x-session-id", "x-omniroute-session")
"""For this service only: listed under `strip_headers` of every dispatch."""
MAX_LENGTH = 4_096
_PLAIN = re.compile(r"[A-Za-z0-9._:-]{1,180}")
_BODY_IDS = (
    (("metadata", "session_id"), "metadata"),
    (("metadata", "sessionId"), "metadata"),
    (("conversation_id",), "conversation"),
    (("session_id",), "session"),
    (("prompt_cache_key",), "prompt-cache"),
)
_TEXT_FIELDS = ("text", "content", "parts")


@dataclass(frozen=True, slots=True)
class SessionSources:
    """Where a key may come from: headers (any case) and the fields of the request body."""

    headers: Mapping[str, str]
    body: Mapping[str, object]


def session_key(sources: SessionSources) -> str | None:
    """Key of the first source that yields one: headers, ids of the body, first user text; None: no session."""
    return _header_key(sources.headers) or _body_key(sources.body) or _text_key(sources.body)


def session_hash(provider: str, key: str) -> str:
    """What a pin stores: lower-case hex SHA-256 of `<provider>:<session key>`."""
    return _sha256(f"{provider}:{key}")


def normalized(namespace: str, raw: object) -> str | None:
    """`<namespace>:<value>` of an explicit id, hashed unless short and plain; None where it is none."""
    if not isinstance(raw, str) or len(raw) > MAX_LENGTH or not (value := raw.strip()):
        return None
    return f"{namespace}:{value}" if _PLAIN.fullmatch(value) else f"{namespace}:sha256:{_sha256(value)}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _header_key(headers: Mapping[str, str]) -> str | None:
    """The first non-blank header decides, valid or not."""
    lowered = {name.lower(): value for name, value in headers.items()}
    present = (lowered[name] for name in SESSION_HEADERS if lowered.get(name, "").strip())
    return normalized("header", next(present, None))


def _body_key(body: Mapping[str, object]) -> str | None:
    keys = (normalized(namespace, _at(body, path)) for path, namespace in _BODY_IDS)
    return next((key for key in keys if key), None)


def _at(body: object, path: tuple[str, ...]) -> object:
    for name in path:
        body = body.get(name) if isinstance(body, Mapping) else None
    return body


def _text_key(body: Mapping[str, object]) -> str | None:
    text = first_user_text(body)
    return f"input:sha256:{_sha256(text)}" if text else None


def first_user_text(body: Mapping[str, object]) -> str:
    """First user text, trimmed, then cut at 4 096 characters; "" where no field has any."""
    return next((text for text in _candidates(body) if text), "")


def _candidates(body: Mapping[str, object]) -> Iterator[str]:
    yield _first_item_text(body.get("input"))
    yield _first_item_text(body.get("messages"))
    yield _first_item_text(body.get("contents"))
    for name in ("prompt", "query", "instruction"):
        yield _text(body.get(name))


def _first_item_text(value: object) -> str:
    """Text of the first item of role user, else of the first item; anything but a list is the item itself."""
    if not isinstance(value, list):
        return _text(value)
    users = (item for item in value if isinstance(item, Mapping) and item.get("role") == "user")
    return _text(next(users, value[0] if value else None))


def _text(value: object) -> str:
    return "\n".join(_parts(value)).strip()[:MAX_LENGTH]


def _parts(value: object, nesting: int = 4) -> Iterator[str]:
    """Text parts in order. An object without a known text field has none; it is never turned into a string."""
    if isinstance(value, str):
        if value.strip():
            yield value
    elif nesting > 0 and isinstance(value, list):
        for item in value:
            yield from _parts(item, nesting - 1)
    elif nesting > 0 and isinstance(value, Mapping):
        known = next((value[name] for name in _TEXT_FIELDS if value.get(name)), None)
        yield from _parts(known, nesting - 1)
