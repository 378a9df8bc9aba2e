"""What a reported answer says about the rate of its connection, for the queue limiter (queue_admission.md section 5).

Only the upstream's own words count: a refusal that the gateway or this service made teaches nothing.
"""

from __future__ import annotations

from policy_service.application.messages import EndKind, ReportRequest
from policy_service.domain.guards import local_guard
from policy_service.domain.ids import Instant
from policy_service.domain.outcome import Origin, Outcome
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import ConnectionPolicy
from policy_service.domain.queue_learning import RateEvidence
from policy_service.domain.rate_headers import rate_evidence
from policy_service.domain.rate_texts import body_cap
from policy_service.domain.reading import Reading

NOTHING = RateEvidence()
_TOO_MANY = 429


def rates_of(request: ReportRequest, applies: ConnectionPolicy, now: Instant) -> RateEvidence:
    """Evidence of one report.

    A body counts only with a 429: other errors may quote the caller's own text.

    Args:
        applies: policy of the served connection.
    """
    if request.end is not EndKind.HTTP_STATUS or request.origin not in (Origin.UNSET, Origin.UPSTREAM):
        return NOTHING
    outcome = _outcome(request)
    if outcome.status != _TOO_MANY:
        return rate_evidence(request.headers, now)
    if local_guard(outcome, applies):
        return NOTHING
    hint = Reading(outcome._replace(headers={}), applies, now).hint
    return rate_evidence(
        request.headers,
        now,
        status=outcome.status,
        body_hint_ms=hint.wait_ms if hint else None,
        body_cap=body_cap(outcome.text),
    )


def _outcome(request: ReportRequest) -> Outcome:
    """The answer as it came, a status that the body of a 200 contradicts included."""
    extras = request.extras
    return parse_outcome(
        RawOutcome(
            status=request.status,
            headers=tuple(request.headers.items()),
            body=extras.stream_error or request.body,
            code=extras.error_code,
            type=extras.error_type,
            message=extras.error_message,
            inner_status=extras.inner_status,
            circuit_open_answer=extras.circuit_open_answer,
            own_queue_timeout=extras.own_queue_timeout,
            own_timeout=extras.own_timeout,
        )
    )
