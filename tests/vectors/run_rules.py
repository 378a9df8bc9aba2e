"""Runs the vectors of spec/restatement_and_rules.md sections 2 to 6; stage `lint` checks rules without a failure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policy_service.domain.catalogue import OperatorRule
from policy_service.domain.rule_linter import Finding, is_accepted, lint, lint_provider
from policy_service.settings.provider_data import builtin_providers
from tests.vectors.classification_stage import run_failure


def run(vector: Mapping[str, Any]) -> None:
    """Run one vector; raise AssertionError where the result differs."""
    if vector["given"].get("stage") == "lint":
        _lint(vector)
    else:
        run_failure(vector)


def _lint(vector: Mapping[str, Any]) -> None:
    findings, wanted = _findings(vector["given"]), vector["expect"]
    codes = sorted(finding.code for finding in findings)
    assert codes == sorted(wanted["codes"]), f"codes: {codes}"
    assert is_accepted(findings) is wanted["accepted"], f"accepted: {is_accepted(findings)}"


def _findings(given: Mapping[str, Any]) -> list[Finding]:
    if "catalogue_rule" in given:
        named = given["catalogue_rule"]
        found = lint_provider(builtin_providers()[named["provider"]], _operator_rules(given))
        return [finding for finding in found if finding.rule_id == named["id"]]
    return [finding for finding in lint(builtin_providers(), _operator_rules(given)) if not _is_builtin(finding)]


def _is_builtin(finding: Finding) -> bool:
    """Findings on the catalogue that ships are known and not the vector's subject."""
    return finding in lint(builtin_providers())


def _operator_rules(given: Mapping[str, Any]) -> list[OperatorRule]:
    generated = given.get("operator_rules_generated")
    listed = list(given.get("operator_rules", ()))
    if generated is not None:
        form = {name: value for name, value in generated.items() if name != "count"}
        numbers = range(1, generated["count"] + 1)
        listed += [{**form, "match": form["match"].replace("{n}", str(n))} for n in numbers]
    return [OperatorRule(**rule) for rule in listed]
