"""A rule said that one connection had spent its quota, and the provider cooldown took its siblings out as well."""

from __future__ import annotations

import pytest

from policy_service.application.messages import Dispatch, SelectAnswer
from policy_service.settings.catalogue_file import load_catalogue
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, ask, failure, make_replica, quick_settings, report, running, select

COOLS_AT_ONCE = """
version: 1
settings:
  provider_cooldown: {enabled: true, api_key: {failure_threshold: 1}}
"""
PLAN_OF_A_CONNECTION = """
rules:
  - {provider: openai, status: 429, match: plan spent, scope: connection, cooldown_ms: 90000}
"""
ADDRESS = "  egress_lock: {providers: openai}\n"


@pytest.mark.parametrize(
    ("more", "is_left"),
    [("", False), (PLAN_OF_A_CONNECTION, True), (ADDRESS, True)],
    ids=["a plain 429", "a quota of the connection", "an address that is spent"],
)
async def test_the_siblings_are_left_where_the_provider_is_not_to_blame(more: str, is_left: bool) -> None:
    moments = FakeTime()
    replica = make_replica(
        MemoryStore(MemoryDatabase(clock=moments.database)),
        time_source=moments,
        catalogue=load_catalogue(COOLS_AT_ONCE + more, source="test").catalogue,
        settings=quick_settings("r"),
    )
    async with running(replica):
        decision = await select(replica, ask("a", "b"))
        await report(replica, failure("a", 429, token=decision.token)._replace(body=b"plan spent"))
        assert is_dispatched(await select(replica, ask("b"))) is is_left


def is_dispatched(answer: SelectAnswer) -> bool:
    return isinstance(answer.verdict, Dispatch)
