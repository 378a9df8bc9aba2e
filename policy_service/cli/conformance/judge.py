"""The judge: rules and what the cases showed in, one result a rule out. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from policy_service.cli.conformance.cases import Case
from policy_service.cli.conformance.checks import CHECKS, Finding, Status
from policy_service.cli.conformance.record import Record
from policy_service.cli.conformance.rules import Rule


@dataclass(frozen=True, slots=True)
class CaseFinding:
    """What one check found in one case."""

    case: str
    check: str
    finding: Finding


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one rule over all cases."""

    rule: Rule
    status: Status
    findings: Sequence[CaseFinding]
    reason: str = ""
    """Why the rule is not applicable."""

    @property
    def failures(self) -> list[CaseFinding]:
        """Findings that the gateway has to answer for."""
        return [each for each in self.findings if each.finding.status is Status.FAIL]

    @property
    def is_breach(self) -> bool:
        """A rule that must be kept is not."""
        return self.status is Status.FAIL and self.rule.level == "must"


def is_judged_in(rule: Rule, case: Case) -> bool:
    """The case says something about the rule."""
    return rule.id in case.expect or (rule.always and rule.id not in case.exempt)


def judge(rules: Sequence[Rule], records: Sequence[Record], without: Collection[str] = ()) -> list[Result]:
    """Judge every rule.

    Args:
        without: features that the gateway does without.
    """
    return [_result(rule, records, without) for rule in rules]


def _result(rule: Rule, records: Sequence[Record], without: Collection[str]) -> Result:
    if rule.feature in without:
        return Result(rule, Status.NOT_APPLICABLE, (), f"the gateway does without {rule.feature}")
    findings = list(_findings(rule, records))
    statuses = {each.finding.status for each in findings}
    if Status.FAIL in statuses:
        return Result(rule, Status.FAIL, findings)
    if Status.PASS in statuses:
        return Result(rule, Status.PASS, findings)
    reasons = dict.fromkeys(each.finding.expected for each in findings)
    return Result(rule, Status.NOT_APPLICABLE, findings, "; ".join(reasons) or "no case was run that is about it")


def _findings(rule: Rule, records: Sequence[Record]) -> Iterator[CaseFinding]:
    for record in records:
        if is_judged_in(rule, record.case):
            given = record.case.expect.get(rule.id, {})
            yield from (CaseFinding(record.case.name, name, CHECKS[name](record, given)) for name in rule.checks)
