"""Answers that the door gives instead of an upstream: status, headers and a body in the OpenAI error shape. Pure.

Source of statuses, codes and headers: spec/diagnostics.md sections 4 and 5.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import ceil

from policy_envoy.actions import Local
from policy_envoy.events import CallFailed, Refused
from policy_envoy.names import (
    DROP_REASON_HEADER,
    RECOVERY_HEADER,
    RETRY_AFTER_SECONDS_HEADER,
    TERMINAL_REASON_HEADER,
)
from policy_service.generated.policy.v1 import policy_pb2, reasons_pb2

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
}
_TYPES |= {409: "conflict_error", 429: "rate_limit_error", 504: "timeout"}


def rejected(reject: policy_pb2.Reject, exclusions: Iterable[policy_pb2.Exclusion]) -> Local:
    """The terminal answer of a Reject."""
    after_ms = reject.retry_after_ms if reject.HasField("retry_after_ms") else None
    named = reject.terminal_reason_text or reject.code
    body = {
        "error": {"message": reject.message, "type": reject.type, "code": reject.code},
        "diagnostics": {
            "terminalReason": named,
            "recovery": reject.recovery_text,
            "attempted": reject.attempted,
            "poolSize": reject.pool_size,
            "excluded": [_exclusion(each) for each in exclusions],
        },
    }
    headers = _reason_headers(named, reject.recovery_text, after_ms)
    return _local(reject.http_status or 503, headers, body, named)


def must_wait(wait: policy_pb2.Wait, exclusions: Iterable[policy_pb2.Exclusion]) -> Local:
    """A Wait that this door may not sit out: the client is told when to come back.

    429 where a limit ends soon or a line is full, 503 where something is broken (spec/diagnostics.md section 4, row 6).
    """
    status = 503 if wait.reason in _BROKEN else 429
    body = {
        "error": {
            "message": f"no target is free now ({wait.reason_text}); come back in {_seconds(wait.wait_ms)} s",
            "type": "rate_limit_error" if status == 429 else "service_unavailable",
            "code": wait.reason_text,
        },
        "diagnostics": {
            "terminalReason": wait.reason_text,
            "recovery": "wait",
            "attempted": wait.attempts_done,
            "excluded": [_exclusion(each) for each in exclusions],
        },
    }
    return _local(status, _reason_headers(wait.reason_text, "wait", wait.wait_ms), body, wait.reason_text)


_BROKEN = frozenset({reasons_pb2.WAIT_REASON_CIRCUIT_OPEN, reasons_pb2.WAIT_REASON_SERVER_ERROR})


def refused(event: Refused | CallFailed, recovery: str = "") -> Local:
    """An error of the service, or an attempt that may not go."""
    wording = _TYPES.get(
        event.http_status, "service_unavailable" if event.http_status >= 500 else "invalid_request_error"
    )
    body = {"error": {"message": event.message, "type": wording, "code": event.code}}
    headers = _reason_headers(event.code, recovery, event.retry_after_ms)
    return _local(event.http_status, headers, body, event.code)


def unanswered(details: str) -> tuple[Sequence[tuple[str, str]], bytes]:
    """Headers and body instead of Envoy's own text where no upstream has answered (row 11 of the table)."""
    message = f"no upstream has answered ({details})"
    local = refused(CallFailed("NO_UPSTREAM_RESPONSE", 503, message), "retry")
    return local.headers, local.body


NO_ROUTE = CallFailed(
    "model_not_found",
    404,
    "no route is named: send x-policy-route, a path such as /routes/<route>/v1/..., or let the gateway read the model "
    "from the body (--set envoy.reads_body=true)",
)


def _local(status: int, headers: list[tuple[str, str]], body: Mapping[str, object], details: str) -> Local:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    return Local(status, [("content-type", "application/json"), *headers], text, f"policy_{details}"[:200])


def _reason_headers(reason: str, recovery: str, after_ms: int | None) -> list[tuple[str, str]]:
    found = [(DROP_REASON_HEADER, reason), (TERMINAL_REASON_HEADER, reason)]
    if recovery:
        found.append((RECOVERY_HEADER, recovery))
    if after_ms is not None:
        seconds = str(_seconds(after_ms))
        found += [("retry-after", seconds), (RETRY_AFTER_SECONDS_HEADER, seconds)]
    return found


def _seconds(duration_ms: int) -> int:
    return max(1, ceil(duration_ms / 1000))


def _exclusion(each: policy_pb2.Exclusion) -> dict[str, object]:
    target = each.target
    return {
        "target": "/".join((target.provider, target.connection, target.model)),
        "mechanism": each.mechanism_text,
        "reason": each.reason_text,
        "until": each.until_at_unix_ms if each.HasField("until_at_unix_ms") else None,
        "remainingMs": each.remaining_ms if each.HasField("remaining_ms") else None,
        "evidenceId": each.evidence_id or None,
    }
