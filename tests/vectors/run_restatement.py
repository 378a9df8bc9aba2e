"""Runs restatement vectors (spec/restatement_and_rules.md section 1) against the built-in provider data."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from policy_service.domain.catalogue import ProviderDirectory
from policy_service.domain.restatement import restate
from policy_service.settings.provider_data import builtin_providers


@lru_cache(maxsize=1)
def _directory() -> ProviderDirectory:
    return ProviderDirectory(builtin_providers())


def run(vector: dict[str, Any]) -> None:
    """Raise AssertionError where the restated answer differs from `expect`."""
    given, expect = vector["given"], vector["expect"]
    answer = restate(
        _directory().get(given["provider"]),
        given["status"],
        given.get("message", ""),
        given.get("body"),
        given.get("upstream_retry_after_ms"),
    )
    for key, wanted in expect.items():
        seen = getattr(answer, key)
        assert seen == wanted, f"{key}: {seen!r} instead of {wanted!r}"
