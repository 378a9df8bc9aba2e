"""ReportOutcomeRequest to ReportRequest: caps on headers and body, one of token and report id, sane numbers."""

from __future__ import annotations

from typing import Any, cast

from policy_service.application.messages import (
    NO_EXTRAS,
    DecisionToken,
    EndKind,
    LimitResetReport,
    ReportExtras,
    ReportRequest,
)
from policy_service.domain.ids import ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.outcome import Origin, UsageCounters
from policy_service.generated.policy.v1 import policy_pb2
from policy_service.transport.grpc.limits import (
    MAX_ATTEMPT,
    MAX_ERROR_TEXT_CHARS,
    MAX_REQUEST_ID_CHARS,
    Limits,
    Problems,
)
from policy_service.transport.grpc.mapping.reading import (
    CALL_KINDS,
    Reading,
    auth_class,
    duration,
    lease_context,
    optional,
    quota_snapshot,
    read_headers,
)
from policy_service.transport.grpc.wire_enums import FAILURE, LEASE_END, LOCAL_FAULT, NETWORK_ERROR, ORIGIN

_ENDS = {
    "http_status": EndKind.HTTP_STATUS,
    "network_error": EndKind.NETWORK_ERROR,
    "client_cancelled": EndKind.CLIENT_CANCELLED,
    "local_fault": EndKind.LOCAL_FAULT,
}
_ORIGINS = {number: Origin(text) for number, text in ORIGIN.texts.items()}
_OWNER_ENDS = ("", "owner_exit", "client_cancelled")
_STEPS = ("STATUS", "ORGANIZATION", "CLAIM")
_NO_TARGET = Target(ProviderId(""), ConnectionId(""), ModelId(""))


def report_request(message: policy_pb2.ReportOutcomeRequest, reading: Reading) -> ReportRequest:
    """The report as the use case reads it. Whether the target is one of the token's is asked there, where aliases are
    known.

    Raises:
        InvalidRequestError: with every wrong field.
        TokenError: the decision token is not one of this fleet, or too old.
    """
    problems = Problems()
    arm = message.WhichOneof("outcome")
    _check(message, arm, problems)
    limits = reading.limits
    headers = read_headers(message.headers, limits.headers)
    body = message.body
    latency = duration(message, "latency_ms", problems)
    first_byte = duration(message, "first_byte_ms", problems)
    offset = duration(message, "attempt_offset_ms", problems)
    elapsed = duration(message, "elapsed_ms", problems)
    extras = _extras(message, limits, problems)
    problems.settle()
    token = reading.seal.open(message.decision_token, reading.clock.now()) if message.decision_token else None
    return ReportRequest(
        target=_served(message, token),
        end=_ENDS[arm or "http_status"],
        token=token,
        report_id="" if token else message.report_id,
        attempt=message.attempt,
        attempt_offset_ms=offset,
        final=message.final,
        status=message.http_status if arm == "http_status" else None,
        network_error=(NETWORK_ERROR.text(message.network_error) or "network_error") if arm == "network_error" else "",
        fault=(LOCAL_FAULT.text(message.local_fault.kind) or "local_fault") if arm == "local_fault" else "",
        headers=headers.values,
        dropped_headers=headers.dropped,
        body=body[: limits.body_bytes],
        body_truncated=len(body) > limits.body_bytes,
        latency_ms=latency,
        first_byte_ms=first_byte,
        streamed=message.streamed,
        bytes_streamed=message.bytes_streamed,
        elapsed_ms=elapsed,
        origin=_ORIGINS.get(message.origin, Origin.UNSET),
        auth_class=auth_class(message.auth_class),
        call_kind=CALL_KINDS.get(message.call_kind),
        pool_attempt=optional(message, "pool_attempt"),
        caller_id=message.caller_id,
        request_id=message.request_id,
        extras=extras,
    )


def _served(message: policy_pb2.ReportOutcomeRequest, token: DecisionToken | None) -> Target:
    if message.HasField("target"):
        named = message.target
        return Target(ProviderId(named.provider), ConnectionId(named.connection), ModelId(named.model))
    return token.targets[0].target if token and token.targets else _NO_TARGET


def _check(message: policy_pb2.ReportOutcomeRequest, arm: str | None, problems: Problems) -> None:
    if arm is None:
        problems.require(
            "outcome", "nothing happened", "set http_status, network_error, client_cancelled or local_fault"
        )
    elif arm == "http_status":
        problems.between("http_status", message.http_status, 100, 999)
    if not message.decision_token:
        _check_tokenless(message, problems)
    if message.HasField("target"):
        _check_target(message, problems)
    problems.between("attempt", message.attempt, 0, MAX_ATTEMPT)
    problems.between("bytes_streamed", message.bytes_streamed, 0, 2**62)
    problems.text("caller_id", message.caller_id)
    problems.text("request_id", message.request_id, MAX_REQUEST_ID_CHARS)


def _check_tokenless(message: policy_pb2.ReportOutcomeRequest, problems: Problems) -> None:
    if not message.report_id:
        remedy = "send the decision_token, or a report_id that stays the same when the report is repeated"
        problems.add("report_id", "neither decision_token nor report_id", remedy, "REPORT_ID_REQUIRED")
    problems.text("report_id", message.report_id, MAX_REQUEST_ID_CHARS)
    if not message.HasField("target"):
        problems.require("target", "unset", "a report without token names the target that was called")


def _check_target(message: policy_pb2.ReportOutcomeRequest, problems: Problems) -> None:
    if not message.target.provider.strip():
        problems.require("target.provider", "empty", "name the provider that was called")
    for name in ("provider", "connection", "model"):
        problems.text(f"target.{name}", getattr(message.target, name))


def _extras(message: policy_pb2.ReportOutcomeRequest, limits: Limits, problems: Problems) -> ReportExtras:
    cause = _cause(message)
    if not message.HasField("details"):
        return ReportExtras(**cause) if cause else NO_EXTRAS
    fields = {**_detail_fields(message.details, limits, problems), **cause}
    return ReportExtras(**fields)


def _cause(message: policy_pb2.ReportOutcomeRequest) -> dict[str, Any]:
    """What the arm of the outcome says besides its kind."""
    if message.client_cancelled.hedge:
        return {"hedge_cancelled": True}
    text = message.network_error_text or message.local_fault.text
    return {"error_message": text[:MAX_ERROR_TEXT_CHARS]} if text else {}


def _detail_fields(message: policy_pb2.ReportDetails, limits: Limits, problems: Problems) -> dict[str, Any]:
    return {
        "error_code": message.error_code[:MAX_ERROR_TEXT_CHARS],
        "error_type": message.error_type[:MAX_ERROR_TEXT_CHARS],
        "error_name": message.error_name[:MAX_ERROR_TEXT_CHARS],
        "error_message": message.error_message[: limits.body_bytes],
        "inner_status": optional(message, "inner_status"),
        "next_target_same_provider": message.next_target_same_provider,
        "persist": message.persist or not message.HasField("persist"),
        "usage": _usage(message.usage) if message.HasField("usage") else None,
        "quota": quota_snapshot(message.quota, problems, "details.quota") if message.HasField("quota") else None,
        "egress_address": message.egress_address,
        "token_expires_at": optional(message, "token_expires_at_unix_ms"),
        "quota_reset_at": optional(message, "quota_reset_at_unix_ms"),
        "own_timeout": message.own_timeout,
        "own_queue_timeout": message.own_queue_timeout,
        "target_timeout": message.target_timeout,
        "circuit_open_answer": message.circuit_open_answer,
        "spare_key": message.spare_key,
        "stream_error": message.stream_error[: limits.body_bytes],
        "sent_slow": message.sent_slow,
        "failure_kind": FAILURE.text(message.failure_kind),
        **_rare_fields(message, limits, problems),
    }


def _rare_fields(message: policy_pb2.ReportDetails, limits: Limits, problems: Problems) -> dict[str, Any]:
    problems.text("details.egress_address", message.egress_address)
    input_tokens, output_tokens = optional(message, "input_tokens"), optional(message, "output_tokens")
    cost = optional(message, "cost_usd")
    for name, value in (("input_tokens", input_tokens), ("output_tokens", output_tokens), ("cost_usd", cost)):
        problems.between(f"details.{name}", value, 0, 1e15)
    return {
        "remaining_budget_ms": optional(message, "remaining_budget_ms"),
        "limit_reset": _limit_reset(message.limit_reset, limits, problems) if message.HasField("limit_reset") else None,
        "end_lease": _end_lease(message.end_lease, problems),
        "lease": lease_context(message.lease) if message.HasField("lease") else None,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "cost_usd": cost,
        "first_output_ms": duration(message, "first_output_ms", problems, path="details.first_output_ms"),
    }


def _end_lease(number: int, problems: Problems) -> str:
    reason = LEASE_END.text(number)
    if reason not in _OWNER_ENDS:
        problems.add("details.end_lease", f"{reason} is not the owner's to say", "OWNER_EXIT or CLIENT_CANCELLED")
    return reason.upper()


def _usage(message: policy_pb2.UsageCounters) -> UsageCounters:
    return UsageCounters(day=message.day, minute=message.minute, token=message.token)


def _limit_reset(message: policy_pb2.LimitResetReport, limits: Limits, problems: Problems) -> LimitResetReport:
    if not message.claim_id:
        problems.require("details.limit_reset.claim_id", "empty", "the claim_id of the action")
    if message.step not in _STEPS:
        problems.add("details.limit_reset.step", f"unknown step {message.step[:40]!r}", "one of " + ", ".join(_STEPS))
    return LimitResetReport(
        claim_id=message.claim_id,
        step=message.step,
        http_status=cast("int | None", optional(message, "http_status")),
        body=message.body[: limits.body_bytes],
        transport_error=message.transport_error[:MAX_ERROR_TEXT_CHARS],
        organization_uuid=message.organization_uuid,
    )
