"""Static start slots of a provider, waited for before a call joins the queue (queue_admission.md section 3, step 4).
Pure; `permits` does the waiting."""

from __future__ import annotations

from dataclasses import replace

from policy_service.application.call_ids import start_id
from policy_service.application.permit_work import QUEUE_SATURATED, Passage, PermitAsk, PermitOutcome
from policy_service.domain.gates import Gate
from policy_service.domain.ids import DurationMs
from policy_service.domain.permits import PermitCode
from policy_service.domain.queue_admission import HTTP_STATUS as QUEUE_STATUS
from policy_service.domain.queue_admission import QueueCode


def start_slot(ask: PermitAsk, gate: Gate) -> PermitAsk:
    """The wait for the provider's start slot on behalf of an ask, inside its budget."""
    longest = ask.passage.timeout_ms
    budget_ms = longest if ask.timeout_ms is None else min(ask.timeout_ms, longest)
    slot = Passage((gate,), timeout_ms=longest, revision=ask.passage.revision)
    return replace(ask, passage=slot, request_id=start_id(ask.request_id), timeout_ms=budget_ms)


def after_start_slot(ask: PermitAsk, waited_ms: DurationMs) -> PermitAsk:
    """The ask with what the wait for its start slot left of its budget."""
    profile = ask.passage.profile
    if ask.timeout_ms is None and profile is not None and profile.unbounded_wait:
        return ask
    return replace(ask, timeout_ms=max(0, ask.budget_ms - waited_ms))


def without_start_slot(ask: PermitAsk, found: PermitOutcome) -> PermitOutcome:
    """What an ask is told whose start slot did not come in time: the queue's own refusal."""
    refused = found.refusal
    if refused is not None and refused.code == PermitCode.TIMEOUT:
        code = QueueCode.QUEUE_TIMEOUT
        refused = replace(refused, code=code, http_status=QUEUE_STATUS[code], reason=QUEUE_SATURATED)
    return replace(found, passage=ask.passage, row=None, refusal=refused)
