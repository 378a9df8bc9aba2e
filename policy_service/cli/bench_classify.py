"""Microbenchmark of the reading of a failure: parse, classify, resolve, in this process."""

from __future__ import annotations

import statistics
import time
from typing import Final

from policy_service.domain.catalogue import Catalogue
from policy_service.domain.classification import classify, resolve
from policy_service.domain.ids import AuthClass
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import Policy
from policy_service.settings.provider_data import builtin_providers

_TYPICAL: Final = RawOutcome(
    status=429,
    provider="openai",
    connection="c1",
    model="gpt-4o",
    auth_class=AuthClass.API_KEY,
    headers=(("content-type", "application/json"), ("x-request-id", "req_1"), ("retry-after", "2")),
    body=b'{"error":{"message":"Rate limit reached for gpt-4o in organization org-1 on tokens per min (TPM): '
    b'Limit 30000, Used 29900, Requested 500. Please try again in 1.2s.","type":"tokens","param":null,'
    b'"code":"rate_limit_exceeded"}}',
)
_NOW: Final = 1_800_000_000_000


def bench_classify(rounds: int = 5_000) -> float:
    """Median time in microseconds from raw bytes to the decision record, for a typical rate limit."""
    policy = Policy(Catalogue(providers=builtin_providers()))
    return statistics.median(_once(policy) for _ in range(rounds)) / 1000


def _once(policy: Policy) -> int:
    started = time.perf_counter_ns()
    outcome = parse_outcome(_TYPICAL)
    applies = policy.for_connection(outcome.provider, outcome.connection, outcome.auth_class)
    resolve(classify(outcome, applies, _NOW), 0, applies)
    return time.perf_counter_ns() - started


if __name__ == "__main__":
    print(f"parse + classify + resolve: {bench_classify():.1f} us (median)")
