"""Use case `classify`: failures in, public verdicts out, one JSON object a line.

Reads no state. A line that cannot be used yields an error object that names the field, and the work goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from policy_service.domain.ids import AuthClass, Instant
from policy_service.domain.outcome import Outcome
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import ConnectionPolicy, Policy
from policy_service.domain.reading import lowered_text
from policy_service.domain.restatement import restate
from policy_service.domain.rules import first_match
from policy_service.domain.success_faults import judge_success, output_came_first
from policy_service.domain.verdict import Verdict, judge

_AUTH: Final = {str(auth): auth for auth in AuthClass}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class RecordError(ValueError):
    """A record that cannot be used: the field, and what to do about it."""

    def __init__(self, field: str, remedy: str) -> None:
        super().__init__(f"{field}: {remedy}")
        self.field = field
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A record that has been read: the raw outcome, its text, and the instant that counts as now."""

    raw: RawOutcome
    text: str
    now: Instant


def classify_lines(lines: Iterable[str], policy: Policy, now: Instant | None = None) -> Iterator[str]:
    """One JSON verdict for each JSON record; blank lines are passed over.

    Args:
        lines: records {id, provider, auth, model, status, network_error, headers, body, observed_at}.
        policy: catalogue and settings in force.
        now: instant for records without `observed_at` and without a `date` header; None: the clock of the host.

    Yields:
        {id, scope, reason, fallback, retry_after_ms, terminal, rule}, or {id, line, error: {field, remedy}}.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield json.dumps(_classify_line(line, number, policy, now), ensure_ascii=False)


def compare_lines(lines: Iterable[str], before: Policy, after: Policy, now: Instant) -> Iterator[str | None]:
    """Dry run of another catalogue: for each record {before, after} as JSON, None where nothing would change.

    Both sides are verdicts as of `classify_lines`, with `configured_rule`: the rule of the catalogue that matches. It
    may change a cooldown and leave the verdict.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            was, becomes = (_with_rule(line, number, policy, now) for policy in (before, after))
            yield None if was == becomes else json.dumps({"before": was, "after": becomes}, ensure_ascii=False)


def _with_rule(line: str, number: int, policy: Policy, now: Instant) -> dict[str, Any]:
    answer = _classify_line(line, number, policy, now)
    if "error" in answer:
        return answer
    attempt = _attempt(_parsed(line), now)
    applies = policy.for_connection(attempt.raw.provider, attempt.raw.connection, attempt.raw.auth_class)
    outcome = restated(parse_outcome(attempt.raw), applies)
    match = first_match(outcome, applies, lowered_text(outcome))
    rule = None if match is None else {"id": match.id, "scope": match.scope, "cooldown_ms": match.cooldown_ms}
    return {**answer, "configured_rule": rule}


def _classify_line(line: str, number: int, policy: Policy, now: Instant | None) -> dict[str, Any]:
    record: object = None
    try:
        record = _parsed(line)
        return classify_record(record, policy, now)
    except RecordError as error:
        known = record.get("id") if isinstance(record, dict) else None
        return {"id": known, "line": number, "error": {"field": error.field, "remedy": error.remedy}}


def _parsed(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError("line", f"not valid JSON ({error})"[:200]) from None
    if not isinstance(record, dict):
        raise RecordError("line", "one JSON object a line is expected")
    return record


def classify_record(record: Mapping[str, Any], policy: Policy, now: Instant | None = None) -> dict[str, Any]:
    """Verdict on one record.

    Raises:
        RecordError: a field has the wrong type or value.
    """
    attempt = _attempt(record, now)
    verdict = classify_attempt(attempt.raw, attempt.text, policy, attempt.now)
    return {
        "id": record.get("id"),
        "scope": verdict.scope,
        "reason": verdict.reason,
        "fallback": verdict.fallback,
        "retry_after_ms": verdict.retry_after_ms,
        "terminal": verdict.terminal,
        "rule": verdict.rule,
    }


def classify_attempt(raw: RawOutcome, body_text: str, policy: Policy, now: Instant) -> Verdict:
    """Verdict on one attempt as the gateway saw it: parse, restate, judge."""
    applies = policy.for_connection(raw.provider, raw.connection, raw.auth_class)
    outcome = restated(parse_outcome(raw), applies)
    if outcome.is_success:
        return judge_success(body_text)
    verdict = judge(outcome, applies, now)
    if outcome.is_error_in_success and output_came_first(body_text):
        return replace(verdict, fallback=False)
    return verdict


def restated(outcome: Outcome, policy: ConnectionPolicy) -> Outcome:
    """The outcome with its status corrected by the provider's restatement rules; none for an error inside a 200."""
    untouched = outcome.network_error or outcome.is_error_in_success or not policy.provider.restatement
    if outcome.status is None or untouched:
        return outcome
    found = restate(policy.provider, outcome.status, outcome.message, outcome.body, None)
    return outcome if found.rule_id is None else outcome._replace(status=found.status)


# --- reading a record ----------------------------------------------------------------------------------------------
def _attempt(record: Mapping[str, Any], now: Instant | None) -> _Attempt:
    headers = _headers(_optional(record, "headers", dict, {}))
    text = _body(record.get("body"))
    status = _status(record)
    network_error = _optional(record, "network_error", str, "")
    if status is None and not network_error:
        raise RecordError("status", "give an HTTP status or a network_error")
    model: str = _optional(record, "model", str, "")
    raw = RawOutcome(
        status=status,
        network_error=network_error,
        headers=headers,
        body=text,
        provider=_provider(record),
        model=model,
        auth_class=_auth(record),
        is_model_untold=not model,
    )
    return _Attempt(raw, text, _instant(record, headers, now))


def _optional(record: Mapping[str, Any], field: str, kind: type, default: Any) -> Any:
    value = record.get(field)
    if value is None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RecordError(field, f"expected {_KIND_NAMES[kind]}, got {type(value).__name__}")
    return value


_KIND_NAMES: Final[Mapping[type, str]] = {str: "a text", int: "a whole number", dict: "an object"}


def _provider(record: Mapping[str, Any]) -> str:
    provider: str = _optional(record, "provider", str, "")
    if not provider.strip():
        raise RecordError("provider", "name the provider that answered")
    return provider


def _status(record: Mapping[str, Any]) -> int | None:
    status: int | None = _optional(record, "status", int, None)
    if status is not None and not 100 <= status <= 599:
        raise RecordError("status", "an HTTP status lies between 100 and 599")
    return status


def _auth(record: Mapping[str, Any]) -> AuthClass | None:
    name: str = _optional(record, "auth", str, "")
    if not name:
        return None
    if name not in _AUTH:
        raise RecordError("auth", f"use one of {', '.join(sorted(_AUTH))}")
    return _AUTH[name]


def _headers(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs in the order given; a list is a repeated header."""
    pairs: list[tuple[str, str]] = []
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(item, (str, int, float)) for item in values):
            raise RecordError(f"headers.{name}", "a header value is a text or a list of texts")
        pairs += ((str(name), str(item)) for item in values)
    return pairs


def _body(body: object) -> str:
    if body is None or isinstance(body, str):
        return body or ""
    return json.dumps(body, ensure_ascii=False)


_CLOCKS: Final[tuple[Callable[[str], datetime], ...]] = (datetime.fromisoformat, parsedate_to_datetime)


def _instant(record: Mapping[str, Any], headers: Iterable[tuple[str, str]], now: Instant | None) -> Instant:
    """`observed_at`, else the `date` header, else `now`, else the clock."""
    stated = record.get("observed_at")
    if stated is not None:
        if isinstance(stated, str) and (moment := _moment(stated)) is not None:
            return moment
        raise RecordError("observed_at", "expected an ISO 8601 time such as 2026-01-01T12:00:00Z")
    dates = (_moment(value) for name, value in headers if name.lower() == "date")
    found = next((moment for moment in dates if moment is not None), now)
    return _milliseconds(datetime.now(UTC)) if found is None else found


def _moment(text: str) -> Instant | None:
    for read in _CLOCKS:
        try:
            moment = read(text)
        except (ValueError, TypeError, OverflowError):
            continue
        return _milliseconds(moment if moment.tzinfo else moment.replace(tzinfo=UTC))
    return None


def _milliseconds(moment: datetime) -> Instant:
    return round((moment - _EPOCH).total_seconds() * 1000)
