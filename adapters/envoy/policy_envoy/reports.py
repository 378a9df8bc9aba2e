"""Reports of attempts to the policy service. Pure: facts in, ReportOutcomeRequest out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from policy_envoy.actions import Success
from policy_envoy.flight import Flight, Step
from policy_service.generated.policy.v1 import policy_pb2, types_pb2

_MAX_HEADERS = 256
_BODY_BYTES = 65_536
_RATE_HEADERS = ("x-ratelimit", "ratelimit", "anthropic-ratelimit", "retry-after")
"""Headers of a success that say something for the next call (spec/queue_admission.md section 5)."""

_KINDS = (
    ("connection_timeout", policy_pb2.NETWORK_ERROR_KIND_CONNECT_TIMEOUT),
    ("response_timeout", policy_pb2.NETWORK_ERROR_KIND_READ_TIMEOUT),
    ("per_try_timeout", policy_pb2.NETWORK_ERROR_KIND_READ_TIMEOUT),
    ("TLS", policy_pb2.NETWORK_ERROR_KIND_TLS),
    ("remote_connection_failure", policy_pb2.NETWORK_ERROR_KIND_CONNECT_REFUSED),
    ("connection_failure", policy_pb2.NETWORK_ERROR_KIND_CONNECT_REFUSED),
    ("protocol_error", policy_pb2.NETWORK_ERROR_KIND_PROTOCOL_ERROR),
    ("connection_termination", policy_pb2.NETWORK_ERROR_KIND_CONNECTION_RESET),
    ("reset", policy_pb2.NETWORK_ERROR_KIND_CONNECTION_RESET),
)
"""Texts of Envoy's response code details, first match, and the kind of network error that each means."""


def success(
    flight: Flight, step: Step, status: int, headers: Mapping[str, str], started_ms: float, first_ms: float
) -> Success:
    """A status line that is no error; how the answer ended is not known yet."""
    offset_ms, first_byte_ms = _ms(started_ms - flight.answered_ms), _ms(first_ms - started_ms)
    kept = tuple([(name, headers[name]) for name in headers if name.startswith(_RATE_HEADERS)])
    return Success(step.token, step.number, step.target, offset_ms, status, first_byte_ms, kept)


def ended(success: Success, started_ms: float, now_ms: float, size: int = 0) -> Success:
    """The same with what the end of the answer says."""
    return success._replace(latency_ms=_ms(now_ms - started_ms), bytes_streamed=size)


def failure(
    flight: Flight,
    step: Step,
    status: int,
    headers: Iterable[tuple[str, str]],
    body: bytes,
    times: tuple[float, float],
) -> policy_pb2.ReportOutcomeRequest:
    """An error status with its body.

    Args:
        times: start of the attempt and now, monotonic clock.
    """
    report = _report(flight, step, times[0])
    report.http_status, report.origin = status, policy_pb2.ORIGIN_UPSTREAM
    report.body = body[:_BODY_BYTES]
    report.latency_ms = _ms(times[1] - times[0])
    for name, value in headers:
        if len(report.headers) < _MAX_HEADERS and not name.startswith(":"):
            report.headers.append(types_pb2.Header(name=name, value=value))
    return report


def stream_failure(
    flight: Flight, step: Step, status: int, headers: Mapping[str, str], error: str, times: tuple[float, float]
) -> policy_pb2.ReportOutcomeRequest:
    """An error event inside a 200 stream."""
    report = failure(flight, step, status, headers.items(), b"", times)
    report.details.stream_error = error.encode()[:_BODY_BYTES]
    report.streamed = True
    return report


def network_error(
    flight: Flight, step: Step, details: str, times: tuple[float, float]
) -> policy_pb2.ReportOutcomeRequest:
    """No status line came.

    Args:
        details: Envoy's response code details; empty: another attempt followed before they were known.
    """
    report = _report(flight, step, times[0])
    report.network_error = next(
        (kind for text, kind in _KINDS if text in details), policy_pb2.NETWORK_ERROR_KIND_UNSPECIFIED
    )
    report.network_error_text = details or "the upstream gave no answer"
    report.latency_ms = _ms(times[1] - times[0])
    return report


def too_slow(flight: Flight, step: Step, times: tuple[float, float], size: int) -> policy_pb2.ReportOutcomeRequest:
    """The throughput watchdog ended the attempt (spec/watchdog.md section 3)."""
    report = _report(flight, step, times[0])
    report.network_error = policy_pb2.NETWORK_ERROR_KIND_STREAM_TOO_SLOW
    report.network_error_text = "STREAM_THROUGHPUT_TOO_LOW"
    report.streamed = True
    return _ended(report, times, size)


def cancelled(flight: Flight, step: Step, times: tuple[float, float], size: int = 0) -> policy_pb2.ReportOutcomeRequest:
    """The client left."""
    report = _report(flight, step, times[0])
    report.client_cancelled.SetInParent()
    report.final = True
    return _ended(report, times, size)


def earlier_attempt(
    step: Step, report: policy_pb2.ReportOutcomeRequest, verdict: policy_pb2.Verdict | None = None
) -> types_pb2.EarlierAttempt:
    """A failed attempt, for the next selection."""
    attempt = types_pb2.EarlierAttempt(target=step.target)
    if report.WhichOneof("outcome") == "http_status":
        attempt.http_status = report.http_status
    if verdict is not None:
        attempt.reason, attempt.scope, attempt.kind = verdict.reason_text, verdict.scope_text, verdict.failure_kind_text
        if verdict.HasField("retry_after_ms"):
            attempt.retry_hint_ms = verdict.retry_after_ms
    return attempt


def _report(flight: Flight, step: Step, started_ms: float) -> policy_pb2.ReportOutcomeRequest:
    return policy_pb2.ReportOutcomeRequest(
        decision_token=step.token,
        attempt=step.number,
        target=step.target,
        attempt_offset_ms=_ms(started_ms - flight.answered_ms),
    )


def _ended(
    report: policy_pb2.ReportOutcomeRequest, times: tuple[float, float], size: int
) -> policy_pb2.ReportOutcomeRequest:
    report.latency_ms, report.bytes_streamed = _ms(times[1] - times[0]), size
    return report


def _ms(duration: float) -> int:
    return max(0, round(duration))
