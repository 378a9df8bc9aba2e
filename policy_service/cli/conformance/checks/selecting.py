"""Asking: before every dispatch, with a deadline, again as told, and never taking a refusal for leave to go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policy_service.cli.conformance.checks.findings import Finding, absent, check, holds, none_of
from policy_service.cli.conformance.checks.views import dispatched, heard, place, selects, since_the_wait
from policy_service.cli.conformance.record import SELECT, PolicyCall, Record

_LONGEST_CALL_S = 60.0
_EARLY_S = 0.02
"""Clocks of two processes may round differently."""
_MAX_ID = 128


@check
def asks_first(record: Record, _: Mapping[str, Any]) -> Finding:
    """No upstream is called before a Dispatch was answered."""
    leave = [call.ended_at for call in dispatched(record)]
    wrong = [f"{call.connection} called without" for call in record.upstream if not any(at <= call.at for at in leave)]
    return none_of(wrong, "SelectTarget answered with Dispatch before each upstream call", record.upstream)


@check
def has_request_id(record: Record, _: Mapping[str, Any]) -> Finding:
    """Every SelectTarget carries an idempotency key."""
    ids = [call.request.request_id for call in selects(record)]
    if not ids:
        return absent("SelectTarget was not called")
    return holds(all(0 < len(each) <= _MAX_ID for each in ids), "request_id of 1 to 128 characters", f"{ids[:3]}")


@check
def request_ids_differ(record: Record, _: Mapping[str, Any]) -> Finding:
    """Client requests of a case have keys of their own."""
    if len(record.clients) < 2:
        return absent("one client request")
    if record.case.together:
        known = {call.request.request_id for call in selects(record)}
        return holds(len(known) >= len(record.clients), "another request_id for each client request", f"{known}")
    ids = [_ids_between(record, number) for number in range(len(record.clients))]
    shared = set.intersection(*ids) if all(ids) else set()
    return holds(not shared, "another request_id for each client request", f"shared: {sorted(shared)}")


def _ids_between(record: Record, number: int) -> set[str]:
    """Ids that were sent for one client request."""
    client = record.clients[number]
    return {call.request.request_id for call in selects(record) if client.at <= call.at <= client.ended_at}


@check
def has_deadline(record: Record, _: Mapping[str, Any]) -> Finding:
    """Calls to the service end by themselves."""
    endless = [call.method for call in record.policy if call.limit_s is None or call.limit_s > _longest_s(call)]
    return none_of(
        endless, f"a gRPC deadline of at most {_LONGEST_CALL_S:.0f} s on every call to the service", record.policy
    )


def _longest_s(call: PolicyCall) -> float:
    """A call that may stand in line takes as much longer."""
    return _LONGEST_CALL_S + getattr(call.request, "wait_budget_ms", 0) / 1000


@check
def asks_times(record: Record, given: Mapping[str, Any]) -> Finding:
    """SelectTarget is called so many times: between `least` and `most`."""
    count, least, most = len(selects(record)), given.get("least", 0), given.get("most", 1_000)
    return holds(least <= count <= most, f"{least} to {most} calls of SelectTarget", str(count))


@check
def asks_during(record: Record, given: Mapping[str, Any]) -> Finding:
    """SelectTarget is called for the client request of this number."""
    since = record.clients[given["request"]].at
    return holds(any(call.at >= since for call in selects(record)), "SelectTarget called", "not called")


@check
def asks_no_more(record: Record, _: Mapping[str, Any]) -> Finding:
    """Behind a Wait nothing is asked."""
    asked = since_the_wait(record)
    if not asked:
        return absent("no Wait was answered")
    return holds(len(asked) == 1, "no SelectTarget behind the Wait", f"{len(asked) - 1} calls")


@check
def forgets_attempts(record: Record, _: Mapping[str, Any]) -> Finding:
    """The SelectTarget behind a Wait tells of no attempt from before it."""
    asked = since_the_wait(record)
    if len(asked) < 2:
        return absent("the gateway did not ask again")
    told = [_words(each) for each in asked[1].request.earlier_attempts]
    return holds(not told, "no earlier_attempts behind a Wait", f"{told}")


@check
def goes_nowhere(record: Record, _: Mapping[str, Any]) -> Finding:
    """No upstream is called at all."""
    if not selects(record) and not record.upstream:
        return absent("SelectTarget was not called")
    return holds(not record.upstream, "no upstream call", ", ".join(heard(record)))


@check
def waits_and_asks_again(record: Record, given: Mapping[str, Any]) -> Finding:
    """After a Wait: asleep for so long, then SelectTarget with the token of the Wait; or an answer for the client."""
    asked = since_the_wait(record)
    if not asked:
        return absent("no Wait was answered")
    if len(asked) == 1:
        return _told_to_come_back(record)
    pause_s = asked[1].at - asked[0].ended_at
    wanted_s = given["wait_ms"] / 1000
    if pause_s < wanted_s - _EARLY_S:
        return holds(False, f"asked again after {wanted_s:.1f} s", f"after {pause_s:.2f} s")
    follows = asked[1].request.previous_decision_token == asked[0].answer.decision_token
    return holds(follows, "previous_decision_token is the token of the Wait", "another one, or none")


def _told_to_come_back(record: Record) -> Finding:
    client = record.clients[-1]
    fits = client.status in (429, 503) and any(name == "retry-after" for name, _ in client.headers)
    seen = f"status {client.status or 'none'}, {len(record.upstream)} upstream calls"
    return holds(fits, "asked again, or the client told 429 or 503 with Retry-After", seen)


@check
def keeps_its_place(record: Record, _: Mapping[str, Any]) -> Finding:
    """After a Wait in line the same request_id is asked with."""
    ids = [call.request.request_id for call in since_the_wait(record)]
    if len(ids) < 2:
        return absent("the gateway did not ask again")
    return holds(len(set(ids)) == 1, "the same request_id, which keeps the place in line", f"{ids[:3]}")


@check
def tells_earlier_attempts(record: Record, given: Mapping[str, Any]) -> Finding:
    """The next SelectTarget names the attempts made so far, with what the service said of them."""
    asked = selects(record)
    if len(asked) < 2:
        return holds(False, "a second SelectTarget after FALL_BACK without next_target", f"{len(asked)} calls")
    told = [_words(each) for each in asked[1].request.earlier_attempts]
    wanted = [tuple(map(str, each)) for each in given["earlier"]]
    return holds(told == wanted, f"earlier_attempts {wanted}", f"{told}")


def _words(attempt: Any) -> tuple[str, ...]:
    return attempt.target.connection, str(attempt.http_status), attempt.reason, attempt.scope


@check
def repeats_the_call(record: Record, given: Mapping[str, Any]) -> Finding:
    """A call of the `method` that failed with UNAVAILABLE is made again."""
    method = given.get("method", SELECT)
    made = record.of(method)
    if not made:
        return absent(f"{method} was not called")
    return holds(len(made) > 1, f"{method} made again after UNAVAILABLE", f"{len(made)} call")


@check
def heeds_pushback(record: Record, given: Mapping[str, Any]) -> Finding:
    """No repetition comes earlier than the trailer says."""
    made = record.of(given.get("method", SELECT))
    if len(made) < 2:
        return absent("the call was not repeated")
    pause_ms = (made[1].at - made[0].ended_at) * 1000
    wanted = given["pushback_ms"]
    return holds(pause_ms >= wanted - _EARLY_S * 1000, f"a pause of {wanted} ms (pushback)", f"{pause_ms:.0f} ms")


@check
def repeats_the_same(record: Record, given: Mapping[str, Any]) -> Finding:
    """The repeated call is the same message: it is safe because its key is the same."""
    made = record.of(given.get("method", SELECT))
    if len(made) < 2:
        return absent("the call was not repeated")
    first, second = made[0].request, made[1].request
    same = first.request_id == second.request_id if given.get("method", SELECT) == SELECT else first == second
    return holds(same, "the repetition has the same key", "another one")


@check
def passes_the_session(record: Record, given: Mapping[str, Any]) -> Finding:
    """The client's session reaches SelectTarget, ready-made or to be derived."""
    asked = selects(record)
    if not asked:
        return absent("SelectTarget was not called")
    request, wanted = asked[0].request, given["session"]
    sent = [each.value for each in request.session.headers if each.name.lower() == "x-session-id"]
    return holds(wanted in request.session_key or wanted in sent, f"session {wanted}", request.session_key or f"{sent}")


@check
def withdraws_what_waits(record: Record, _: Mapping[str, Any]) -> Finding:
    """The client left while SelectTarget was pending: the call is cancelled, or what it brought is given back."""
    pending = selects(record)[:1]
    if not pending:
        return absent("SelectTarget was not called")
    withdrawn = pending[0].left or bool(record.of("CancelPermit", "ReleasePermit"))
    ended = any(call.request.final and place(record, call.request) == 0 for call in record.of("ReportOutcome"))
    return holds(withdrawn or ended, "the pending SelectTarget cancelled, or its grant given back", "neither")
