"""ReportAnswer to ReportOutcomeResponse."""

from __future__ import annotations

from policy_service.application.messages import Action, ClaimStep, Effect, ReportAnswer, Verdict
from policy_service.generated.policy.v1 import policy_pb2
from policy_service.transport.grpc.mapping.select_answer import degradation, headers, target
from policy_service.transport.grpc.wire_enums import ACTION, BLAME, FAILURE, IGNORED, MECHANISM, OUTCOME, PIN

MAX_EFFECTS = 100


def report_answer(answer: ReportAnswer) -> policy_pb2.ReportOutcomeResponse:
    """The answer on the wire; at most 100 effects."""
    response = policy_pb2.ReportOutcomeResponse(
        verdict=verdict(answer.verdict),
        action=_action(answer.action),
        durable=answer.durable,
        pin=PIN.number(answer.pin),
        policy_revision=answer.policy_revision,
        view_age_ms=answer.view_age_ms,
        degraded=answer.is_degraded,
    )
    if answer.effects or answer.ignored:
        response.effects.extend(map(_effect, answer.effects[:MAX_EFFECTS]))
        response.ignored.extend(map(IGNORED.number, answer.ignored))
        response.ignored_texts.extend(answer.ignored)
    if answer.lease_result:
        response.lease.applied = answer.lease_result == "APPLIED"
        response.lease.code = answer.lease_code
    if answer.degradations:
        response.degradations.extend(map(degradation, answer.degradations))
    return response


def verdict(each: Verdict) -> policy_pb2.Verdict:
    """A verdict on the wire."""
    return policy_pb2.Verdict(
        reason=OUTCOME.number(each.reason),
        reason_text=each.reason,
        scope=BLAME.number(each.scope),
        scope_text=each.scope,
        restated_status=each.restated_status,
        retry_after_ms=each.retry_after_ms,
        rule=each.rule,
        rule_id=each.rule_id,
        hint_source=each.hint_source,
        failure_kind=FAILURE.number(each.failure_kind),
        failure_kind_text=each.failure_kind,
        success=each.is_success,
        terminal_state=each.terminal_state,
    )


def _action(each: Action) -> policy_pb2.Action:
    return policy_pb2.Action(
        kind=ACTION.number(each.kind),
        kind_text=each.kind,
        delay_ms=each.delay_ms,
        set_headers=headers(each.set_headers),
        next_target=target(each.next_target) if each.next_target else None,
        via=each.via,
        reason=each.reason,
        claim=_claim(each.claim) if each.claim else None,
    )


def _claim(each: ClaimStep) -> policy_pb2.ClaimStep:
    return policy_pb2.ClaimStep(
        claim_id=each.claim_id,
        step=each.step,
        method=each.method,
        url=each.url,
        body=each.body,
        timeout_ms=each.timeout_ms,
    )


def _effect(each: Effect) -> policy_pb2.Effect:
    return policy_pb2.Effect(
        fact_id=each.fact_id,
        mechanism=MECHANISM.number(each.mechanism),
        mechanism_text=each.mechanism,
        key=each.key,
        from_state=each.from_state,
        to_state=each.to_state,
        until_at_unix_ms=each.until,
        generation=each.generation,
    )
