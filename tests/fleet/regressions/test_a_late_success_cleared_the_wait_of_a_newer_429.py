"""A 503 cooled the account, a 429 with Retry-After came while it cooled, and a success that had started between the
two wiped the stated wait out: the 429 had only prolonged the timer and left the time of the last error alone.
"""

from __future__ import annotations

from dataclasses import replace

from policy_service.domain import cooldown
from policy_service.domain.connection_state import UNAVAILABLE, ConnectionState

PROLONGED = ConnectionState(
    "openai",
    "a",
    test_status=UNAVAILABLE,
    rate_limited_until=32_000,
    limited_since=1_000,
    last_error="status 503",
    last_error_at=1_000,
    last_event_at=2_000,
    failure_heard_at=2_000,
)


def test_a_success_that_started_before_the_wait_was_stated_clears_nothing() -> None:
    assert cooldown.success(PROLONGED, 1_500) == PROLONGED


def test_a_success_that_started_after_it_clears_the_connection() -> None:
    assert cooldown.success(PROLONGED, 2_000) == cooldown.clear(PROLONGED)


def test_an_event_that_was_no_failure_holds_no_success_back() -> None:
    without_timer = replace(PROLONGED, rate_limited_until=None, limited_since=None, failure_heard_at=None)
    assert cooldown.success(without_timer, 1_500) == cooldown.clear(without_timer)
