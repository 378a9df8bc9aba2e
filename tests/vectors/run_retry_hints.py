"""Runs retry hint vectors (spec/retry_hints.md): one reading, and the lock it leads to where the vector asks."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from policy_service.domain.decision_record import Hint
from policy_service.domain.lockout import LockEvidence, lock_duration
from policy_service.domain.outcome_parsing import first_values
from policy_service.domain.profiles import HintProfile, LockoutProfile
from policy_service.domain.retry_hints import read_header_hint, read_hint
from tests.vectors.step_fields import body_text, header_pairs

_DEFAULT_NOW = "2026-06-01T00:00:00Z"


def run(vector: dict[str, Any]) -> None:
    """Raise AssertionError where the reading differs from `expect`."""
    given, expect = vector["given"], vector["expect"]
    hint = _read(given)
    seen = {
        "hint_ms": hint.wait_ms if hint else None,
        "source": hint.source.value if hint else None,
        "lock_ms": _lock_ms(hint, given.get("lock")),
    }
    for key, wanted in expect.items():
        assert seen[key] == wanted, f"{key}: {seen[key]} instead of {wanted}"


def _read(given: dict[str, Any]) -> Hint | None:
    headers = first_values(header_pairs(given))
    settings = given.get("settings", {})
    profile = HintProfile(
        extended_texts=settings.get("retry_hints.extended_texts", True),
        extended_reset_headers=settings.get("retry_hints.extended_reset_headers", True),
    )
    now = _instant(given.get("now", _DEFAULT_NOW))
    if given.get("stage") == "headers":
        return read_header_hint(headers, now, profile)
    return read_hint(headers, given.get("body"), given.get("text") or body_text(given), now, profile)


def _instant(text: str | datetime) -> int:
    moment = text if isinstance(text, datetime) else datetime.fromisoformat(text)
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1_000)


def _lock_ms(hint: Hint | None, lock: dict[str, Any] | None) -> int | None:
    """Section 5: only a wait stated by the server may exceed the maximum of a lock."""
    if hint is None or lock is None:
        return None
    evidence = LockEvidence(429, "rate_limit_exceeded", exact_ms=hint.wait_ms, exact_source=hint.source)
    profile = LockoutProfile(max_cooldown_ms=lock["max_cooldown_ms"])
    return lock_duration(evidence, 1, profile, 0, 0, None)
