"""What rate headers say to a queue limiter (spec/queue_admission.md section 5)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from policy_service.domain.queue_learning import RateEvidence
from policy_service.domain.rate_headers import rate_evidence

LIMITS = ("x-ratelimit-limit-requests", "anthropic-ratelimit-requests-limit", "x-ratelimit-limit", "ratelimit-limit")


def test_every_field_of_the_evidence_is_filled() -> None:
    headers = {"x-ratelimit-limit": "60", "ratelimit-remaining": "5", "ratelimit-reset": "30"}
    assert rate_evidence(headers, 0, status=429, body_hint_ms=7, over_limit=True) == RateEvidence(
        status=429, limit=60.0, remaining=5.0, reset_ms=30_000, body_hint_ms=7, over_limit=True
    )
    assert rate_evidence({}, 0) == RateEvidence()


@pytest.mark.parametrize(
    ("text", "number"),
    [("60", 60.0), ("0", 0.0), ("0.5", 0.5), (" 60, 60;w=60", 60.0), ("60;w=1", 60.0), ("-1", None), ("-0.5", None),
    ("inf", None), ("nan", None), ("", None), ("many", None)],
)  # fmt: skip
def test_only_finite_numbers_from_zero_on_are_read(text: str, number: float | None) -> None:
    assert rate_evidence({"ratelimit-limit": text}, 0).limit == number


def test_an_unreadable_header_leaves_its_place_to_the_next() -> None:
    for first, second in pairwise(LIMITS):
        assert rate_evidence({first: "1", second: "2"}, 0).limit == 1.0
        for junk in ("many", "-1", "nan"):
            assert rate_evidence({first: junk, second: "2"}, 0).limit == 2.0
    resets = {"x-ratelimit-reset-requests": "soon", "x-ratelimit-reset": "10", "ratelimit-reset": "20"}
    assert rate_evidence(resets, 0).reset_ms == 10_000
