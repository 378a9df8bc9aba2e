"""Every span name, attribute and event name of the service. Nothing else spells one out."""

from __future__ import annotations

from typing import Final

SCOPE: Final = "policy_service"

SPAN_SELECT: Final = "policy.SelectTarget"
SPAN_REPORT: Final = "policy.ReportOutcome"

EVENT_EXCLUSION: Final = "policy.exclusion"
EVENT_FACT: Final = "policy.fact"

DECISION_ID: Final = "policy.decision_id"
REQUEST_ID: Final = "policy.request_id"
ROUTE: Final = "policy.route"
STRATEGY: Final = "policy.strategy"
CANDIDATE_COUNT: Final = "policy.candidate_count"
VERDICT: Final = "policy.verdict"
EXCLUDED_COUNT: Final = "policy.excluded_count"
REVISION: Final = "policy.revision"
VIEW_AGE_MS: Final = "policy.view_age_ms"
DEGRADED: Final = "policy.degraded"
TARGET_PROVIDER: Final = "policy.target.provider"
TARGET_CONNECTION: Final = "policy.target.connection"
TARGET_MODEL: Final = "policy.target.model"
IS_PROBE: Final = "policy.is_probe"
WAIT_MS: Final = "policy.wait_ms"
WAIT_REASON: Final = "policy.wait_reason"
REJECT_STATUS: Final = "policy.reject.http_status"
REJECT_CODE: Final = "policy.reject.code"
TERMINAL_REASON: Final = "policy.reject.terminal_reason"

MECHANISM: Final = "policy.mechanism"
REASON: Final = "policy.reason"
UNTIL_MS: Final = "policy.until_ms"
EVIDENCE_ID: Final = "policy.evidence_id"
FACT_ID: Final = "policy.fact_id"
FACT_KEY: Final = "policy.key"
FROM_STATE: Final = "policy.from_state"
TO_STATE: Final = "policy.to_state"

ATTEMPT: Final = "policy.attempt"
OUTCOME_STATUS: Final = "policy.outcome.status"
OUTCOME_NETWORK_ERROR: Final = "policy.outcome.network_error"
RESTATED_STATUS: Final = "policy.outcome.restated_status"
SCOPE_OF_BLAME: Final = "policy.scope"
RULE: Final = "policy.rule"
RULE_ID: Final = "policy.rule_id"
ACTION: Final = "policy.action"
DURABLE: Final = "policy.durable"
IGNORED: Final = "policy.ignored"
EVENTS_DROPPED: Final = "policy.events_dropped"
