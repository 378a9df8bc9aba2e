"""Who speaks for a lease: owner tokens, headers, lifecycle messages, order of checks, codes (spec/leases.md 1, 2, 6).

Pure. Owner tokens are hashed here and go no further.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from policy_service.domain.catalogue import Caller
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.lease import GENERATION_MAX, RELEASE_REASONS, EndReason, Fence

LEASE_SCOPE = "lease:exclusive"
OWNER_HEADER = "x-policy-lease-owner"
OWNER_ALIAS = "x-omniroute-lease-owner"
GENERATION_HEADER = "x-policy-lease-generation"
GENERATION_ALIAS = "x-omniroute-lease-generation"
LEASE_HEADERS = (OWNER_HEADER, OWNER_ALIAS, GENERATION_HEADER, GENERATION_ALIAS)
"""Never logged, stored or sent upstream; listed under `strip_headers` of every dispatch."""
MODEL_MAX_LENGTH = 512
RETRY_AFTER_MAX_S = 3_600
_OWNER = re.compile(r"vlo_[A-Za-z0-9_-]{43}")
_GENERATION = re.compile(r"[1-9][0-9]{0,15}")


class LeaseCode(StrEnum):
    """Error codes of section 6."""

    AUTHENTICATION_REQUIRED = "LEASE_AUTHENTICATION_REQUIRED"
    API_KEY_INVALID = "LEASE_API_KEY_INVALID"
    CONTENT_TYPE_REQUIRED = "LEASE_CONTENT_TYPE_REQUIRED"
    ACTION_INVALID = "LEASE_ACTION_INVALID"
    SCOPE_REQUIRED = "LEASE_SCOPE_REQUIRED"
    KEY_CONFIGURATION_INVALID = "LEASE_KEY_CONFIGURATION_INVALID"
    CONTEXT_REQUIRED = "LEASE_CONTEXT_REQUIRED"
    CONTEXT_INVALID = "LEASE_CONTEXT_INVALID"
    MODEL_INVALID = "LEASE_MODEL_INVALID"
    REQUIRED = "LEASE_REQUIRED"
    FENCE_STALE = "LEASE_FENCE_STALE"
    AUTHORIZATION_MISMATCH = "LEASE_AUTHORIZATION_MISMATCH"
    CONNECTION_MISMATCH = "LEASE_CONNECTION_MISMATCH"
    NO_ELIGIBLE_CONNECTION = "LEASE_NO_ELIGIBLE_CONNECTION"
    CAPACITY_UNAVAILABLE = "LEASE_CAPACITY_UNAVAILABLE"
    ELIGIBILITY_UNAVAILABLE = "LEASE_ELIGIBILITY_UNAVAILABLE"
    SERVICE_UNAVAILABLE = "LEASE_SERVICE_UNAVAILABLE"


_FORMS: Mapping[LeaseCode, tuple[int, str]] = {
    LeaseCode.AUTHENTICATION_REQUIRED: (401, "UNAUTHENTICATED"),
    LeaseCode.API_KEY_INVALID: (401, "UNAUTHENTICATED"),
    LeaseCode.CONTENT_TYPE_REQUIRED: (415, "INVALID_ARGUMENT"),
    LeaseCode.ACTION_INVALID: (400, "INVALID_ARGUMENT"),
    LeaseCode.SCOPE_REQUIRED: (403, "PERMISSION_DENIED"),
    LeaseCode.KEY_CONFIGURATION_INVALID: (403, "PERMISSION_DENIED"),
    LeaseCode.CONTEXT_REQUIRED: (400, "INVALID_ARGUMENT"),
    LeaseCode.CONTEXT_INVALID: (400, "INVALID_ARGUMENT"),
    LeaseCode.MODEL_INVALID: (400, "INVALID_ARGUMENT"),
    LeaseCode.REQUIRED: (409, "FAILED_PRECONDITION"),
    LeaseCode.FENCE_STALE: (409, "FAILED_PRECONDITION"),
    LeaseCode.AUTHORIZATION_MISMATCH: (409, "FAILED_PRECONDITION"),
    LeaseCode.CONNECTION_MISMATCH: (409, "FAILED_PRECONDITION"),
    LeaseCode.NO_ELIGIBLE_CONNECTION: (409, "OK"),
    LeaseCode.CAPACITY_UNAVAILABLE: (429, "OK"),
    LeaseCode.ELIGIBILITY_UNAVAILABLE: (429, "OK"),
    LeaseCode.SERVICE_UNAVAILABLE: (503, "UNAVAILABLE"),
}
_FENCE_CODES = {
    Fence.REQUIRED: LeaseCode.REQUIRED,
    Fence.STALE: LeaseCode.FENCE_STALE,
    Fence.AUTHORIZATION_MISMATCH: LeaseCode.AUTHORIZATION_MISMATCH,
    Fence.CONNECTION_MISMATCH: LeaseCode.CONNECTION_MISMATCH,
}


@dataclass(frozen=True, slots=True)
class LeaseRefusal:
    """A refusal of a lease call. Local: it cools nothing, counts for no breaker, locks no model, causes no fallback."""

    code: LeaseCode
    field: str = ""
    """Field path of the message, where one is at fault."""
    retry_after_s: int | None = None

    @property
    def http_status(self) -> int:
        """Status of the HTTP form."""
        return _FORMS[self.code][0]

    @property
    def grpc(self) -> str:
        """Name of the gRPC status code; OK: a verdict is data."""
        return _FORMS[self.code][1]


@dataclass(frozen=True, slots=True)
class PolicyRefusal:
    """Refusal by the ordinary policy of the API key (step 6), passed on unchanged."""

    http_status: int
    code: str
    message: str = ""


Refused = LeaseRefusal | PolicyRefusal


def fence_refusal(verdict: Fence) -> LeaseRefusal | None:
    """Refusal for a fence verdict; None for VALID."""
    code = _FENCE_CODES.get(verdict)
    return None if code is None else LeaseRefusal(code)


# --- callers ---------------------------------------------------------------------------------------------


def is_managed(caller: Caller | None) -> bool:
    """An enabled key with the scope and an explicit list of connections."""
    return caller is not None and caller.enabled and standing_refusal(caller) is None


def standing_refusal(caller: Caller | None) -> LeaseRefusal | None:
    """Why a key may not use leases (steps 7 and 8); also the answer to a lease context sent by such a key."""
    if caller is None or LEASE_SCOPE not in caller.scopes:
        return LeaseRefusal(LeaseCode.SCOPE_REQUIRED)
    return None if caller.allowed_connections else LeaseRefusal(LeaseCode.KEY_CONFIGURATION_INVALID)


# --- owner and generation --------------------------------------------------------------------------------


def owner_hash(token: str) -> str:
    """Lower-case hex SHA-256 of the whole token, the only thing that is stored or compared."""
    return hashlib.sha256(token.encode()).hexdigest()


def is_owner_token(text: str) -> bool:
    """`vlo_` and 43 base64url characters."""
    return _OWNER.fullmatch(text) is not None


def parse_generation(text: str) -> int | None:
    """Generation from its text form: digits without sign, leading zero or fraction, up to 2^53-1; else None."""
    value = int(text) if _GENERATION.fullmatch(text) else 0
    return value if 0 < value <= GENERATION_MAX else None


@dataclass(frozen=True, slots=True)
class LeaseContext:
    """Fence of an inference request: hash of its owner token, and generation."""

    owner_hash: str
    generation: int


class _Conflict:
    """Canonical header and alias say different things."""


_CONFLICT = _Conflict()
_HeaderValue = str | _Conflict | None


def has_context(headers: Mapping[str, str]) -> bool:
    """True if a request carries a lease header, whatever it says."""
    return any(name.lower() in LEASE_HEADERS for name in headers)


def read_headers(headers: Mapping[str, str]) -> LeaseContext | LeaseRefusal:
    """Lease context of an inference request of a managed key; names without regard to case."""
    lowered = {name.lower(): value for name, value in headers.items()}
    return read_context(
        _one_value(lowered, OWNER_HEADER, OWNER_ALIAS), _one_value(lowered, GENERATION_HEADER, GENERATION_ALIAS)
    )


def _one_value(lowered: Mapping[str, str], name: str, alias: str) -> _HeaderValue:
    canonical, other = lowered.get(name), lowered.get(alias)
    if canonical is not None and other is not None and canonical != other:
        return _CONFLICT
    return other if canonical is None else canonical


def read_context(owner: _HeaderValue, generation: _HeaderValue) -> LeaseContext | LeaseRefusal:
    """Check owner and generation in the order of section 2."""
    if owner is None or (isinstance(owner, str) and not owner.strip()):
        return LeaseRefusal(LeaseCode.CONTEXT_REQUIRED, "lease.owner")
    if generation is None:
        return LeaseRefusal(LeaseCode.CONTEXT_REQUIRED, "lease.generation")
    if not isinstance(owner, str) or not is_owner_token(owner):
        return LeaseRefusal(LeaseCode.CONTEXT_INVALID, "lease.owner")
    number = parse_generation(generation) if isinstance(generation, str) else None
    if number is None:
        return LeaseRefusal(LeaseCode.CONTEXT_INVALID, "lease.generation")
    return LeaseContext(owner_hash(owner), number)


def read_owner(owner: str | None) -> str | LeaseRefusal:
    """Owner hash of a lifecycle call (step 9)."""
    if owner is None or not owner.strip():
        return LeaseRefusal(LeaseCode.CONTEXT_REQUIRED, "lease.owner")
    return owner_hash(owner) if is_owner_token(owner) else LeaseRefusal(LeaseCode.CONTEXT_INVALID, "lease.owner")


# --- lifecycle calls -------------------------------------------------------------------------------------


class LeaseAction(StrEnum):
    """Actions of the public lifecycle."""

    ACQUIRE = "acquire"
    RENEW = "renew"
    RELEASE = "release"
    STATUS = "status"


@dataclass(frozen=True, slots=True)
class LifecycleCall:
    """A well-formed lifecycle message."""

    action: LeaseAction
    model: str = ""
    generation: int = 0
    ttl_ms: DurationMs | None = None
    reason: EndReason = EndReason.OWNER_EXIT


def _read_model(value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if not 1 <= len(text) <= MODEL_MAX_LENGTH:
        raise ValueError("model")
    return text


def _read_count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("number")
    if value < 1 or value != int(value):
        raise ValueError("number")
    return int(value)


def _read_generation(value: object) -> int:
    number = _read_count(value)
    if number > GENERATION_MAX:
        raise ValueError("generation")
    return number


def _read_reason(value: object) -> EndReason:
    reason = EndReason(str(value))
    if reason not in RELEASE_REASONS:
        raise ValueError("reason")
    return reason


_Reader = Callable[[object], object]
_MODEL: tuple[str, _Reader] = ("model", _read_model)
_GENERATION_FIELD: tuple[str, _Reader] = ("generation", _read_generation)
_TTL: tuple[str, _Reader] = ("ttl_ms", _read_count)
_REASON: tuple[str, _Reader] = ("reason", _read_reason)
_FIELDS: Mapping[LeaseAction, tuple[Mapping[str, tuple[str, _Reader]], frozenset[str]]] = {
    LeaseAction.ACQUIRE: ({"model": _MODEL, "ttlMs": _TTL}, frozenset({"model"})),
    LeaseAction.RENEW: ({"generation": _GENERATION_FIELD, "ttlMs": _TTL}, frozenset({"generation"})),
    LeaseAction.RELEASE: ({"generation": _GENERATION_FIELD, "reason": _REASON}, frozenset({"generation"})),
    LeaseAction.STATUS: ({"generation": _GENERATION_FIELD}, frozenset({"generation"})),
}
"""Per action: fields with the attribute and the reader of each, and the fields that must be there."""


def parse_action(body: object) -> LifecycleCall | LeaseRefusal:
    """A JSON body (or a message as one); unknown fields are refused, a misspelt `ttlMs` must not mean 120 s."""
    action = body.get("action") if isinstance(body, Mapping) else None
    if not isinstance(body, Mapping) or not isinstance(action, str) or action not in set(LeaseAction):
        return LeaseRefusal(LeaseCode.ACTION_INVALID, "action")
    readers, needed = _FIELDS[LeaseAction(action)]
    given = {name: value for name, value in body.items() if name != "action"}
    odd = next((name for name in [*given, *needed] if name not in readers or name not in given), None)
    if odd is not None:
        return LeaseRefusal(LeaseCode.ACTION_INVALID, str(odd))
    return _read_fields(LeaseAction(action), given, readers)


def _read_fields(
    action: LeaseAction, given: Mapping[str, object], readers: Mapping[str, tuple[str, _Reader]]
) -> LifecycleCall | LeaseRefusal:
    values: dict[str, object] = {}
    for name, value in given.items():
        attribute, read = readers[name]
        try:
            values[attribute] = read(value)
        except ValueError:
            return LeaseRefusal(LeaseCode.ACTION_INVALID, name)
    return LifecycleCall(action, **values)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class LifecycleRequest:
    """A lifecycle call as it arrives, before any check."""

    has_api_key: bool
    caller: Caller | None
    body: object
    owner: str | None
    content_type: str | None = None
    is_http: bool = True
    owner_read: str | LeaseRefusal | None = None
    """Owner hash, or what is wrong with the owner, where the edge has read the token already; wins over `owner`."""


@dataclass(frozen=True, slots=True)
class AdmittedCall:
    """A lifecycle call that passed steps 1 to 9."""

    caller: Caller
    owner_hash: str
    call: LifecycleCall


def admit(
    request: LifecycleRequest,
    *,
    model_lookup_fails: Callable[[str], bool] = lambda model: False,
    key_policy: Callable[[Caller, str | None], PolicyRefusal | None] = lambda caller, model: None,
) -> AdmittedCall | Refused:
    """Steps 1 to 9 of section 6.1, in order.

    Args:
        model_lookup_fails: True if looking up the model of an acquire ends in an error (not: finds nothing).
        key_policy: ordinary policy of the API key; the model is passed for acquire only.
    """
    if not request.has_api_key:
        return LeaseRefusal(LeaseCode.AUTHENTICATION_REQUIRED)
    caller = request.caller
    if caller is None or not caller.enabled:
        return LeaseRefusal(LeaseCode.API_KEY_INVALID)
    if request.is_http and not is_json(request.content_type):
        return LeaseRefusal(LeaseCode.CONTENT_TYPE_REQUIRED)
    call = parse_action(request.body)
    if isinstance(call, LeaseRefusal):
        return call
    if call.action is LeaseAction.ACQUIRE and model_lookup_fails(call.model):
        return LeaseRefusal(LeaseCode.SERVICE_UNAVAILABLE)
    refused: Refused | None = key_policy(caller, call.model or None) or standing_refusal(caller)
    if refused is not None:
        return refused
    owner = request.owner_read or read_owner(request.owner)
    return owner if isinstance(owner, LeaseRefusal) else AdmittedCall(caller, owner, call)


def is_json(content_type: str | None) -> bool:
    """`application/json`, case and parameters ignored."""
    return (content_type or "").split(";", 1)[0].strip().lower() == "application/json"


# --- capacity (section 6.2) ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Capacity:
    """WAITING_FOR_CAPACITY: eligible connections exist, all are held by others."""

    eligible_count: int
    retry_after_s: int
    free_count: int = 0
    state: str = "WAITING_FOR_CAPACITY"
    reason: str = "NO_FREE_ELIGIBLE_CONNECTION"


def capacity_retry_s(earliest_free_at: Instant | None, now: Instant) -> int:
    """Whole seconds to the earliest free-at, 1 .. 3600; unknown: 1."""
    if earliest_free_at is None:
        return 1
    return max(1, min(RETRY_AFTER_MAX_S, -(-(earliest_free_at - now) // 1_000)))
