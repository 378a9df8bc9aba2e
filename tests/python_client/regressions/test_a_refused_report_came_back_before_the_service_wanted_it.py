"""A service whose spool is full says when to come back; the report was sent again after a second all the same."""

from __future__ import annotations

from policy_client import messages
from policy_client.away import AwayPolicy
from policy_client.connection import Connection
from policy_client.core import FLUSH_MS, Core, Sources
from policy_client.errors import OverloadedError
from policy_client.steps import BehindReport


class Clock:
    """Time as the test has it, ms."""

    def __init__(self) -> None:
        self.at = 0

    def __call__(self) -> int:
        return self.at


def flushed_after(error: OverloadedError) -> int:
    """When a report that was refused so is sent again, ms."""
    clock = Clock()
    core = Core(Connection(), AwayPolicy(), Sources(now=clock), lambda: None)
    core.not_sent(BehindReport(messages.ReportOutcomeRequest(report_id="r")), error)
    assert len(core.backlog) == 1, "kept"
    while not core.is_time_to_flush():
        clock.at += 100
    return clock.at


def test_a_refused_report_waits_as_long_as_the_service_says() -> None:
    assert flushed_after(OverloadedError("full", "SPOOL_FULL", "RESOURCE_EXHAUSTED", retry_after_ms=3_000)) == 3_000
    assert (
        flushed_after(OverloadedError("busy", "TOO_MANY_CALLS", "RESOURCE_EXHAUSTED", retry_after_ms=100)) == FLUSH_MS
    )
