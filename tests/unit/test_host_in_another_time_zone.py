"""Instants are the same on a host whose local time is not UTC."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from policy_service.domain import limit_reset
from policy_service.domain.cooldown import read_instant
from policy_service.domain.daily_reset import until_midnight
from policy_service.domain.permits import block_until

HOUR_MS = 3_600_000


@pytest.fixture(autouse=True)
def _tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


def test_a_stored_time_without_a_zone_is_utc() -> None:
    assert read_instant(datetime(1970, 1, 1, 1)) == HOUR_MS


def test_the_days_end_in_a_named_zone_does_not_look_at_the_hosts() -> None:
    assert until_midnight(0, "UTC") == 24 * HOUR_MS
    assert until_midnight(0, "Asia/Tokyo") == 15 * HOUR_MS


def test_a_block_until_a_time_without_a_zone_is_until_that_time_of_utc() -> None:
    assert block_until("1970-01-01T01:00:00", 0) == HOUR_MS


def test_an_offer_announced_without_a_zone_is_announced_in_utc() -> None:
    stated = ("1970-01-01T01:00:00", "1970-01-01T02:00:00+01:00")
    assert [limit_reset._announced({"next_available_at": at}) for at in stated] == [HOUR_MS, HOUR_MS]
