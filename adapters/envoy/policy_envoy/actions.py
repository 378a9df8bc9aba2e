"""What a stage wants done: replies to Envoy and calls of the policy service. Values only; `performing` does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from policy_service.generated.policy.v1 import lease_pb2, permit_pb2, policy_pb2, types_pb2

if TYPE_CHECKING:
    from policy_envoy.flight import Flight, Step


class Mode(Enum):
    """What Envoy is to send next, beyond what the filter is configured for."""

    REQUEST_BODY = "request_body"
    ERROR_BODY = "error_body"
    """The body of the answer, whole."""
    CHUNKS = "chunks"
    """The body of the answer chunk by chunk, each after the reply to the one before."""
    HELD = "held"
    """Head and chunks of the answer, each let through only when the door says so."""
    HEAD = "head"
    """The head of the answer; every other mode brings it too."""
    END = "end"
    """Nothing, but the stream stays open until the answer ends."""


class Pass(NamedTuple):
    """Go on, with these changes."""

    kind: str
    """Name of the message that is answered, such as `request_headers`."""
    set_headers: tuple[tuple[str, str], ...] = ()
    remove_headers: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = ()
    """None: as configured."""
    chain: Flight | None = None
    """Write the order of the upstreams, and what the other stage needs, into the metadata."""
    clears_route: bool = False
    body: bytes | None = None
    """Another body, of an answer's head instead of what follows it; None: unchanged."""
    chunk: bytes | None = None
    """Held answers: let this chunk through."""
    is_end: bool = False


class Local(NamedTuple):
    """Answer the client here."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes
    details: str


class Select(NamedTuple):
    """Call SelectTarget."""

    request: policy_pb2.SelectTargetRequest


class Strange(NamedTuple):
    """Tell the operator of connections that the catalogue names and Envoy has no cluster of."""

    connections: tuple[str, ...]


class Report(NamedTuple):
    """Call ReportOutcome; nobody waits for it."""

    request: policy_pb2.ReportOutcomeRequest


class Success(NamedTuple):
    """Call ReportOutcome of an answer that is no error; nobody waits for it. The last report of its decision.

    A value of its own, since nearly every request ends with one: it becomes a message only where it has to travel.
    """

    token: bytes
    attempt: int
    target: types_pb2.Target
    attempt_offset_ms: int
    status: int
    first_byte_ms: int
    headers: tuple[tuple[str, str], ...] = ()
    """Those that say something for the next call."""
    latency_ms: int | None = None
    """None: the answer has not ended yet."""
    bytes_streamed: int = 0

    @property
    def request(self) -> policy_pb2.ReportOutcomeRequest:
        """As a message."""
        return policy_pb2.ReportOutcomeRequest(
            decision_token=self.token,
            attempt=self.attempt,
            target=self.target,
            attempt_offset_ms=self.attempt_offset_ms,
            http_status=self.status,
            origin=policy_pb2.ORIGIN_UPSTREAM,
            final=True,
            streamed=True,
            first_byte_ms=self.first_byte_ms,
            headers=[types_pb2.Header(name=name, value=value) for name, value in self.headers],
            latency_ms=self.latency_ms,
            bytes_streamed=self.bytes_streamed,
        )


class Judge(NamedTuple):
    """Call ReportOutcome and go on with its verdict."""

    request: policy_pb2.ReportOutcomeRequest


class Acquire(NamedTuple):
    """Take what an attempt needs."""

    permit: permit_pb2.AcquirePermitRequest | None
    """None: it has one."""
    fence: lease_pb2.CheckFenceRequest | None = None


class Release(NamedTuple):
    """Give back every grant of a decision."""

    request: permit_pb2.ReleasePermitRequest


class Sleep(NamedTuple):
    """Pause."""

    duration_ms: int


class Register(NamedTuple):
    """The request is under way: its attempts find it by its decision."""

    flight: Flight


class Hold(NamedTuple):
    """Keep the permits of a request alive until its last report."""

    flight: Flight


class Begin(NamedTuple):
    """An attempt starts; those before it that were never answered failed on the way."""

    flight: Flight
    attempt: int
    """Attempt of Envoy, from 1."""


class Unanswered(NamedTuple):
    """An attempt ended without an answer: what that means is known when the request goes on or ends."""

    flight: Flight
    step: Step
    dispatched_ms: float


class Settle(NamedTuple):
    """The request has its answer (or its client has left): now the unanswered attempts are known."""

    flight: Flight
    details: str = ""
    is_client_gone: bool = False
    attempts: int = 0
    """Attempts that Envoy has made; 0: unknown."""


class Leave(NamedTuple):
    """The listener stage is over."""

    flight: Flight


Reply: TypeAlias = Pass | Local
REPLIES = (Pass, Local)
"""Kinds of actions that are replies."""
Action: TypeAlias = (
    Pass
    | Local
    | Select
    | Report
    | Success
    | Judge
    | Acquire
    | Release
    | Sleep
    | Register
    | Hold
    | Begin
    | Unanswered
    | Settle
    | Leave
    | Strange
)
Headers: TypeAlias = Mapping[str, str]
