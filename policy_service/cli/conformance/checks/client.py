"""What the client of the gateway gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policy_service.cli.conformance.checks.findings import Finding, absent, check, holds
from policy_service.cli.conformance.record import SELECT, ClientExchange, Record


def _client(record: Record, given: Mapping[str, Any]) -> ClientExchange:
    return record.clients[int(given.get("request", -1))]


@check
def client_gets(record: Record, given: Mapping[str, Any]) -> Finding:
    """The status is one of those listed."""
    client, wanted = _client(record, given), given["status"]
    listed = wanted if isinstance(wanted, list) else [wanted]
    return holds(client.status in listed, f"status {wanted} for the client", f"{client.status or client.problem}")


@check
def client_waits(record: Record, given: Mapping[str, Any]) -> Finding:
    """Retry-After has this value; `none`: there is none."""
    client = _client(record, given)
    found = next((value for name, value in client.headers if name == "retry-after"), "none")
    wanted = str(given["retry_after"])
    return holds(found == wanted, f"Retry-After {wanted}", found)


@check
def client_reads(record: Record, given: Mapping[str, Any]) -> Finding:
    """The body has these words."""
    body = _client(record, given).body.decode("utf-8", "replace")
    lacking = [word for word in given["words"] if word not in body]
    return holds(not lacking, f"body with {given['words']}", f"{body[:120]!r}")


@check
def client_is_served_within(record: Record, given: Mapping[str, Any]) -> Finding:
    """The answer is there in time."""
    client = _client(record, given)
    if not client.status:
        return holds(False, "an answer", client.problem)
    took_ms = (client.ended_at - client.at) * 1000
    return holds(took_ms <= given["within_ms"], f"an answer within {given['within_ms']} ms", f"{took_ms:.0f} ms")


@check
def client_is_served_within_the_deadline(record: Record, given: Mapping[str, Any]) -> Finding:
    """The client has an answer soon after the deadline that the gateway itself gave to its last SelectTarget."""
    client, asked = _client(record, given), record.of(SELECT)
    if not asked:
        return absent("SelectTarget was not called")
    until = asked[-1].at + (asked[-1].limit_s or 0) + given["slack_ms"] / 1000
    if not client.status and asked[-1].limit_s is not None and client.ended_at < until:
        return absent(f"the deadline of {asked[-1].limit_s:.0f} s is longer than the case (see wait_budget_ms)")
    took_s = client.ended_at - client.at
    return holds(bool(client.status), "an answer once the deadline is over", f"none after {took_s:.1f} s")


@check
def client_reads_as_it_comes(record: Record, given: Mapping[str, Any]) -> Finding:
    """The first piece of a stream arrives well before its end."""
    client = _client(record, given)
    if not client.arrivals or not record.upstream:
        return absent("no stream arrived")
    ahead_ms = (record.upstream[-1].ended_at - client.arrivals[0]) * 1000
    return holds(
        ahead_ms >= given["ahead_ms"], f"first piece {given['ahead_ms']} ms before the end", f"{ahead_ms:.0f} ms"
    )


@check
def client_is_told_of_the_break(record: Record, given: Mapping[str, Any]) -> Finding:
    """A stream that broke off does not look complete."""
    client = _client(record, given)
    looks_whole = client.status == 200 and not client.problem and b"[DONE]" in client.body
    return holds(not looks_whole, "an error event or a broken-off answer", "an answer that looks complete")
