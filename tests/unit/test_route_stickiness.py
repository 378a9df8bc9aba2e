"""Route stickiness of a replica: what is remembered, reused, and left to the strategy."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from policy_service.application.messages import SelectRequest, SessionSource
from policy_service.application.ports import Versioned
from policy_service.application.report_result import fold_report
from policy_service.application.stickiness import DECISIONS_KEPT, RouteStickiness
from policy_service.application.view import View
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.ids import ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.policy import Policy
from policy_service.domain.stickiness import TTL_MS, StickyStanding

TARGETS = [Target(ProviderId("openai"), ConnectionId(name), ModelId("gpt")) for name in "abc"]
ORDER = (0, 1, 2)
HELLO = SelectRequest("r", route="chat", caller_id="u", session=SessionSource(first_user_text=" hello "))
NO_OPTIONS: Mapping[str, object] = {}


def view(**settings: object) -> View:
    stored = {f"affinity.{name}": value for name, value in settings.items()}
    return View(Policy(Catalogue(stored_settings=stored)), fold_report)


def served(sticky: RouteStickiness, position: int = 1, now: int = 0) -> None:
    key = sticky.key(HELLO, NO_OPTIONS)
    sticky.dispatched("d1", key)
    sticky.reported("d1", TARGETS[position], now, is_success=True)


def preferred(sticky: RouteStickiness, request: SelectRequest = HELLO, now: int = 1) -> int | None:
    return sticky.prefer(sticky.key(request, NO_OPTIONS), ORDER, TARGETS, now)


def test_a_conversation_returns_to_the_target_that_served_it() -> None:
    sticky = RouteStickiness(view())
    assert preferred(sticky) is None
    served(sticky)
    same_text = HELLO._replace(session=SessionSource(first_user_text="hello"))
    assert (preferred(sticky), preferred(sticky, same_text)) == (1, 1)


@pytest.mark.parametrize(
    "other", [{"route": "other"}, {"caller_id": "v"}, {"session": SessionSource(first_user_text="x")}]
)
def test_another_route_caller_or_text_is_another_conversation(other: dict[str, object]) -> None:
    sticky = RouteStickiness(view())
    served(sticky)
    assert preferred(sticky, HELLO._replace(**other)) is None  # type: ignore[arg-type]


def test_the_entry_ends_15_minutes_after_the_last_success() -> None:
    sticky = RouteStickiness(view())
    served(sticky)
    assert preferred(sticky, now=TTL_MS - 1) == 1
    assert preferred(sticky, now=TTL_MS) is None


def test_the_routes_own_opt_out_beats_the_setting() -> None:
    off = RouteStickiness(view(disable_route_stickiness=True))
    assert off.key(HELLO, {}) is None
    assert off.key(HELLO, {"disable_session_stickiness": False}) is not None
    assert RouteStickiness(view()).key(HELLO, {"disable_session_stickiness": True}) is None


def test_nothing_sticks_without_a_route_a_text_or_a_caller_where_one_is_required() -> None:
    sticky, strict = RouteStickiness(view()), RouteStickiness(view(require_caller=True))
    for request in (HELLO._replace(route=""), HELLO._replace(session=SessionSource(first_user_text="  "))):
        assert sticky.key(request, NO_OPTIONS) is None
    assert sticky.key(HELLO._replace(caller_id=""), NO_OPTIONS) is not None
    assert strict.key(HELLO._replace(caller_id=""), NO_OPTIONS) is None


def test_a_failing_target_clears_only_its_own_entry() -> None:
    sticky = RouteStickiness(view())
    served(sticky)
    sticky.reported("d1", TARGETS[2], 1, is_success=False)
    assert preferred(sticky) == 1
    sticky.reported("d1", TARGETS[1], 1, is_success=False)
    assert preferred(sticky) is None


def test_an_ineligible_cooling_dead_or_nearly_spent_target_is_left_to_the_strategy() -> None:
    seen = view()
    sticky = RouteStickiness(seen)
    served(sticky)
    assert sticky.prefer(sticky.key(HELLO, NO_OPTIONS), (0, 2), TARGETS, 1) is None
    for version, row in enumerate(
        (ConnectionState("openai", "b", rate_limited_until=9), ConnectionState("openai", "b", test_status="banned")), 1
    ):
        seen.apply_committed([Versioned(version, row)])
        assert preferred(sticky) is None
    spent = RouteStickiness(view(), lambda target: StickyStanding(five_hour=0.2, weekly=0.86))
    served(spent)
    assert preferred(spent) is None


def test_decisions_that_are_never_reported_are_forgotten() -> None:
    sticky = RouteStickiness(view())
    for number in range(DECISIONS_KEPT + 1):
        sticky.dispatched(f"n{number}", sticky.key(HELLO, NO_OPTIONS))
    sticky.reported("n0", TARGETS[0], 1, is_success=True)
    assert preferred(sticky) is None
