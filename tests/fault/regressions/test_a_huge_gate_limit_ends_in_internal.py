"""A gate limit of 1e308 reached the store, which has no such number: the call ended in INTERNAL."""

from __future__ import annotations

import pytest

from policy_service.domain.permits import LARGEST_CAP, cap_of


@pytest.mark.parametrize("limit", [2**31, 2**63, 10**400, 1e10, 1e308])
def test_a_limit_that_no_count_reaches_is_the_largest_one(limit: float) -> None:
    assert cap_of(limit) == LARGEST_CAP


def test_the_largest_limit_is_kept() -> None:
    assert cap_of(LARGEST_CAP) == cap_of(float(LARGEST_CAP)) == 2**31 - 1
    assert cap_of(1.9) == 1
