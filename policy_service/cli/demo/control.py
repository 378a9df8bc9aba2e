"""The control: a gateway as many are, without the service. Round robin in a fixed order, one retry, no memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from policy_service.cli.demo.http_call import call
from policy_service.cli.demo.script import Pace
from policy_service.cli.demo.traffic import ClientAnswer, ClientRequest


class NaiveGateway:
    """Each request starts at the target after that of the last one; a failure is tried once more, at the next target.

    Args:
        routes: connections of each route, in order.
        ports: where they listen.
        pace: limits, the same as those of the other gateway.
    """

    def __init__(self, routes: Mapping[str, tuple[str, ...]], ports: Mapping[str, int], pace: Pace) -> None:
        self._routes = routes
        self._ports = ports
        self._pace = pace
        self._turns: Counter[str] = Counter()

    async def serve(self, request: ClientRequest) -> ClientAnswer:
        """Call at most two targets."""
        targets = self._routes[request.route]
        turn = self._turns[request.route]
        self._turns[request.route] += 1
        status = 502
        for step in range(2):
            result = await call(self._ports[targets[(turn + step) % len(targets)]], self._pace.attempt_timeout_s)
            if result.is_success:
                return ClientAnswer(result.status)
            status = result.status or 502
        return ClientAnswer(status)
