"""Views of a record that several checks share: attempts, offered targets, reports as the service counts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from policy_service.cli.conformance.record import FENCE, RELEASE, REPORT, SELECT, PolicyCall, Record, UpstreamCall
from policy_service.cli.conformance.scripted_upstreams import CLOSED
from policy_service.generated.policy.v1 import policy_pb2


def selects(record: Record) -> list[PolicyCall]:
    """Calls of SelectTarget."""
    return record.of(SELECT)


def dispatched(record: Record) -> list[PolicyCall]:
    """Calls of SelectTarget that were answered with Dispatch."""
    return [call for call in selects(record) if call.answer is not None and _of(call).HasField("dispatch")]


def since_the_wait(record: Record) -> list[PolicyCall]:
    """The SelectTarget that was answered with Wait, and those behind it."""
    asked = selects(record)
    first = next((n for n, call in enumerate(asked) if call.answer is not None and call.answer.HasField("wait")), None)
    return [] if first is None else asked[first:]


def reports(record: Record) -> list[PolicyCall]:
    """Reports that the service took, repetitions included, in order of arrival."""
    return [call for call in record.of(REPORT) if call.answer is not None]


def attempts(record: Record) -> list[PolicyCall]:
    """The first report of each (decision, attempt), by decision and number."""
    first: dict[tuple[int, int], PolicyCall] = {}
    for call in reports(record):
        first.setdefault((place(record, call.request), call.request.attempt), call)
    return [first[key] for key in sorted(first)]


def dispatched_attempts(record: Record) -> list[PolicyCall]:
    """Attempts that were made; an attempt that was given up before its dispatch is a local fault."""
    return [call for call in attempts(record) if call.request.WhichOneof("outcome") != "local_fault"]


def place(record: Record, request: Any) -> int:
    """Which decision of the case a message is about; -1: none that this kit gave out."""
    tokens = [decision.decision_token for decision in record.decisions]
    return tokens.index(request.decision_token) if request.decision_token in tokens else -1


def offers(record: Record, before: float) -> list[tuple[float, str]]:
    """Connections that answers had named as targets before an instant, with the instant of each."""
    return [(at, connection) for at, connection in _offers(record) if at <= before]


def _offers(record: Record) -> Iterator[tuple[float, str]]:
    for call in dispatched(record):
        dispatch = _of(call).dispatch
        for target in (dispatch.target, *dispatch.fallbacks):
            yield call.ended_at, target.connection
    for call in reports(record):
        if call.answer.action.HasField("next_target"):
            yield call.ended_at, call.answer.action.next_target.connection


def heard(record: Record) -> list[str]:
    """Connections that were called, in order."""
    return [call.connection for call in record.upstream]


def header(call: UpstreamCall, name: str) -> list[str]:
    """Values of a header of an upstream call."""
    return [value for each, value in call.headers if each == name.lower()]


def outcome(request: Any) -> str:
    """The outcome of a report in a word."""
    kind = request.WhichOneof("outcome")
    if kind == "http_status":
        return str(request.http_status)
    if kind == "network_error":
        return network_error(request.network_error)
    return kind or "no outcome"


def network_error(number: int) -> str:
    """Name without prefix; the number where the contract has none."""
    names = policy_pb2.NetworkErrorKind.DESCRIPTOR.values_by_number
    return names[number].name.removeprefix("NETWORK_ERROR_KIND_") if number in names else str(number)


def told(record: Record) -> str:
    """Reports in words, for what was seen."""
    found = [
        f"{call.request.attempt}: {call.request.target.connection} {outcome(call.request)}" for call in attempts(record)
    ]
    return ", ".join(found) or "no report"


def can_count_calls(record: Record) -> bool:
    """Every attempt is a call that an upstream has seen: nobody was sent where nobody listens."""
    return all(connection != CLOSED for _, connection in _offers(record))


def freeing(record: Record) -> list[PolicyCall]:
    """Calls that free the permits of a decision: final reports and releases that the service took."""
    final = [call for call in reports(record) if call.request.final]
    return sorted([*final, *(c for c in record.of(RELEASE) if c.answer is not None)], key=lambda call: call.at)


def fenced(record: Record, since: float, until: float) -> bool:
    """Between two instants the lease was found in order, by CheckFence or by a fresh SelectTarget."""
    valid = [call for call in record.of(FENCE) if call.answer is not None and call.answer.status == 1]
    return any(since <= call.at and call.ended_at <= until for call in [*valid, *dispatched(record)])


def _of(call: PolicyCall) -> Any:
    return call.answer
