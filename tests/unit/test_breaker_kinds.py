"""Opening thresholds of one failure kind come from the catalogue (spec/breaker.md section 6)."""

from __future__ import annotations

import pytest

from policy_service.settings.catalogue_file import load_catalogue
from policy_service.settings.problems import ConfigError
from policy_service.storage.memory.store import MemoryDatabase
from tests.replicas import FakeTime, ask, chosen, failure, report, running, select
from tests.unit.test_replica import with_catalogue

CATALOGUE = """
providers:
  - id: acme
    auth_class: api_key
    kind_thresholds: {quota_exhausted: {immediate: true}, transient: {threshold: 3}}
"""
"""The class alone would need five failures."""


async def test_a_kind_with_a_threshold_of_its_own_opens_the_breaker_at_exactly_that_count() -> None:
    moments = FakeTime()
    database = MemoryDatabase(clock=moments.database)
    async with running(with_catalogue(database, moments, load_catalogue(CATALOGUE).catalogue)) as replica:
        for count in (1, 2, 3):
            assert chosen(await select(replica, ask("new", provider="acme"))) == "new", count
            await report(replica, failure(f"c{count}", 503, provider="acme"))
        answer = await select(replica, ask("new", provider="acme", explain=True))
        assert [each.reason for each in answer.exclusions] == ["circuit_open"]


@pytest.mark.parametrize("entry", ["{odd: {threshold: 1}}", "{transient: {threshold: 0}}", "{transient: {count: 1}}"])
def test_a_threshold_that_means_nothing_is_refused_with_its_path(entry: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_catalogue("providers:\n  - id: acme\n    kind_thresholds: " + entry)
    assert "kind_thresholds" in str(refused.value)
