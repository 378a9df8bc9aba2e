"""Kinds of failures (spec/diagnostics.md section 4)."""

from __future__ import annotations

import pytest

from policy_service.domain.failure_kinds import failure_kind


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (429, "rate_limit", "quota"),
        (403, "quota_exhausted", "quota"),
        (402, "quota_exhausted", "quota"),
        (403, "auth_error", "auth"),
        (403, "region_blocked", "auth"),
        (401, "auth_error", "auth"),
        (404, "model_not_found", "model"),
        (422, "client_error", "model"),
        (504, "server_error", "timeout"),
        (408, "server_error", "timeout"),
        (502, "network", "upstream"),
        (529, "overloaded", "upstream"),
        (499, "none", ""),
        (None, "none", ""),
    ],
)
def test_meaning_first_then_status(status: int | None, reason: str, kind: str) -> None:
    assert failure_kind(status, reason) == kind
