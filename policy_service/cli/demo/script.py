"""What the upstreams do and when: data, and the question "what does this connection do now?".

Times of the script are seconds of the long run; a pace shortens all of them alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the demo runs.

    Args:
        scale: real seconds for one second of the script.
        requests_per_s: client requests a real second.
        attempt_timeout_s: a gateway gives up an upstream call after it; the same for both gateways.
        patience_s: a client gives up after it; the same for both gateways.
        slow_answer_s: what an upstream takes while it is slow.
    """

    scale: float
    requests_per_s: float
    attempt_timeout_s: float
    patience_s: float
    slow_answer_s: float

    @property
    def length_s(self) -> float:
        """Real seconds of traffic."""
        return SCRIPT_S * self.scale


SCRIPT_S: Final = 60.0
NORMAL: Final = Pace(scale=1.0, requests_per_s=14, attempt_timeout_s=1.0, patience_s=6.0, slow_answer_s=2.5)
FAST: Final = Pace(scale=0.15, requests_per_s=45, attempt_timeout_s=0.5, patience_s=1.5, slow_answer_s=1.2)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One way to answer.

    Args:
        label: for the display.
        status: HTTP status; 0: the connection is reset instead.
        body: JSON text of the answer.
        says_retry_after: the answer states how long the trouble lasts.
        is_slow: the answer takes `slow_answer_s`.
    """

    label: str
    status: int
    body: str
    says_retry_after: bool = False
    is_slow: bool = False


@dataclass(frozen=True, slots=True)
class Phase:
    """Trouble of one connection from `start_s` to `end_s` of the script."""

    start_s: float
    end_s: float
    behaviour: Behaviour


def _error(message: str, **fields: str) -> str:
    return json.dumps({"error": {"message": message, **fields}}, ensure_ascii=False)


HEALTHY: Final = Behaviour("200", 200, json.dumps({"choices": [{"message": {"content": "hello"}}]}))
RATE_LIMITED: Final = Behaviour(
    "429 + Retry-After",
    429,
    _error("Rate limit reached for requests per min", type="requests", code="rate_limit_exceeded"),
    says_retry_after=True,
)
SLOW: Final = Behaviour("200, too late", 200, HEALTHY.body, is_slow=True)
DOWN: Final = Behaviour("503 burst", 503, _error("backend is unavailable", type="server_error"))
EMPTY_WALLET: Final = Behaviour("402 empty wallet", 402, _error("insufficient balance", type="billing_error"))
DEAD_KEY: Final = Behaviour(
    "401 dead key",
    401,
    _error("Incorrect API key provided", type="invalid_request_error", code="invalid_api_key"),
)
MISSTATED_QUOTA: Final = Behaviour("403 额度不足", 403, _error("用户额度不足, 剩余额度: $0.00", type="new_api_error"))
RESET: Final = Behaviour("connection reset", 0, "")

CONNECTIONS: Final[Mapping[str, str]] = {
    "openai-main": "openai",
    "openai-spare": "openai",
    "anthropic-team": "anthropic",
    "anthropic-batch": "anthropic",
    "house-a": "house-llm",
    "house-b": "house-llm",
    "reseller": "agentrouter",
}
"""Connection to provider: those of the example catalogue, and one that misstates its quota."""

SCRIPT: Final[Mapping[str, tuple[Phase, ...]]] = {
    "openai-main": (Phase(5, 17, RATE_LIMITED), Phase(46, 52, RESET)),
    "openai-spare": (Phase(30, SCRIPT_S, DEAD_KEY),),
    "anthropic-team": (Phase(9, 18, SLOW),),
    "anthropic-batch": (Phase(26, SCRIPT_S, EMPTY_WALLET),),
    "house-a": (Phase(20, 37, DOWN),),
    "house-b": (Phase(20, 37, DOWN),),
    "reseller": (Phase(12, SCRIPT_S, MISSTATED_QUOTA),),
}


@dataclass(frozen=True, slots=True)
class Moment:
    """What a connection does at one time. `phase` is its number in the script, -1 while it is well."""

    behaviour: Behaviour = HEALTHY
    phase: int = -1
    left_s: float = 0.0

    @property
    def is_trouble(self) -> bool:
        """The connection is in one of its phases."""
        return self.phase >= 0

    @property
    def retry_after_s(self) -> int:
        """Whole seconds as a Retry-After header states them, at least 1."""
        return max(1, math.ceil(self.left_s))


def moment(connection: str, elapsed_s: float, pace: Pace) -> Moment:
    """What `connection` does `elapsed_s` real seconds after the start."""
    at = elapsed_s / pace.scale
    for number, phase in enumerate(SCRIPT[connection]):
        if phase.start_s <= at < phase.end_s:
            return Moment(phase.behaviour, number, (phase.end_s - at) * pace.scale)
    return Moment()
