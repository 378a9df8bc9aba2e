"""What rate headers say to a queue limiter (spec/queue_admission.md section 5)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from policy_service.domain.queue_learning import RateEvidence
from policy_service.domain.rate_headers import rate_evidence
from policy_service.domain.rate_texts import body_cap

LIMITS = ("x-ratelimit-limit-requests", "anthropic-ratelimit-requests-limit", "x-ratelimit-limit", "ratelimit-limit")


def test_every_field_of_the_evidence_is_filled() -> None:
    headers = {"x-ratelimit-limit": "60", "ratelimit-remaining": "5", "ratelimit-reset": "30"}
    flagged = {**headers, "x-ratelimit-over-limit": "Yes"}
    assert rate_evidence(flagged, 0, status=429, body_hint_ms=7, body_cap=(3, 1_000)) == RateEvidence(
        status=429, limit=60.0, remaining=5.0, reset_ms=30_000, body_hint_ms=7, over_limit=True, body_cap=(3, 1_000)
    )
    assert rate_evidence({}, 0) == RateEvidence()
    assert rate_evidence({"x-ratelimit-over-limit": "no"}, 0) == RateEvidence()


@pytest.mark.parametrize(
    ("text", "cap"),
    [
        ("You may send 10 requests per minute.", (10, 60_000)),
        ("429: 5 per 1 minute", (5, 60_000)),
        ("Limit of 3 API calls per 30 seconds reached", (3, 30_000)),
        ("20 req/min, 500 req/day", (20, 60_000)),
        ("allows 100 requests/1h", (100, 3_600_000)),
        ("40000 tokens per minute, 3 requests per hour", (3, 3_600_000)),
        ("40000 tokens per minute", None),
        ("$5 per day", None),
        ("1.5 requests per second", None),
        ("0 requests per minute", None),
        ("10 requests per user", None),
        ("try again in 10 seconds", None),
        ("2024/10/10 10:00", None),
    ],
)
def test_a_limit_is_read_from_a_text_where_it_counts_requests(text: str, cap: tuple[int, int] | None) -> None:
    assert body_cap(text) == cap


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


def test_a_limit_counts_within_the_first_8192_characters() -> None:
    assert body_cap(" " * 8_188 + "10/h") == (10, 3_600_000)
    assert body_cap(" " * 8_189 + "10/h") is None
