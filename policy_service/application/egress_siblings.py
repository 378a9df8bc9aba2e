"""Egress lock over a `StateBook`: where a connection was seen, and cooling its siblings (spec/egress_lock.md)."""

from __future__ import annotations

from dataclasses import replace

from policy_service.domain import cooldown, egress
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.egress import EgressSighting
from policy_service.domain.facts import FactLog
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.outcome import Outcome
from policy_service.domain.policy import ConnectionPolicy, Policy
from policy_service.domain.state import StateBook

REASON = "egress_lock"


def needs_sighting(book: StateBook, outcome: Outcome, policy: ConnectionPolicy, now: Instant) -> EgressSighting | None:
    """Sighting that the outcome's address makes necessary; None where nothing is to be written."""
    if not policy.in_egress_set or not outcome.egress_address or not outcome.connection:
        return None
    row = book.get(EgressSighting, outcome.provider, outcome.connection, outcome.egress_address)
    own = (
        other
        for other in book.rows(EgressSighting)
        if other.provider == row.provider and other.connection == row.connection and other.address != row.address
    )
    return egress.sighted(row, own, now)


def note_sighting(book: StateBook, outcome: Outcome, policy: ConnectionPolicy, now: Instant) -> None:
    """Remember on which address the connection was seen."""
    sighting = needs_sighting(book, outcome, policy, now)
    if sighting is not None:
        book.put(sighting)


def cool_siblings(
    book: StateBook, outcome: Outcome, whole: Policy, at: Instant, duration: DurationMs, facts: FactLog
) -> tuple[tuple[str, str], ...]:
    """Cool every connection that shares the failing one's address; returns those whose timer changed.

    A search that fails is recorded and swallowed: the failing connection stays cooled, the caller gets no error.
    """
    try:
        found = _siblings(book, outcome, whole, at)
    except Exception as error:  # section 3, point 5: no error of the search may reach the caller
        _record_search(outcome, type(error).__name__, facts)
        return ()
    return tuple(each for each in found if _cool(book, each, whole, at, duration, facts))


def _siblings(book: StateBook, outcome: Outcome, whole: Policy, at: Instant) -> tuple[tuple[str, str], ...]:
    sightings = tuple(book.rows(EgressSighting))
    address = egress.last_address(sightings, outcome.provider, outcome.connection, at)
    if not address:
        return ()
    failing = (outcome.provider, outcome.connection)
    return egress.siblings(sightings, address, whole.egress_providers, failing, at)


def _cool(
    book: StateBook, sibling: tuple[str, str], whole: Policy, at: Instant, duration: DurationMs, facts: FactLog
) -> bool:
    row = book.get(ConnectionState, *sibling)
    if row.is_terminal or whole.for_connection(*sibling).connection.disable_cooling:
        return False
    until = at + duration
    if row.rate_limited_until is not None and row.rate_limited_until >= until:
        book.put(cooldown.heard(row, at))
        return False
    cooled = cooldown.start_timer(row, at, until, facts.cause.hint_source or "")
    fields = cooldown.ErrorFields("address exhausted by a sibling", REASON, "egress", "429", at)
    cooled = replace(cooldown.merge_error(cooled, fields), fact_id=facts.next_id())
    facts.add(
        REASON,
        f"{row.provider}:{row.connection}",
        row.test_status,
        cooled.test_status,
        provider=row.provider,
        connection=row.connection,
        generation=row.generation,
        deadline_at=cooled.rate_limited_until,
    )
    book.put(replace(cooled, last_event_at=max(at, row.last_event_at or at)))
    return True


def _record_search(outcome: Outcome, error: str, facts: FactLog) -> None:
    facts.add(
        REASON,
        f"{outcome.provider}:{outcome.connection}",
        "unavailable",
        "unavailable",
        provider=outcome.provider,
        connection=outcome.connection,
        reason=f"sibling_search_failed:{error}",
    )
