"""Failures of the field that show in a selection: dead keys and the attempts, and a pool that cools as a whole."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from policy_service.application.messages import Dispatch, EarlierAttempt, Reject, ReportAnswer
from policy_service.application.replica import Replica
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, ask, chosen, failure, make_replica, quick_settings, report, running, select

KEYS = tuple("abcdef")
DEATHS = (
    (401, b'{"error": {"message": "Incorrect API key provided", "code": "invalid_api_key"}}'),
    (402, b'{"error": {"message": "Insufficient credits", "code": "insufficient_credits"}}'),
    (403, b'{"error": {"message": "This organization has been disabled.", "code": "account_deactivated"}}'),
    (401, b'{"error": {"message": "Incorrect API key provided", "code": "invalid_api_key"}}'),
)
RETRY_LIMIT = 3


@pytest.fixture
def moments() -> FakeTime:
    return FakeTime()


@pytest.fixture
def database(moments: FakeTime) -> MemoryDatabase:
    return MemoryDatabase(clock=moments.database)


@pytest.fixture
async def replica(database: MemoryDatabase, moments: FakeTime) -> AsyncIterator[Replica]:
    made = make_replica(MemoryStore(database), time_source=moments, settings=quick_settings("r1"))
    async with running(made):
        yield made


async def killed(replica: Replica, name: str, status: int, body: bytes) -> ReportAnswer:
    return await report(replica, failure(name, status)._replace(body=body))


async def test_dead_keys_do_not_use_up_the_attempts_of_a_request(replica: Replica) -> None:
    """Six keys, the first four dead, three attempts: the first attempt goes to a key that works."""
    for name, (status, body) in zip(KEYS, DEATHS, strict=False):
        answer = await killed(replica, name, status, body)
        assert answer.verdict.terminal_state, (name, status)
    decision = await select(replica, ask(*KEYS)._replace(max_fallbacks=RETRY_LIMIT - 1))
    assert isinstance(decision.verdict, Dispatch)
    attempts = [decision.verdict.target, *decision.verdict.fallbacks]
    assert [entry.target.connection for entry in attempts] == ["e", "f"]


async def test_keys_that_die_under_a_request_leave_it_the_healthy_ones(replica: Replica, moments: FakeTime) -> None:
    """Keys die one after the other while one request tries them: each death excludes that key and no more."""
    tried: tuple[EarlierAttempt, ...] = ()
    for status, body in DEATHS:
        answer = await select(replica, ask(*KEYS)._replace(earlier_attempts=tried))
        name = chosen(answer)
        moments.ms += 10
        request = failure(name, status, token=answer.token, final=False)._replace(body=body)
        assert (await report(replica, request)).verdict.terminal_state
        tried += (EarlierAttempt("openai", name, "gpt", status),)
    assert [attempt.connection for attempt in tried] == list("abcd")
    assert chosen(await select(replica, ask(*KEYS)._replace(earlier_attempts=tried))) == "e"
    assert chosen(await select(replica, ask(*KEYS))) == "e"


async def test_only_when_every_key_is_dead_a_typed_refusal_says_so(replica: Replica) -> None:
    keys = KEYS[: len(DEATHS)]
    for name, (status, body) in zip(keys, DEATHS, strict=True):
        assert isinstance((await select(replica, ask(*keys))).verdict, Dispatch)
        await killed(replica, name, status, body)
    refused = await select(replica, ask(*keys)._replace(allow_wait=True))
    assert isinstance(refused.verdict, Reject)
    assert (refused.verdict.http_status, refused.verdict.terminal_reason) == (503, "all_targets_skipped")
    assert "2 expired, 1 credits_exhausted, 1 banned of 4 targets" in refused.verdict.message
    assert [e.mechanism for e in refused.exclusions] == ["terminal_state"] * 4
    assert refused.verdict.retry_after_s is None


async def test_a_pool_that_cools_as_a_whole_says_when_the_first_target_returns(
    replica: Replica, moments: FakeTime
) -> None:
    for name, seconds in (("a", "900"), ("b", "240"), ("c", "600")):
        await report(replica, failure(name, 429, headers={"retry-after": seconds}))
    moments.ms += 30_000
    refused = await select(replica, ask("a", "b", "c"))
    assert isinstance(refused.verdict, Reject)
    assert refused.verdict.retry_after_s == 210
    assert min(e.until or 0 for e in refused.exclusions) == moments.ms + 210_000
    moments.ms += 209_999
    late = await select(replica, ask("a", "b", "c"))
    assert isinstance(late.verdict, Reject)
    assert late.verdict.retry_after_s == 1
    moments.ms += 1
    assert chosen(await select(replica, ask("a", "b", "c"))) == "b"
