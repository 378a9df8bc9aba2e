"""Leases under any order of calls: one active lease per owner and connection, growing generations, hard fences.

The rows are kept as a table would keep them; every operation gets only the rows of its owner and of its connection.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policy_service.domain import lease
from policy_service.domain.lease import EndReason, Fence, LeaseCall, LeaseResult, LeaseRow, LeaseRules, LeaseState

pytestmark = pytest.mark.timeout(600)
"""Two thousand examples on a busy machine."""
EXAMPLES = int(os.environ.get("POLICY_HYPOTHESIS_EXAMPLES", "200"))
OWNERS, KEYS, CONNECTIONS = ("a", "b", "c"), ("k1", "k2"), ("c1", "c2", "c3")
owners, keys, connections = st.sampled_from(OWNERS), st.sampled_from(KEYS), st.sampled_from(CONNECTIONS)
generations = st.integers(1, 4)
exact = st.sampled_from([True, True, False])
"""Most calls name the key and generation of the owner's newest lease; the others name anything."""
ttls = st.sampled_from([None, 10, 1_000, 60_000, 9_999_999])


class Leases(RuleBasedStateMachine):
    """Three owners, two keys, three connections, one lock-delay."""

    @initialize(delay=st.sampled_from([0, 5_000]))
    def start(self, delay: int) -> None:
        self.now = 0
        self.numbers = LeaseRules(delay)
        self.rows: list[LeaseRow] = []
        self.busy_until: dict[str, int] = {}
        """The model's own account of who may not be leased before when, kept at the time of each end."""

    def read(self, owner: str, connection: str) -> list[LeaseRow]:
        """What a transaction reads under its locks."""
        return [row for row in self.rows if row.owner_hash == owner or row.connection_id == connection]

    def write(self, step: lease.LeaseStep) -> None:
        for row in step.writes:
            if row.id == lease.NEW_ROW:
                self._insert(row)
                continue
            before = self.rows[row.id - 1]
            assert before.state is LeaseState.ACTIVE, "an ended lease never changes"
            assert (row.owner_hash, row.generation, row.connection_id) == (
                before.owner_hash,
                before.generation,
                before.connection_id,
            )
            self.rows[row.id - 1] = row
            self._ended(row)

    def _insert(self, row: LeaseRow) -> None:
        assert self.now >= self.busy_until.get(row.connection_id, 0), "inside the lock-delay"
        stored = [old.generation for old in self.rows if old.owner_hash == row.owner_hash]
        moved = any(old.generation == row.generation and old.ended_at == self.now for old in self.of(row.owner_hash))
        assert row.generation == max(stored, default=0) + (0 if moved else 1)
        self.rows.append(replace(row, id=len(self.rows) + 1))

    def of(self, owner: str) -> list[LeaseRow]:
        return [row for row in self.rows if row.owner_hash == owner and row.state is LeaseState.INVALIDATED]

    def _ended(self, row: LeaseRow) -> None:
        if row.state is LeaseState.EXPIRED:
            self.busy_until[row.connection_id] = row.expires_at + self.numbers.lock_delay_ms
        elif row.state is LeaseState.INVALIDATED:
            self.busy_until[row.connection_id] = self.now + self.numbers.lock_delay_ms

    @rule(owner=owners, key=keys, connection=connections, ttl=ttls)
    def acquires(self, owner: str, key: str, connection: str, ttl: int | None) -> None:
        call = LeaseCall(owner, key, provider="p", connection_id=connection, ttl_ms=ttl)
        step = lease.acquire(self.read(owner, connection), call, self.numbers, self.now)
        self.write(step)
        if step.result is LeaseResult.CONNECTION_BUSY:
            assert step.free_at is not None
            assert step.free_at > self.now
        else:
            assert step.lease is not None
            assert step.lease.owner_hash == owner

    @rule(owner=owners, key=keys, generation=generations, exact=exact, connection=connections)
    def moves(self, owner: str, key: str, generation: int, connection: str, exact: bool) -> None:
        key, generation = self.named(owner, key, generation, exact)
        call = LeaseCall(owner, key, generation, "p", connection, reason=EndReason.CONNECTION_INELIGIBLE)
        step = lease.transition(self.read(owner, connection), call, self.numbers, self.now)
        self.write(step)
        if step.result in (LeaseResult.TRANSITIONED, LeaseResult.REUSED):
            assert step.lease is not None
            assert step.lease.generation == generation

    @rule(owner=owners, key=keys, generation=generations, exact=exact, ttl=ttls)
    def renews(self, owner: str, key: str, generation: int, ttl: int | None, exact: bool) -> None:
        key, generation = self.named(owner, key, generation, exact)
        alive = self.alive(owner, key, generation)
        step = lease.renew(self.read(owner, ""), LeaseCall(owner, key, generation, ttl_ms=ttl), self.now)
        self.write(step)
        assert (step.result is LeaseResult.RENEWED) == alive

    @rule(owner=owners, key=keys, generation=generations, exact=exact)
    def releases(self, owner: str, key: str, generation: int, exact: bool) -> None:
        key, generation = self.named(owner, key, generation, exact)
        call = LeaseCall(owner, key, generation)
        periods = [row for row in self.rows if (row.owner_hash, row.generation) == (owner, generation)]
        done = [row.state is LeaseState.RELEASED and row.api_key_id == key for row in periods[-1:]] == [True]
        released = done or self.alive(owner, key, generation)
        first = lease.release(self.read(owner, ""), call, self.now)
        self.write(first)
        again = lease.release(self.read(owner, ""), call, self.now)
        assert (first.result is LeaseResult.RELEASED) == released
        assert again.result is first.result
        assert again.writes == ()

    @rule(owner=owners, key=keys, generation=generations, exact=exact)
    def invalidates(self, owner: str, key: str, generation: int, exact: bool) -> None:
        key, generation = self.named(owner, key, generation, exact)
        alive = self.alive(owner, key, generation)
        call = LeaseCall(owner, key, generation, reason=EndReason.HEALTH_OR_COOLDOWN)
        step = lease.invalidate(self.read(owner, ""), call, self.now)
        self.write(step)
        assert (step.result is LeaseResult.INVALIDATED) == alive

    @rule(owner=owners, key=keys, generation=generations, exact=exact, connection=connections)
    def fences(self, owner: str, key: str, generation: int, connection: str, exact: bool) -> None:
        key, generation = self.named(owner, key, generation, exact)
        verdict = lease.fence(
            self.read(owner, connection), LeaseCall(owner, key, generation, "p", connection), self.now
        )
        lives = [row for row in self.rows if row.owner_hash == owner and self.lives(row)]
        holds = any(
            (row.api_key_id, row.generation, row.connection_id) == (key, generation, connection) for row in lives
        )
        assert (verdict is Fence.VALID) == holds
        assert (verdict is Fence.REQUIRED) == (not lives)

    @rule()
    def sweeps(self) -> None:
        self.write(lease.LeaseStep(LeaseResult.FOUND, writes=lease.expire(self.rows, self.now)))

    @rule(by=st.sampled_from([1, 999, 1_000, 5_000, 60_000, 120_000]))
    def time_passes(self, by: int) -> None:
        self.now += by

    @rule()
    def time_reaches_an_expiry(self) -> None:
        lives = [row.expires_at for row in self.rows if self.lives(row)]
        self.now = min(lives, default=self.now)

    def named(self, owner: str, key: str, generation: int, exact: bool) -> tuple[str, int]:
        newest = [row for row in self.rows if row.owner_hash == owner][-1:]
        return (newest[0].api_key_id, newest[0].generation) if exact and newest else (key, generation)

    def lives(self, row: LeaseRow) -> bool:
        return row.state is LeaseState.ACTIVE and row.expires_at > self.now

    def alive(self, owner: str, key: str, generation: int) -> bool:
        mine = (row for row in self.rows if self.lives(row))
        return any((row.owner_hash, row.api_key_id, row.generation) == (owner, key, generation) for row in mine)

    @precondition(lambda self: hasattr(self, "rows"))
    @invariant()
    def one_active_lease_per_owner_and_connection(self) -> None:
        """As the partial unique indexes demand, which look at the state alone."""
        active = [row for row in self.rows if row.state is LeaseState.ACTIVE]
        for names in (Counter(row.owner_hash for row in active), Counter(row.connection_id for row in active)):
            assert max(names.values(), default=0) <= 1

    @precondition(lambda self: hasattr(self, "rows"))
    @invariant()
    def an_end_has_an_instant_and_a_reason(self) -> None:
        for row in self.rows:
            ended = row.state is not LeaseState.ACTIVE
            assert ended == (row.ended_at is not None) == (row.end_reason is not None)


Leases.TestCase.settings = settings(max_examples=max(50, EXAMPLES // 2), stateful_step_count=50, deadline=None)
TestLeases = Leases.TestCase
