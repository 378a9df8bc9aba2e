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


KIND_OF_STATUS = {
    "quota": {429},
    "auth": {401, 402, 403},
    "model": {400, 404, 413, 422},
    "timeout": {408, 504, 524},
    "upstream": {status for status in range(500, 600) if status not in (504, 524)},
}


@pytest.mark.parametrize("kind", KIND_OF_STATUS)
def test_without_a_telling_reason_each_status_has_one_kind(kind: str) -> None:
    assert {status for status in range(100, 600) if failure_kind(status, "") == kind} == KIND_OF_STATUS[kind]


def test_no_status_is_no_kind_whatever_number_stands_for_it() -> None:
    assert {failure_kind(status, "") for status in (None, -1, 0, 1)} == {""}
