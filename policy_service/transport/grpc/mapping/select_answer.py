"""SelectAnswer to SelectTargetResponse, the decision token sealed on the way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from policy_service.application.errors import FieldProblem, InvalidRequestError
from policy_service.application.messages import (
    AttemptPolicy,
    Degradation,
    Dispatch,
    Exclusion,
    Explanation,
    Plan,
    Reject,
    SelectAnswer,
    TokenTarget,
    Wait,
)
from policy_service.domain.ids import Target
from policy_service.generated.policy.v1 import permit_pb2, policy_pb2, types_pb2
from policy_service.transport.grpc.memo import Memo
from policy_service.transport.grpc.token import MAX_TOKEN_BYTES, TokenSeal, TokenTooLargeError
from policy_service.transport.grpc.wire_enums import (
    AFFINITY,
    EXCLUSION,
    MECHANISM,
    PERMIT_KIND,
    PERMIT_USE,
    RECOVERY,
    STAGE,
    TERMINAL,
    WAIT,
)

_TOO_LONG_IDS = FieldProblem(
    "candidates",
    f"the ids of the decision do not fit into a token of {MAX_TOKEN_BYTES} bytes",
    "shorter ids of target, caller and request; characters beyond ASCII take up to 4 bytes each",
    "TOO_LARGE",
)
CONTROL_HEADERS = (
    "x-policy-lease-owner",
    "x-omniroute-lease-owner",
    "x-policy-lease-generation",
    "x-omniroute-lease-generation",
    "x-codex-session-id",
    "x-session-id",
    "x-omniroute-session",
    "x-policy-mode",
    "x-policy-budget",
    "x-policy-budget-fallback",
    "x-omniroute-mode",
    "x-omniroute-budget",
    "x-omniroute-budget-fallback",
)
"""Never sent upstream (spec/leases.md section 2, affinity.md section 1, strategies.md section 7)."""


def select_answer(
    answer: SelectAnswer, seal: TokenSeal, into: policy_pb2.SelectTargetResponse | None = None
) -> policy_pb2.SelectTargetResponse:
    """The answer on the wire. A token above its limit is cut by giving up the last fallbacks.

    Args:
        into: empty message to fill, such as one of a batch; None: a new one.
    """
    answer, token = _sealed(answer, seal)
    response = policy_pb2.SelectTargetResponse() if into is None else into
    response.decision_id = answer.decision_id
    response.decision_token = token
    response.policy_revision = answer.policy_revision
    response.view_age_ms = answer.view_age_ms
    response.degraded = answer.is_degraded
    response.decided_at_unix_ms = answer.decided_at
    response.request_id = answer.request_id
    _put_verdict(response, answer.verdict)
    if answer.exclusions:
        response.exclusions.extend(map(exclusion, answer.exclusions))
    if answer.degraded_reasons:
        response.degraded_reasons.extend(answer.degraded_reasons)
    if answer.explanation is not None:
        response.explanation.CopyFrom(_explanation(answer.explanation))
    return response


def _sealed(answer: SelectAnswer, seal: TokenSeal) -> tuple[SelectAnswer, bytes]:
    while answer.token is not None:
        try:
            return answer, seal.seal(answer.token)
        except TokenTooLargeError:
            answer = _with_fewer_fallbacks(answer)
    return answer, b""


def _with_fewer_fallbacks(answer: SelectAnswer) -> SelectAnswer:
    """Half of the fallbacks, in the answer and in the token alike: a report may only name what the token holds."""
    verdict, token = answer.verdict, answer.token
    if not isinstance(verdict, Dispatch) or not verdict.fallbacks or token is None:
        raise InvalidRequestError((_TOO_LONG_IDS,))
    kept = verdict.fallbacks[: len(verdict.fallbacks) // 2]
    targets = (*token.targets[: len(token.targets) - len(verdict.fallbacks)], *kept)
    return replace(answer, verdict=replace(verdict, fallbacks=kept), token=token._replace(targets=targets))


def _put_verdict(response: policy_pb2.SelectTargetResponse, verdict: Dispatch | Wait | Reject) -> None:
    if isinstance(verdict, Dispatch):
        _put_dispatch(response.dispatch, verdict)
    elif isinstance(verdict, Wait):
        response.wait.CopyFrom(_wait(verdict))
    else:
        response.reject.CopyFrom(_reject(verdict))


def target(each: Target, key: str = "", address: str = "") -> types_pb2.Target:
    """A target on the wire."""
    return types_pb2.Target(provider=each[0], connection=each[1], model=each[2], key=key, address=address)


def _keyed(entry: TokenTarget) -> types_pb2.Target:
    return target(entry.target, entry.key, entry.address)


def headers(pairs: Iterable[tuple[str, str]]) -> list[types_pb2.Header]:
    """Headers to set, on the wire."""
    return [types_pb2.Header(name=name, value=value) for name, value in pairs]


def _render(targets: tuple[TokenTarget, ...]) -> bytes:
    """The part of a Dispatch that its targets alone decide, as bytes."""
    message = policy_pb2.Dispatch(
        target=_keyed(targets[0]), fallbacks=map(_keyed, targets[1:]), strip_headers=CONTROL_HEADERS
    )
    return message.SerializeToString()


_rendered = Memo(_render)


def dispatch_to(targets: tuple[TokenTarget, ...]) -> policy_pb2.Dispatch:
    """The Dispatch that says nothing but where to go, in which order."""
    return policy_pb2.Dispatch.FromString(_rendered(targets))


def _put_dispatch(message: policy_pb2.Dispatch, verdict: Dispatch) -> None:
    # Messages that are passed to a constructor are copied one by one; parsing their bytes is several times as fast.
    message.MergeFromString(_rendered((verdict.target, *verdict.fallbacks)))
    message.affinity = AFFINITY.number(verdict.affinity)
    message.permit_use = PERMIT_USE.number(verdict.permit_use)
    message.no_fail_open = verdict.no_fail_open
    message.probe = verdict.is_probe
    if verdict.permits or verdict.set_headers or verdict.degradations or verdict.strip_headers:
        _put_extras(message, verdict)
    if verdict.handoff or verdict.plan or verdict.attempt_policy:
        _put_guidance(message, verdict)
    if verdict.is_panic or verdict.waited_ms or verdict.lease_transitioned:
        message.panic = verdict.is_panic
        message.waited_ms = verdict.waited_ms
        message.lease_transitioned = verdict.lease_transitioned


def _put_extras(message: policy_pb2.Dispatch, verdict: Dispatch) -> None:
    message.permits.extend(
        permit_pb2.Permit(
            permit_id=grant.permit_id,
            kind=PERMIT_KIND.number(grant.kind),
            gate=grant.gate,
            expires_at_unix_ms=grant.expires_at,
            execution_limit_ms=grant.execution_limit_ms,
            is_local=grant.is_local,
        )
        for grant in verdict.permits
    )
    message.set_headers.extend(headers(verdict.set_headers))
    message.strip_headers.extend(verdict.strip_headers)
    message.degradations.extend(map(degradation, verdict.degradations))


def _put_guidance(message: policy_pb2.Dispatch, verdict: Dispatch) -> None:
    if verdict.handoff:
        message.handoff.from_target.CopyFrom(target(verdict.handoff.from_target))
        message.handoff.to_target.CopyFrom(target(verdict.handoff.to_target))
    if verdict.plan:
        message.plan.CopyFrom(_plan(verdict.plan))
    if verdict.attempt_policy:
        message.attempt_policy.CopyFrom(_attempt_policy(verdict.attempt_policy))


def _plan(plan: Plan) -> policy_pb2.Plan:
    return policy_pb2.Plan(
        kind=plan.kind,
        targets=map(_keyed, plan.targets),
        judge=_keyed(plan.judge) if plan.judge else None,
        min_panel=plan.min_panel,
        grace_ms=plan.grace_ms,
        hard_ms=plan.hard_ms,
        mode=plan.mode,
        max_tool_rounds=plan.max_tool_rounds,
    )


def _attempt_policy(policy: AttemptPolicy) -> policy_pb2.AttemptPolicy:
    return policy_pb2.AttemptPolicy(
        max_retries=policy.max_retries,
        retry_delay_ms=policy.retry_delay_ms,
        fallback_delay_ms=policy.fallback_delay_ms,
        max_set_retries=policy.max_set_retries,
        set_retry_delay_ms=policy.set_retry_delay_ms,
        max_dispatches=policy.max_dispatches,
        hedge_delay_ms=policy.hedge_delay_ms,
        request_timeout_ms=policy.request_timeout_ms,
        target_timeout_ms=policy.target_timeout_ms,
    )


def degradation(each: Degradation) -> types_pb2.Degradation:
    """A degradation on the wire."""
    return types_pb2.Degradation(
        name=each.name,
        reason=each.reason,
        warning=each.warning,
        tool_limit=each.tool_limit,
        replaced=target(each.replaced) if each.replaced else None,
        max_output_tokens=each.max_output_tokens,
    )


def _wait(verdict: Wait) -> policy_pb2.Wait:
    return policy_pb2.Wait(
        wait_ms=verdict.wait_ms,
        reason=WAIT.number(verdict.reason),
        reason_text=verdict.reason,
        attempts_done=verdict.attempts_done,
        budget_left_ms=verdict.budget_left_ms,
        gate=verdict.gate,
        ticket=verdict.ticket,
        line_depth=verdict.line_depth,
    )


def _reject(verdict: Reject) -> policy_pb2.Reject:
    return policy_pb2.Reject(
        http_status=verdict.http_status,
        code=verdict.code,
        type=verdict.type,
        terminal_reason=TERMINAL.number(verdict.terminal_reason),
        terminal_reason_text=verdict.terminal_reason,
        recovery=RECOVERY.number(verdict.recovery),
        recovery_text=verdict.recovery,
        message=verdict.message,
        retry_after_ms=None if verdict.retry_after_s is None else verdict.retry_after_s * 1000,
        pool_size=verdict.pool_size,
        attempted=verdict.attempted,
        gate=verdict.gate,
        line_depth=verdict.line_depth,
        eligible_count=verdict.eligible_count,
        free_count=verdict.free_count,
    )


def exclusion(each: Exclusion) -> policy_pb2.Exclusion:
    """An exclusion record on the wire."""
    return policy_pb2.Exclusion(
        target=target(each.target, each.key),
        mechanism=MECHANISM.number(each.mechanism),
        mechanism_text=each.mechanism,
        reason=EXCLUSION.number(each.reason),
        reason_text=each.reason,
        until_at_unix_ms=each.until,
        remaining_ms=each.remaining_ms,
        evidence_id=each.evidence_id,
        stage=STAGE.number(each.stage),
    )


def _explanation(each: Explanation) -> policy_pb2.Explanation:
    return policy_pb2.Explanation(
        strategy=each.strategy,
        chosen_by=each.chosen_by,
        order=[
            policy_pb2.ExplainedTarget(
                target=target(entry.target, entry.key),
                score=entry.score,
                gates_passed=entry.gates_passed,
                inputs=[policy_pb2.ExplainedInput(name=i.name, value=i.value, source=i.source) for i in entry.inputs],
            )
            for entry in each.order
        ],
        affinity=each.affinity,
        pin_connection=each.pin_connection,
        notes=each.notes,
    )
