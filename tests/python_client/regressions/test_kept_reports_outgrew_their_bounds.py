"""Reports that were put back after a batch had failed came on top of those kept meanwhile, beyond both bounds."""

from __future__ import annotations

from policy_client import messages
from policy_client.backlog import Backlog


def test_what_is_put_back_keeps_to_the_bounds_and_the_oldest_go_first() -> None:
    backlog = Backlog(2, 10_000)
    for number in range(2):
        backlog.keep(messages.ReportOutcomeRequest(attempt=number))
    taken = backlog.take()
    backlog.keep(messages.ReportOutcomeRequest(attempt=2))
    backlog.put_back(taken)
    assert [kept.request.attempt for kept in backlog.take()] == [1, 2]
    assert backlog.dropped == 1
