"""Messages that a request sends on its way, made of what is known of it. Pure."""

from __future__ import annotations

from policy_client import messages
from policy_client.outcomes import Outcome, put

WAIT_EXCEEDS_BUDGET = "wait_exceeds_budget"
TIME_IS_OVER = "request_timeout"


def report(
    token: bytes, number: int, target: messages.Target, offset_ms: int, outcome: Outcome, *, final: bool
) -> messages.ReportOutcomeRequest:
    """The report of one attempt of a decision."""
    request = messages.ReportOutcomeRequest(
        decision_token=token, attempt=number, target=target, attempt_offset_ms=max(0, offset_ms), final=final
    )
    put(outcome, request)
    return request


def report_without_token(
    report_id: str, asked: messages.SelectTargetRequest, target: messages.Target, outcome: Outcome
) -> messages.ReportOutcomeRequest:
    """The report of an attempt that was decided without the service."""
    request = messages.ReportOutcomeRequest(
        report_id=report_id, target=target, final=True, caller_id=asked.caller_id, call_kind=asked.call_kind
    )
    put(outcome, request)
    return request


def earlier_attempt(
    target: messages.Target, outcome: Outcome, verdict: messages.Verdict | None = None
) -> messages.EarlierAttempt:
    """A failed attempt as the next SelectTarget of the same request is told of it."""
    earlier = messages.EarlierAttempt(target=target, http_status=outcome.status)
    if verdict is not None:
        earlier.reason = verdict.reason_text
        earlier.scope = verdict.scope_text
        earlier.kind = verdict.failure_kind_text
        if verdict.HasField("retry_after_ms"):
            earlier.retry_hint_ms = verdict.retry_after_ms
    return earlier


def wait_as_reject(wait: messages.Wait) -> messages.Reject:
    """A Wait that does not fit into the budget, as an answer for the client; whole seconds, rounded up."""
    return messages.Reject(
        http_status=503,
        code=WAIT_EXCEEDS_BUDGET,
        type="service_unavailable",
        message=f"no target before {wait.wait_ms} ms ({wait.reason_text})",
        retry_after_ms=-(-wait.wait_ms // 1000) * 1000,
    )


def time_as_reject() -> messages.Reject:
    """The time of the request is over."""
    return messages.Reject(
        http_status=504, code=TIME_IS_OVER, type="service_unavailable", message="the time of the request is over"
    )
