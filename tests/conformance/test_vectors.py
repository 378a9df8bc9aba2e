"""The golden vectors hang together: rules, cases, checks and the documents that the rules name."""

from __future__ import annotations

import re

import pytest
from google.protobuf.descriptor import FileDescriptor

from policy_service.cli.conformance import answers
from policy_service.cli.conformance.cases import CONNECTIONS, Case, load_cases, read_case
from policy_service.cli.conformance.checks import CHECKS
from policy_service.cli.conformance.judge import is_judged_in
from policy_service.cli.conformance.record import CANCEL, FENCE, RELEASE, RENEW, REPORT, SELECT
from policy_service.cli.conformance.rules import Rule, features, load_rules
from policy_service.generated.policy.v1 import lease_pb2, permit_pb2, policy_pb2, reasons_pb2, types_pb2
from tests.docs_pages import ROOT

RULES = load_rules()
CASES = load_cases()
FILES: dict[str, FileDescriptor] = {
    f"proto/{module.DESCRIPTOR.name}": module.DESCRIPTOR
    for module in (policy_pb2, types_pb2, reasons_pb2, lease_pb2, permit_pb2)
}
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_rule
def test_every_rule_is_judged_by_checks_that_exist_in_a_case_at_least(rule: Rule) -> None:
    assert [name for name in rule.checks if name not in CHECKS] == []
    assert rule.checks
    assert any(is_judged_in(rule, case) for case in CASES)


def test_every_check_is_used_and_no_rule_is_named_twice() -> None:
    assert {name for rule in RULES for name in rule.checks} == set(CHECKS)
    assert len({rule.id for rule in RULES}) == len(RULES)


@every_rule
def test_every_source_is_a_file_of_this_repository_and_a_name_of_the_contract(rule: Rule) -> None:
    assert rule.sources
    for source in rule.sources:
        path, _, name = source.partition(": ")
        assert (ROOT / path).exists(), path
        assert not name or _is_known(FILES[path], name), source


def _is_known(file: FileDescriptor, name: str) -> bool:
    parent, _, member = name.partition(".")
    return (
        (parent in file.message_types_by_name and member in file.message_types_by_name[parent].fields_by_name)
        or (parent in file.enum_types_by_name and member in file.enum_types_by_name[parent].values_by_name)
        or (parent in file.services_by_name and member in file.services_by_name[parent].methods_by_name)
    )


@every_case
def test_a_case_judges_rules_that_exist_and_exempts_only_from_those_for_every_case(case: Case) -> None:
    always = {rule.id for rule in RULES if rule.always}
    assert set(case.expect) <= {rule.id for rule in RULES}
    assert case.expect
    assert case.exempt <= always


@every_case
def test_a_case_scripts_only_calls_of_the_contract_and_known_connections(case: Case) -> None:
    assert set(case.policy) <= {SELECT, REPORT, FENCE, RENEW, RELEASE, CANCEL}
    assert set(case.upstreams) <= set(CONNECTIONS)


@every_case
def test_every_scripted_answer_is_a_message_of_the_contract(case: Case) -> None:
    readers = {SELECT: answers.selection, REPORT: answers.judgement}
    for method, steps in case.policy.items():
        for step in steps:
            document = answers.expand(dict(step.answer), {}, 0, "case")
            if method in readers and step.answer:
                assert readers[method](document).ByteSize() > 0


def test_the_page_names_every_rule_and_every_feature() -> None:
    text = (ROOT / "docs" / "doors" / "conformance.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)*)`", text))
    assert {rule.id for rule in RULES} - named == set()
    assert set(features(RULES)) - named == set()


def test_the_page_names_no_rule_that_there_is_not() -> None:
    text = (ROOT / "docs" / "doors" / "conformance.md").read_text(encoding="utf-8")
    for listed in re.findall(r"Rules ((?:`[^`]+`[,.\s]*)+)", text):
        assert set(re.findall(r"`([^`]+)`", listed)) <= {rule.id for rule in RULES}


def test_a_word_that_the_format_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="expects"):
        read_case({"name": "a", "says": "b", "expects": {}})
    with pytest.raises(TypeError, match="delay"):
        read_case({"name": "a", "says": "b", "policy": {"SelectTarget": [{"delay": 1}]}})


def test_no_rule_speaks_of_a_place_outside_of_the_repository() -> None:
    assert [rule.id for rule in RULES if re.search(r"\.\./|shared/", " ".join([rule.says, *rule.sources]))] == []


def test_targets_and_permits_of_the_short_form_become_messages() -> None:
    short = {"dispatch": {"target": "alpha", "fallbacks": ["bravo"], "permits": [{"permit_id": "p", "ttl_ms": 500}]}}
    answer = answers.selection(answers.expand(short, {"alpha": "127.0.0.1:1"}, 1_000, "case"))
    assert (answer.dispatch.target.connection, answer.dispatch.target.address) == ("alpha", "127.0.0.1:1")
    assert answer.dispatch.fallbacks[0].model == "model-of-bravo"
    assert (answer.dispatch.permits[0].permit_id, answer.dispatch.permits[0].expires_at_unix_ms) == ("case/p", 1_500)
