"""From what a gateway saw on the wire to an `Outcome`: headers, error object, stream errors, network failures.

Pure and cheap; junk parses to an outcome with little in it and never raises. What an outcome means is
`classification`. Gateways and the Envoy adapter hand in raw bytes; a status that the body of a 200 contradicts
becomes the status of the error inside.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from policy_service.domain.error_kinds import (
    NETWORK_FAILURES,
    OTHER_NETWORK_FAILURE,
    STATUS_OF_KIND,
    UNKNOWN_KIND_STATUS,
    NetworkFailure,
)
from policy_service.domain.error_object import (
    MAX_DEPTH,
    ErrorObject,
    describe,
    error_nodes,
    json_text,
    loose_node,
    read_json,
    xml_node,
)
from policy_service.domain.ids import AuthClass, Instant
from policy_service.domain.outcome import CallKind, Origin, Outcome, UsageCounters
from policy_service.domain.stream_errors import may_hold_error, stream_error
from policy_service.domain.stream_events import carries_error, choice_error

BODY_LIMIT = 65_536
"""Bytes of a body that are kept."""
_LIST_READ = 128
"""Parts of a body that is a list; a stream ends with its error."""
_OUTPUT_NAMES = frozenset({"choices", "candidates", "output", "output_text", "content", "delta"})
_ECHO_NAMES = frozenset({"input", "inputs", "flagged_input", "failed_generation", "prompt"})
_ECHO_MARKS = tuple(f'"{name}"' for name in _ECHO_NAMES)
_GZIP = b"\x1f\x8b"
_QUOTED_FAILURE = re.compile(r"\s{0,4}(?:error:? )?api request failed \(([1-5][0-9]{2})\):? ?(?=\{)", re.IGNORECASE)


class RawOutcome(NamedTuple):
    """One attempt as the gateway saw it. Fields below `body` are handed on as they stand (see `Outcome`).

    `code`, `type`, `name` and `message` are for gateways that parsed the error themselves; they beat the body.
    """

    status: int | None = None
    network_error: str = ""
    """Kind or wording of the transport failure; empty where a status line was received."""
    headers: Sequence[tuple[str, str]] = ()
    """In the order received, repeated names as they came."""
    body: bytes | str = b""
    """At most 64 KiB are read."""
    code: str = ""
    type: str = ""
    name: str = ""
    message: str = ""
    provider: str = ""
    connection: str = ""
    model: str = ""
    auth_class: AuthClass | None = None
    origin: Origin = Origin.UNSET
    failure_kind: str = ""
    call_kind: CallKind = CallKind.CLIENT
    inner_status: int | None = None
    pool_attempt: bool = False
    next_target_same_provider: bool = False
    persist: bool = True
    usage: UsageCounters | None = None
    egress_address: str = ""
    circuit_open_answer: bool = False
    own_queue_timeout: bool = False
    own_timeout: bool = False
    first_output_ms: int | None = None
    token_expires_at: Instant | None = None
    quota_reset_at: Instant | None = None
    is_model_untold: bool = False


class _Reading(NamedTuple):
    """What the body says: its text, its JSON, the error in it, and whether a 200 carries that error."""

    text: str = ""
    body: object | None = None
    error: ErrorObject = ErrorObject()
    is_error_in_success: bool = False


def parse_outcome(raw: RawOutcome) -> Outcome:
    """The outcome that the mechanisms read.

    A network error gives the status it stands for (502, 504, 499) and its origin. An error inside a 2xx answer
    gives its own status, both as `status` and as `inner_status`.
    """
    headers = first_values(raw.headers)
    failure = network_failure(raw.network_error) if raw.network_error else None
    reading = _read_body(raw)
    error = reading.error
    status, inner_status = _statuses(raw, failure, reading)
    message = raw.message or error.message or (failure and raw.network_error) or reading.text
    return Outcome(
        status=status,
        provider=raw.provider,
        connection=raw.connection,
        model=raw.model,
        auth_class=raw.auth_class,
        network_error=raw.network_error,
        code=raw.code or error.code or (failure.code if failure else ""),
        type=raw.type or error.type or _amazon_type(headers),
        name=raw.name or (failure.name if failure else ""),
        message=message[:BODY_LIMIT],
        text=_searchable(message, reading),
        body=reading.body,
        headers=headers,
        origin=raw.origin or (failure.origin if failure else Origin.UNSET),
        failure_kind=raw.failure_kind,
        call_kind=raw.call_kind,
        inner_status=inner_status,
        pool_attempt=raw.pool_attempt,
        next_target_same_provider=raw.next_target_same_provider,
        persist=raw.persist,
        usage=raw.usage,
        egress_address=raw.egress_address,
        circuit_open_answer=raw.circuit_open_answer,
        own_queue_timeout=raw.own_queue_timeout,
        own_timeout=raw.own_timeout,
        first_output_ms=raw.first_output_ms,
        token_expires_at=raw.token_expires_at,
        quota_reset_at=raw.quota_reset_at,
        is_error_in_success=reading.is_error_in_success,
        is_model_untold=raw.is_model_untold,
    )


def first_values(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Lower-case names; of a repeated header the first value (spec/README.md, conventions)."""
    found: dict[str, str] = {}
    for name, value in headers:
        found.setdefault(name.strip().lower(), value)
    return found


@lru_cache(maxsize=256)
def network_failure(report: str) -> NetworkFailure:
    """Group of a transport failure by its wording; an unknown one is a 502."""
    lowered = report[:1_000].lower()
    told = (failure for failure in NETWORK_FAILURES if any(word in lowered for word in failure.words))
    return next(told, OTHER_NETWORK_FAILURE)


_GENERAL_STATUSES = (400, 500)
"""What a type says for want of a better word; the code beside it may say more."""


def status_of_kind(error: ErrorObject) -> int:
    """Status of an error inside a 200: the number it names, else that of its type or code, else 500."""
    if error.status is not None and error.status >= 400:
        return error.status
    words = (error.type, error.code, error.code.partition(".")[0])
    known = [status for word in words if (status := STATUS_OF_KIND.get(word.lower())) is not None]
    telling = (status for status in known if status not in _GENERAL_STATUSES)
    return next(telling, known[0] if known else UNKNOWN_KIND_STATUS)


def _statuses(raw: RawOutcome, failure: NetworkFailure | None, reading: _Reading) -> tuple[int | None, int | None]:
    """Effective and inner status."""
    if reading.is_error_in_success:
        inner = status_of_kind(reading.error)
        return inner, raw.inner_status or inner
    status = failure.status if failure and (raw.status or 0) < 400 else raw.status
    named = reading.error.status
    return status, raw.inner_status or (named if named is not None and named >= 400 and named != status else None)


def _read_body(raw: RawOutcome) -> _Reading:
    text = _decoded(raw.body)
    if not text.strip():
        return _Reading()
    succeeded = raw.status is not None and 200 <= raw.status < 300
    if succeeded and not may_hold_error(text):
        return _Reading()
    body = read_json(text)
    root = stream_error(text) if body is None else _told_in(body)
    return _success_reading(text, root) if succeeded else _failure_reading(text, root)


def _failure_reading(text: str, body: object | None) -> _Reading:
    if body is None and (named := xml_node(text) or loose_node(text)) is not None:
        return _Reading(text, {**named, "text": text}, describe(error_nodes(named)))
    echoes = body is not None and any(name in text for name in _ECHO_MARKS)
    return _Reading(json_text(_without_echo(body, MAX_DEPTH)) if echoes else text, body, describe(error_nodes(body)))


def _without_echo(body: object, depth: int) -> object:
    """A body without the members in which a provider sends the caller's own input back."""
    if isinstance(body, list) and depth:
        return [_without_echo(part, depth - 1) for part in body[:_LIST_READ]]
    if not isinstance(body, dict) or not depth:
        return body
    return {name: _without_echo(part, depth - 1) for name, part in body.items() if name not in _ECHO_NAMES}


def _success_reading(text: str, body: object | None) -> _Reading:
    """A 2xx body counts only where it carries an error; else nothing of it is kept."""
    quoted = _quoted_failure(body)
    if quoted is not None:
        return _Reading(text, quoted, describe(error_nodes(quoted)), True)
    if not isinstance(body, dict | list) or not carries_error(body):
        return _Reading()
    return _Reading(json_text(_without_output(body)), body, describe(error_nodes(body)), True)


def _without_output(body: object) -> object:
    """An error without the answer that came before it: what a model wrote says nothing about an account."""
    if not isinstance(body, dict):
        return body
    told = {name: value for name, value in body.items() if name not in _OUTPUT_NAMES}
    if isinstance(response := told.get("response"), dict):
        told["response"] = {name: value for name, value in response.items() if name not in _OUTPUT_NAMES}
    error = choice_error(body)
    return told if error is None else {**told, "error": error}


def _decoded(body: bytes | str) -> str:
    """Text of a body, capped; compressed bytes are inflated up to the cap, invalid UTF-8 is replaced."""
    if isinstance(body, str):
        return body[:BODY_LIMIT]
    head = body[:BODY_LIMIT]
    return (_inflated(head) if head[:2] == _GZIP else head).decode("utf-8", "replace")


def _inflated(head: bytes) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(head, BODY_LIMIT)
    except zlib.error:
        return head


def _told_in(body: object) -> object:
    """A body, or of a list of stream chunks the first near its end that is an error."""
    if not isinstance(body, list):
        return body
    return next((part for part in body[-_LIST_READ:] if isinstance(part, dict) and carries_error(part)), body)


def _quoted_failure(body: object | None) -> object | None:
    """Error that a proxy wrote as the whole content of a completion, with the status it got itself."""
    choices = body.get("choices") if isinstance(body, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    answer = choice.get("message") if isinstance(choice, dict) else None
    content = answer.get("content") if isinstance(answer, dict) else None
    found = _QUOTED_FAILURE.match(content) if isinstance(content, str) else None
    quoted = read_json(content[found.end() :]) if found and isinstance(content, str) else None
    return quoted if carries_error(quoted) else None


def _amazon_type(headers: Mapping[str, str]) -> str:
    """Exception name of AWS answers: the part before the colon."""
    return headers.get("x-amzn-errortype", "").partition(":")[0].rpartition("#")[2].strip()


def _searchable(message: str, reading: _Reading) -> str:
    """Message and body as one text, non-ASCII unescaped."""
    body = reading.text
    if "\\u" in body and reading.body is not None:
        body = json_text(reading.body) or body
    return (body if not message or message in body else f"{message} {body}".rstrip())[:BODY_LIMIT]
