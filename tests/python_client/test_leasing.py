"""The life of a lease: when it is renewed, what counts as lost (spec/leases.md section 9)."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_client import messages
from policy_client.errors import FenceError, ForbiddenError, ServiceAwayError, UnauthenticatedError, UnavailableError
from policy_client.leasing import EXPIRED, Held, Wanted, ended, granted, new_owner, not_renewed, renewed

WANTED = Wanted("gpt", "agent", ttl_ms=90_000)
LEASE = messages.Lease(generation=4, renewed_at_unix_ms=1_000, expires_at_unix_ms=91_000, ttl_ms=90_000)


def held() -> Held:
    return granted(WANTED, LEASE, asked_at=500)


def test_a_lease_is_renewed_at_a_third_of_its_life_and_ends_by_our_clock() -> None:
    assert (held().renew_at, held().ends_at, held().generation) == (30_500, 90_500, 4)


def test_a_lease_that_was_held_already_has_an_unknown_end_and_is_renewed_at_once() -> None:
    reused = granted(WANTED, messages.Lease(generation=4, reused=True, expires_at_unix_ms=1), asked_at=500)
    assert (reused.renew_at, reused.ends_at) == (500, 1_500)


def test_a_renewal_counts_from_before_the_call() -> None:
    after = renewed(held(), LEASE, asked_at=40_000)
    assert (after.renew_at, after.ends_at, after.failures) == (70_000, 130_000, 0)


@pytest.mark.parametrize(
    "error",
    [
        FenceError("no", "LEASE_FENCE_STALE", "FAILED_PRECONDITION"),
        UnauthenticatedError("no", "LEASE_API_KEY_INVALID", "UNAUTHENTICATED"),
        ForbiddenError("no", "LEASE_SCOPE_REQUIRED", "PERMISSION_DENIED"),
    ],
)
def test_no_is_a_loss(error: FenceError) -> None:
    assert not_renewed(held(), error, 31_000).lost == error.reason


@pytest.mark.parametrize("error", [ServiceAwayError("gone"), UnavailableError("x", "LEASE_SERVICE_UNAVAILABLE")])
def test_an_exception_is_tried_again_soon_until_the_time_is_over(error: Exception) -> None:
    once = not_renewed(held(), error, 31_000)
    twice = not_renewed(once, error, once.renew_at)
    assert (once.lost, once.renew_at, twice.renew_at) == ("", 31_100, 31_300)
    assert not_renewed(twice, error, 90_500).lost == EXPIRED


def test_the_service_says_when_to_come_back() -> None:
    error = UnavailableError("x", "LEASE_SERVICE_UNAVAILABLE", retry_after_ms=1_000)
    assert not_renewed(held(), error, 31_000).renew_at == 32_000


@given(st.lists(st.integers(0, 20_000), max_size=40))
def test_a_lease_is_never_held_beyond_the_last_life_that_was_granted(pauses: list[int]) -> None:
    state, now = held(), 500
    for pause in pauses:
        now += pause
        state = not_renewed(state, ServiceAwayError("gone"), now)
        assert bool(state.lost) == (now >= 90_500) or state.lost
        assert state.renew_at > now
    assert ended(state, 90_500).lost


def test_owner_tokens_are_well_formed_different_and_not_shown() -> None:
    assert re.fullmatch(r"vlo_[A-Za-z0-9_-]{43}", new_owner())
    assert new_owner() != new_owner()
    assert WANTED.owner not in repr(held())
