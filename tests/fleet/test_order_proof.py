"""Five reports with fixed instants, in every grouping, commit order and duplication, on one replica and on three.

The instants, ms after a fixed start: a 503 of account a at 1000; a 429 of a with Retry-After at 2000; a success of
a that started at 1500, before that 429; a 503 of account b at 3000; another 429 of a, longer, at 9000.
Short form: all 541 groupings in commit order on one replica, a third of them on three; arrival orders within one
transaction have a test of their own. Long form: all 1 920 arrival orders and cuts on both, ten times as many on the
real store.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import permutations, product
from typing import Any, cast

import pytest

from policy_service.application.commit import GroupedCommit
from policy_service.application.events import OutcomeEvent
from policy_service.application.ports import Store
from policy_service.application.replica import FOLDING
from policy_service.application.report_result import ReportResult, fold_report
from policy_service.application.view import View
from policy_service.domain.ids import AuthClass, Generations, ProviderId
from policy_service.domain.outcome import Origin, Outcome
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import Policy
from policy_service.domain.state import Row, StateBook
from policy_service.settings.catalogue_file import builtin_catalogue
from policy_service.storage import event_codec
from policy_service.storage.memory.store import MemoryDatabase, MemoryStore
from policy_service.storage.postgres.store import PostgresStore
from tests.fleet.fleet import LONG, LONG_TIMEOUT_S, figure, form
from tests.replicas import ListSpool, target

START = 1_700_000_000_000
POLICY = Policy(builtin_catalogue())
Batch = tuple[int, ...]
History = tuple[tuple[int, Batch], ...]
"""(replica, events of one transaction in their order of arrival), in commit order."""


def event(number: int, connection: str, status: int, at: int, *, started: int, wait_s: int = 0) -> OutcomeEvent:
    """One report as ReportOutcome makes it, at fixed instants."""
    headers = {"retry-after": str(wait_s)} if wait_s else {}
    outcome = outcome_of(connection, status, headers)
    return OutcomeEvent(
        event_id=f"d{number}/0",
        at=START + at,
        target=target(connection),
        outcome=outcome,
        started_at=START + started,
        first_byte_at=START + started + 100 if status == 200 else None,
        generations=Generations(),
        decision_id=f"d{number}",
        replica="r",
    )


def outcome_of(connection: str, status: int, headers: dict[str, str]) -> Outcome:
    return parse_outcome(
        RawOutcome(
            status=status,
            headers=tuple(headers.items()),
            provider="openai",
            connection=connection,
            model="gpt",
            origin=Origin.UPSTREAM,
        )
    )


EVENTS = (
    event(0, "a", 503, 1_000, started=900),
    event(1, "a", 429, 2_000, started=1_900, wait_s=30),
    event(2, "a", 200, 2_500, started=1_500),
    event(3, "b", 503, 3_000, started=2_900),
    event(4, "a", 429, 9_000, started=8_900, wait_s=60),
)
SUCCESS = 2
NEWER_THAN_SUCCESS = (1, 3, 4)


# --- histories --------------------------------------------------------------------------------------------
def groupings(order: Sequence[int]) -> Iterator[tuple[Batch, ...]]:
    """Every way to cut an order into transactions."""
    for cuts in product((False, True), repeat=len(order) - 1):
        batches: list[list[int]] = [[order[0]]]
        for number, cut in zip(order[1:], cuts, strict=True):
            if cut:
                batches.append([])
            batches[-1].append(number)
        yield tuple(map(tuple, batches))


def all_groupings() -> Iterator[tuple[Batch, ...]]:
    """Every order of arrival with every cut: 120 x 16."""
    for order in permutations(range(len(EVENTS))):
        yield from groupings(order)


def chosen_groupings(replicas: int) -> list[tuple[Batch, ...]]:
    """What the form that was asked for plays."""
    commit_orders = [batches for batches in all_groupings() if all(batch == tuple(sorted(batch)) for batch in batches)]
    return list(all_groupings()) if LONG else commit_orders[:: 1 if replicas == 1 else 3]


def on_replicas(batches: tuple[Batch, ...], count: int, rng: random.Random) -> History:
    return tuple((rng.randrange(count), batch) for batch in batches)


def with_duplicates(history: History, count: int, rng: random.Random) -> History:
    """Each report may come again: within its transaction, in a later one, on any replica."""
    found: list[tuple[int, Batch]] = []
    sent: list[int] = []
    for replica, batch in history:
        again = tuple(n for n in sent if rng.random() < 0.5)
        found.append((replica, batch + again))
        sent += batch
        if rng.random() < 0.5:
            found.append((rng.randrange(count), tuple(rng.sample(sent, rng.randint(1, len(sent))))))
    return tuple(found)


# --- running one -------------------------------------------------------------------------------------------
@dataclass
class Outcomes:
    """What a history left: the rows after each transaction, and the answers."""

    states: list[dict[tuple[str, ...], Row]]
    fresh: list[int]
    """Events whose answer was not a duplicate's, in order."""


class Fleet:
    """Grouped commits of several replicas over one store each; views are left alone, the fold is what is tested."""

    def __init__(self, stores: Sequence[Store], provider: str) -> None:
        self.provider = provider
        self.commits = [self._commit(store, n) for n, store in enumerate(stores)]

    def _commit(self, store: Store, number: int) -> GroupedCommit[ReportResult]:
        view = View(POLICY, fold_report)
        return GroupedCommit(
            store,
            view,
            ListSpool(),
            FOLDING,
            f"{self.provider}-r{number}",
            encode_event=event_codec.encode,
            decode_event=event_codec.decode,
        )

    def event(self, number: int) -> OutcomeEvent:
        """The same report for this fleet's own provider, so that histories share a database."""
        known = EVENTS[number]
        outcome = known.outcome._replace(provider=self.provider, auth_class=AuthClass.API_KEY)
        target_here = known.target._replace(provider=ProviderId(self.provider))
        decision = f"{self.provider}-{known.event_id}"
        return replace(known, event_id=decision, target=target_here, outcome=outcome)

    async def play(self, history: History) -> Outcomes:
        states: list[dict[tuple[str, ...], Row]] = []
        fresh: list[int] = []
        book: dict[tuple[str, ...], Row] = {}
        for replica, batch in history:
            fresh += await self.transaction(self.commits[replica], batch, book)
            states.append(dict(book))
        return Outcomes(states, fresh)

    async def transaction(
        self, commit: GroupedCommit[ReportResult], batch: Batch, book: dict[tuple[str, ...], Row]
    ) -> list[int]:
        """One transaction of the given reports, each once or more; which of them had an effect of their own."""
        events = [self.event(number) for number in dict.fromkeys(batch)]
        items = [commit._enqueue(each) for each in events]
        committed = await commit._run(items)
        await commit._settle(items, committed)
        for versioned in committed.rows:
            key = versioned.row.key
            book[(key[0], "p", *key[2:])] = versioned.row
        return [
            n for n, e in zip(dict.fromkeys(batch), events, strict=True) if not committed.value[e.event_id].duplicate
        ]


def comparable(state: dict[tuple[str, ...], Row]) -> dict[tuple[str, ...], object]:
    """A state without what names the provider, the fact or the replica."""
    return {key: cleaned(row) for key, row in state.items()}


def cleaned(row: Row) -> object:
    names = {"provider", "fact_id", "replica"}
    return tuple((name, value) for name, value in fields_of(row) if name not in names)


def fields_of(row: Row) -> Iterator[tuple[str, object]]:
    return ((field.name, getattr(row, field.name)) for field in fields(cast("Any", row)))


def deadlines(state: dict[tuple[str, ...], Row]) -> dict[tuple[str, ...], int]:
    """Every instant until which a row keeps traffic away."""
    found: dict[tuple[str, ...], int] = {}
    for key, row in state.items():
        for name, value in fields_of(row):
            if name.endswith(("_until", "reopen_at")) and isinstance(value, int):
                found[(*key, name)] = value
    return found


def failures_counted(state: dict[tuple[str, ...], Row]) -> int:
    row = state.get(("breaker", "p", ""))
    return int(getattr(row, "failure_count", 0))


def alone(number: int) -> dict[tuple[str, ...], int]:
    """Deadlines that one report sets by itself."""
    book = StateBook()
    known = EVENTS[number]
    fold_report(book, known, POLICY, known.at)
    return deadlines({(key[0], "p", *key[2:]): row for key, row in book.changes.items()})


def check(history: History, outcomes: Outcomes) -> None:
    """What must hold for every history, whatever its order."""
    assert sorted(outcomes.fresh) == list(range(len(EVENTS))), "a report had no effect of its own, or had it twice"
    before: dict[tuple[str, ...], int] = {}
    seen: set[int] = set()
    for (_, batch), state in zip(history, outcomes.states, strict=True):
        after = deadlines(state)
        if SUCCESS in seen or SUCCESS not in batch:
            shorter = {name for name, until in before.items() if after.get(name, 0) < until}
            assert not shorter, f"a deadline got shorter: {shorter}"
        seen |= set(batch)
        before = after
    for number in NEWER_THAN_SUCCESS:
        for name, until in alone(number).items():
            assert before.get(name, 0) >= until, f"evidence {number} was cleared: {name}"
    assert failures_counted(outcomes.states[-1]) <= len(EVENTS) - 1


def memory_fleet(count: int, provider: str = "openai") -> Fleet:
    shared = MemoryDatabase(lambda: START + 20_000)
    return Fleet([MemoryStore(shared) for _ in range(count)], provider)


# --- claims -----------------------------------------------------------------------------------------------
def test_the_five_reports_really_set_deadlines() -> None:
    assert all(alone(number) for number in (0, 1, 3, 4))
    assert not alone(SUCCESS)


@pytest.mark.timeout(LONG_TIMEOUT_S)
@pytest.mark.parametrize("replicas", [1, 3])
async def test_no_order_of_reports_counts_twice_shortens_or_clears_newer_evidence(replicas: int) -> None:
    rng = random.Random(replicas)
    played = 0
    for batches in chosen_groupings(replicas):
        history = on_replicas(batches, replicas, rng)
        once = await memory_fleet(replicas).play(history)
        check(history, once)
        twice = with_duplicates(history, replicas, rng)
        again = await memory_fleet(replicas).play(twice)
        check(twice, again)
        assert comparable(again.states[-1]) == comparable(once.states[-1])
        played += 2
    figure(f"order_proof.histories_on_{replicas}_replicas", played)


async def test_within_one_transaction_every_order_of_arrival_ends_alike() -> None:
    ends = []
    for order in permutations(range(len(EVENTS))):
        outcomes = await memory_fleet(1).play(((0, order),))
        ends.append(comparable(outcomes.states[-1]))
    figure("order_proof.arrival_orders", len(ends))
    assert all(end == ends[0] for end in ends)


@pytest.mark.timeout(LONG_TIMEOUT_S)
async def test_postgres_ends_in_the_same_state_as_the_reference_store(embedded_url: str) -> None:
    rng = random.Random(5)
    chosen = rng.sample(list(all_groupings()), form(24, 240))
    stores = [await PostgresStore.connect(embedded_url) for _ in range(3)]
    try:
        for number, batches in enumerate(chosen):
            history = with_duplicates(on_replicas(batches, 3, rng), 3, rng)
            stored = await Fleet(stores, f"p{number}").play(history)
            check(history, stored)
            reference = await memory_fleet(3, f"p{number}").play(history)
            assert comparable(stored.states[-1]) == comparable(reference.states[-1])
    finally:
        await asyncio.gather(*(store.close() for store in stores))
    figure("order_proof.histories_on_postgres", len(chosen))
