"""Terminal answers: what a request is told when no target can serve it (spec/diagnostics.md section 4).

Pure and total: every combination of exclusions gives a typed answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policy_service.domain.exclusions import Exclusion, Level, Mechanism
from policy_service.domain.ids import Instant

_UNAVAILABLE = frozenset({Mechanism.AVAILABILITY, Mechanism.TERMINAL_STATE})


@dataclass(frozen=True, slots=True)
class TerminalAnswer:
    """Status, code, type, terminal reason and recovery hint of a refusal; `retry_after_s` None: no header."""

    http_status: int
    code: str
    type: str
    terminal_reason: str
    recovery: str
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class _Case:
    """Facts of one refusal that the rows look at."""

    strategy: str
    exclusions: Sequence[Exclusion]

    @property
    def is_weighted(self) -> bool:
        return self.strategy == "weighted"

    def every(self, test: Callable[[Exclusion], bool]) -> bool:
        return bool(self.exclusions) and all(map(test, self.exclusions))


def _nothing_to_resolve(case: _Case) -> bool:
    return not case.exclusions or (case.is_weighted and case.every(lambda e: e.spec.mechanism in _UNAVAILABLE))


def _weighted_cooling(case: _Case) -> bool:
    return case.is_weighted and any(e.spec.is_recovery_timer for e in case.exclusions)


def _all_open(case: _Case) -> bool:
    return case.every(lambda e: e.reason == "circuit_open")


_COOLING = TerminalAnswer(503, "all_targets_cooling_down", "service_unavailable", "all_targets_cooling_down", "wait")
_ROWS: tuple[tuple[Callable[[_Case], bool], TerminalAnswer], ...] = (
    (
        _nothing_to_resolve,
        TerminalAnswer(404, "model_not_found", "invalid_request_error", "no_executable_targets", "switch-combo"),
    ),
    (_weighted_cooling, _COOLING),
    (_all_open, _COOLING),
)


def terminal_answer(
    strategy: str, exclusions: Sequence[Exclusion], now: Instant, hints_ms: Sequence[int] = ()
) -> TerminalAnswer:
    """Answer for a request whose every target is excluded before dispatch (rows 3 to 6).

    Args:
        strategy: route strategy.
        exclusions: one record a target, in configured order.
        now: database time, ms.
        hints_ms: retry hints of attempts of this request that failed before.
    """
    case = _Case(strategy, exclusions)
    for applies, answer in _ROWS:
        if applies(case):
            return _with_retry_after(answer, exclusions, now, hints_ms)
    return _with_retry_after(_skipped(exclusions), exclusions, now, hints_ms)


def _skipped(exclusions: Sequence[Exclusion]) -> TerminalAnswer:
    contended = any(e.spec.level is Level.CONNECTION and e.until is not None for e in exclusions)
    return TerminalAnswer(
        429 if contended else 503,
        "ALL_TARGETS_SKIPPED",
        "service_unavailable",
        "all_targets_skipped",
        "switch-combo",
    )


def _with_retry_after(
    answer: TerminalAnswer, exclusions: Sequence[Exclusion], now: Instant, hints_ms: Sequence[int]
) -> TerminalAnswer:
    if answer.http_status not in (429, 503):
        return answer
    seconds = retry_after_s(exclusions, now, hints_ms)
    return TerminalAnswer(
        answer.http_status, answer.code, answer.type, answer.terminal_reason, answer.recovery, seconds
    )


def retry_after_s(exclusions: Sequence[Exclusion], now: Instant, hints_ms: Sequence[int] = ()) -> int | None:
    """max(1, ceil(smallest known remaining seconds)); None where nothing is known."""
    known = [r for e in exclusions if (r := e.remaining_ms(now)) is not None]
    known.extend(hints_ms)
    return max(1, math.ceil(min(known) / 1000)) if known else None
