"""Reporting: every attempt, once, under its number, with what came back and nothing that is secret."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.message import Message

from policy_service.cli.conformance.checks.findings import Finding, absent, check, holds, none_of
from policy_service.cli.conformance.checks.views import (
    attempts,
    can_count_calls,
    dispatched,
    dispatched_attempts,
    freeing,
    outcome,
    place,
    reports,
    told,
)
from policy_service.cli.conformance.record import RELEASE, REPORT, SELECT, PolicyCall, Record, UpstreamCall

BODY_LIMIT = 65_536
_SLACK_MS = 1_000
"""What a busy machine may add to a time that the gateway measured."""
_EARLY_MS = 30


@check
def reports_every_attempt(record: Record, _: Mapping[str, Any]) -> Finding:
    """As many attempts are reported as upstream calls were seen."""
    if not can_count_calls(record):
        return absent("a target of the case has no upstream that counts")
    made, known = len(record.upstream), len(dispatched_attempts(record))
    return holds(made == known, f"{made} attempts reported, one for each upstream call", told(record))


@check
def reports_once(record: Record, _: Mapping[str, Any]) -> Finding:
    """(Decision, attempt) is not reported again once the service has taken it."""
    keys = [(place(record, call.request), call.request.attempt) for call in reports(record)]
    twice = sorted(
        {f"attempt {number} of decision {which}" for which, number in keys if keys.count((which, number)) > 1}
    )
    return none_of(twice, "each attempt reported once", keys)


@check
def numbers_attempts(record: Record, _: Mapping[str, Any]) -> Finding:
    """Attempts of a decision are numbered from 0, without a gap."""
    numbers: dict[int, list[int]] = {}
    for call in attempts(record):
        numbers.setdefault(place(record, call.request), []).append(call.request.attempt)
    wrong = [f"decision {which}: {found}" for which, found in numbers.items() if found != list(range(len(found)))]
    return none_of(wrong, "attempt is 0, 1, 2 ... within each decision", numbers)


@check
def keeps_the_token(record: Record, _: Mapping[str, Any]) -> Finding:
    """The decision token comes back byte for byte. Where the service was away there was none to send."""
    was_away = any(call.error for call in record.of(SELECT))
    unknown = [c.request for c in record.of(REPORT) if place(record, c.request) < 0]
    wrong = [f"{len(r.decision_token)} other bytes" for r in unknown if not (was_away and not r.decision_token)]
    return none_of(wrong, "decision_token exactly as it was given out, as bytes", record.of(REPORT))


def _first_target(record: Record, call: PolicyCall) -> str:
    """A report that names none means the first."""
    which = place(record, call.request)
    return str(record.decisions[which].dispatch.target.connection) if which >= 0 else ""


@check
def targets_match_calls(record: Record, _: Mapping[str, Any]) -> Finding:
    """Attempt by attempt, the reported target is the one that was called."""
    if not can_count_calls(record) or not dispatched_attempts(record):
        return absent("nothing to compare")
    found = [call.request.target.connection or _first_target(record, call) for call in dispatched_attempts(record)]
    seen = [call.connection for call in record.upstream]
    return holds(found == seen[: len(found)], f"targets as called: {seen}", f"{found}")


@check
def targets_belong(record: Record, _: Mapping[str, Any]) -> Finding:
    """Each report names a target of the decision whose token it carries, and each decision is reported."""
    if not dispatched(record):
        return absent("no Dispatch was answered")
    found = {place(record, call.request): call.request.target.connection for call in attempts(record)}
    wanted = {
        number: decision.dispatch.target.connection
        for number, decision in enumerate(record.decisions)
        if decision.HasField("dispatch")
    }
    return holds(found == wanted, f"targets by decision: {wanted}", f"{found}")


@check
def outcomes(record: Record, given: Mapping[str, Any]) -> Finding:
    """Attempt by attempt, the outcome is one of those listed."""
    found = [outcome(call.request) for call in attempts(record)]
    wanted = [each if isinstance(each, list) else [each] for each in given["outcomes"]]
    fits = len(found) == len(wanted) and all(str(a) in map(str, b) for a, b in zip(found, wanted, strict=True))
    return holds(fits, f"outcomes {given['outcomes']}", f"{found}")


@check
def final_is_last(record: Record, _: Mapping[str, Any]) -> Finding:
    """Behind the final report of a decision there is no attempt of it, unless there was nothing left to free."""
    final: dict[int, Any] = {}
    late = []
    for call in attempts(record):
        which = place(record, call.request)
        if which in final and _was_too_early(record, which, final[which]):
            late.append(f"attempt {call.request.attempt} behind the final one")
        if call.request.final:
            final.setdefault(which, call.request)
    return none_of(late, "final in the last report of a decision only", attempts(record))


def _was_too_early(record: Record, which: int, request: Any) -> bool:
    """Permits were held, or other targets left. Without either only RETRY_SAME can follow: nothing is lost by it."""
    if which < 0:
        return False
    dispatch = record.decisions[which].dispatch
    last = [dispatch.target, *dispatch.fallbacks][-1].connection
    return bool(dispatch.permits) or request.target.connection != last


@check
def ends_decisions(record: Record, _: Mapping[str, Any]) -> Finding:
    """A decision that holds permits, or whose last attempt cannot be followed by another, is ended."""
    ended = {place(record, call.request) for call in freeing(record)}
    last = {place(record, call.request): call.request for call in attempts(record)}
    wanted = [which for which, request in last.items() if which >= 0 and _must_end(record, which, request)]
    open_ones = [f"decision {which} is left open" for which in wanted if which not in ended]
    return none_of(open_ones, "the last report of a decision is final, or ReleasePermit ends it", last)


def _must_end(record: Record, which: int, request: Any) -> bool:
    over = _is_success(request) and not request.details.stream_error
    return over or request.HasField("client_cancelled") or bool(record.decisions[which].dispatch.permits)


@check
def offsets(record: Record, _: Mapping[str, Any]) -> Finding:
    """attempt_offset_ms is the time from the SelectTarget answer to the dispatch of the attempt."""
    if not can_count_calls(record) or len(dispatched_attempts(record)) != len(record.upstream):
        return absent("reports and calls cannot be matched")
    pairs = list(zip(dispatched_attempts(record), record.upstream, strict=True))
    wrong = [text for report, call in pairs if (text := _offset_fault(record, pairs, report, call))]
    return none_of(wrong, "attempt_offset_ms from the answer of SelectTarget to the dispatch", pairs)


def _offset_fault(
    record: Record, pairs: list[tuple[PolicyCall, UpstreamCall]], report: PolicyCall, call: UpstreamCall
) -> str:
    which = place(record, report.request)
    answered = [c.ended_at for c in dispatched(record) if record.decisions.index(c.answer) == which]
    if not answered:
        return ""
    before = [c for r, c in pairs if place(record, r.request) == which and c.at < call.at]
    # Whoever made the first call had the answer of SelectTarget; whoever goes on has the answer to the call before.
    least = (before[-1].answered_at - before[0].at) * 1000 - _EARLY_MS if before else 0
    most = (call.at - answered[0]) * 1000 + _EARLY_MS
    offset = report.request.attempt_offset_ms
    return (
        "" if least <= offset <= most else f"attempt {report.request.attempt}: {offset}, not {least:.0f} .. {most:.0f}"
    )


@check
def reports_headers(record: Record, given: Mapping[str, Any]) -> Finding:
    """Headers of the answer are in the report of that attempt."""
    found = attempts(record)
    if len(found) <= given.get("attempt", 0):
        return absent("the attempt was not reported")
    sent = {header.name.lower(): header.value for header in found[given.get("attempt", 0)].request.headers}
    lacking = [
        f"{name}: {sent.get(name, 'absent')}" for name, value in given["headers"].items() if sent.get(name) != value
    ]
    return none_of(lacking, f"headers of the answer: {given['headers']}", found)


@check
def reports_the_body(record: Record, given: Mapping[str, Any]) -> Finding:
    """The body of a failure is reported, at least its start."""
    found = attempts(record)
    if len(found) <= given.get("attempt", 0):
        return absent("the attempt was not reported")
    body = found[given.get("attempt", 0)].request.body.decode("utf-8", "replace")
    return holds(given["has"] in body, f"body with {given['has']!r}", f"{body[:80]!r}")


@check
def caps_bodies(record: Record, _: Mapping[str, Any]) -> Finding:
    """Not more of a body is sent than is kept."""
    wrong = [f"{len(c.request.body)} bytes" for c in record.of(REPORT) if len(c.request.body) > BODY_LIMIT]
    return none_of(wrong, f"at most {BODY_LIMIT} bytes of body", record.of(REPORT))


@check
def keeps_successes_private(record: Record, _: Mapping[str, Any]) -> Finding:
    """Bodies of successes stay in the gateway."""
    wrong = [f"{len(c.request.body)} bytes" for c in record.of(REPORT) if c.request.body and _is_success(c.request)]
    return none_of(wrong, "no body in the report of a success", record.of(REPORT))


def _is_success(request: Any) -> bool:
    return bool(200 <= request.http_status < 300)


@check
def tells_no_secret(record: Record, _: Mapping[str, Any]) -> Finding:
    """Credentials and owner tokens reach no report, and nothing else where they do not belong."""
    secrets = {**record.secrets, **{f"the key of {name}": key for name, key in record.keys.items()}}
    wrong = [
        f"{name} in {call.method}"
        for call in record.policy
        for name, secret in secrets.items()
        if secret.encode() in _without_lease(call.request)
    ]
    return none_of(wrong, "no credential and no lease owner in messages to the service", record.policy)


def _without_lease(request: Message) -> bytes:
    """The message without the field that lease owners belong into."""
    rest = type(request)()
    rest.CopyFrom(request)
    if "lease" in rest.DESCRIPTOR.fields_by_name:
        rest.ClearField("lease")
    if "details" in rest.DESCRIPTOR.fields_by_name:
        rest.details.ClearField("lease")  # type: ignore[attr-defined]
    return rest.SerializeToString()


@check
def reports_times(record: Record, _: Mapping[str, Any]) -> Finding:
    """latency_ms is the time of the attempt, first_byte_ms not more than it."""
    pairs = list(zip(dispatched_attempts(record), record.upstream, strict=False))
    if not pairs or not can_count_calls(record):
        return absent("no attempt to compare")
    return none_of(list(_time_faults(pairs)), "latency_ms from dispatch to the end, first_byte_ms within it", pairs)


def _time_faults(pairs: list[tuple[PolicyCall, UpstreamCall]]) -> Iterator[str]:
    for report, call in pairs:
        request, took = report.request, (call.ended_at - call.at) * 1000
        least = (call.answered_at - call.at) * 1000 - _EARLY_MS
        if not request.HasField("latency_ms"):
            yield f"attempt {request.attempt}: no latency_ms"
        elif not least <= request.latency_ms <= took + _SLACK_MS:
            yield f"attempt {request.attempt}: latency_ms {request.latency_ms}, took {took:.0f}"
        elif request.HasField("first_byte_ms") and request.first_byte_ms > request.latency_ms:
            yield f"attempt {request.attempt}: first_byte_ms {request.first_byte_ms} of {request.latency_ms}"


@check
def reports_the_stream(record: Record, given: Mapping[str, Any]) -> Finding:
    """A streamed answer is said to be one, with the time of its first byte."""
    if not attempts(record):
        return absent("no attempt was reported")
    request = attempts(record)[-1].request
    first = request.first_byte_ms if request.HasField("first_byte_ms") else None
    fits = request.streamed and first is not None and first <= given["first_byte_before_ms"]
    return holds(fits, f"streamed, first_byte_ms below {given['first_byte_before_ms']}", f"{request.streamed}, {first}")


@check
def reports_the_stream_error(record: Record, given: Mapping[str, Any]) -> Finding:
    """The error event of a stream that began with 200 is in the report."""
    if not attempts(record):
        return absent("no attempt was reported")
    event = attempts(record)[0].request.details.stream_error.decode("utf-8", "replace")
    return holds(given["has"] in event, f"details.stream_error with {given['has']!r}", f"{event[:80]!r}")


@check
def reports_within(record: Record, given: Mapping[str, Any]) -> Finding:
    """The end of an attempt is reported soon: within `within_ms` of the client's leaving."""
    found = record.of(REPORT)
    if not found:
        return holds(False, "a report", "none")
    took_ms = (found[-1].at - record.clients[0].ended_at) * 1000
    return holds(took_ms <= given["within_ms"], f"reported within {given['within_ms']} ms", f"after {took_ms:.0f} ms")


@check
def reports_reach_the_service(record: Record, _: Mapping[str, Any]) -> Finding:
    """A report that failed with UNAVAILABLE is sent again until it is taken."""
    if not record.of(REPORT):
        return absent("nothing was reported")
    return holds(bool(reports(record)), "the report sent again until it is taken", f"{len(record.of(REPORT))} tries")


@check
def releases_belong(record: Record, _: Mapping[str, Any]) -> Finding:
    """What is released was given out."""
    known = {permit.permit_id for decision in record.decisions for permit in decision.dispatch.permits}
    wrong = [each for call in record.of(RELEASE) for each in call.request.permit_ids if each not in known]
    return none_of(wrong, "permit ids as they were given out", record.of(RELEASE))
