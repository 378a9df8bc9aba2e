"""Connections on offer for a lease: every account by itself, judged by the ordinary gates."""

from __future__ import annotations

from policy_service.application.clock import DatabaseClock
from policy_service.application.gating import Gating
from policy_service.application.lease_offers import ConnectionOffers, account_offers
from policy_service.application.pools import Pools
from policy_service.application.ports import Versioned
from policy_service.application.report_result import fold_report
from policy_service.application.view import View
from policy_service.domain.catalogue import Caller, Catalogue, Connection, Route, RouteTarget
from policy_service.domain.connection_state import BANNED, ConnectionState
from policy_service.domain.policy import Policy

NOW = 1_700_000_000_000
ALLOWED = frozenset({"a", "b", "c"})
CALLER = Caller("k", "1" * 64)
CONNECTIONS = (
    Connection("a", "acme", priority=2),
    Connection("b", "acme", priority=1),
    Connection("c", "other"),
    Connection("d", "acme"),
)


def view(*routes: Route) -> View:
    catalogue = Catalogue(connections={c.id: c for c in CONNECTIONS}, routes={r.name: r for r in routes})
    seen = View(Policy(catalogue), fold_report)
    seen.apply_committed([Versioned(1, ConnectionState("acme", "b", test_status=BANNED))])
    return seen


def offered(seen: View, model: str, allowed: frozenset[str] = ALLOWED) -> list[tuple[str, str]] | None:
    offers = ConnectionOffers(seen, DatabaseClock(lambda: 0.0, NOW))(CALLER, model, allowed)
    if offers is None:
        return None
    return [(target.connection, exclusion.reason if exclusion else "") for target, exclusion in offers]


def test_a_model_that_no_route_names_is_offered_on_every_allowed_connection_by_priority() -> None:
    assert offered(view(), "m") == [("c", ""), ("b", "banned"), ("a", "")]


def test_a_model_that_routes_name_is_offered_where_its_providers_are() -> None:
    route = Route("r", "priority", (RouteTarget("t", "acme", model="m"),))
    assert offered(view(route), "m") == [("b", "banned"), ("a", "")]


def test_a_route_offers_each_account_of_its_entries_allowed_or_not() -> None:
    route = Route("r", "priority", (RouteTarget("t", "acme", model="m"),))
    assert offered(view(route), "r") == [("d", ""), ("b", "banned"), ("a", "")]


def test_without_an_allowed_connection_nobody_serves_the_model() -> None:
    assert offered(view(), "m", frozenset({"elsewhere"})) is None


def test_an_entry_for_a_provider_offers_its_accounts_under_its_position() -> None:
    route = Route("r", "priority", (RouteTarget("t", "other", "c", "m"), RouteTarget("u", "acme", model="m")))
    seen = view(route)
    pool = Pools(seen.policy).route("r")
    assert pool is not None
    found = account_offers(pool, Gating(seen), NOW)
    assert [(each.position, each.offer.target.connection) for each in found] == [(0, "c"), (1, "d"), (1, "b"), (1, "a")]
