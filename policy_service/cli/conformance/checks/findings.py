"""What a check says of one case, and the registry of checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

from policy_service.cli.conformance.record import Record


class Status(StrEnum):
    """Result of a rule."""

    PASS = "PASS"
    FAIL = "FAIL"
    NOT_APPLICABLE = "NOT APPLICABLE"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found in one case.

    Args:
        status: of this check alone.
        expected: what had to be seen; for NOT APPLICABLE the reason.
        seen: what was.
    """

    status: Status
    expected: str = ""
    seen: str = ""


Check: TypeAlias = Callable[[Record, Mapping[str, Any]], Finding]

CHECKS: Final[dict[str, Check]] = {}
"""By name, as the rules name them."""


def check(function: Check) -> Check:
    """Enter a check under its own name."""
    CHECKS[function.__name__] = function
    return function


def holds(claim: bool, expected: str, seen: str = "") -> Finding:
    """PASS where the claim is true."""
    return Finding(Status.PASS if claim else Status.FAIL, expected, seen)


def absent(reason: str) -> Finding:
    """The case did not get to the point that the check is about."""
    return Finding(Status.NOT_APPLICABLE, reason)


def none_of(wrong: list[str], expected: str, among: Sized) -> Finding:
    """PASS where nothing is wrong; names the first few. Where there was nothing to look at, the rule is not judged."""
    if not among:
        return absent("nothing to judge was seen")
    return holds(not wrong, expected, "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if wrong[3:] else ""))
