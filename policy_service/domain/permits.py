"""Concurrency permits: which gates a dispatch passes, their caps, and what a refusal means (spec/concurrency.md).

Pure rules around `line`, which keeps holders and waiters. All refusals here are local: no breaker, cooldown or
lockout counts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from policy_service.domain.gates import Gate, GateBook, PermitState
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.line import Answer, PermitAnswer, earliest_expiry

RETRY_AFTER_MAX_S = 3_600
FLEET_GATE = "global"
QUOTA_SHARE = "quota-share"
"""The one strategy whose requests may go on without a permit (section 4.2)."""


class PermitCode(StrEnum):
    """Refusals of section 2, 4.2 and 5."""

    QUEUE_FULL = "SEMAPHORE_QUEUE_FULL"
    TIMEOUT = "SEMAPHORE_TIMEOUT"
    RESET = "SEMAPHORE_RESET"
    EXPIRED = "PERMIT_EXPIRED"
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
    CANCELLED = "CLIENT_CLOSED_REQUEST"
    WAITER_LOST = "WAITER_LOST"
    """Nobody is there to be told."""


HTTP_STATUS = {
    PermitCode.QUEUE_FULL: 429,
    PermitCode.TIMEOUT: 429,
    PermitCode.RESET: 503,
    PermitCode.EXPIRED: 409,
    PermitCode.STORE_UNAVAILABLE: 503,
    PermitCode.CANCELLED: 499,
    PermitCode.WAITER_LOST: 499,
}
_BY_ANSWER = {
    Answer.QUEUE_FULL: PermitCode.QUEUE_FULL,
    Answer.TIMEOUT: PermitCode.TIMEOUT,
    Answer.EXPIRED: PermitCode.EXPIRED,
}
_BY_END = {
    PermitState.TIMED_OUT: PermitCode.TIMEOUT,
    PermitState.RESET: PermitCode.RESET,
    PermitState.CANCELLED: PermitCode.CANCELLED,
    PermitState.WAITER_LOST: PermitCode.WAITER_LOST,
    PermitState.EXPIRED: PermitCode.EXPIRED,
}


class OnSaturation(StrEnum):
    """Setting `concurrency.quota_share.on_saturation`."""

    PROCEED = "proceed"
    REJECT = "reject"


class AtCap(StrEnum):
    """What a request does at a target whose gate is full (section 5, who waits)."""

    WAIT = "wait"
    QUOTA_SHARE = "quota_share"
    PASS_OVER = "pass_over"
    """Next target first; waits only if every target is at its cap, at the one whose turn it is."""
    EXCLUDE = "exclude"


_AT_CAP = {"": AtCap.WAIT, QUOTA_SHARE: AtCap.QUOTA_SHARE, "round-robin": AtCap.PASS_OVER}


def at_cap(strategy: str) -> AtCap:
    """Rule for a strategy; "" is a request without a route."""
    return _AT_CAP.get(strategy, AtCap.EXCLUDE)


LARGEST_CAP = 2**31 - 1
"""Caps and counts are 32-bit integers in the store and on the wire."""


def cap_of(raw: object) -> int | None:
    """Cap from a configured value: null, not positive, not finite or not a number is no limit; fractions are cut, and
    so is what no count can reach."""
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        return None
    if isinstance(raw, float) and not math.isfinite(raw):
        return None
    return min(int(raw), LARGEST_CAP) if raw >= 1 else None


def connection_gate(connection: str) -> str:
    """The one gate of a capped connection, shared by all strategies (section 1)."""
    return f"qsconn:{connection}"


def account_gate(provider: str, account: str) -> str:
    """Gate of an account without a connection cap."""
    return f"{provider}:{account}"


def model_gate(provider: str, account: str, model: str) -> str:
    """Gate of one model of an account."""
    return f"{provider}:{account}:model:{model}"


def round_robin_gate(route: str, target_key: str) -> str:
    """Gate of a round-robin target."""
    return f"combo:{route}:{target_key}"


def combined(gates: Iterable[Gate]) -> tuple[Gate, ...]:
    """Gates to lock, sorted by key; of one asked for twice the smaller limit counts."""
    found: dict[str, Gate] = {}
    for gate in gates:
        known = found.get(gate.key)
        found[gate.key] = gate if known is None else min(known, gate, key=_limit_or_infinite)
    return tuple(found[key] for key in sorted(found))


def _limit_or_infinite(gate: Gate) -> float:
    return math.inf if gate.limit is None else gate.limit


def takes_permit(strategy: str, cap: int | None, quota_share_enabled: bool) -> bool:
    """True if a dispatch takes a permit: always at a cap, but quota-share can be switched off as a whole."""
    return cap is not None and (quota_share_enabled or strategy != QUOTA_SHARE)


def block_until(value: object, now: Instant) -> Instant | None:
    """End of a manual block (section 5): a number is ms from now, anything else an instant; None: unusable or past."""
    until = now + int(value) if isinstance(value, int | float) else _instant(value)
    return until if until is not None and until > now else None


def _instant(value: object) -> Instant | None:
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    except ValueError:
        return None
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return round(aware.timestamp() * 1_000)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no permit was given. `retry_after_s` None where nothing is known."""

    code: PermitCode
    http_status: int
    depth: int = 0
    """Length of the line."""
    retry_after_s: int | None = None
    reason: str = "concurrency_saturated"


def refusal(found: PermitAnswer, book: GateBook, now: Instant) -> Refusal | None:
    """The refusal that an answer of the line stands for; None where it is none (held, waiting, renewed, released)."""
    code = _BY_ANSWER.get(found.answer)
    if found.answer is Answer.ALREADY_ENDED and found.row is not None:
        code = _BY_END.get(found.row.state)
    if code is None:
        return None
    gate = found.gate or (found.row.gate if found.row else next(iter(book.gates)))
    return Refusal(code, HTTP_STATUS[code], book.waiting(gate), retry_after_s(book, gate, now))


def ended_refusal(state: PermitState, book: GateBook, gate: str, now: Instant) -> Refusal | None:
    """The refusal told to a waiter whose row ended in `state`."""
    code = _BY_END.get(state)
    return (
        None if code is None else Refusal(code, HTTP_STATUS[code], book.waiting(gate), retry_after_s(book, gate, now))
    )


def retry_after_s(book: GateBook, gate: str, now: Instant) -> int | None:
    """Seconds until the earliest expiry among held permits, 1 .. 3600; None if nothing is held."""
    expiry = earliest_expiry(book.rows(gate))
    return None if expiry is None else bounded_seconds(expiry - now)


def bounded_seconds(wait_ms: DurationMs) -> int:
    """Whole seconds, rounded up, 1 .. 3600."""
    return max(1, min(RETRY_AFTER_MAX_S, -(-wait_ms // 1_000)))


def store_unavailable() -> Refusal:
    """The store is away and the gate is strict."""
    return Refusal(PermitCode.STORE_UNAVAILABLE, HTTP_STATUS[PermitCode.STORE_UNAVAILABLE], reason="store_unavailable")


_PROCEEDS_ON = frozenset({PermitCode.QUEUE_FULL, PermitCode.TIMEOUT, PermitCode.STORE_UNAVAILABLE})


def proceeds_without_permit(strategy: str, mode: OnSaturation, code: PermitCode) -> bool:
    """True if a quota-share request goes on without a permit (section 4.2); such dispatches count as overflow."""
    return strategy == QUOTA_SHARE and mode is OnSaturation.PROCEED and code in _PROCEEDS_ON


def fallback_needs_permit(mode: OnSaturation) -> bool:
    """A fallback target of quota-share takes its own permit, without waiting, in mode `reject` only."""
    return mode is OnSaturation.REJECT
