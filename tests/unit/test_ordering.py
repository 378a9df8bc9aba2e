"""Strategy names to orderings: which are implemented, and where the stickiness of a rotation comes from."""

from __future__ import annotations

import pytest

from policy_service.application.entropy import SystemEntropy
from policy_service.application.errors import UnknownStrategyError
from policy_service.application.ordering import Ordering
from policy_service.application.pools import Pools
from policy_service.domain.catalogue import Catalogue, Route, RouteTarget
from policy_service.domain.policy import Policy
from policy_service.domain.strategies import IMPLEMENTED_STRATEGIES, ROUTE_STRATEGIES


def heads(strategy: str, calls: int, *, setting: int | None = None, option: int | None = None) -> list[int]:
    """First positions of consecutive selections by a route of two targets."""
    targets = (RouteTarget("a", "openai", "a"), RouteTarget("b", "openai", "b"))
    options = {} if option is None else {"sticky_round_robin_limit": option}
    stored = {} if setting is None else {"strategies.sticky_round_robin_limit": setting}
    catalogue = Catalogue(routes={"r": Route("r", strategy, targets, options)}, stored_settings=stored)
    pool = Pools(Policy(catalogue)).route("r")
    assert pool is not None
    ordering, found = Ordering(SystemEntropy(1)), []
    for _ in range(calls):
        order, rotation = ordering.order(pool, (0, 1))
        ordering.keep(pool, rotation)
        found.append(order[0])
    return found


@pytest.mark.parametrize("strategy", [*ROUTE_STRATEGIES, "quota-share", "nonsense"])
def test_exactly_the_implemented_strategies_order(strategy: str) -> None:
    if strategy in IMPLEMENTED_STRATEGIES:
        assert heads(strategy, 1)
    else:
        with pytest.raises(UnknownStrategyError) as caught:
            heads(strategy, 1)
        assert caught.value.metadata["known"] == ",".join(IMPLEMENTED_STRATEGIES)


@pytest.mark.parametrize(
    ("setting", "option", "expected"),
    [
        (None, None, [0, 0, 0, 1]),
        (2, None, [0, 0, 1, 1]),
        (0, None, [0, 1, 0, 1]),
        (2, 3, [0, 0, 0, 1]),
        (2, 0, [0, 1, 0, 1]),
    ],
)
def test_a_rotation_stays_by_the_option_of_the_route_then_by_the_setting(
    setting: int | None, option: int | None, expected: list[int]
) -> None:
    assert heads("round-robin", 4, setting=setting, option=option) == expected
