"""Retry hints: the waiting time that an answer states, and where it was read (spec/retry_hints.md).

Pure reading. Whether a hint is used, and whether it may exceed the maximum of a lock, is decided elsewhere.
Junk is no hint and never an error; the work per answer is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from policy_service.domain.decision_record import Hint
from policy_service.domain.error_object import describe, error_nodes
from policy_service.domain.ids import DurationMs, HintSource, Instant
from policy_service.domain.profiles import HintProfile
from policy_service.domain.retry_body import WAIT_CAP_MS, Stated, body_waits
from policy_service.domain.retry_headers import header_waits
from policy_service.domain.retry_texts import parse_resets_in, text_waits

__all__ = ["Hint", "parse_resets_in", "read_header_hint", "read_hint", "stated_wait_ms"]


def read_hint(headers: Mapping[str, str], body: object, text: str, now: Instant, profile: HintProfile) -> Hint | None:
    """First positive wait of headers, JSON body and text, in this order.

    Args:
        headers: names in any case; of a repeated name the first value.
        body: parsed JSON body, None where there is none.
        text: searchable text of the answer.
        now: database time, ms.
        profile: switches of the extended readings.

    Returns:
        The hint with its wait rounded up and capped by its place, or None.
    """
    found = read_header_hint(headers, now, profile)
    if found is not None:
        return found
    in_body = (stated for stated in _in_body(body, text, now, profile) if stated[0] > 0)
    first = next(in_body, None)
    return _hint(*first, now) if first else None


def read_header_hint(headers: Mapping[str, str], now: Instant, profile: HintProfile) -> Hint | None:
    """Only the header stage (section 1)."""
    for wait in header_waits(headers, now, extended=profile.extended_reset_headers):
        if wait > 0:
            return _hint(wait, WAIT_CAP_MS, HintSource.HEADER, now)
    return None


def stated_wait_ms(
    headers: Mapping[str, str], body: object, text: str, now: Instant, profile: HintProfile
) -> DurationMs | None:
    """Wait that the answer states, for display and not for timers.

    As `read_hint`, but a stated zero or past wait is 0 instead of None, and only the cap of 30 days applies.
    """
    in_headers = header_waits(headers, now, extended=profile.extended_reset_headers)
    stated = chain(in_headers, (wait for wait, _, _ in _in_body(body, text, now, profile)))
    waits = [min(wait, WAIT_CAP_MS) for wait in stated]
    return next((wait for wait in waits if wait > 0), 0 if waits else None)


def _hint(wait: DurationMs, cap: DurationMs, source: HintSource, now: Instant) -> Hint:
    capped = min(wait, cap)
    return Hint(capped, source, now + capped)


def _in_body(body: object, text: str, now: Instant, profile: HintProfile) -> Iterator[Stated]:
    nodes = error_nodes(body)
    yield from body_waits(nodes, now, extended=profile.extended_texts)
    if text:
        message = describe(nodes).message
        found = text_waits(text, message, now, extended=profile.extended_texts)
        yield from ((wait, cap, HintSource.BODY) for wait, cap in found)
