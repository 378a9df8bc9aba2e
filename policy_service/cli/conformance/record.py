"""What a case showed: calls to the policy service, calls to upstreams, exchanges with clients, in monotonic seconds.

Written by the scripted parts, read by the checks; nothing here decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from policy_service.cli.conformance.cases import Case
from policy_service.generated.policy.v1 import policy_pb2

Headers: TypeAlias = Sequence[tuple[str, str]]

SELECT = "SelectTarget"
REPORT = "ReportOutcome"
FENCE = "CheckFence"
RENEW = "RenewPermit"
RELEASE = "ReleasePermit"
CANCEL = "CancelPermit"


@dataclass(slots=True)
class PolicyCall:
    """One call to the scripted policy service; an item of a batch counts as a call.

    Args:
        method: name of the single form.
        request: as it came.
        at: arrival.
        limit_s: time that the caller's deadline left on arrival; None: no deadline.
        answer: None while pending, and after an error.
        error: name of the status code; empty: none.
        ended_at: when the answer or error went out, or the caller hung up.
        left: the caller cancelled before there was an answer.
    """

    method: str
    request: Any
    at: float
    limit_s: float | None = None
    answer: Any = None
    error: str = ""
    ended_at: float = math.inf
    left: bool = False


@dataclass(slots=True)
class UpstreamCall:
    """One call to a scripted upstream.

    Args:
        connection: whose address was called.
        at: arrival of the whole request.
        headers: names in lower case.
        body: whole.
        answered_at: before the answer, or the last event of it, was written: the caller can't have known of it earlier.
        ended_at: when the answer was out, or the caller hung up.
        left: the caller hung up first.
    """

    connection: str
    at: float
    headers: Headers = ()
    body: bytes = b""
    answered_at: float = 0.0
    ended_at: float = math.inf
    left: bool = False


@dataclass(slots=True)
class ClientExchange:
    """One client request through the gateway.

    Args:
        at: when it was sent.
        status: of the answer; 0: none came.
        headers: of the answer, names in lower case.
        body: of the answer, as far as it came.
        arrivals: instant of each piece of the body.
        ended_at: end of the answer, or when the client left.
        left: the client hung up, as the case says.
        problem: why the answer broke off or never came; empty: it is whole.
    """

    at: float
    status: int = 0
    headers: Headers = ()
    body: bytes = b""
    arrivals: list[float] = field(default_factory=list)
    ended_at: float = math.inf
    left: bool = False
    problem: str = ""


@dataclass(slots=True)
class Record:
    """Everything that one case showed."""

    case: Case
    policy: list[PolicyCall] = field(default_factory=list)
    upstream: list[UpstreamCall] = field(default_factory=list)
    clients: list[ClientExchange] = field(default_factory=list)
    decisions: list[policy_pb2.SelectTargetResponse] = field(default_factory=list)
    """Answers with a token, in the order in which they were given."""
    secrets: dict[str, str] = field(default_factory=dict)
    """What must not reach the policy service, by what it is."""
    keys: dict[str, str] = field(default_factory=dict)
    """Credential of each connection."""

    def of(self, *methods: str) -> list[PolicyCall]:
        """Calls of these methods, in order of arrival."""
        return [call for call in self.policy if call.method in methods]
