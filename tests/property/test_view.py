"""The view against its definition: committed rows with this replica's pending events folded on top."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from policy_service.application import view as module
from policy_service.application.events import OutcomeEvent
from policy_service.application.ports import Feed, Versioned
from policy_service.application.view import View
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.ids import ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.outcome import Outcome
from policy_service.domain.policy import Policy
from policy_service.domain.provider_cooldown import ProviderCooldownState
from policy_service.domain.state import Key, Row, StateBook

CONNECTIONS = ("a", "b", "c")


def count_up(book: StateBook, event: OutcomeEvent, policy: Policy) -> None:
    """A fold that any order of events leaves with the same sum."""
    row = book.get(ProviderCooldownState, "p", event.target.connection)
    book.put(replace(row, count=row.count + 1))


def event(number: int, connection: str) -> OutcomeEvent:
    target = Target(ProviderId("p"), ConnectionId(connection), ModelId("m"))
    return OutcomeEvent(f"e{number}", number, target, Outcome(503), number)


class World:
    """One database, one view, and events that are committed in order by this replica or by others."""

    def __init__(self) -> None:
        self.view = View(Policy(Catalogue()), count_up)
        self.rows: dict[Key, Row] = {}
        self.versions: dict[Key, int] = {}
        self.version = 0
        self.number = 0
        self.committed_up_to = 0
        self.pending: list[OutcomeEvent] = []
        self.view.apply(self.feed(is_full=True), "me")

    def feed(self, *, is_full: bool) -> Feed:
        rows = tuple(Versioned(self.versions[key], row) for key, row in self.rows.items())
        return Feed(rows, self.version, "w", is_full, 0, {"me": self.committed_up_to})

    def write(self, connection: str) -> Versioned:
        book = StateBook(self.rows)
        count_up(book, event(0, connection), self.view.policy)
        (row,) = book.changes.values()
        self.version += 1
        self.rows[row.key], self.versions[row.key] = row, self.version
        return Versioned(self.version, row)

    def report(self, connection: str) -> None:
        self.number += 1
        self.pending.append(event(self.number, connection))
        self.view.add_pending(self.number, self.pending[-1])

    def commit(self, connection: str) -> None:
        """The oldest two events are committed; the store's answer reaches the view at once."""
        batch, self.pending = self.pending[:2], self.pending[2:]
        rows = {v.row.key: v for v in (self.write(e.target.connection) for e in batch)}
        self.committed_up_to = batch[-1].at if batch else self.committed_up_to
        self.view.apply_committed(rows.values(), self.committed_up_to)

    def refuse(self, connection: str) -> None:
        """The newest event of a connection is taken back."""
        own = [each for each in self.pending if each.target.connection == connection]
        if own:
            self.pending.remove(own[-1])
            self.view.remove_pending(own[-1].at)

    def foreign(self, connection: str) -> None:
        self.write(connection)

    def poll(self, connection: str) -> None:
        self.view.apply(self.feed(is_full=False), "me")

    def reload(self, connection: str) -> None:
        self.view.apply(self.feed(is_full=True), "me")

    def expected(self) -> dict[Key, Row]:
        """What is committed as of the newest poll, with the pending events on top."""
        book = StateBook(self.rows)
        for each in self.pending:
            count_up(book, each, self.view.policy)
        return {**self.rows, **book.changes}


STEPS: dict[str, Callable[[World, str], None]] = {
    "report": World.report,
    "commit": World.commit,
    "foreign": World.foreign,
    "poll": World.poll,
    "refuse": World.refuse,
    "reload": World.reload,
}


@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from(CONNECTIONS)), max_size=40))
def test_after_a_poll_the_view_is_what_is_committed_with_the_pending_events_on_top(
    steps: list[tuple[str, str]],
) -> None:
    world = World()
    for name, connection in steps:
        STEPS[name](world, connection)
    world.poll("")
    assert dict(world.view.rows) == world.expected()
    assert len(world.view._pending) == len(world.pending)


def test_a_refused_event_among_many_uncovers_what_was_beneath_it() -> None:
    world = World()
    for _ in range(2 * module.REFOLD_LIMIT):
        world.report("a")
    before = dict(world.view.rows)
    for connection in ("a", "b"):
        world.report(connection)
        assert dict(world.view.rows) != before
        world.refuse(connection)
        assert dict(world.view.rows) == before


def test_a_storm_beyond_the_limit_shows_the_committed_row_and_ends_right() -> None:
    world = World()
    for _ in range(3 * module.REFOLD_LIMIT):
        world.report("a")
    world.foreign("a")
    world.poll("")
    shown = world.view.rows[("provider_cooldown", "p", "a")]
    assert isinstance(shown, ProviderCooldownState)
    assert shown.count == 1
    while world.pending:
        world.commit("")
    world.poll("")
    assert dict(world.view.rows) == world.expected()
