"""A model that left the free tier is out of use for good, and nothing else is (spec/guards.md section 1)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from policy_service.application.messages import Reject
from policy_service.application.replica import Replica
from policy_service.domain.connection_state import ConnectionState
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, ask, chosen, failure, make_replica, quick_settings, report, running, select

BODY = b'{"error": {"message": "The free tier of the model has been exhausted. If you wish to continue access the model on a paid basis, please disable the \\"use free tier only\\" mode in the management console.", "code": "AllocationQuota.FreeTierOnly"}}'  # noqa: E501
YEAR = 365 * 86_400_000


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


async def remove(replica: Replica, connection: str = "a") -> None:
    await report(replica, failure(connection, 403, provider="alibaba")._replace(body=BODY))


async def test_the_model_is_refused_without_an_end_and_the_answer_says_why(
    replica: Replica, database: MemoryDatabase, moments: FakeTime
) -> None:
    await remove(replica)
    moments.ms += YEAR
    refused = await select(replica, ask("a", provider="alibaba", explain=True))
    assert isinstance(refused.verdict, Reject)
    assert refused.verdict.retry_after_s is None
    (exclusion,) = refused.exclusions
    assert (exclusion.reason, exclusion.until) == ("free_tier_drained", None)
    fact = database.facts[exclusion.evidence_id]
    assert (fact.mechanism, fact.model, fact.reason) == ("model_lock", "gpt", "free_tier_drained")


async def test_other_models_and_keys_stay_in_use_and_the_key_does_not_cool(replica: Replica) -> None:
    await remove(replica)
    row = replica.view.book().get(ConnectionState, "alibaba", "a")
    assert row.is_default
    other_model = ask("a", provider="alibaba")
    (candidate,) = other_model.candidates
    assert chosen(await select(replica, other_model._replace(candidates=(candidate._replace(model="other"),)))) == "a"
    assert chosen(await select(replica, ask("a", "b", provider="alibaba"))) == "b"


async def test_the_same_answer_again_changes_nothing(
    replica: Replica, database: MemoryDatabase, moments: FakeTime
) -> None:
    await remove(replica)
    before = dict(database.rows)
    moments.ms += 60_000
    await remove(replica)
    assert database.rows == before


async def test_a_call_that_works_brings_the_model_back_and_an_older_one_does_not(
    replica: Replica, moments: FakeTime
) -> None:
    await remove(replica)
    moments.ms += 10_000
    await report(replica, failure("a", 200, provider="alibaba", elapsed_ms=20_000))
    assert isinstance((await select(replica, ask("a", provider="alibaba"))).verdict, Reject)
    await report(replica, failure("a", 200, provider="alibaba", elapsed_ms=5_000))
    assert chosen(await select(replica, ask("a", provider="alibaba"))) == "a"


async def test_an_ordinary_provider_takes_the_same_text_for_a_quota(replica: Replica) -> None:
    await report(replica, failure("a", 403)._replace(body=BODY))
    answer = await select(replica, ask("a", explain=True))
    assert "free_tier_drained" not in {each.reason for each in answer.exclusions}
