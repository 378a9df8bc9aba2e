"""Waits stated in a JSON error body (spec/retry_hints.md section 3).

Yields (wait in ms, cap in ms, source), zero and past waits included. The error object is read before its
wrappers; the members that only some gateways write (`metadata` and the headers it quotes, quota stamps) come
last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from policy_service.domain.error_object import Node
from policy_service.domain.ids import DurationMs, HintSource, Instant
from policy_service.domain.retry_grammar import (
    DAY_MS,
    EPOCH_MS_ABOVE,
    EPOCH_SECONDS_ABOVE,
    SECOND_MS,
    VALUE_LIMIT,
    read_date,
    read_number,
    scaled,
    whole_duration,
)
from policy_service.domain.retry_headers import header_waits

Stated = tuple[DurationMs, DurationMs, HintSource]
"""Wait, the cap of its place, its source."""

WAIT_CAP_MS = 30 * DAY_MS
_DETAILS_READ = 16
_DELAY_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "": 1_000}
_DELAY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)[ ]?(ms|s|m|h)?", re.IGNORECASE | re.ASCII)
_MS_KEYS = ("retry_after_ms", "retryAfterMs")
_SECONDS_KEYS = (
    "retry_after", "retryAfter", "resets_in_seconds", "reset_after_seconds", "retry_after_seconds", "retryAfterSeconds",
    "estimated_time", "quotaResetDelay",
)  # fmt: skip
_INSTANT_KEYS = ("resets_at", "reset_at", "reset_time", "resetsAt", "resetAt", "quotaResetTimeStamp")
_NESTED_KEYS = ("metadata", "error_details")


def body_waits(nodes: Iterable[Node], now: Instant, *, extended: bool) -> Iterator[Stated]:
    """Waits of every object of an error body, innermost first."""
    seen = tuple(nodes)
    for node in seen:
        yield from ((wait, DAY_MS, HintSource.RETRY_INFO) for wait in _retry_info(node))
        yield from ((wait, WAIT_CAP_MS, HintSource.BODY) for wait in _members(node, now, extended=extended))
    for nested in _nested(seen) if extended else ():
        yield from ((wait, WAIT_CAP_MS, HintSource.BODY) for wait in _members(nested, now, extended=True))
        yield from ((wait, WAIT_CAP_MS, HintSource.BODY) for wait in _quoted_headers(nested, now))


def _details(node: Node) -> list[Node]:
    details = node.get("details")
    return [entry for entry in details[:_DETAILS_READ] if isinstance(entry, dict)] if isinstance(details, list) else []


def _retry_info(node: Node) -> Iterator[DurationMs]:
    for entry in _details(node):
        if "RetryInfo" in str(entry.get("@type", ""))[:200]:
            wait = _delay(entry.get("retryDelay"))
            if wait is not None:
                yield wait


def _delay(raw: object) -> DurationMs | None:
    """Text with a unit, bare seconds, or the object form of a protobuf duration."""
    if isinstance(raw, dict):
        seconds = read_number(raw.get("seconds", 0), SECOND_MS)
        nanos = read_number(raw.get("nanos", 0), 1)
        return None if seconds is None or nanos is None else seconds - (-nanos // 1_000_000)
    found = _DELAY.fullmatch(raw.strip()) if isinstance(raw, str) and len(raw) <= VALUE_LIMIT else None
    return scaled(found[1], _DELAY_UNITS[(found[2] or "").lower()]) if found else read_number(raw, SECOND_MS)


def _members(node: Node, now: Instant, *, extended: bool) -> Iterator[DurationMs]:
    stamp = node.get("retryAfter")
    if isinstance(stamp, str) and (at := read_date(stamp)) is not None:
        yield at - now
    yield from _known(read_number(node.get(key), 1) for key in _MS_KEYS)
    if extended:
        yield from _known(_seconds(node.get(key), now) for key in _SECONDS_KEYS)
        yield from _known(_until(node.get(key), now) for key in _INSTANT_KEYS)


def _known(waits: Iterable[DurationMs | None]) -> Iterator[DurationMs]:
    return (wait for wait in waits if wait is not None)


def _epoch(wait: DurationMs, now: Instant) -> DurationMs:
    """Bare seconds (in ms) as they are, or the epoch time that a large number must be."""
    if wait > EPOCH_MS_ABOVE * SECOND_MS:
        return wait // SECOND_MS - now
    return wait - now if wait > EPOCH_SECONDS_ABOVE * SECOND_MS else wait


def _seconds(raw: object, now: Instant) -> DurationMs | None:
    bare = read_number(raw, SECOND_MS)
    if bare is not None:
        return _epoch(bare, now)
    return whole_duration(raw) if isinstance(raw, str) else None


def _until(raw: object, now: Instant) -> DurationMs | None:
    bare = read_number(raw, SECOND_MS)
    if bare is not None:
        return _epoch(bare, now) if bare > EPOCH_SECONDS_ABOVE * SECOND_MS else None
    at = read_date(raw) if isinstance(raw, str) else None
    return None if at is None else at - now


def _nested(nodes: Iterable[Node]) -> Iterator[Node]:
    """`metadata` of an object and of its detail entries."""
    for node in nodes:
        for holder in (node, *_details(node)):
            yield from (inner for key in _NESTED_KEYS if isinstance(inner := holder.get(key), dict))


def _quoted_headers(node: Node, now: Instant) -> Iterator[DurationMs]:
    quoted = node.get("headers")
    if isinstance(quoted, Mapping):
        named = {str(name): str(value) for name, value in list(quoted.items())[:64]}
        yield from header_waits(named, now, extended=True)
