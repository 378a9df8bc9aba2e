"""Small readers that several requests share: optional fields, headers, quota snapshots, lease contexts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite
from typing import Any, NamedTuple

from google.protobuf.struct_pb2 import Struct, Value

from policy_service.application.messages import LeaseContext, QuotaSnapshot, QuotaWindow
from policy_service.application.ports import Clock, Entropy
from policy_service.domain.ids import AuthClass
from policy_service.domain.outcome import CallKind
from policy_service.generated.policy.v1 import lease_pb2, types_pb2
from policy_service.transport.grpc.limits import HEADER_BYTES, MAX_REQUEST_ID_CHARS, Limits, Problems
from policy_service.transport.grpc.token import TokenSeal
from policy_service.transport.grpc.wire_enums import CALL_KIND

MAX_GENERATION = 2**53 - 1
MAX_DURATION_MS = 31_536_000_000
"""A year; times beyond it are a mistake of the caller."""
_OWNER = re.compile(r"vlo_[A-Za-z0-9_-]{43}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

AUTH_CLASSES = (None, AuthClass.OAUTH, AuthClass.API_KEY, AuthClass.LOCAL)
CALL_KINDS = {number: CallKind(text) for number, text in CALL_KIND.texts.items() if text}


@dataclass(frozen=True, slots=True)
class Reading:
    """What reading a request needs besides the message."""

    seal: TokenSeal
    clock: Clock
    entropy: Entropy
    limits: Limits


class ReadHeaders(NamedTuple):
    """Headers of an answer: lower-case names, first value of each; how many were dropped."""

    values: dict[str, str]
    dropped: int


def optional(message: Any, name: str) -> Any:
    """Value of a field with presence; None where it is unset."""
    return getattr(message, name) if message.HasField(name) else None


def auth_class(number: int) -> AuthClass | None:
    """Class of a credential; None for unset and for numbers of a newer contract."""
    return AUTH_CLASSES[number] if 0 <= number < len(AUTH_CLASSES) else None


def read_headers(headers: Iterable[types_pb2.Header], limit: int) -> ReadHeaders:
    """At most `limit` headers and 64 KiB; the rest is dropped and counted (a flood never fails a report)."""
    values: dict[str, str] = {}
    size = dropped = 0
    for position, header in enumerate(headers):
        value = header.value or header.value_bytes.decode("latin-1")
        size += len(header.name) + len(value)
        if position >= limit or size > HEADER_BYTES:
            dropped += 1
            continue
        values.setdefault(header.name.lower(), value)
    return ReadHeaders(values, dropped)


def request_id(given: str, reading: Reading, problems: Problems, path: str = "request_id") -> str:
    """The caller's request id, or a drawn one."""
    if not given:
        return reading.entropy.new_id()
    problems.text(path, given, MAX_REQUEST_ID_CHARS)
    return given


def key_hash(given: str, problems: Problems, path: str = "caller_key_sha256") -> str:
    """SHA-256 of a caller's key; never the key itself."""
    if given and _SHA256.fullmatch(given) is None:
        problems.add(path, "not a SHA-256 in lower-case hex", "64 hex digits; never send the key itself")
    return given


def lease_context(message: lease_pb2.LeaseContext) -> LeaseContext:
    """Lease context with the owner hashed. What is wrong with it is noted, not raised: whether the caller may send one
    at all is asked first (spec/leases.md sections 2 and 6.1)."""
    owner, generation = message.owner, message.generation
    return LeaseContext(
        owner_hash=sha256(owner.encode()).hexdigest() if owner else "",
        generation=generation or None,
        problem=_lease_problem(owner, generation),
    )


def _lease_problem(owner: str, generation: int) -> str:
    if not owner.strip():
        return "LEASE_CONTEXT_REQUIRED"
    if not _OWNER.fullmatch(owner) or not 0 <= generation <= MAX_GENERATION:
        return "LEASE_CONTEXT_INVALID"
    return ""


def quota_snapshot(message: types_pb2.QuotaSnapshot, problems: Problems, path: str) -> QuotaSnapshot:
    """A quota reading; percentages must be finite and not negative."""
    for index, window in enumerate(message.windows):
        problems.between(f"{path}.windows[{index}].used_percent", window.used_percent, 0, 1e9)
    return QuotaSnapshot(
        windows=tuple(QuotaWindow(w.name, w.used_percent, optional(w, "reset_at_unix_ms")) for w in message.windows),
        used_percent=optional(message, "used_percent"),
        limit_reached=message.limit_reached,
        reset_at=optional(message, "reset_at_unix_ms"),
        taken_at=optional(message, "taken_at_unix_ms"),
    )


def struct_fields(message: Struct, path: str, problems: Problems) -> dict[str, Any]:
    """A Struct as JSON has it. Numbers that JSON does not know (NaN, infinities) are noted with their path."""
    return {name: _json(value, f"{path}.{name}", problems) for name, value in message.fields.items()}


def _json(value: Value, path: str, problems: Problems) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return struct_fields(value.struct_value, path, problems)
    if kind == "list_value":
        return [_json(item, f"{path}[{index}]", problems) for index, item in enumerate(value.list_value.values)]
    if kind == "number_value" and not isfinite(value.number_value):
        problems.add(path, f"{value.number_value} is no number", "a finite number")
    return None if kind in (None, "null_value") else getattr(value, kind)


def duration(message: Any, name: str, problems: Problems, high: int = MAX_DURATION_MS, path: str = "") -> int | None:
    """A time in ms with presence: 0 .. `high`."""
    value: int | None = optional(message, name)
    problems.between(path or name, value, 0, high)
    return value
