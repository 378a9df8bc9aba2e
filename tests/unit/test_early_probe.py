"""Early probe of long blocks (spec/guards.md section 7)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policy_service.application import connection_acts as acts
from policy_service.domain import early_probe
from policy_service.domain.connection_state import EarlyProbe
from policy_service.domain.early_probe import Block
from policy_service.domain.profiles import EarlyProbeProfile
from policy_service.domain.state import StateBook
from tests.vectors.account_world import AccountWorld

ON = EarlyProbeProfile(enabled=True)
BLOCK = Block(0, 3_600_000, "body")
TTL = 30_000


def test_the_first_permit_comes_one_interval_after_the_start() -> None:
    assert early_probe.grant(BLOCK, ON, 299_999, "a", TTL) is None
    permit = early_probe.grant(BLOCK, ON, 300_000, "a", TTL)
    assert permit is not None
    assert permit.expires_at == 330_000


def test_a_failed_test_waits_one_interval_from_its_grant() -> None:
    permit = early_probe.grant(BLOCK, ON, 310_000, "a", TTL)
    assert permit is not None
    tested = replace(BLOCK, permit=early_probe.failed(permit))
    assert early_probe.next_permit_at(tested, ON) == 610_000


def test_a_lost_permit_gives_its_place_back_at_its_expiry() -> None:
    permit = early_probe.grant(BLOCK, ON, 310_000, "a", TTL)
    taken = replace(BLOCK, permit=permit)
    assert early_probe.grant(taken, ON, 339_999, "b", TTL) is None
    assert early_probe.grant(taken, ON, 340_000, "b", TTL) is not None


@pytest.mark.parametrize(
    ("block", "profile"),
    [
        (BLOCK, EarlyProbeProfile()),
        (Block(0, 600_000), ON),
        (Block(0, 3_600_000, "header"), ON),
        (Block(0, 3_600_000, "google_rpc_retry_info"), ON),
    ],
)
def test_short_and_server_stated_blocks_are_not_tested(block: Block, profile: EarlyProbeProfile) -> None:
    assert early_probe.next_permit_at(block, profile) is None


def test_server_stated_blocks_are_tested_where_the_setting_says_so() -> None:
    profile = replace(ON, include_server_stated=True)
    assert early_probe.next_permit_at(Block(0, 3_600_000, "header"), profile) == 300_000


def test_no_permit_is_granted_at_or_after_the_end() -> None:
    assert early_probe.grant(BLOCK, ON, 3_600_000, "a", TTL) is None


def lock_world() -> AccountWorld:
    world = AccountWorld({"provider": "gemini", "settings": {"early_probe.enabled": True}})
    world.failure({"status": 429, "model": "m", "body": {"error": {"retry_after": 1_200}}})
    return world


def probe_lock(world: AccountWorld, at: int, permit_id: str) -> bool:
    book = StateBook(world.rows)
    permit = acts.grant_lock_probe(book, world.place("m"), world.profile(), permit_id, at)
    world.rows.update(book.changes)
    return permit is not None


def test_a_failed_test_of_a_model_lock_neither_counts_nor_moves_the_end() -> None:
    world = lock_world()
    before = world.lock("m", 0)
    assert before is not None
    assert probe_lock(world, 300_000, "p1")
    assert not probe_lock(world, 300_001, "p2")
    world.failure({"at_ms": 301_000, "status": 429, "model": "m", "permit_id": "p1"})
    after = world.lock("m", 301_000)
    assert after is not None
    assert (after.failure_count, after.until) == (1, before.until)
    assert not probe_lock(world, 599_999, "p3")
    assert probe_lock(world, 600_000, "p3")


def test_a_failed_test_of_a_model_lock_takes_over_a_later_stated_end() -> None:
    world = lock_world()
    assert probe_lock(world, 300_000, "p1")
    world.failure(
        {"at_ms": 301_000, "status": 429, "model": "m", "permit_id": "p1", "headers": {"Retry-After": "7200"}}
    )
    lock = world.lock("m", 301_000)
    assert lock is not None
    assert (lock.failure_count, lock.until) == (1, 301_000 + 7_200_000)


def test_a_passed_test_of_a_model_lock_frees_the_model() -> None:
    world = lock_world()
    assert probe_lock(world, 300_000, "p1")
    world.success({"at_ms": 301_000, "started_at_ms": 300_000, "model": "m", "permit_id": "p1"})
    assert world.lock("m", 301_000) is None


@pytest.mark.parametrize("status", [502, 500, 429])
def test_a_failed_test_of_a_lock_waits_its_interval_at_whichever_key_the_failure_was_written(status: int) -> None:
    """A family lock is tested by a call that ends in another status: the next test was due after a reset timeout."""
    world = AccountWorld({"provider": "gemini", "settings": {"early_probe.enabled": True}})
    world.record({"at_ms": 0, "model": "m", "status": 429, "exact_ms": 1_800_000, "exact_source": "body"})
    assert grant_lock(world, 300_000) is not None
    world.failure({"at_ms": 301_000, "status": status, "model": "m", "permit_id": "p300000"})
    assert world.count("m") == 1
    assert grant_lock(world, 331_000) is None
    assert grant_lock(world, 599_999) is None
    assert grant_lock(world, 600_000) is not None


def test_a_failed_test_raises_no_count_although_two_writers_see_it() -> None:
    settings = {"early_probe.enabled": True, "model_lockout.enabled": True}
    world = AccountWorld({"provider": "gemini", "settings": settings})
    world.record({"at_ms": 0, "model": "m", "status": 429, "exact_ms": 1_800_000, "exact_source": "body"})
    assert grant_lock(world, 300_000) is not None
    failure = {"status": 429, "model": "m", "permit_id": "p300000", "pool_attempt": True, "persist": False}
    world.failure({"at_ms": 301_000, **failure})
    lock = world.lock("m", 301_000)
    assert lock is not None
    assert (lock.failure_count, lock.until) == (1, 1_800_000)


def grant_lock(world: AccountWorld, at: int) -> object:
    book = StateBook(world.rows)
    permit = acts.grant_lock_probe(book, world.place("m"), world.profile(), f"p{at}", at)
    world.rows.update(book.changes)
    return permit


def test_a_permit_ends_at_a_whole_millisecond_whatever_fraction_the_environment_names() -> None:
    environment = {"POLICY_BREAKER_API_KEY_RESET_TIMEOUT_MS": "700.5"}
    world = AccountWorld({"provider": "gemini", "settings": {"early_probe.enabled": True}, "env": environment})
    world.record({"at_ms": 0, "model": "m", "status": 429, "exact_ms": 1_800_000, "exact_source": "body"})
    permit = grant_lock(world, 300_000)
    assert isinstance(permit, EarlyProbe)
    assert permit.expires_at == 300_701
