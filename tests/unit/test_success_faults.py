"""Answers with a 2xx status that are no whole answers."""

from __future__ import annotations

import pytest

from policy_service.domain.catalogue import Route, RouteTarget
from policy_service.domain.success_faults import FAULTS, NO_FAULT, judge_success, success_fault
from policy_service.domain.verdict import Verdict


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("", "empty-answer"), ("\ufeff \r\n", "empty-answer"), ("plain words", ""),
        ("<!DOCTYPE html><p>", "page-instead-of-answer"), ("<HTML>", "page-instead-of-answer"), ("<p>", ""),
        ('{"a": 1', "cut-answer"), ("[1, 2", "cut-answer"), ('{"a": 1}', ""), ("[]", ""),
        ('{"promptFeedback": {"blockReason": "SAFETY"}}', "blocked-prompt"),
        ('{"candidates": [{"finishReason": "SAFETY"}]}', "blocked-prompt"),
        ('{"candidates": [{"finishReason":"SAFETY", "parts": [{"text": "x"}]}]}', ""),
        ('{"candidates": [{"finishReason":"RECITATION"}]}', "blocked-prompt"),
        ('{"candidates": [{"finishReason":    "BLOCKLIST"}]}', "blocked-prompt"),
        ('{"candidates": [{"finishReason": "SPII"}]}', "blocked-prompt"),
        ('{"candidates": [{"finishReason": "STOP"}]}', "empty-answer"),
        ('{"reason": "PROHIBITED_CONTENT"}', "blocked-prompt"),
        ('{"choices": [{"finish_reason":"content_filter"}]}', "filtered-answer"),
        ('{"choices": [{"finish_reason":    "content_filter"}]}', "filtered-answer"),
        ('{"choices": [{"finish_reason": "length"}]}', ""),
        ('data: {"incomplete_details": {"reason": "content_filter"}}\n\ndata: [DONE]', "filtered-answer"),
        ('data: {"finish_reason": "content_filter"}\n\ndata: {"a": 1}', ""),
        ('{"candidates": [{"content": {}}]}', "empty-answer"),
        ('{"candidates": [{"content": {"parts": [1]}}]}', ""),
        ('{"choices": []}', "empty-answer"), ('{"choices": [ ]}', "empty-answer"), ('{"choices": [{"index": 0}]}', ""),
        ("data: [DONE]", "empty-stream"), ("data:[DONE]", "empty-stream"),
        ("event: ping", "empty-stream"), (": keep-alive", "empty-stream"),
        ('data: {"a": 1}\n\ndata: [DONE]', ""), ('data: {"a": 1}\n\ndata: {"b": ', "cut-stream"),
        ('data: {"b": \n\ndata: {"a": 1}', ""), ("data: words", ""),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_success(body: str, fault: str) -> None:
    assert success_fault(body) == fault


def test_a_target_serves_without_being_asked_for_by_a_quota() -> None:
    assert RouteTarget("k", "p") == RouteTarget("k", "p", "", "", 1.0, 0, False)


def test_a_page_is_a_fault_of_the_service_and_another_account_may_answer() -> None:
    rule = "page-instead-of-answer"
    assert judge_success("<html>") == Verdict("provider_failure", "server_error", True, rule=rule)


def test_a_route_needs_no_options() -> None:
    assert Route("chat", "priority", ()).options == {}


TABLE = """
empty-answer           | provider_failure | server_error   | another
page-instead-of-answer | provider_failure | server_error   | another
empty-stream           | provider_failure | server_error   | another
cut-answer             | provider_failure | network        | another
blocked-prompt         | none             | content_policy | stop
filtered-answer        | none             | content_policy | stop
cut-stream             | none             | network        | stop
"""


def test_each_fault_says_what_the_table_says() -> None:
    said = [tuple(cell.strip() for cell in line.split("|")) for line in TABLE.strip().splitlines()]
    shown = [(each.rule, each.scope, each.reason, "another" if each.fallback else "stop") for each in FAULTS.values()]
    assert shown == said
    assert [*FAULTS] == [name for name, *_ in said]
    assert Verdict("none", "none", False, rule="success") == NO_FAULT
