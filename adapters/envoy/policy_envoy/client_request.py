"""What a client request says: its route, session, lease, caller and wishes, read from head and body. Pure.

The words of the client end here: only ids, hashes and sizes go on to the service.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from policy_envoy.names import (
    BUDGET_FALLBACK_HEADERS,
    BUDGET_HEADERS,
    EXPLAIN_HEADER,
    GENERATION_HEADERS,
    MODE_HEADERS,
    MODEL_HEADER,
    OWNER_HEADERS,
    ROUTE_HEADER,
    SESSION_HEADERS,
)
from policy_envoy.options import DoorOptions
from policy_service.generated.policy.v1 import lease_pb2, policy_pb2, types_pb2

Headers = Mapping[str, str]

_PATHS = (
    ("/routes/", re.compile(r"/routes/(?P<route>[^/?]+)(?P<rest>/.*)")),
    # Gemini, Vertex AI
    ("/models/", re.compile(r"/v1(?:beta|alpha)?/(?:publishers/[^/]+/)?models/(?P<route>[^/:?]+):")),
    ("/deployments/", re.compile(r"(?:/openai)?/deployments/(?P<route>[^/?]+)/")),  # Azure OpenAI
    ("/model/", re.compile(r"/model/(?P<route>[^/?]+)/(?:invoke|converse)")),  # Amazon Bedrock
)
"""Paths that name a route or model, each with a part that it has to have; `rest` is the path that goes upstream."""
_STREAM_PATHS = re.compile(r":streamGenerateContent|[?&]alt=sse\b|/(?:invoke-with-response-stream|converse-stream)\b")
_NO = frozenset({"", "0", "false", "no"})


class BodyFacts(NamedTuple):
    """What the body of a request says, as far as it is JSON."""

    model: str = ""
    is_stream: bool = False
    tool_count: int = 0
    session: Mapping[str, str] = {}
    """Fields of SessionSource."""


NO_BODY = BodyFacts()


class ClientRequest(NamedTuple):
    """A request as the listener stage reads it."""

    headers: Headers
    route: str
    path: str
    """As it goes upstream."""


def read_request(headers: Headers, options: DoorOptions) -> ClientRequest:
    """Route and path by header, then by path; an empty route: neither names one."""
    path = headers.get(":path", "")
    found = _named_by(path)
    if found is None:
        return ClientRequest(headers, headers.get(ROUTE_HEADER) or headers.get(MODEL_HEADER, ""), path)
    rest = found["rest"] if "rest" in found.re.groupindex else path
    return ClientRequest(headers, headers.get(ROUTE_HEADER) or found["route"], rest)


def _named_by(path: str) -> re.Match[str] | None:
    for part, pattern in _PATHS:
        if part in path and (match := pattern.match(path)):
            return match
    return None


def wants_body(request: ClientRequest, options: DoorOptions, has_body: bool) -> bool:
    """The body has to be read: nothing else names the route."""
    return options.reads_body and has_body and not request.route


def is_stream(headers: Headers, body: BodyFacts) -> bool:
    """The client wants a streamed answer, as far as it can be known before the answer."""
    return (
        body.is_stream
        or "text/event-stream" in headers.get("accept", "")
        or _STREAM_PATHS.search(headers.get(":path", "")) is not None
    )


def wants_explanation(headers: Headers) -> bool:
    """`x-policy-explain` is set."""
    return headers.get(EXPLAIN_HEADER, "").strip().lower() not in _NO


def read_body(body: bytes) -> BodyFacts:
    """Facts of a JSON body; anything else says nothing."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return NO_BODY
    if not isinstance(data, dict):
        return NO_BODY
    tools = data.get("tools")
    return BodyFacts(
        model=_text(data.get("model")),
        is_stream=data.get("stream") is True,
        tool_count=len(tools) if isinstance(tools, list) else 0,
        session=_session_fields(data),
    )


def with_model(body: bytes, model: str) -> bytes:
    """The body with another model; unchanged where it is no JSON object or names that model already."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(data, dict) or data.get("model") == model:
        return body
    text = json.dumps({**data, "model": model}, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")  # half of a surrogate pair stays the escape that it was


def select_request(request: ClientRequest, body: BodyFacts, options: DoorOptions) -> policy_pb2.SelectTargetRequest:
    """The selection that a client request asks for."""
    message = policy_pb2.SelectTargetRequest(
        route=request.route or body.model or options.default_route,
        allow_wait=options.max_wait_ms > 0,
        wait_budget_ms=options.max_wait_ms,
    )
    headers = request.headers
    _put_caller(message, headers, options)
    if body.tool_count:
        message.traits.tool_count = body.tool_count
    for field, value in body.session.items():
        setattr(message.session, field, value)
    if not _CONTROLS.isdisjoint(headers):
        _put_session(message, headers)
        _put_lease(message, headers)
        _put_wishes(message, headers)
    return message


_CONTROLS = frozenset(
    (
        EXPLAIN_HEADER,
        *SESSION_HEADERS,
        *OWNER_HEADERS,
        *GENERATION_HEADERS,
        *MODE_HEADERS,
        *BUDGET_HEADERS,
        *BUDGET_FALLBACK_HEADERS,
    )
)
"""Headers by which a client says more than what it wants to call; most requests have none."""


def _put_caller(message: policy_pb2.SelectTargetRequest, headers: Headers, options: DoorOptions) -> None:
    if options.caller_header and (caller := headers.get(options.caller_header)):
        message.caller_id = caller
    elif key := _client_key(headers):
        message.caller_key_sha256 = hashlib.sha256(key.encode()).hexdigest()


def _client_key(headers: Headers) -> str:
    """The key that the client shows to this gateway, as OpenAI, Anthropic, Azure and Gemini clients send it."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key:
        return key.strip()
    return headers.get("x-api-key") or headers.get("api-key") or headers.get("x-goog-api-key") or ""


def _put_session(message: policy_pb2.SelectTargetRequest, headers: Headers) -> None:
    for name in SESSION_HEADERS:
        if name in headers:
            message.session.headers.append(types_pb2.Header(name=name, value=headers[name]))


def _put_lease(message: policy_pb2.SelectTargetRequest, headers: Headers) -> None:
    owner, generation = _first(headers, OWNER_HEADERS), _first(headers, GENERATION_HEADERS)
    if owner or generation:
        number = int(generation) if generation.isascii() and generation.isdigit() and len(generation) <= 16 else 0
        message.lease.CopyFrom(lease_pb2.LeaseContext(owner=owner, generation=number))


def _put_wishes(message: policy_pb2.SelectTargetRequest, headers: Headers) -> None:
    if wants_explanation(headers):
        message.explain = True
    if mode := _first(headers, MODE_HEADERS):
        message.traits.mode = mode
    if fallback := _first(headers, BUDGET_FALLBACK_HEADERS):
        message.traits.budget_fallback = fallback
    budget = _number(_first(headers, BUDGET_HEADERS))
    if budget is not None:
        message.cost_budget_usd = budget


def _first(headers: Headers, names: Iterable[str]) -> str:
    return next((headers[name] for name in names if headers.get(name)), "")


def _number(text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


_SESSION_FIELDS = {
    "conversation_id": ("conversation_id",),
    "session_id": ("session_id",),
    "prompt_cache_key": ("prompt_cache_key",),
    "metadata_session_id": ("metadata", "session_id"),
    "metadata_session_id_camel": ("metadata", "sessionId"),
    "metadata_prompt_cache_key": ("metadata", "prompt_cache_key"),
}


_SESSION_NAMES = frozenset(path[0] for path in _SESSION_FIELDS.values())


def _session_fields(data: Mapping[str, object]) -> dict[str, str]:
    if _SESSION_NAMES.isdisjoint(data):
        return {}
    found = {field: _text(_at(data, path)) for field, path in _SESSION_FIELDS.items()}
    return {field: value for field, value in found.items() if value}


def _at(data: object, path: Iterable[str]) -> object:
    for name in path:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _text(value: object) -> str:
    """As UTF-8 can carry it: half a surrogate pair, which JSON lets through, becomes `?`."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""
