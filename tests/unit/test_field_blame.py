"""Failures of the field about who is blamed and who may still be drawn: quota through a chain of gateways, dead
accounts that look idle, deployments of weight 0, cooldowns without a cause."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from policy_service.application.classify import classify_record
from policy_service.application.messages import Candidate, Dispatch
from policy_service.application.replica import Replica
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.policy import Policy
from policy_service.domain.strategies import IMPLEMENTED_STRATEGIES
from policy_service.settings.catalogue_file import builtin_catalogue
from policy_service.settings.provider_data import builtin_providers
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, ask, chosen, failure, make_replica, quick_settings, report, running, select

SYNTHETIC = "all accounts have exhausted their quota, reset after 5m"


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


@pytest.mark.parametrize("status", [429, 502])
def test_a_synthetic_429_that_comes_back_through_a_chain_is_a_spent_quota_for_its_wait(status: int) -> None:
    """Case 7: as the next gateway passes it on, or wraps it into an answer of its own."""
    inner = f'{{"error": {{"message": "{SYNTHETIC}", "code": 429}}}}'
    body = inner if status == 429 else f'{{"error": {{"message": {_quoted(f"upstream error: {inner}")}}}}}'
    policy = Policy(Catalogue(providers=builtin_providers()))
    verdict = classify_record({"id": "7", "provider": "acme", "status": status, "body": body}, policy)
    assert (verdict["reason"], verdict["retry_after_ms"], verdict["fallback"]) == ("quota_exhausted", 300_000, True)


def _quoted(text: str) -> str:
    escaped = text.replace('"', '\\"')
    return f'"{escaped}"'


@pytest.mark.parametrize("strategy", IMPLEMENTED_STRATEGIES)
async def test_a_dead_account_that_looks_idle_is_drawn_by_no_strategy(replica: Replica, strategy: str) -> None:
    """Case 11: its 401 carried no rate-limit headers, so it looks as if nothing had been used of it."""
    await report(replica, failure("dead", 401)._replace(body=b'{"error": {"code": "invalid_api_key"}}'))
    for number in range(8):
        request = ask("dead", "a", "b", request_id=f"q{number}")._replace(strategy=strategy)
        answer = await select(replica, request)
        assert isinstance(answer.verdict, Dispatch)
        drawn = {each.target.connection for each in (answer.verdict.target, *answer.verdict.fallbacks)}
        assert "dead" not in drawn


async def test_a_deployment_of_weight_0_is_drawn_only_where_all_are_0(replica: Replica) -> None:
    """Case 26."""
    weights = {"idle": 0.0, "a": 1.0, "b": 3.0}

    async def drawn(chosen_weights: dict[str, float]) -> set[str]:
        candidates = tuple(Candidate("openai", name, "gpt", weight=w) for name, w in chosen_weights.items())
        requests = (
            ask(request_id=f"{len(chosen_weights)}/{n}")._replace(candidates=candidates, strategy="weighted")
            for n in range(60)
        )
        return {chosen(await select(replica, request)) for request in requests}

    assert await drawn(weights) == {"a", "b"}
    assert await drawn(dict.fromkeys(weights, 0.0)) == {"idle", "a", "b"}


async def test_no_account_is_blocked_without_a_cause(
    replica: Replica, database: MemoryDatabase, moments: FakeTime
) -> None:
    """Case 27: three of four accounts are blocked, each for a reason of its own, and each says why."""
    blamed = {
        "a": failure("a", 429, headers={"retry-after": "900"}),
        "b": failure("b", 401)._replace(body=b'{"error": {"code": "invalid_api_key"}}'),
        "c": failure("c", 503),
    }
    for name, request in blamed.items():
        answer = await select(replica, ask(name, request_id=f"client-{name}"))
        await report(replica, request._replace(token=answer.token, report_id=""))
        moments.ms += 100
    answer = await select(replica, ask("a", "b", "c", "d", explain=True))
    assert chosen(answer) == "d"
    assert {each.target.connection for each in answer.exclusions} == set(blamed)
    for exclusion in answer.exclusions:
        fact = database.facts[exclusion.evidence_id]
        assert fact.connection == exclusion.target.connection
        assert (fact.replica, fact.request_id) == ("r1", f"client-{fact.connection}")
        assert fact.rule
        assert fact.reason
        assert fact.decision_id
        assert fact.status == blamed[fact.connection].status
        assert fact.deadline_at == exclusion.until


async def test_each_model_and_breaker_that_blocks_has_a_cause_too(database: MemoryDatabase, moments: FakeTime) -> None:
    """Case 27: the other kinds of block."""
    catalogue = replace(builtin_catalogue(), stored_settings={"breaker.api_key.failure_threshold": 1})
    store = MemoryStore(database)
    settings = quick_settings("r1")
    async with running(make_replica(store, time_source=moments, catalogue=catalogue, settings=settings)) as one:
        await report(one, failure("a", 503))
        await report(one, failure("k", 429, provider="gemini"))
        for provider, reason in (("openai", "circuit_open"), ("gemini", "model_lockout")):
            answer = await select(one, ask("k", provider=provider, explain=True))
            (exclusion,) = answer.exclusions
            assert exclusion.reason == reason
            fact = database.facts[exclusion.evidence_id]
            assert (fact.provider, fact.replica, bool(fact.rule)) == (provider, "r1", True)
