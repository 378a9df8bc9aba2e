"""Answers with a 2xx status that are no whole answers."""

from __future__ import annotations

import pytest

from policy_service.domain.catalogue import RouteTarget
from policy_service.domain.success_faults import success_fault


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("", "empty-answer"), ("\ufeff \r\n", "empty-answer"), ("plain words", ""),
        ("<!DOCTYPE html><p>", "page-instead-of-answer"), ("<HTML>", "page-instead-of-answer"), ("<p>", ""),
        ('{"a": 1', "cut-answer"), ("[1, 2", "cut-answer"), ('{"a": 1}', ""), ("[]", ""),
        ('{"promptFeedback": {"blockReason": "SAFETY"}}', "blocked-prompt"),
        ('{"candidates": [{"finishReason": "SAFETY"}]}', "blocked-prompt"),
        ('{"candidates": [{"finishReason":"SAFETY", "parts": [{"text": "x"}]}]}', ""),
        ('{"candidates": [{"content": {}}]}', "empty-answer"),
        ('{"candidates": [{"content": {"parts": [1]}}]}', ""),
        ('{"choices": []}', "empty-answer"), ('{"choices": [ ]}', "empty-answer"), ('{"choices": [{"index": 0}]}', ""),
        ("data: [DONE]", "empty-stream"), ("event: ping", "empty-stream"), (": keep-alive", "empty-stream"),
        ('data: {"a": 1}\n\ndata: [DONE]', ""), ('data: {"a": 1}\n\ndata: {"b": ', "cut-stream"),
        ('data: {"b": \n\ndata: {"a": 1}', ""), ("data: words", ""),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_success(body: str, fault: str) -> None:
    assert success_fault(body) == fault


def test_a_target_serves_without_being_asked_for_by_a_quota() -> None:
    assert RouteTarget("k", "p") == RouteTarget("k", "p", "", "", 1.0, 0, False)
