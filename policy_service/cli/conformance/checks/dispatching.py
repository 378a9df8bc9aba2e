"""Going: to the targets that were served, in the order that reports are answered with, with the right headers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from policy_service.cli.conformance.answers import model_of
from policy_service.cli.conformance.checks.findings import Finding, absent, check, holds, none_of
from policy_service.cli.conformance.checks.views import dispatched, header, heard, offers
from policy_service.cli.conformance.record import Record, UpstreamCall

_EARLY_S = 0.02
_CONTROL = "x-policy-"


@check
def goes_where_told(record: Record, _: Mapping[str, Any]) -> Finding:
    """Every connection that is called was a target of an answer before."""
    wrong = [c.connection for c in record.upstream if c.connection not in {name for _, name in offers(record, c.at)}]
    return none_of(wrong, "calls only to targets that an answer named", record.upstream)


@check
def calls(record: Record, given: Mapping[str, Any]) -> Finding:
    """Exactly these connections are called, in this order."""
    return holds(heard(record) == given["calls"], f"calls: {given['calls']}", f"{heard(record)}")


@check
def starts_with(record: Record, given: Mapping[str, Any]) -> Finding:
    """The first calls go to these connections."""
    first = heard(record)[: len(given["calls"])]
    return holds(first == given["calls"], f"first calls: {given['calls']}", f"{heard(record)}")


@check
def calls_at_most(record: Record, given: Mapping[str, Any]) -> Finding:
    """Not more upstream calls than allowed."""
    count = len(record.upstream)
    return holds(count <= given["most"], f"at most {given['most']} upstream calls", str(count))


@check
def avoids(record: Record, given: Mapping[str, Any]) -> Finding:
    """A connection is not called from the client request `from_request` on."""
    since = record.clients[given.get("from_request", 0)].at
    late = [call.connection for call in record.upstream if call.at >= since and call.connection == given["connection"]]
    return holds(not late, f"no call to {given['connection']}", f"{len(late)} calls")


@check
def sends_the_model(record: Record, _: Mapping[str, Any]) -> Finding:
    """The model of the target is what is asked for upstream."""
    wrong = [
        f"{call.connection}: {_model(call)}" for call in record.upstream if _model(call) != model_of(call.connection)
    ]
    return none_of(wrong, "field model of the request is Target.model", record.upstream)


def _model(call: UpstreamCall) -> str:
    try:
        return str(json.loads(call.body).get("model"))
    except (ValueError, AttributeError):
        return "no JSON object"


@check
def uses_the_targets_key(record: Record, _: Mapping[str, Any]) -> Finding:
    """Each upstream gets its own credential and nobody else's."""
    wrong = [f"{call.connection} got {_whose(record, call)}" for call in record.upstream if not _has_own(record, call)]
    return none_of(wrong, "each upstream gets its own key", record.upstream)


def _has_own(record: Record, call: UpstreamCall) -> bool:
    text = " ".join(value for _, value in call.headers)
    return record.keys[call.connection] in text and not any(key in text for key in _foreign(record, call))


def _foreign(record: Record, call: UpstreamCall) -> list[str]:
    others = [key for connection, key in record.keys.items() if connection != call.connection]
    return [*others, record.secrets["the client's key"]]


def _whose(record: Record, call: UpstreamCall) -> str:
    text = " ".join(value for _, value in call.headers)
    known = {**{f"the key of {name}": key for name, key in record.keys.items()}, **record.secrets}
    return ", ".join(name for name, key in known.items() if key in text) or "none"


@check
def strips_control_headers(record: Record, _: Mapping[str, Any]) -> Finding:
    """Headers that are meant for the policy do not travel on."""
    wrong = [
        f"{c.connection} got {name}" for c in record.upstream for name, _ in c.headers if name.startswith(_CONTROL)
    ]
    return none_of(wrong, f"no header {_CONTROL}* upstream", record.upstream)


@check
def strips_headers(record: Record, given: Mapping[str, Any]) -> Finding:
    """Headers of `strip_headers` do not travel on, however they are spelt."""
    if not record.upstream:
        return absent("no upstream was called")
    wrong = [
        f"{call.connection} got {name}" for call in record.upstream for name in given["stripped"] if header(call, name)
    ]
    return none_of(wrong, f"without {given['stripped']}", record.upstream)


@check
def sets_headers(record: Record, given: Mapping[str, Any]) -> Finding:
    """Call by call, the header has these values: what was told is set, once, and not on other targets."""
    name = given["name"]
    found = [header(call, name) for call in record.upstream]
    return holds(found == given["values"], f"{name} by call: {given['values']}", f"{found}")


@check
def pauses(record: Record, given: Mapping[str, Any]) -> Finding:
    """Between two calls there is the pause that was asked for."""
    if len(record.upstream) < 2:
        return absent("there was no second call")
    pause_ms = (record.upstream[1].at - record.upstream[0].answered_at) * 1000
    wanted = given["pause_ms"]
    return holds(pause_ms >= wanted - _EARLY_S * 1000, f"a pause of {wanted} ms", f"{pause_ms:.0f} ms")


@check
def ends_the_call(record: Record, given: Mapping[str, Any]) -> Finding:
    """The upstream call is broken off within `within_ms` of the client's leaving, or of its own start."""
    if not record.upstream:
        return absent("no upstream was called")
    call = record.upstream[0]
    since = record.clients[0].ended_at if given.get("after") == "leaving" else call.at
    took_ms = (call.ended_at - since) * 1000
    in_time = call.left and took_ms <= given["within_ms"]
    seen = f"after {took_ms:.0f} ms" if call.left else "it went on to its end"
    return holds(in_time, f"the upstream call broken off within {given['within_ms']} ms", seen)


@check
def cuts_tools(record: Record, given: Mapping[str, Any]) -> Finding:
    """Not more tools than the degradation allows are sent."""
    if not dispatched(record) or not record.upstream:
        return absent("no upstream was called")
    count = len(json.loads(record.upstream[0].body).get("tools", []))
    return holds(count <= given["most"], f"at most {given['most']} tools", str(count))
