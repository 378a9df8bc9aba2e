"""SelectTargetRequest to SelectRequest. Runs for every decision: the common case touches each field once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from policy_service.application.messages import (
    NO_SESSION,
    NO_TRAITS,
    Candidate,
    CandidateInputs,
    EarlierAttempt,
    RequestTraits,
    SelectRequest,
    SessionSource,
)
from policy_service.domain.outcome import CallKind
from policy_service.generated.policy.v1 import policy_pb2, types_pb2
from policy_service.transport.grpc.limits import (
    DEFAULT_FALLBACKS,
    MAX_ALLOWED_CONNECTIONS,
    MAX_EARLIER_ATTEMPTS,
    MAX_FALLBACKS,
    MAX_PIN_TTL_MS,
    MAX_REQUEST_ID_CHARS,
    MAX_SESSION_KEY_CHARS,
    MAX_WAIT_MS,
    SESSION_HEADERS,
    Problems,
)
from policy_service.transport.grpc.mapping.reading import (
    CALL_KINDS,
    Reading,
    auth_class,
    duration,
    key_hash,
    lease_context,
    optional,
    quota_snapshot,
    read_headers,
    request_id,
    struct_fields,
)

_SHARES = ("success_rate", "error_rate", "quality", "task_fitness")
_AMOUNTS = (
    "input_price_usd",
    "output_price_usd",
    "context_window",
    "latency_avg_ms",
    "latency_p95_ms",
    "latency_stddev_ms",
    "request_count",
    "consecutive_count",
    "connection_count",
)
_ID_FIELDS = ("route", "strategy", "caller_id", "forced_connection")
_RANGES: dict[str, float] = {
    "affinity_ttl_ms": MAX_PIN_TTL_MS,
    "estimated_tokens": 1e12,
    "cost_budget_usd": 1e12,
    "max_fallbacks": MAX_FALLBACKS,
    "wait_budget_ms": MAX_WAIT_MS,
    "deadline_ms": MAX_WAIT_MS,
    "start_timeout_ms": MAX_WAIT_MS,
}
_SESSION_FIELDS = (
    "metadata_session_id",
    "metadata_session_id_camel",
    "conversation_id",
    "session_id",
    "prompt_cache_key",
    "metadata_prompt_cache_key",
    "first_user_text",
)


_KNOWN_REQUESTS: dict[bytes, SelectRequest] = {}
"""Valid requests by their bytes without the request id: a gateway asks the same few questions again and again, and
serialising one again costs a fraction of reading and checking it."""
_MAX_KNOWN_REQUESTS = 512
_MAX_KNOWN_REQUEST_BYTES = 65_536
_OF_ONE_CALL = ("session", "lease", "traits", "estimated_tokens", "deadline_ms", "start_timeout_ms")
"""Fields that differ from call to call; remembering such a request would only push the others out."""


def select_request(message: policy_pb2.SelectTargetRequest, reading: Reading) -> SelectRequest:
    """The request as the use case reads it.

    Raises:
        InvalidRequestError: with every wrong field.
        TokenError: `previous_decision_token` is not a token of this fleet.
    """
    if message.previous_decision_token or message.earlier_attempts or message.session_key:
        return _read(message, reading)
    own_id = message.request_id
    if own_id:
        message.ClearField("request_id")
    data = message.SerializeToString()
    known = _KNOWN_REQUESTS.get(data)
    if own_id:
        message.request_id = own_id
    if known is None:
        return _learn_request(data, message, reading)
    if not own_id:
        return _under(known, reading.entropy.new_id(), is_retry_safe=False)
    if len(own_id) > MAX_REQUEST_ID_CHARS or not own_id.isprintable():
        return _read(message, reading)
    return _under(known, own_id, is_retry_safe=True)


_ID, _SAFE = map(SelectRequest._fields.index, ("request_id", "is_retry_safe"))


def _under(known: SelectRequest, request_id: str, *, is_retry_safe: bool) -> SelectRequest:
    """The same under its own id; `_replace` goes through every field by name, which costs several times as much."""
    values = list(known)
    values[_ID], values[_SAFE] = request_id, is_retry_safe
    return SelectRequest._make(values)


def _learn_request(data: bytes, message: policy_pb2.SelectTargetRequest, reading: Reading) -> SelectRequest:
    request = _read(message, reading)
    has: Callable[[Any], bool] = message.HasField
    is_repeated = not any(map(has, _OF_ONE_CALL)) and all(c.inputs is None for c in request.candidates)
    if is_repeated and len(data) <= _MAX_KNOWN_REQUEST_BYTES:
        if len(_KNOWN_REQUESTS) >= _MAX_KNOWN_REQUESTS:
            _KNOWN_REQUESTS.clear()
        _KNOWN_REQUESTS[data] = request
    return request


def _read(message: policy_pb2.SelectTargetRequest, reading: Reading) -> SelectRequest:
    problems = Problems()
    has = message.HasField
    request = SelectRequest(
        request_id=request_id(message.request_id, reading, problems),
        is_retry_safe=bool(message.request_id),
        route=message.route,
        candidates=_candidates(message.candidates, reading.limits.candidates, problems),
        strategy=message.strategy,
        strategy_options=_options(message, problems),
        caller_id=message.caller_id,
        caller_key_sha256=key_hash(message.caller_key_sha256, problems),
        session_key=message.session_key,
        session=_session(message.session) if has("session") else NO_SESSION,
        affinity_ttl_ms=message.affinity_ttl_ms,
        estimated_tokens=message.estimated_tokens if has("estimated_tokens") else None,
        wait_budget_ms=message.wait_budget_ms if has("wait_budget_ms") else None,
        deadline_ms=message.deadline_ms if has("deadline_ms") else None,
        start_timeout_ms=message.start_timeout_ms if has("start_timeout_ms") else None,
        cost_budget_usd=message.cost_budget_usd if has("cost_budget_usd") else None,
        allow_wait=message.allow_wait or not has("allow_wait"),
        earlier_attempts=_earlier(message.earlier_attempts, problems),
        lease=lease_context(message.lease) if has("lease") else None,
        call_kind=CALL_KINDS.get(message.call_kind, CallKind.CLIENT),
        forced_connection=message.forced_connection,
        allowed_connections=_allowed(message.allowed_connections, problems),
        max_fallbacks=message.max_fallbacks if has("max_fallbacks") else DEFAULT_FALLBACKS,
        explain=message.explain,
        traits=_traits(message.traits, problems) if has("traits") else NO_TRAITS,
    )
    _check(request, problems)
    problems.settle()
    return _continued(request, message.previous_decision_token, reading)


def _options(message: policy_pb2.SelectTargetRequest, problems: Problems) -> dict[str, Any] | None:
    if not message.HasField("strategy_options"):
        return None
    return struct_fields(message.strategy_options, "strategy_options", problems)


def _continued(request: SelectRequest, token: bytes, reading: Reading) -> SelectRequest:
    if not token:
        return request
    previous = reading.seal.open(token, reading.clock.now(), "previous_decision_token")
    return request._replace(previous=previous)


def _check(request: SelectRequest, problems: Problems) -> None:
    if not request.candidates:
        _check_route(request.route, problems)
    elif request.route:
        problems.add("candidates", "given together with a route", "give one of route and candidates")
    if request.route and (request.strategy or request.strategy_options):
        problems.add("strategy", "a route has its own strategy", "leave strategy and strategy_options unset")
    for path in _ID_FIELDS:
        if text := getattr(request, path):
            problems.text(path, text)
    if len(request.session_key) > MAX_SESSION_KEY_CHARS:
        problems.too_large("session_key", f"{len(request.session_key)} characters", f"at most {MAX_SESSION_KEY_CHARS}")
    for path, high in _RANGES.items():
        if value := getattr(request, path):
            problems.between(path, value, 0, high)


def _check_route(route: str, problems: Problems) -> None:
    if not route.strip() and not problems.found:
        problems.require("candidates", "no candidates and no route", "name a route or list 1 .. 10 000 candidates")


def _candidates(messages: Sequence[types_pb2.Candidate], limit: int, problems: Problems) -> tuple[Candidate, ...]:
    if len(messages) > limit:
        # Not read at all: a flood must cost no more than its count.
        problems.too_large("candidates", f"{len(messages)} candidates", f"at most {limit}")
        return ()
    return tuple([_known_candidate(message, index, problems) for index, message in enumerate(messages)])


_KNOWN: dict[bytes, Candidate] = {}
"""Valid candidates by their bytes: a gateway names the same few in every request, and serialising one again is several
times as fast as reading and checking its fields. Not a Memo, because what is wrong must be found each time."""
_MAX_KNOWN = 8_192
_MAX_KNOWN_BYTES = 1_024


def _known_candidate(message: types_pb2.Candidate, index: int, problems: Problems) -> Candidate:
    data = message.SerializeToString()
    known = _KNOWN.get(data)
    return known if known is not None else _learned(data, message, index, problems)


def _learned(data: bytes, message: types_pb2.Candidate, index: int, problems: Problems) -> Candidate:
    before = len(problems.found)
    candidate = _candidate(message)
    _check_candidate(message, candidate, f"candidates[{index}]", problems)
    # Inputs change with every reading; remembering them would only push the others out.
    if len(problems.found) == before and candidate.inputs is None and len(data) <= _MAX_KNOWN_BYTES:
        if len(_KNOWN) >= _MAX_KNOWN:
            _KNOWN.clear()
        _KNOWN[data] = candidate
    return candidate


def _candidate(message: types_pb2.Candidate) -> Candidate:
    return Candidate(
        provider=message.provider,
        connection=message.connection,
        model=message.model,
        weight=message.weight if message.HasField("weight") else 1.0,
        priority=message.priority,
        auth_class=auth_class(message.auth_class),
        key=message.key,
        fallback_only_on_quota=message.fallback_only_on_quota,
        max_concurrent=message.max_concurrent or None,
        inputs=_inputs(message.inputs) if message.HasField("inputs") else None,
    )


def _check_candidate(message: types_pb2.Candidate, candidate: Candidate, path: str, problems: Problems) -> None:
    if not candidate.provider.strip():
        problems.require(f"{path}.provider", "empty", "name the provider")
    for name in ("provider", "connection", "model", "key"):
        problems.text(f"{path}.{name}", getattr(candidate, name))
    if not 0 <= candidate.weight < inf:
        problems.add(f"{path}.weight", f"{candidate.weight} is no weight", "a finite number >= 0")
    if candidate.inputs is not None:
        _check_inputs(message.inputs, f"{path}.inputs", problems)


def _check_inputs(message: types_pb2.CandidateInputs, path: str, problems: Problems) -> None:
    for name in _SHARES:
        problems.between(f"{path}.{name}", optional(message, name), 0, 1)
    for name in _AMOUNTS:
        problems.between(f"{path}.{name}", optional(message, name), 0, 1e15)
    if message.HasField("quota"):
        quota_snapshot(message.quota, problems, f"{path}.quota")


def _inputs(message: types_pb2.CandidateInputs) -> CandidateInputs:
    return CandidateInputs(
        input_price=optional(message, "input_price_usd"),
        output_price=optional(message, "output_price_usd"),
        context_window=optional(message, "context_window"),
        capabilities=tuple(message.capabilities),
        has_capabilities=message.has_capabilities or bool(message.capabilities),
        quota=quota_snapshot(message.quota, Problems(), "") if message.HasField("quota") else None,
        latency_avg_ms=optional(message, "latency_avg_ms"),
        latency_p95_ms=optional(message, "latency_p95_ms"),
        latency_stddev_ms=optional(message, "latency_stddev_ms"),
        success_rate=optional(message, "success_rate"),
        error_rate=optional(message, "error_rate"),
        request_count=optional(message, "request_count"),
        last_used_at=optional(message, "last_used_at_unix_ms"),
        consecutive_count=optional(message, "consecutive_count"),
        tier=message.tier,
        quality=optional(message, "quality"),
        task_fitness=optional(message, "task_fitness"),
        connection_count=optional(message, "connection_count"),
        tags=tuple(message.tags),
    )


def _earlier(messages: Sequence[types_pb2.EarlierAttempt], problems: Problems) -> tuple[EarlierAttempt, ...]:
    if not messages:
        return ()
    problems.count("earlier_attempts", len(messages), MAX_EARLIER_ATTEMPTS)
    return tuple(_attempt(m, f"earlier_attempts[{i}]", problems) for i, m in enumerate(messages[:MAX_EARLIER_ATTEMPTS]))


def _attempt(message: types_pb2.EarlierAttempt, path: str, problems: Problems) -> EarlierAttempt:
    target = message.target
    if not target.provider.strip():
        problems.require(f"{path}.target.provider", "empty", "name the target that was tried")
    for name in ("provider", "connection", "model"):
        problems.text(f"{path}.target.{name}", getattr(target, name))
    status = optional(message, "http_status")
    problems.between(f"{path}.http_status", status, 100, 999)
    hint = duration(message, "retry_hint_ms", problems, path=f"{path}.retry_hint_ms")
    return EarlierAttempt(
        target.provider,
        target.connection,
        target.model,
        status,
        message.reason,
        message.scope,
        message.code,
        hint,
        message.kind,
    )


def _allowed(ids: Sequence[str], problems: Problems) -> tuple[str, ...]:
    if not ids:
        return ()
    allowed = tuple(ids)
    problems.count("allowed_connections", len(allowed), MAX_ALLOWED_CONNECTIONS)
    for index, each in enumerate(allowed[:MAX_ALLOWED_CONNECTIONS]):
        problems.text(f"allowed_connections[{index}]", each)
    return allowed


def _session(message: types_pb2.SessionSource) -> SessionSource:
    known = (header for header in message.headers if header.name.lower() in SESSION_HEADERS)
    fields: dict[str, Any] = {name: optional(message, name) for name in _SESSION_FIELDS}
    return SessionSource(headers=read_headers(known, len(message.headers)).values, **fields)


def _traits(message: types_pb2.RequestTraits, problems: Problems) -> RequestTraits:
    traits = RequestTraits(
        tags=tuple(message.tags),
        capabilities=tuple(message.capabilities),
        required_context=optional(message, "required_context"),
        tool_count=message.tool_count,
        background=message.background,
        task=message.task,
        specificity=optional(message, "specificity"),
        tier=message.tier,
        mode=message.mode,
        router=message.router,
        budget_fallback=message.budget_fallback,
        stable_prefix_hash=message.stable_prefix_hash,
        pinned_model=message.pinned_model,
        premium_only=message.premium_only,
        max_p95_ms=optional(message, "max_p95_ms"),
        max_error_rate=optional(message, "max_error_rate"),
        seed=optional(message, "seed"),
        allow_cooling=message.allow_cooling,
    )
    problems.between("traits.tool_count", traits.tool_count, 0, 1_000_000)
    problems.between("traits.required_context", traits.required_context, 0, 1e12)
    problems.between("traits.specificity", traits.specificity, 0, 100)
    problems.between("traits.max_p95_ms", traits.max_p95_ms, 0, 1e12)
    problems.between("traits.max_error_rate", traits.max_error_rate, 0, 1)
    return traits
