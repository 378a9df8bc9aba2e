"""A conversation stays on the target of a route that served it last (spec/affinity.md section 8), in selections."""

from __future__ import annotations

from policy_service.application.messages import SelectRequest
from policy_service.application.messages.request import SessionSource
from policy_service.application.replica import Replica
from policy_service.domain.ids import ModelId
from policy_service.settings.catalogue_file import load_catalogue
from policy_service.storage.memory.store import MemoryDatabase
from tests.replicas import FakeTime, chosen, failure, report, running, select
from tests.unit.test_replica import with_catalogue

CATALOGUE = """
connections: [{id: a, provider: openai}, {id: b, provider: openai}]
routes:
  - name: chat
    strategy: round-robin
    options: {sticky_round_robin_limit: 1}
    targets:
      - {provider: openai, connection: a, model: m}
      - {provider: openai, connection: b, model: m}
"""


def rotating(more: str = "") -> Replica:
    moments = FakeTime()
    database = MemoryDatabase(clock=moments.database)
    return with_catalogue(database, moments, load_catalogue(CATALOGUE + more).catalogue)


async def turns(replica: Replica, text: str | None, count: int = 4, status: int = 200) -> list[str]:
    """Connections of successive turns of one conversation, each reported."""
    found = []
    for n in range(count):
        request = SelectRequest(f"{text}{n}", route="chat", session=SessionSource(first_user_text=text))
        answer = await select(replica, request)
        found.append(chosen(answer))
        outcome = failure(found[-1], status, token=answer.token)
        await report(replica, outcome._replace(target=outcome.target._replace(model=ModelId("m"))))
    return found


async def test_turns_of_one_conversation_stay_where_the_first_was_served_and_others_rotate() -> None:
    async with running(rotating()) as replica:
        assert len(set(await turns(replica, None))) == 2
        assert len(set(await turns(replica, "hello"))) == 1


async def test_the_opt_out_lets_a_conversation_rotate() -> None:
    async with running(rotating("settings: {affinity.disable_route_stickiness: true}\n")) as replica:
        assert len(set(await turns(replica, "hello"))) == 2


async def test_a_failure_sends_the_conversation_elsewhere() -> None:
    async with running(rotating()) as replica:
        (home,) = await turns(replica, "hello", 1)
        await turns(replica, "hello", 1, status=429)
        assert home not in await turns(replica, "hello", 2)
