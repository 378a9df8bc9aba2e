"""Results for people, one line a rule, and for machines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from policy_service.cli.conformance.checks import Status
from policy_service.cli.conformance.judge import CaseFinding, Result
from policy_service.cli.conformance.rules import Rule

_STATUS = max(map(len, Status))


def lines(results: Sequence[Result]) -> Iterator[str]:
    """The table, every failure in full, and the sum."""
    width = max(len(result.rule.id) for result in results)
    yield from (f"{result.status:{_STATUS}}  {result.rule.id:{width}}  {_remark(result)}" for result in results)
    failed = [result for result in results if result.status is Status.FAIL]
    for result in failed:
        yield ""
        yield from _in_full(result)
    yield ""
    yield _sum(results)


def _remark(result: Result) -> str:
    if result.status is Status.NOT_APPLICABLE:
        return result.reason
    if result.status is Status.PASS:
        return f"in {_cases(len({each.case for each in result.findings if each.finding.status is Status.PASS}))}"
    first, more = result.failures[0], len(result.failures) - 1
    rest = f" (and {more} more)" if more else ""
    should = "should, " if result.rule.level == "should" else ""
    return f"{should}{_told(first)}{rest}; see {result.rule.sources[0]}"


def _told(failure: CaseFinding) -> str:
    return f"{failure.case}: expected {failure.finding.expected}; seen {failure.finding.seen or 'otherwise'}"


def _in_full(result: Result) -> Iterator[str]:
    yield f"{result.rule.id}: {result.rule.says}"
    yield from (f"  {_told(each)}" for each in result.failures)
    yield f"  see {'; '.join(result.rule.sources)}"


def _cases(count: int) -> str:
    return f"{count} case" + ("s" if count != 1 else "")


def _sum(results: Sequence[Result]) -> str:
    counts = {status: sum(result.status is status for result in results) for status in Status}
    breaches = sum(result.is_breach for result in results)
    found = ", ".join(f"{count} {status}" for status, count in counts.items())
    count = "1 rule" if len(results) == 1 else f"{len(results)} rules"
    return f"{count}: {found}; " + ("conforms" if not breaches else f"{breaches} must be mended")


def as_json(results: Sequence[Result]) -> str:
    """Everything, findings that passed included."""
    conforms = not any(result.is_breach for result in results)
    return json.dumps({"conforms": conforms, "rules": [_as_dict(result) for result in results]}, indent=2)


def _as_dict(result: Result) -> dict[str, Any]:
    return {
        "rule": result.rule.id,
        "level": result.rule.level,
        "says": result.rule.says,
        "sources": list(result.rule.sources),
        "status": result.status,
        "reason": result.reason,
        "findings": [_finding(each) for each in result.findings],
    }


def _finding(each: CaseFinding) -> dict[str, str]:
    found = each.finding
    return {"case": each.case, "status": found.status, "expected": found.expected, "seen": found.seen}


def listed(rules: Sequence[Rule]) -> Iterator[str]:
    """The rules, for `--list`."""
    width = max(len(rule.id) for rule in rules)
    for rule in rules:
        feature = f" [{rule.feature}]" if rule.feature else ""
        yield f"{rule.id:{width}}  {rule.level}{feature}: {rule.says}"
