"""What reported answers teach the queue limiter of their connection (spec/queue_admission.md section 5)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from policy_service.application.messages import Dispatch, ReportExtras, ReportRequest, SelectRequest
from policy_service.application.replica import Replica
from policy_service.domain.catalogue import Catalogue, Connection
from policy_service.domain.gates import Pace
from policy_service.domain.outcome import Origin
from policy_service.domain.queue_learning import LEARNED_LIFE_MS
from policy_service.storage.memory.permit_store import MemoryPermitStore
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from tests.replicas import FakeTime, ask, failure, make_replica, report, running, select

KEY = "openai:paced"
SETTINGS = {"queue.min_time_between_requests_ms": 50, "queue.max_wait_ms": 20_000}
CATALOGUE = Catalogue(
    connections={"paced": Connection("paced", "openai", settings=SETTINGS), "free": Connection("free", "openai")}
)
LIMIT_60 = {"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "20"}


class Paced:
    """A replica whose connection `paced` has a limiter."""

    def __init__(self) -> None:
        self.time = FakeTime()
        self.replica: Replica = make_replica(
            MemoryStore(MemoryDatabase(self.time.database)), time_source=self.time, catalogue=CATALOGUE
        )

    @property
    def pace(self) -> Pace:
        store = self.replica.permits._store
        assert isinstance(store, MemoryPermitStore)
        pace = store.shared.gates[KEY].gate.pace
        assert pace is not None
        return pace

    async def call(self, request: ReportRequest) -> None:
        """Dispatch on the paced connection, then report it."""
        answer = await select(self.replica, SelectRequest(ask("x").request_id, candidates=ask("paced").candidates))
        assert isinstance(answer.verdict, Dispatch), answer.verdict
        await self.told(request._replace(token=answer.token, report_id="", elapsed_ms=None))

    async def told(self, request: ReportRequest) -> None:
        await report(self.replica, request)
        await self.replica.grants.settle()
        await self.replica.permits.settled()


@pytest.fixture
async def paced() -> AsyncIterator[Paced]:
    fleet = Paced()
    async with running(fleet.replica):
        yield fleet


async def test_a_429_drops_what_headers_taught_even_within_the_minute(paced: Paced) -> None:
    await paced.call(failure("paced", 500, headers=LIMIT_60))
    assert paced.pace.gap_ms == 990
    await paced.told(failure("paced", 429))
    assert (paced.pace.gap_ms, paced.pace.tokens, paced.pace.refill_to) == (50, 60, 60)


async def test_a_429_with_a_wait_in_its_body_empties_the_reservoir_until_then(paced: Paced) -> None:
    await paced.call(failure("paced", 429)._replace(body=b'{"error": {"message": "Please try again in 7s"}}'))
    assert (paced.pace.tokens, paced.pace.refill_to, paced.pace.refill_at) == (0, 60, paced.time.ms + 7_000)


async def test_a_wait_in_a_header_alone_leaves_the_reservoir_as_configured(paced: Paced) -> None:
    await paced.call(failure("paced", 429, headers={"retry-after": "7"}))
    assert paced.pace.tokens == 60


async def test_a_limit_that_a_429_states_spaces_the_starts(paced: Paced) -> None:
    await paced.call(failure("paced", 429)._replace(body=b"Only 10 requests per minute are allowed"))
    assert paced.pace.gap_ms == 6_000


async def test_a_limit_that_another_error_quotes_teaches_nothing(paced: Paced) -> None:
    await paced.call(failure("paced", 400)._replace(body=b"bad prompt: 10 requests per minute"))
    assert paced.pace.gap_ms == 50


async def test_the_soft_flag_of_a_success_spaces_the_starts(paced: Paced) -> None:
    await paced.call(failure("paced", 200, headers={"x-ratelimit-over-limit": "yes"}))
    assert paced.pace.gap_ms == 200


async def test_an_attempt_that_is_not_the_last_teaches_and_keeps_its_permit(paced: Paced) -> None:
    await paced.call(failure("paced", 429, final=False)._replace(body=b"10 requests per minute"))
    assert paced.pace.gap_ms == 6_000
    assert paced.replica.permits.loads.of(KEY).held == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"origin": Origin.GATEWAY},
        {"extras": ReportExtras(own_queue_timeout=True)},
        {"extras": ReportExtras(error_code="rate_limit_queue_full")},
    ],
)
async def test_a_429_that_is_not_of_the_upstream_teaches_nothing(paced: Paced, fields: dict[str, object]) -> None:
    await paced.call(failure("paced", 500, headers=LIMIT_60))
    await paced.told(failure("paced", 429)._replace(**fields))  # type: ignore[arg-type]
    assert paced.pace.gap_ms == 990


async def test_what_was_learned_is_forgotten_after_a_day_without_being_confirmed(paced: Paced) -> None:
    await paced.call(failure("paced", 200, headers=LIMIT_60))
    paced.time.ms += 43_200_000
    await paced.call(failure("paced", 200, headers=LIMIT_60))
    paced.time.ms += LEARNED_LIFE_MS
    await paced.call(failure("paced", 200))
    assert paced.pace.gap_ms == 990
    paced.time.ms += 50
    await paced.call(failure("paced", 200))
    assert (paced.pace.gap_ms, paced.pace.learned_at) == (50, None)


async def test_an_answer_of_another_connection_leaves_the_limiter_alone(paced: Paced) -> None:
    await paced.call(failure("paced", 500, headers=LIMIT_60))
    await paced.told(failure("free", 429))
    assert paced.pace.gap_ms == 990
